//! Netlink, as far as a lane needs it: messages written and read as bytes, and a socket that waits for nobody.
//!
//! Reading is total: what is cut or lies about its length ends the walk, and never panics.

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind,
        netlink::{self, SocketAddrNetlink},
        recvfrom, send, socket_with,
    },
};

/// Flags of a request.
pub(super) mod flag {
    pub(in crate::net) const REQUEST: u16 = 0x1;
    pub(in crate::net) const ACK: u16 = 0x4;
    pub(in crate::net) const DUMP: u16 = 0x300;
    pub(in crate::net) const REPLACE: u16 = 0x100;
    pub(in crate::net) const CREATE: u16 = 0x400;
}

const HEADER: usize = 16;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// An attribute that holds attributes.
const NESTED: u16 = 0x8000;
/// The bits of an attribute's kind that are its kind.
const KIND: u16 = 0x3fff;
/// The kernel fills at most 32 KiB per read, however long the dump.
const BUFFER: usize = 64 << 10;
/// Messages in one write: their answers fit the smallest receive buffer in use (212,992 bytes, some 770 for an answer).
const TOGETHER: usize = 64;

/// A request that is being written. Its number is given when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl Message {
    /// A request with its fixed header.
    pub(super) fn new(kind: u16, flags: u16, header: &[u8]) -> Self {
        Self {
            kind,
            flags: flags | flag::REQUEST,
            body: header.to_vec(),
        }
    }

    /// Adds an attribute. Ours are far shorter than the 64 KiB that its length can say.
    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        attribute(&mut self.body, kind, value);
        self
    }

    /// Adds an attribute of text, with the NUL that the kernel expects.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// Adds an attribute that holds others.
    pub(super) fn nested(self, kind: u16, inside: &Nest) -> Self {
        self.attribute(kind | NESTED, &inside.0)
    }

    /// The same request, to be answered even if it succeeds.
    pub(super) fn acknowledged(mut self) -> Self {
        self.flags |= flag::ACK;
        self
    }

    fn write(&self, number: u32, out: &mut Vec<u8>) {
        let length = u32::try_from(HEADER + self.body.len()).unwrap_or(u32::MAX);
        out.extend(length.to_ne_bytes());
        out.extend(self.kind.to_ne_bytes());
        out.extend(self.flags.to_ne_bytes());
        out.extend(number.to_ne_bytes());
        out.extend(0_u32.to_ne_bytes());
        out.extend(&self.body);
        pad(out);
    }
}

/// Attributes inside an attribute.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Nest(Vec<u8>);

impl Nest {
    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        attribute(&mut self.0, kind, value);
        self
    }

    pub(super) fn number(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    pub(super) fn nested(self, kind: u16, inside: &Self) -> Self {
        self.attribute(kind | NESTED, &inside.0)
    }
}

fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    out.extend(length.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(value);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// A message of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) kind: u16,
    pub(super) number: u32,
    pub(super) body: Vec<u8>,
}

/// The messages in what was read; ends at the first that is not whole.
fn replies(mut bytes: &[u8]) -> Vec<Reply> {
    let mut found = Vec::new();
    while let Some(length) = number_at(bytes, 0).and_then(|length| usize::try_from(length).ok()) {
        let (Some(body), Some(kind), Some(number)) =
            (bytes.get(HEADER..length), short_at(bytes, 4), number_at(bytes, 8))
        else {
            break;
        };
        found.push(Reply {
            kind,
            number,
            body: body.to_vec(),
        });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// The attributes in a body behind its fixed header of `header` bytes; ends at the first that is not whole.
pub(super) fn attributes(body: &[u8], header: usize) -> Vec<(u16, &[u8])> {
    let mut bytes = body.get(header..).unwrap_or_default();
    let mut found = Vec::new();
    while let (Some(length), Some(kind)) = (short_at(bytes, 0), short_at(bytes, 2)) {
        let length = usize::from(length);
        let Some(value) = bytes.get(4..length) else { break };
        found.push((kind & KIND, value));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn short_at(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_ne_bytes(two))
}

/// Four bytes in the host's order.
pub(super) fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_ne_bytes(four))
}

/// Which part of the kernel a socket speaks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    /// Links, addresses, neighbours.
    Route,
    /// Packet filter.
    Netfilter,
}

