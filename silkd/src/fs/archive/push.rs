//! Push: an archive is unpacked whole beside its destination, and only then lands there.

use std::{os::fd::OwnedFd, sync::Arc};

use bytes::Bytes;
use rustix::{
    fs::{FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, fchmod, fchown, openat2, renameat_with},
    io::Errno,
};
use sandbox_protocol::{
    reason::Reason,
    v1::{AgentPushReply, PushIn, PushMode, PushStart},
};
use tonic::{Status, Streaming};

use super::{
    reader::Reader,
    stage::{Rules, Stage, refused},
};
use crate::{
    fs::{
        errno::{About, field, refuse},
        input::gather,
        open::{Spot, Wanted, open_child},
        stat::{MODE, is_dir},
        walk::{Seen, Walk},
        workers::{Call, Cancel, Parked, Workers},
    },
    refusal::{Escaped, Refusal},
};

/// Mode of a destination that the push makes.
const NEW: u32 = 0o755;

/// A request, checked.
#[derive(Debug)]
pub(in crate::fs) struct Plan {
    dest: Wanted,
    replace: bool,
    rules: Rules,
}

impl Plan {
    /// Pure.
    ///
    /// # Errors
    /// `FIELD_INVALID`, `PATH_DENIED`, and those of a path.
    pub(in crate::fs) fn new(start: &PushStart, root: bool) -> Result<Self, Refusal> {
        let replace = match PushMode::try_from(start.mode) {
            Ok(PushMode::Unspecified | PushMode::Merge) => false,
            Ok(PushMode::Replace) => true,
            Err(_unknown) => return Err(field("mode: unknown")),
        };
        if start.keep_owner && !root {
            let message = "only root may give files to other owners";
            return Err(Refusal::new(Reason::PathDenied, message).with_path(&start.dest));
        }
        Ok(Self {
            dest: Wanted::new(&start.dest, start.resolve.as_ref())?,
            replace,
            rules: Rules {
                strip: start.strip,
                keep_owner: start.keep_owner,
            },
        })
    }

    fn failed(&self, tried: &str, errno: Errno) -> Refusal {
        self.dest.failed(tried, errno)
    }
}

/// A push that has begun.
#[derive(Debug)]
struct Pushing {
    plan: Plan,
    reader: Reader,
    stage: Stage,
    dest: Dest,
}

/// Where it is to land.
#[derive(Debug)]
struct Dest {
    /// `None`: the root itself, which has no name.
    spot: Option<Spot>,
    /// What is there now.
    old: Option<(OwnedFd, Stat)>,
}

impl Dest {
    fn open(plan: &Plan) -> Result<Self, Refusal> {
        let opened = |old: &crate::fs::open::Found| {
            if !is_dir(&old.stat) {
                return Err(plan.failed("unpack to", Errno::NOTDIR));
            }
            let dir = open_child(&old.fd, b".").map_err(|errno| plan.failed("open", errno))?;
            Ok((dir, old.stat))
        };
        match plan.dest.target(false) {
            Ok((spot, old)) => Ok(Self {
                spot: Some(spot),
                old: old.as_ref().map(opened).transpose()?,
            }),
            // `/`: there is nothing beside it, and nothing to swap it with.
            Err(refusal) if refusal.reason == Reason::InvalidPath && !plan.replace => Ok(Self {
                spot: None,
                old: Some(opened(&plan.dest.look(true)?)?),
            }),
            Err(refusal) => Err(refusal),
        }
    }

    /// Beside it; within it where a file system of its own begins, or beside it nothing may be made.
    fn stage(&self, plan: &Plan) -> Result<Stage, Refusal> {
        let fail = |errno| plan.failed("unpack beside", errno);
        let within = match (&self.spot, &self.old) {
            (Some(spot), None) => return Stage::within(&spot.parent, plan.rules).map_err(fail),
            (Some(spot), Some((old, _))) => {
                let beside = same_mount(spot).and_then(|()| Stage::within(&spot.parent, plan.rules));
                match beside {
                    Err(Errno::XDEV | Errno::ACCESS | Errno::PERM | Errno::ROFS) if !plan.replace => old,
                    other => return other.map_err(fail),
                }
            }
            (None, Some((old, _))) => old,
            (None, None) => return Err(plan.failed("reach", Errno::NOENT)),
        };
        Stage::within(within, plan.rules).map_err(|errno| plan.failed("unpack within", errno))
    }
}

