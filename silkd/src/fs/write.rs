//! Write: the whole new content, or the old one.
//!
//! What comes goes into a file beside the target, which takes the target's place in one step when all of it is there.
//! Appending alone goes into the file itself.

use std::{os::fd::OwnedFd, sync::Arc};

use bytes::{Buf as _, Bytes};
use rustix::{
    fs::{
        FsWord, Gid, Mode, OFlags, RenameFlags, SeekFrom, Stat, Uid, fstat, fstatfs, fsync, ftruncate,
        openat, renameat_with, seek,
    },
    io::Errno,
};
use sandbox_protocol::{
    reason::Reason,
    v1::{AgentWriteReply, WriteIf, WriteIn, WriteStart},
};
use tonic::{Status, Streaming};

use super::{
    errno::{field, refused},
    input::gather,
    open::{Found, Spot, Wanted, open_child},
    stat::{MODE, mtime, wire},
    temp::Temp,
    workers::{Call, Parked, Workers, as_silkd},
};
use crate::refusal::Refusal;

/// Mode of a new file.
const NEW: u32 = 0o644;
/// Set-user and set-group bits: what is written to by anybody but root loses them, as the kernel has it.
const SET_ID: u32 = 0o6000;

/// A block of a hole.
const ZEROS: [u8; 4096] = [0; 4096];

/// What must hold of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum If {
    Any,
    Absent,
    SameMtime(i64),
}

/// A request, checked.
#[derive(Debug)]
pub(super) struct Plan {
    wanted: Wanted,
    mode: Option<u32>,
    size: Option<u64>,
    parents: bool,
    only: If,
    append: bool,
    durable: bool,
}

impl Plan {
    /// Pure.
    ///
    /// # Errors
    /// `FIELD_INVALID`, and those of a path.
    pub(super) fn new(start: &WriteStart) -> Result<Self, Refusal> {
        let only = match WriteIf::try_from(start.r#if) {
            Ok(WriteIf::Unspecified | WriteIf::Any) => If::Any,
            Ok(WriteIf::Absent) => If::Absent,
            Ok(WriteIf::SameMtime) => If::SameMtime(start.mtime_ns),
            Err(_unknown) => return Err(field("if: unknown")),
        };
        if start.mode.is_some_and(|mode| mode & !MODE != 0) {
            return Err(field("mode: at most 07777"));
        }
        let wanted = Wanted::new(&start.path, start.resolve.as_ref())?;
        if wanted.path().ends_with(b"/") {
            return Err(refused(
                Reason::NotRegularFile,
                "names a directory",
                wanted.path(),
            ));
        }
        Ok(Self {
            wanted,
            mode: start.mode,
            size: start.size,
            parents: start.parents,
            only,
            append: start.append,
            durable: start.durable,
        })
    }

    /// Whether what is there now may be written over.
    fn allows(&self, there: Option<&Stat>) -> Result<(), Refusal> {
        let path = self.wanted.path();
        match (self.only, there) {
            (If::Absent, Some(_)) => return Err(refused(Reason::PathExists, "is there already", path)),
            (If::SameMtime(then), Some(stat)) if mtime(stat) != then => {
                return Err(refused(Reason::MtimeChanged, "was changed meanwhile", path));
            }
            (If::SameMtime(_), None) => return Err(refused(Reason::MtimeChanged, "is gone", path)),
            (If::Any | If::SameMtime(_), _) | (If::Absent, None) => {}
        }
        there.map_or(Ok(()), |stat| self.wanted.plain(stat))
    }
}

/// A write that has begun.
#[derive(Debug)]
struct Writing {
    plan: Plan,
    to: To,
    written: u64,
    /// Whom it acts as; root may do what the others may not.
    uid: u32,
}

#[derive(Debug)]
enum To {
    /// Into a new file that becomes the target.
    Beside {
        temp: Temp,
        target: Spot,
        old: Option<Box<Stat>>,
    },
    /// Into the file itself.
    End(OwnedFd),
}

impl Writing {
    fn begin(plan: Plan, uid: u32) -> Result<Self, Refusal> {
        let (target, found) = plan.wanted.target(plan.parents)?;
        plan.allows(found.as_ref().map(|found| &found.stat))?;
        let to = if plan.append {
            To::End(open_end(&plan, &target, found.as_ref())?)
        } else {
            if let Some(found) = &found {
                may_write(&plan.wanted, found)?;
            }
            let temp = Temp::beside(&target);
            To::Beside {
                temp: temp.map_err(|errno| plan.wanted.failed("make a file beside", errno))?,
                target,
                old: found.map(|found| Box::new(found.stat)),
            }
        };
        Ok(Self {
            plan,
            to,
            written: 0,
            uid,
        })
    }