/// A socket that asks. It belongs to the network namespace of the thread that opened it. The kernel answers within the
/// write, so an answer that is not there is an error, and nothing here waits.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    number: u32,
    sent: u64,
}

impl Socket {
    pub(super) fn open(family: Family) -> Result<Self, Errno> {
        Ok(Self {
            fd: open(family, 0)?,
            number: 0,
            sent: 0,
        })
    }

    /// Messages sent so far.
    pub(super) const fn sent(&self) -> u64 {
        self.sent
    }

    fn numbered(&mut self) -> u32 {
        self.number = self.number.wrapping_add(1);
        self.number
    }

    fn write(&mut self, bytes: &[u8], messages: usize) -> Result<(), Errno> {
        self.sent += messages as u64;
        match send(&self.fd, bytes, SendFlags::empty()) {
            Ok(n) if n == bytes.len() => Ok(()),
            Ok(_) => Err(Errno::MSGSIZE),
            Err(errno) => Err(errno),
        }
    }

    /// Sends requests that each stand for themselves; all are done, the first failure is told.
    pub(super) fn tell(&mut self, messages: &[Message]) -> Result<(), Errno> {
        let mut outcome = Ok(());
        for some in messages.chunks(TOGETHER) {
            let mut bytes = Vec::new();
            let first = self.number.wrapping_add(1);
            for message in some {
                let number = self.numbered();
                message.clone().acknowledged().write(number, &mut bytes);
            }
            self.write(&bytes, some.len())?;
            let mut waiting = some.len();
            while waiting > 0 {
                for reply in receive(&self.fd)? {
                    // An answer to an earlier request, which was given up, is nobody's any more.
                    let ours = reply.number.wrapping_sub(first) < u32::try_from(some.len()).unwrap_or(0);
                    if ours && reply.kind == ERROR {
                        waiting -= 1;
                        outcome = outcome.and(verdict(&reply.body));
                    }
                }
            }
        }
        outcome
    }

    /// Sends requests that the kernel does all of or none. Their answers: one for each that failed, and one for the last
    /// even if all went well; a failed batch never answers for its end, and a failure before its first request answers
    /// for its beginning alone.
    pub(super) fn batch(&mut self, begin: &Message, inside: &[Message], end: &Message) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        let first = self.numbered();
        begin.write(first, &mut bytes);
        let mut last = first;
        for (at, message) in inside.iter().enumerate() {
            last = self.numbered();
            if at + 1 == inside.len() {
                message.clone().acknowledged().write(last, &mut bytes);
            } else {
                message.write(last, &mut bytes);
            }
        }
        end.write(self.numbered(), &mut bytes);
        self.write(&bytes, inside.len() + 2)?;
        let (mut outcome, mut done) = (Ok(()), false);
        while !done {
            match receive(&self.fd) {
                Ok(replies) => {
                    for reply in replies {
                        let ours = reply.number.wrapping_sub(first) <= last.wrapping_sub(first);
                        if ours && reply.kind == ERROR {
                            done |= reply.number == last;
                            outcome = outcome.and(verdict(&reply.body));
                        }
                    }
                }
                // Nothing more was said: fine if a failure was.
                Err(Errno::AGAIN) if outcome.is_err() => done = true,
                Err(errno) => return Err(errno),
            }
        }
        outcome
    }

    /// Asks for one thing, or for all of a kind.
    pub(super) fn ask(&mut self, message: &Message) -> Result<Vec<Reply>, Errno> {
        let number = self.numbered();
        let many = message.flags & flag::DUMP == flag::DUMP;
        let mut bytes = Vec::new();
        message.write(number, &mut bytes);
        self.write(&bytes, 1)?;
        let mut found = Vec::new();
        loop {
            for reply in receive(&self.fd)? {
                if reply.number != number {
                    continue;
                }
                match reply.kind {
                    DONE => return Ok(found),
                    ERROR => return verdict(&reply.body).map(|()| found),
                    _ => found.push(reply),
                }
            }
            if !many && !found.is_empty() {
                return Ok(found);
            }
        }
    }
}