/// Says `XDEV` where something is mounted.
fn same_mount(spot: &Spot) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(
        &spot.parent,
        spot.name.as_slice(),
        flags,
        Mode::empty(),
        ResolveFlags::NO_XDEV,
    )
    .map(drop)
}

impl Pushing {
    fn begin(plan: Plan) -> Result<Self, Refusal> {
        let dest = Dest::open(&plan)?;
        let stage = dest.stage(&plan)?;
        Ok(Self {
            plan,
            reader: Reader::default(),
            stage,
            dest,
        })
    }

    fn feed(&mut self, batch: Vec<Bytes>, cancel: &Cancel) -> Result<(), Refusal> {
        for mut data in batch {
            while let Some(event) = self.next(&mut data)? {
                cancel.check()?;
                self.stage.put(event)?;
            }
        }
        Ok(())
    }

    fn next(&mut self, data: &mut Bytes) -> Result<Option<super::reader::Event>, Refusal> {
        let event = self.reader.next(data);
        event.map_err(|bad| refused(self.reader.name(), &bad.to_string()))
    }

    fn finish(mut self, cancel: &Cancel) -> Result<AgentPushReply, Refusal> {
        let whole = self.reader.finish();
        whole.map_err(|bad| refused(self.reader.name(), &bad.to_string()))?;
        if self.plan.replace || self.dest.old.is_none() {
            self.swap(cancel)?;
        } else if let Some((old, _)) = &self.dest.old {
            let merge = Merge {
                stage: &self.stage,
                to: old,
                path: self.plan.dest.path(),
            };
            merge.check(cancel)?;
            merge.land()?;
        }
        Ok(AgentPushReply {
            entries: self.stage.entries,
            bytes: self.stage.bytes,
        })
    }

    /// Puts the whole directory in the place of the old one, or of none, in one step.
    fn swap(&mut self, cancel: &Cancel) -> Result<(), Refusal> {
        let fail = |tried, errno| self.plan.failed(tried, errno);
        let spot = self
            .dest
            .spot
            .as_ref()
            .ok_or_else(|| fail("replace", Errno::BUSY))?;
        let (mode, how) = match &self.dest.old {
            Some((_, old)) => {
                let own = rustix::fs::fstat(&self.stage.dir).map_err(|errno| fail("look at", errno))?;
                if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid) {
                    let (uid, gid) = (
                        rustix::fs::Uid::from_raw(old.st_uid),
                        rustix::fs::Gid::from_raw(old.st_gid),
                    );
                    fchown(&self.stage.dir, Some(uid), Some(gid))
                        .map_err(|errno| fail("keep the owner of", errno))?;
                }
                (old.st_mode & MODE, RenameFlags::EXCHANGE)
            }
            None => (NEW, RenameFlags::NOREPLACE),
        };
        self.stage.shut(&self.stage.dir, b"")?;
        fchmod(&self.stage.dir, Mode::from_raw_mode(mode)).map_err(|errno| fail("set the mode of", errno))?;
        renameat_with(
            &self.stage.spot.parent,
            self.stage.spot.name.as_slice(),
            &spot.parent,
            spot.name.as_slice(),
            how,
        )
        .map_err(|errno| fail("replace", errno))?;
        if self.dest.old.is_none() {
            self.stage.there = false;
            return Ok(());
        }
        // What bears the stage's name now is what was there before.
        let name = self.stage.spot.name.clone();
        self.stage.remove(cancel).map_err(|errno| {
            let what = format!("remove what was replaced, now `{}`, at", Escaped(&name, 64));
            self.plan.failed(&what, errno)
        })
    }
}

/// One tree into another.
struct Merge<'a> {
    stage: &'a Stage,
    to: &'a OwnedFd,
    path: &'a [u8],
}