    fn put(&mut self, mut data: Bytes) -> Result<(), Refusal> {
        let count = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self
            .plan
            .size
            .is_some_and(|size| count > size.saturating_sub(self.written))
        {
            return Err(self.mismatch("more"));
        }
        let (file, hole) = match &self.to {
            // Zeros are not written but passed over: the file reads the same and takes no room.
            To::Beside { temp, .. } => (
                &temp.file,
                data.chunks(ZEROS.len()).all(|part| ZEROS.starts_with(part)),
            ),
            To::End(file) => (file, false),
        };
        if hole {
            let over = i64::try_from(count).unwrap_or(i64::MAX);
            seek(file, SeekFrom::Current(over)).map_err(|errno| self.plan.wanted.failed("write", errno))?;
            data.clear();
        }
        while data.has_remaining() {
            match rustix::io::write(file, &data) {
                Ok(n) => data.advance(n),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.plan.wanted.failed("write", errno)),
            }
        }
        self.written = self.written.saturating_add(count);
        Ok(())
    }

    fn mismatch(&self, what: &str) -> Refusal {
        let size = self.plan.size.unwrap_or_default();
        let message = format!("{what} than the {size} bytes that were announced came");
        Refusal::new(Reason::SizeMismatch, message).with_path(self.plan.wanted.path())
    }

    /// All has come: makes it the file.
    fn finish(self) -> Result<AgentWriteReply, Refusal> {
        if self.plan.size.is_some_and(|size| self.written < size) {
            return Err(self.mismatch("less"));
        }
        let Self {
            plan,
            to,
            written,
            uid,
        } = self;
        let fail = |tried, errno| plan.wanted.failed(tried, errno);
        let (file, lasting) = match to {
            To::End(file) => {
                if let Some(mode) = plan.mode {
                    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
                        .map_err(|errno| fail("set the mode of", errno))?;
                }
                let lasting = plan.durable && on_disk(&file).map_err(|errno| fail("look at", errno))?;
                if lasting {
                    fsync(&file).map_err(|errno| fail("sync", errno))?;
                }
                (file, lasting)
            }
            To::Beside { temp, target, old } => {
                // Zeros at the end were passed over.
                ftruncate(&temp.file, written).map_err(|errno| fail("write", errno))?;
                place(&plan, temp, &target, old.as_deref(), uid)?
            }
        };
        let stat = fstat(&file).map_err(|errno| fail("look at", errno))?;
        Ok(AgentWriteReply {
            bytes: written,
            durable: lasting,
            stat: Some(wire(&stat, Vec::new())),
        })
    }
}

/// Gives the new file mode and owner, and then the target's name. Success means that this has happened.
fn place(
    plan: &Plan,
    mut temp: Temp,
    target: &Spot,
    old: Option<&Stat>,
    uid: u32,
) -> Result<(OwnedFd, bool), Refusal> {
    let fail = |tried, errno| plan.wanted.failed(tried, errno);
    if let Some(old) = old {
        if plan.mode.is_some() && uid != 0 && uid != old.st_uid {
            return Err(fail("set the mode of another's file", Errno::PERM));
        }
        keep_owner(&temp.file, old).map_err(|errno| fail("keep the owner of", errno))?;
    }
    let kept = old.map(|old| kept_mode(old, uid));
    let mode = Mode::from_raw_mode(plan.mode.or(kept).unwrap_or(NEW));
    // Of a file that was given back to another owner, only silkd can set the mode.
    as_silkd(|| rustix::fs::fchmod(&temp.file, mode)).map_err(|errno| fail("set the mode of", errno))?;
    let lasting = plan.durable && on_disk(&temp.file).map_err(|errno| fail("look at", errno))?;
    if lasting {
        fsync(&temp.file).map_err(|errno| fail("sync", errno))?;
    }
    let now = match target.stat() {
        Err(Errno::NOENT) => None,
        other => Some(other.map_err(|errno| fail("look at", errno))?),
    };
    plan.allows(now.as_ref())?;
    let how = match plan.only {
        If::Absent => RenameFlags::NOREPLACE,
        If::Any | If::SameMtime(_) => RenameFlags::empty(),
    };
    renameat_with(
        &temp.spot.parent,
        temp.spot.name.as_slice(),
        &target.parent,
        target.name.as_slice(),
        how,
    )
    .map_err(|errno| fail("replace", errno))?;
    temp.there = false;
    if lasting {
        let dir = open_child(&target.parent, b".").and_then(fsync);
        dir.map_err(|errno| fail("sync the directory of", errno))?;
    }
    let file = temp
        .file
        .try_clone()
        .map_err(|_full| fail("look at", Errno::MFILE))?;
    Ok((file, lasting))
}

