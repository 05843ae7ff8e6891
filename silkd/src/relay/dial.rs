//! From what a client asks for to a connection: the two addresses there are, and what a failure means.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use rustix::io::Errno;
use sandbox_protocol::{
    reason::Reason,
    v1::{PortForwardOpen, port_forward_open::Address},
};
use tokio::net::TcpStream;

use crate::refusal::Refusal;

/// Where to. Pure.
///
/// # Errors
/// `FIELD_INVALID`.
pub(super) fn target(open: PortForwardOpen) -> Result<SocketAddr, Refusal> {
    let invalid = |message: String| Refusal::new(Reason::FieldInvalid, message);
    let port = u16::try_from(open.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| invalid(format!("port {} is not within 1 and 65535", open.port)))?;
    let ip = match Address::try_from(open.address) {
        Ok(Address::Unspecified | Address::V4) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Ok(Address::V6) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        Err(_unknown) => return Err(invalid(format!("address {} is unknown", open.address))),
    };
    Ok(SocketAddr::new(ip, port))
}

/// Connects to a port of the loopback. Cancel safe.
///
/// # Errors
/// `PORT_REFUSED`, or what this guest has run out of.
pub(super) async fn connect(target: SocketAddr) -> Result<TcpStream, Refusal> {
    let failed = |error: io::Error| refused(target, &error);
    let socket = TcpStream::connect(target).await.map_err(failed)?;
    // Where nobody listens, a connection can meet itself: its own port may be the one it asks for.
    if socket.local_addr().map_err(failed)? == target {
        return Err(refused(target, &Errno::CONNREFUSED.into()));
    }
    socket.set_nodelay(true).map_err(failed)?;
    Ok(socket)
}

fn refused(target: SocketAddr, error: &io::Error) -> Refusal {
    let reason = match Errno::from_io_error(error) {
        Some(Errno::MFILE | Errno::NFILE) => Reason::FdLimit,
        Some(Errno::NOMEM | Errno::NOBUFS) => Reason::MemoryExhausted,
        Some(_) | None => Reason::PortRefused,
    };
    let refusal = Refusal::new(reason, format!("cannot connect to {target}: {error}"));
    match error.raw_os_error() {
        Some(errno) => refusal.with_errno(errno),
        None => refusal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(port: u32, address: i32) -> PortForwardOpen {
        PortForwardOpen { port, address }
    }

    #[test]
    fn only_ports_of_the_two_loopbacks() {
        let text = |port, address| target(open(port, address)).map(|target| target.to_string());
        assert_eq!(text(80, Address::Unspecified.into()).unwrap(), "127.0.0.1:80");
        assert_eq!(text(65535, Address::V4.into()).unwrap(), "127.0.0.1:65535");
        assert_eq!(text(1, Address::V6.into()).unwrap(), "[::1]:1");
        for (port, address) in [(0, 1), (65536, 1), (u32::MAX, 2), (80, 3), (80, -1)] {
            assert_eq!(text(port, address).unwrap_err().reason, Reason::FieldInvalid);
        }
    }

    #[test]
    fn what_the_guest_has_run_out_of_is_no_closed_port() {
        let target = target(open(80, 0)).unwrap();
        for (errno, reason) in [
            (Errno::CONNREFUSED, Reason::PortRefused),
            (Errno::ADDRNOTAVAIL, Reason::PortRefused),
            (Errno::MFILE, Reason::FdLimit),
            (Errno::NOBUFS, Reason::MemoryExhausted),
        ] {
            let refusal = refused(target, &errno.into());
            assert_eq!(
                (refusal.reason, refusal.errno),
                (reason, Some(errno.raw_os_error()))
            );
        }
    }
}