/// A socket that hears what a group of the kernel is told.
pub(super) fn listen(family: Family, group: u32) -> Result<OwnedFd, Errno> {
    open(family, 1 << (group - 1))
}

fn open(family: Family, groups: u32) -> Result<OwnedFd, Errno> {
    let protocol: Option<Protocol> = match family {
        // Protocol 0, which rustix spells so.
        Family::Route => None,
        Family::Netfilter => Some(netlink::NETFILTER),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    bind(&fd, &SocketAddrNetlink::new(0, groups))?;
    Ok(fd)
}

/// What an answer says: zero is success, else an error number below zero.
fn verdict(body: &[u8]) -> Result<(), Errno> {
    let code = number_at(body, 0).map_or(-libc::EPROTO, u32::cast_signed);
    if code == 0 {
        Ok(())
    } else {
        Err(Errno::from_raw_os_error(code.saturating_neg()))
    }
}

/// What lies ready, from the kernel and nobody else: any process of the namespace may write to a socket.
pub(super) fn receive(fd: &OwnedFd) -> Result<Vec<Reply>, Errno> {
    let mut buffer = vec![0_u8; BUFFER];
    loop {
        let (length, _whole, from) = recvfrom(fd, buffer.as_mut_slice(), RecvFlags::DONTWAIT)?;
        let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
        if from.is_some_and(|from| from.pid() == 0) {
            return Ok(replies(buffer.get(..length).unwrap_or_default()));
        }
    }
}

/// An error number as the rest of the crate has it.
pub(super) fn fault(errno: Errno) -> io::Error {
    errno.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_is_laid_out_as_the_kernel_reads_it() {
        let inside = Nest::default().number(2, 7);
        let message = Message::new(0x10, flag::ACK, &[9; 4])
            .text(1, "ab")
            .nested(3, &inside);
        let mut bytes = Vec::new();
        message.write(5, &mut bytes);
        let expected: Vec<u8> = [
            &40_u32.to_ne_bytes()[..],
            &0x10_u16.to_ne_bytes(),
            &5_u16.to_ne_bytes(),
            &5_u32.to_ne_bytes(),
            &[0; 4],
            &[9; 4],
            &7_u16.to_ne_bytes(),
            &1_u16.to_ne_bytes(),
            b"ab\0\0",
            &12_u16.to_ne_bytes(),
            &0x8003_u16.to_ne_bytes(),
            &8_u16.to_ne_bytes(),
            &2_u16.to_ne_bytes(),
            &[0, 0, 0, 7],
        ]
        .concat();
        assert_eq!(bytes, expected);
        let read = replies(&bytes);
        assert_eq!((read.len(), read[0].kind, read[0].number), (1, 0x10, 5));
        let outer = attributes(&read[0].body, 4);
        assert_eq!(outer[0], (1, &b"ab\0"[..]));
        assert_eq!(attributes(outer[1].1, 0), [(2, &[0, 0, 0, 7][..])]);
    }

    #[test]
    fn an_answer_is_success_or_its_error() {
        assert_eq!(verdict(&0_i32.to_ne_bytes()), Ok(()));
        assert_eq!(verdict(&(-libc::EPERM).to_ne_bytes()), Err(Errno::PERM));
        assert_eq!(verdict(&[]), Err(Errno::PROTO));
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..200), header in 0_usize..40) {
            for reply in replies(&bytes) {
                prop_assert!(reply.body.len() + HEADER <= bytes.len());
            }
            for (_, value) in attributes(&bytes, header) {
                prop_assert!(value.len() + 4 <= bytes.len());
            }
        }
    }
}