impl Merge<'_> {
    fn refuse(&self, errno: Errno, tried: &str, name: &[u8]) -> Refusal {
        let mut path = self.path.to_vec();
        path.push(b'/');
        path.extend_from_slice(name);
        refuse(errno, About::File, tried, &path)
    }

    fn walk(&self) -> Result<Walk, Refusal> {
        let dir = open_child(&self.stage.dir, b".").and_then(Walk::new);
        dir.map_err(|errno| self.refuse(errno, "read", b""))
    }

    /// Looks for everything that is in the way.
    fn check(&self, cancel: &Cancel) -> Result<(), Refusal> {
        let mut walk = self.walk()?;
        while let Some(seen) = walk.next() {
            cancel.check()?;
            match self
                .there(&seen)
                .map_err(|errno| self.refuse(errno, "merge into", &seen.path))?
            {
                Some(old) if is_dir(&seen.stat) && is_dir(&old) => walk.enter(&seen),
                Some(old) => {
                    let errno = match (is_dir(&seen.stat), FileType::from_raw_mode(old.st_mode)) {
                        (true, _) => Errno::NOTDIR,
                        (false, FileType::Directory) => Errno::ISDIR,
                        (false, _) => continue,
                    };
                    return Err(self.refuse(errno, "merge into", &seen.path));
                }
                // Whatever it holds lands with it.
                None => {}
            }
        }
        self.whole(&walk)
    }

    /// Nothing of what was unpacked was passed over.
    fn whole(&self, walk: &Walk) -> Result<(), Refusal> {
        if walk.unreadable > 0 {
            return Err(self.refuse(Errno::ACCESS, "read again what was unpacked for", b""));
        }
        Ok(())
    }

    /// What is at the destination.
    fn there(&self, seen: &Seen) -> Result<Option<Stat>, Errno> {
        match at(self.to, &seen.path, OFlags::PATH | OFlags::NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            opened => rustix::fs::fstat(opened?).map(Some),
        }
    }

    /// Renames one after the other. What fails here was no conflict a moment ago: it says how far it came.
    fn land(&self) -> Result<(), Refusal> {
        let mut walk = self.walk()?;
        let mut landed = 0_u64;
        while let Some(seen) = walk.next() {
            let one = self.land_one(&walk, &seen);
            let one = one.map_err(|errno| self.refuse(errno, "merge into", &seen.path));
            let one = one.and_then(|one| {
                if one && is_dir(&seen.stat) {
                    self.stage.shut(self.to, &seen.path)?;
                }
                Ok(one)
            });
            match one {
                Ok(true) => landed += 1,
                Ok(false) => walk.enter(&seen),
                Err(mut refusal) => {
                    refusal.message = format!("{}; {landed} before it were merged", refusal.message);
                    return Err(refusal);
                }
            }
        }
        self.whole(&walk)
    }

    /// Whether it has landed; else it is to be entered.
    fn land_one(&self, walk: &Walk, seen: &Seen) -> Result<bool, Errno> {
        let above = seen.path.len().saturating_sub(seen.name.len() + 1);
        let above = seen
            .path
            .get(..above)
            .filter(|path| !path.is_empty())
            .unwrap_or(b".");
        let into = at(
            self.to,
            above,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
        )?;
        let from = walk.dir().ok_or(Errno::NOENT)?;
        // A directory makes way for nothing.
        let how = if is_dir(&seen.stat) {
            RenameFlags::NOREPLACE
        } else {
            RenameFlags::empty()
        };
        match renameat_with(from, seen.name.as_slice(), &into, seen.name.as_slice(), how) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) if is_dir(&seen.stat) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

/// Opens below the destination: no link is a way, and no mount.
fn at(dir: &OwnedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let rule = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(dir, path, flags | OFlags::CLOEXEC, Mode::empty(), rule)
}

/// Takes a client's stream, whose first message is `start`. Cancel safe: dropped, it leaves what was there.
pub(in crate::fs) async fn push(
    workers: &Workers,
    call: Arc<Call>,
    start: &PushStart,
    mut input: Streaming<PushIn>,
) -> Result<AgentPushReply, Status> {
    let plan = Plan::new(start, call.uid() == 0)?;
    let begun = workers.run(&call, move |_| Pushing::begin(plan)).await?;
    let mut parked = Parked::new(workers, &call, begun);
    while let Some(batch) = gather(&mut input).await? {
        let step = parked.step(move |mut pushing, cancel| {
            pushing.feed(batch, cancel)?;
            Ok(pushing)
        })?;
        parked = Parked::new(workers, &call, step.await?);
    }
    Ok(parked.step(|pushing, cancel| pushing.finish(cancel))?.await?)
}
