//! A slot in somebody's hand, and on its way back.

use std::{
    fs::File,
    io,
    net::{SocketAddrV4, TcpListener, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt},
};

use super::{
    DNS_PORT, HOST_ADDRESS, HTTP_PORT, NetError, SOCKS5_PORT,
    lane::{Lane, Order, Shared},
    slot::Event,
    tap_name,
};
use crate::{names::SlotNumber, sys, words};

/// Connections that wait to be accepted, at most: as many as a door takes in all.
const BACKLOG: i32 = 256;

/// A slot that is one sandbox's. Dropped without [`release`](Self::release) it drains too; but where doors or a VMM may be
/// left, nobody tells that they are gone, and it stays out of use until the next start.
#[derive(Debug)]
pub struct Taken {
    shared: Arc<Shared>,
    slot: SlotNumber,
    tap: Option<File>,
    /// Its queue was given out: there may be a VMM.
    handed: bool,
    /// There may be doors.
    bound: AtomicBool,
    /// What is left of it is told by its [`Draining`].
    released: AtomicBool,
}

impl Taken {
    pub(super) const fn new(shared: Arc<Shared>, slot: SlotNumber) -> Self {
        Self {
            shared,
            slot,
            tap: None,
            handed: false,
            bound: AtomicBool::new(false),
            released: AtomicBool::new(false),
        }
    }

    /// One that a VMM of an earlier daemon may have.
    pub(super) const fn adopted(shared: Arc<Shared>, slot: SlotNumber) -> Self {
        let mut taken = Self::new(shared, slot);
        taken.handed = true;
        taken
    }

    pub(super) fn attached(&mut self, tap: File) {
        self.tap = Some(tap);
    }

    /// Its number.
    #[must_use]
    pub const fn slot(&self) -> SlotNumber {
        self.slot
    }

    /// Name of its TAP.
    #[must_use]
    pub fn name(&self) -> String {
        tap_name(self.slot)
    }

    /// The TAP's queue, for the VMM; once. It is the only one: until it is closed everywhere the slot is not free again.
    pub const fn take_tap(&mut self) -> Option<File> {
        self.handed = true;
        self.tap.take()
    }

    /// Opens what the doors listen on: sockets that hear this TAP alone. They listen from here on.
    ///
    /// # Errors
    /// The slot has doors already or was given back, the lane has ended, the kernel's. Cancelled: sockets that nobody gets
    /// are closed.
    pub async fn bind(&self) -> Result<Doors, NetError> {
        let slot = self.slot;
        // Told first: what may be open must be shown to be shut.
        self.shared.tell(slot, Event::Bound)?;
        self.bound.store(true, Ordering::Relaxed);
        self.shared.order(|reply| Order::Bind { slot, reply }).await
    }

    /// Notes that the doors have a policy now. Neither waits nor asks the kernel.
    ///
    /// # Errors
    /// The slot has no doors, or armed ones.
    pub fn arm(&self) -> Result<(), NetError> {
        self.shared.tell_armed(self.slot)
    }

    /// Gives the slot back. It is free once both things that the value asks for are told, and the kernel agrees.
    #[must_use = "the slot is free again only once doors and VMM are told to be gone"]
    pub fn release(&self) -> Draining {
        if !self.released.swap(true, Ordering::Relaxed) {
            tell(&self.shared, self.slot, Event::Released);
        }
        Draining {
            shared: Arc::clone(&self.shared),
            slot: self.slot,
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        drop(self.tap.take());
        if *self.released.get_mut() {
            return;
        }
        let gone = [
            (Event::Released, true),
            (Event::DoorsShut, !*self.bound.get_mut()),
            (Event::VmmGone, !self.handed),
        ];
        for (event, _) in gone.into_iter().filter(|(_, so)| *so) {
            tell(&self.shared, self.slot, event);
        }
    }
}

fn tell(shared: &Shared, slot: SlotNumber, event: Event) {
    if let Err(error) = shared.tell(slot, event) {
        tracing::error!(%slot, %error, "a network slot was not in a state to be given back");
    }
}

/// What a machine of this lane gets: none on lane none, else a slot and the queue of its TAP. Cancelled: it drains.
///
/// # Errors
/// The lane is off, or [`Lane::take`]'s.
pub async fn card(net: Option<&Lane>, lane: words::Lane) -> Result<Option<(Taken, OwnedFd)>, NetError> {
    match lane {
        words::Lane::None => Ok(None),
        words::Lane::Guarded => {
            let mut taken = net.ok_or(NetError::Off)?.take().await?;
            let slot = taken.slot();
            let queue = taken.take_tap().ok_or(NetError::OutOfPlace { slot })?;
            Ok(Some((taken, queue.into())))
        }
    }
}

/// A slot on its way back.
#[derive(Debug)]
pub struct Draining {
    shared: Arc<Shared>,
    slot: SlotNumber,
}

impl Draining {
    /// Its listeners and every connection of theirs are closed, its policy is dropped; or there never were any.
    ///
    /// # Errors
    /// It is free already: a bug.
    pub fn doors_shut(&self) -> Result<(), NetError> {
        self.shared.tell(self.slot, Event::DoorsShut)
    }

    /// The VMM's pidfd has fired, or there never was a VMM.
    ///
    /// # Errors
    /// It is free already: a bug.
    pub fn vmm_gone(&self) -> Result<(), NetError> {
        self.shared.tell(self.slot, Event::VmmGone)
    }
}

/// What the doors of one sandbox listen on; none of them blocks. What is accepted is reset when it is closed with bytes
/// on their way, so that none of them reaches the slot's next guest.
#[derive(Debug)]
pub struct Doors {
    /// HTTP.
    pub http: TcpListener,
    /// SOCKS5.
    pub socks5: TcpListener,
    /// DNS over TCP.
    pub dns_stream: TcpListener,
    /// DNS over UDP.
    pub dns: UdpSocket,
}

impl Doors {
    /// How many sockets are bound.
    pub(super) const COUNT: u64 = 4;

    /// Binds them, in the namespace of this thread.
    pub(super) fn bind(slot: SlotNumber) -> Result<Self, NetError> {
        let name = tap_name(slot);
        let all = || {
            Ok(Self {
                http: listener(&name, HTTP_PORT)?,
                socks5: listener(&name, SOCKS5_PORT)?,
                dns_stream: listener(&name, DNS_PORT)?,
                dns: socket(&name, SocketType::DGRAM, DNS_PORT)?.into(),
            })
        };
        all()
            .map_err(|source: io::Error| NetError::io("listen on the TAP", Some(name.clone().into()), source))
    }
}

fn socket(name: &str, kind: SocketType, port: u16) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, kind, flags, None)?;
    sys::bind_to_interface(&socket, name)?;
    bind(&socket, &SocketAddrV4::new(HOST_ADDRESS, port))?;
    Ok(socket)
}

fn listener(name: &str, port: u16) -> io::Result<TcpListener> {
    let socket = socket(name, SocketType::STREAM, port)?;
    // Inherited by what is accepted: else the kernel goes on sending what a closed connection had not sent yet.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    listen(&socket, BACKLOG).map_err(|errno: Errno| io::Error::from(errno))?;
    Ok(socket.into())
}
