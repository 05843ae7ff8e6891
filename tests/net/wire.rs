//! The guest's end of a TAP: what a VMM does with it, frame by frame.

use std::{
    fs::File,
    io::{Read as _, Write as _},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandboxd::net::HTTP_PORT;

use crate::frames::{ACK, RST, SYN, Segment, segment};

/// Against a hang.
const LIMIT: Timespec = Timespec {
    tv_sec: 20,
    tv_nsec: 0,
};

/// A TAP's queue.
#[derive(Debug)]
pub(crate) struct Wire {
    tap: File,
    /// Source port of the next fence.
    fence: u16,
}

impl Wire {
    pub(crate) fn new(tap: File) -> Self {
        Self { tap, fence: 60_000 }
    }

    /// The same end in another hand.
    pub(crate) fn file(&self) -> File {
        self.tap.try_clone().unwrap()
    }

    /// Sends a frame. The host has handled it when this returns.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.tap.write_all(frame).unwrap();
    }

    /// Sends what may be refused at the first look.
    pub(crate) fn send_odd(&mut self, frame: &[u8]) {
        match rustix::io::write(&self.tap, frame) {
            Ok(length) => assert_eq!(length, frame.len()),
            Err(errno) => assert_eq!(errno, rustix::io::Errno::INVAL),
        }
    }

    /// The next frame that the host sends.
    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut ready = [PollFd::new(&self.tap, PollFlags::IN)];
        assert_eq!(poll(&mut ready, Some(&LIMIT)).unwrap(), 1, "no frame came");
        let mut frame = vec![0; 4_096];
        let length = self.tap.read(&mut frame).unwrap();
        frame.truncate(length);
        frame
    }

    /// Every frame that came since the last fence: asks the HTTP door, which must listen, for a connection, and reads until
    /// its answer. Frames are handled and sent in order, so what is not among them was never sent.
    pub(crate) fn until_fence(&mut self) -> Vec<Vec<u8>> {
        self.fence += 1;
        let syn = Segment::syn(self.fence, HTTP_PORT);
        self.send(&syn.frame());
        let mut before = Vec::new();
        loop {
            let frame = self.next();
            match segment(&frame) {
                Some((answer, _)) if answer.to.1 == self.fence => {
                    assert_eq!(answer.flags, SYN | ACK, "{answer:?}");
                    self.send(
                        &Segment {
                            flags: RST,
                            seq: answer.ack,
                            ..syn
                        }
                        .frame(),
                    );
                    return before;
                }
                Some(_) | None => before.push(frame),
            }
        }
    }
}
