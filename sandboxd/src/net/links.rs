//! The TAPs of this thread's namespace: laid, listed, attached, and put up and down together.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, netdevice::name_to_index, socket_with},
};

use super::{
    NetError,
    netlink::{Family, Socket, fault},
    place::TUN,
    route::{self, Link},
    tap_name, tap_slot,
};
use crate::{names::SlotNumber, sys};

/// The queue of a TAP that was laid.
#[derive(Debug)]
pub(super) struct Queue {
    index: u32,
    pub(super) file: File,
}

/// A socket to the links.
#[derive(Debug)]
pub(super) struct Links {
    socket: Socket,
    /// For the one question that netlink answers less well: a link's number by its name.
    names: OwnedFd,
}

impl Links {
    pub(super) fn open() -> Result<Self, NetError> {
        let failed = |errno| NetError::io("open netlink", None, fault(errno));
        Ok(Self {
            socket: Socket::open(Family::Route).map_err(failed)?,
            names: socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .map_err(failed)?,
        })
    }

    pub(super) const fn sent(&self) -> u64 {
        self.socket.sent()
    }

    /// All links of the namespace.
    pub(super) fn list(&mut self) -> Result<Vec<Link>, NetError> {
        let failed = |errno| NetError::io("list links", None, fault(errno));
        let replies = self.socket.ask(&route::links_request()).map_err(failed)?;
        Ok(replies
            .iter()
            .filter_map(|reply| route::link(reply.kind, &reply.body))
            .collect())
    }

    /// Whether the slot's TAP is the one that was laid.
    pub(super) fn is(&self, slot: SlotNumber, laid: &Queue) -> bool {
        name_to_index(&self.names, &tap_name(slot)) == Ok(laid.index)
    }

    /// The queue of a slot's TAP, made if it is not there. EBUSY while anybody has it.
    fn attach(slot: SlotNumber) -> Result<File, NetError> {
        let failed = |error: io::Error| NetError::lacking("open", "CONFIG_TUN", Some(TUN.into()), error);
        let tun = OpenOptions::new()
            .read(true)
            .write(true)
            .open(TUN)
            .map_err(failed)?;
        sys::attach_tap(&tun, &tap_name(slot))
            .map_err(|error| NetError::io("attach the TAP", Some(tap_name(slot).into()), error))?;
        Ok(tun)
    }

    /// Makes a slot's TAP one that may be handed out, whatever it was before; up only if `up`. Its queue is kept until it
    /// is handed over: one that was closed meanwhile might live on, for a moment, in a process that is just being started.
    pub(super) fn lay(&mut self, slot: SlotNumber, up: bool) -> Result<Queue, NetError> {
        let name = tap_name(slot);
        let failed = |errno| NetError::io("set up the TAP", Some(name.clone().into()), fault(errno));
        let file = Self::attach(slot)?;
        let index = name_to_index(&self.names, &name).map_err(failed)?;
        self.socket.tell(&route::lay(index, up)).map_err(failed)?;
        Ok(Queue { index, file })
    }

    /// All TAPs down, in one message.
    pub(super) fn lower(&mut self) -> Result<(), NetError> {
        self.all(false)
    }

    /// All TAPs up, and their guests as neighbours again.
    pub(super) fn raise(&mut self) -> Result<(), NetError> {
        self.all(true)?;
        let all: Vec<_> = self
            .list()?
            .iter()
            .filter(|link| tap_slot(&link.name).is_some())
            .map(|link| route::neighbour(link.index))
            .collect();
        let failed = |errno| NetError::io("set neighbours", None, fault(errno));
        self.socket.tell(&all).map_err(failed)
    }

    fn all(&mut self, up: bool) -> Result<(), NetError> {
        match self.socket.tell(&[route::all_links(up)]) {
            // Without one TAP there is no such group.
            Ok(()) | Err(Errno::NODEV) => Ok(()),
            Err(errno) => Err(NetError::io("set all TAPs", None, fault(errno))),
        }
    }
}
