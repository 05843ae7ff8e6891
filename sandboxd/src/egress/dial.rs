//! Connections outwards, to vetted addresses alone.

use std::{io, net::SocketAddr, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use sandbox_protocol::door::DoorReason;
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout},
};

use super::upstream::Place;
use crate::{
    policy::{Source, Vetted},
    sys,
};

/// All of a dial.
pub(super) const DIAL: Duration = Duration::from_secs(10);
/// Addresses that are tried.
const TRIED: usize = 6;
/// From one address to the next, unless it fails before.
const APART: Duration = Duration::from_millis(250);

/// Connects to one of these addresses, families in turn, the next one 250 ms after the one before or when that failed.
/// Cancel safe: every attempt is dropped.
///
/// # Errors
/// `dial_refused`, `dial_unreachable`, `dial_timeout`.
pub(super) async fn dial(vetted: &[Vetted], source: Source) -> Result<(TcpStream, SocketAddr), DoorReason> {
    timeout(DIAL, Box::pin(race(&in_turn(vetted), source)))
        .await
        .unwrap_or(Err(DoorReason::DialTimeout))
}

/// Connects to an upstream proxy, as [`dial`] does to a target.
///
/// # Errors
/// As there.
pub(super) async fn dial_upstream(
    place: &Place,
    source: Source,
) -> Result<(TcpStream, SocketAddr), DoorReason> {
    Box::pin(race(&place.0, source)).await
}

async fn race(addresses: &[SocketAddr], source: Source) -> Result<(TcpStream, SocketAddr), DoorReason> {
    let mut tries = FuturesUnordered::new();
    let mut worst = DoorReason::DialUnreachable;
    let mut addresses = addresses.iter().peekable();
    while let Some(next) = addresses.next() {
        tries.push(connect(*next, source));
        // Behind the last there is nobody to wait for with.
        if addresses.peek().is_none() {
            break;
        }
        let mut pause = std::pin::pin!(sleep(APART));
        loop {
            tokio::select! {
                biased;
                Some(tried) = tries.next() => match tried {
                    Ok(connected) => return Ok(connected),
                    Err(error) => {
                        worst = reason(&error);
                        if tries.is_empty() {
                            break;
                        }
                    }
                },
                () = &mut pause => break,
            }
        }
    }
    while let Some(tried) = tries.next().await {
        match tried {
            Ok(connected) => return Ok(connected),
            Err(error) => worst = reason(&error),
        }
    }
    Err(worst)
}

async fn connect(address: SocketAddr, source: Source) -> io::Result<(TcpStream, SocketAddr)> {
    let source = source.towards(address).ok_or(io::ErrorKind::AddrNotAvailable)?;
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if let Some(source) = source {
        // Else every dial would hold a port of that address, whoever it goes to.
        sys::bind_without_port(&socket)?;
        socket.bind(SocketAddr::new(source, 0))?;
    }
    let stream = socket.connect(address).await?;
    // What was vetted is what is spoken to, whatever the kernel made of the address.
    if stream.peer_addr()? != address {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    stream.set_nodelay(true)?;
    // Whatever is cut is cut on both sides; a graceful end has said so before.
    stream.set_zero_linger()?;
    Ok((stream, address))
}

fn reason(error: &io::Error) -> DoorReason {
    let kind = error.kind();
    if kind == io::ErrorKind::ConnectionRefused {
        DoorReason::DialRefused
    } else if kind == io::ErrorKind::TimedOut {
        DoorReason::DialTimeout
    } else {
        DoorReason::DialUnreachable
    }
}

/// The addresses that are tried, families in turn, as they were answered otherwise.
pub(super) fn in_turn(vetted: &[Vetted]) -> Vec<SocketAddr> {
    let (v6, v4): (Vec<SocketAddr>, Vec<SocketAddr>) = vetted
        .iter()
        .map(|vetted| vetted.address())
        .partition(SocketAddr::is_ipv6);
    let (mut v6, mut v4) = (v6.into_iter(), v4.into_iter());
    let mut turns = Vec::new();
    loop {
        let pair = [v6.next(), v4.next()];
        if pair.iter().all(Option::is_none) {
            break;
        }
        turns.extend(pair.into_iter().flatten());
    }
    turns.truncate(TRIED);
    turns
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::policy::{Vetting, Who};

    #[test]
    fn families_take_turns_and_six_are_tried() {
        let addresses: Vec<IpAddr> = [
            "8.8.8.1", "8.8.8.2", "8.8.8.3", "8.8.8.4", "8.8.8.5", "2600::1", "2600::2", "8.8.8.6",
        ]
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
        let who = Who { pool: "", tenant: "" };
        let vetted = Vetting::default().vet(&[], &addresses, 443, who).unwrap();
        let order: Vec<String> = in_turn(&vetted)
            .iter()
            .map(|address| address.ip().to_string())
            .collect();
        assert_eq!(
            order,
            ["2600::1", "8.8.8.1", "2600::2", "8.8.8.2", "8.8.8.3", "8.8.8.4"]
        );
    }
}