/// The owner is kept as if the old file had been written to, which the user had the right to do. Only silkd can give a
/// file away.
fn keep_owner(file: &OwnedFd, old: &Stat) -> Result<(), Errno> {
    let new = fstat(file)?;
    if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid) {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
    as_silkd(|| rustix::fs::fchown(file, Some(uid), Some(gid)))
}

/// Gives a file that takes the place of an old one the old one's owner and mode.
pub(super) fn like_old(file: &OwnedFd, old: &Stat, uid: u32) -> Result<(), Errno> {
    keep_owner(file, old)?;
    as_silkd(|| rustix::fs::fchmod(file, Mode::from_raw_mode(kept_mode(old, uid))))
}

/// What a file keeps of its mode when this user has written to it.
const fn kept_mode(old: &Stat, uid: u32) -> u32 {
    old.st_mode & MODE & if uid == 0 { MODE } else { !SET_ID }
}

/// Replacing a file takes the right to write to it, and not only to its directory.
fn may_write(wanted: &Wanted, found: &Found) -> Result<(), Refusal> {
    match found.reopen(OFlags::WRONLY) {
        // A program that runs can be replaced, though not written to.
        Ok(_) | Err(Errno::TXTBSY) => Ok(()),
        Err(errno) => Err(wanted.failed("write to", errno)),
    }
}

fn open_end(plan: &Plan, target: &Spot, found: Option<&Found>) -> Result<OwnedFd, Refusal> {
    let fail = |errno| plan.wanted.failed("open", errno);
    if let Some(found) = found {
        return found.reopen(OFlags::WRONLY | OFlags::APPEND).map_err(fail);
    }
    // Nobody's but ours: what somebody else has put there meanwhile was judged by nobody.
    let flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::EXCL
        | OFlags::NOFOLLOW
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let file = openat(
        &target.parent,
        target.name.as_slice(),
        flags,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(fail)?;
    let mode = Mode::from_raw_mode(plan.mode.unwrap_or(NEW));
    rustix::fs::fchmod(&file, mode).map_err(fail)?;
    Ok(file)
}

/// Whether what is synced there outlives the machine. An overlay does not say what it lies on, in a guest it is memory.
fn on_disk(file: &OwnedFd) -> Result<bool, Errno> {
    Ok(lasts(fstatfs(file)?.f_type))
}

/// Pure.
const fn lasts(magic: FsWord) -> bool {
    const TMPFS: FsWord = 0x0102_1994;
    const RAMFS: FsWord = 0x8584_58f6;
    const OVERLAY: FsWord = 0x794c_7630;
    const HUGETLBFS: FsWord = 0x9584_58f6;
    const PROC: FsWord = 0x9fa0;
    const SYSFS: FsWord = 0x6265_6572;
    const CGROUP: FsWord = 0x0027_e0eb;
    const CGROUP2: FsWord = 0x6367_7270;
    const DEVPTS: FsWord = 0x1cd1;
    !matches!(
        magic,
        TMPFS | RAMFS | OVERLAY | HUGETLBFS | PROC | SYSFS | CGROUP | CGROUP2 | DEVPTS
    )
}

/// Takes a client's stream, whose first message is `start`. Cancel safe: dropped, it leaves the old content.
pub(super) async fn write(
    workers: &Workers,
    call: Arc<Call>,
    start: &WriteStart,
    mut input: Streaming<WriteIn>,
) -> Result<AgentWriteReply, Status> {
    let plan = Plan::new(start)?;
    let uid = call.uid();
    let begun = workers.run(&call, move |_| Writing::begin(plan, uid)).await?;
    let mut parked = Parked::new(workers, &call, begun);
    while let Some(batch) = gather(&mut input).await? {
        let step = parked.step(move |mut writing, cancel| {
            for data in batch {
                cancel.check()?;
                writing.put(data)?;
            }
            Ok(writing)
        })?;
        parked = Parked::new(workers, &call, step.await?);
    }
    Ok(parked.step(|writing, _| writing.finish())?.await?)
}
