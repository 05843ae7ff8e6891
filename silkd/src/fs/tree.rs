//! Stat, Mkdir, Rename: one name each.

use rustix::{
    fs::{Mode, RenameFlags, renameat_with},
    io::Errno,
};
use sandbox_protocol::{
    reason::Reason,
    v1::{
        AgentMkdirReply, AgentMkdirRequest, AgentRenameReply, AgentRenameRequest, AgentStatReply,
        AgentStatRequest, RenameReplace,
    },
};

use super::{
    errno::{field, refused},
    open::{Wanted, make_dir},
    stat::{MODE, found, is_dir},
};
use crate::refusal::Refusal;

/// Mode of a new directory.
const NEW: u32 = 0o755;

/// A Stat, checked.
#[derive(Debug)]
pub(super) struct Stat {
    wanted: Wanted,
    follow: bool,
}

impl Stat {
    /// Pure.
    pub(super) fn new(request: &AgentStatRequest) -> Result<Self, Refusal> {
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            follow: request.follow,
        })
    }

    pub(super) fn act(&self) -> Result<AgentStatReply, Refusal> {
        let seen = self.wanted.look(self.follow)?;
        if self.follow && seen.is_link() {
            return Err(refused(Reason::LinkRefused, "is a link", self.wanted.path()));
        }
        let stat = found(&seen).map_err(|errno| self.wanted.failed("look at", errno))?;
        Ok(AgentStatReply { stat: Some(stat) })
    }
}

/// A Mkdir, checked.
#[derive(Debug)]
pub(super) struct Mkdir {
    wanted: Wanted,
    parents: bool,
    mode: u32,
}

impl Mkdir {
    /// Pure.
    pub(super) fn new(request: &AgentMkdirRequest) -> Result<Self, Refusal> {
        let mode = request.mode.unwrap_or(NEW);
        if mode & !MODE != 0 {
            return Err(field("mode: at most 07777"));
        }
        Ok(Self {
            wanted: Wanted::new(&request.path, request.resolve.as_ref())?,
            parents: request.parents,
            mode,
        })
    }

    pub(super) fn act(&self) -> Result<AgentMkdirReply, Refusal> {
        let spot = self.wanted.spot(self.parents)?;
        let made = make_dir(&spot.parent, &spot.name, Mode::from_raw_mode(self.mode));
        let made = made.map_err(|errno| self.wanted.failed("make", errno))?;
        if made {
            return Ok(AgentMkdirReply { made });
        }
        // There already: good enough if it is a directory, through a link or not, and that was asked for.
        let there = self.parents && is_dir(&self.wanted.look(true)?.stat);
        if !there {
            return Err(self.wanted.failed("make", Errno::EXIST));
        }
        Ok(AgentMkdirReply { made })
    }
}

/// A Rename, checked.
#[derive(Debug)]
pub(super) struct Rename {
    from: Wanted,
    to: Wanted,
    how: RenameFlags,
}

impl Rename {
    /// Pure.
    pub(super) fn new(request: &AgentRenameRequest) -> Result<Self, Refusal> {
        let how = match RenameReplace::try_from(request.replace) {
            Ok(RenameReplace::Unspecified | RenameReplace::Yes) => RenameFlags::empty(),
            Ok(RenameReplace::No) => RenameFlags::NOREPLACE,
            Ok(RenameReplace::Exchange) => RenameFlags::EXCHANGE,
            Err(_unknown) => return Err(field("replace: unknown")),
        };
        Ok(Self {
            from: Wanted::new(&request.from, request.resolve.as_ref())?,
            to: Wanted::new(&request.to, request.resolve.as_ref())?,
            how,
        })
    }

    pub(super) fn act(&self) -> Result<AgentRenameReply, Refusal> {
        let (from, to) = (self.from.spot(false)?, self.to.spot(false)?);
        // Of the two the one that is missing is named.
        from.stat().map_err(|errno| self.from.failed("rename", errno))?;
        renameat_with(
            &from.parent,
            from.name.as_slice(),
            &to.parent,
            to.name.as_slice(),
            self.how,
        )
        .map_err(|errno| self.to.failed("rename to", errno))?;
        Ok(AgentRenameReply {})
    }
}
