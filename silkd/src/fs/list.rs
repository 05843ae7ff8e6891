//! List: what a directory holds, in batches, in the order in which the kernel has it.

use rustix::fs::{FileType, readlinkat};
use sandbox_protocol::{
    limits::CHUNK_OUT,
    v1::{AgentListReply, AgentListRequest, FileEntry},
};

use super::{
    errno::field,
    open::Wanted,
    stat::{is_dir, wire},
    steps::{Made, Produce},
    walk::{Seen, Walk},
    workers::Cancel,
};
use crate::refusal::Refusal;

/// Entries of one message.
const BATCH: usize = 1024;
/// Bytes of names in one message, so that a batch of long ones is no longer than any other.
const BYTES: usize = CHUNK_OUT / 2;
/// Levels that one may ask for.
const DEPTH: u32 = 64;

/// A request, checked.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: Wanted,
    depth: usize,
    most: u64,
}

impl Plan {
    /// Pure.
    pub(super) fn new(request: &AgentListRequest) -> Result<Self, Refusal> {
        if request.depth > DEPTH {
            return Err(field("depth: at most 64"));
        }
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            depth: usize::try_from(request.depth.max(1)).unwrap_or(1),
            most: match request.max_entries {
                0 => u64::MAX,
                most => most,
            },
        })
    }
}

/// A list that is being made.
#[derive(Debug)]
pub(super) struct Lister {
    walk: Walk,
    depth: usize,
    left: u64,
    over: bool,
}

impl Lister {
    pub(super) fn open(plan: &Plan) -> Result<Self, Refusal> {
        let (dir, _) = plan.wanted.open_dir()?;
        Ok(Self {
            walk: Walk::new(dir).map_err(|errno| plan.wanted.failed("read", errno))?,
            depth: plan.depth,
            left: plan.most,
            over: false,
        })
    }

    fn entry(&mut self, seen: Seen) -> FileEntry {
        let target = match (FileType::from_raw_mode(seen.stat.st_mode), self.walk.dir()) {
            (FileType::Symlink, Some(dir)) => readlinkat(dir, seen.name.as_slice(), Vec::new()).ok(),
            _ => None,
        };
        if is_dir(&seen.stat) && seen.depth < self.depth {
            self.walk.enter(&seen);
        }
        FileEntry {
            stat: Some(wire(
                &seen.stat,
                target.map(std::ffi::CString::into_bytes).unwrap_or_default(),
            )),
            name: seen.path.into(),
        }
    }
}

impl Produce for Lister {
    type Item = AgentListReply;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<AgentListReply>, Refusal> {
        if self.over {
            return Ok(Made::End);
        }
        let mut reply = AgentListReply::default();
        let mut bytes = 0;
        while reply.entries.len() < BATCH && bytes < BYTES {
            cancel.check()?;
            let Some(seen) = self.walk.next() else {
                self.over = true;
                break;
            };
            if self.left == 0 {
                self.over = true;
                reply.truncated = true;
                break;
            }
            self.left -= 1;
            let entry = self.entry(seen);
            bytes += entry.name.len() + entry.stat.as_ref().map_or(0, |stat| stat.target.len());
            reply.entries.push(entry);
        }
        if self.over {
            reply.unreadable = self.walk.unreadable;
        }
        Ok(Made::Item(reply))
    }
}
