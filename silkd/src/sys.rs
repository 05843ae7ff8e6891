//! What rustix cannot do: the one file of this crate that may hold unsafe code.
//!
//! Starting a program by `clone3` with a shared memory image (`launch`), reaping with the resource usage
//! (`peek_dead`, `reap`), pages that can be given back, acting on files as somebody else (`AsUser`), the entropy
//! ioctls, the allocator's knobs, signals by number.
//!
//! May call: nothing.
//! Never inside: a decision. One operation a block, with SAFETY and why no safe way exists.
#![expect(
    unsafe_code,
    reason = "clone3 with a stack of its own, wait4, ioctls and mallopt have no safe wrapper"
)]

use std::{
    arch::asm,
    ffi::{CStr, c_char, c_int, c_long, c_void},
    fs::File,
    io,
    marker::PhantomData,
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicI32, Ordering},
};

use rustix::{
    fs::{Mode, OFlags},
    mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap},
    process::{Gid, Resource, Rlimit, Signal, Uid},
};
use tokio::io::{Interest, unix::AsyncFd};

/// The largest signal number.
pub(crate) const SIGNAL_MAX: i32 = 64;

/// The signal of this number, real-time ones included; `None` outside 1 to 64.
pub(crate) fn signal(number: i32) -> Option<Signal> {
    if !(1..=SIGNAL_MAX).contains(&number) {
        return None;
    }
    // SAFETY: the number is one that the kernel knows; it is only ever sent, never given a handler. rustix's checked
    // constructor leaves the real-time signals out.
    Some(unsafe { Signal::from_raw_unchecked(number) })
}

// ---- Starting ----

/// Bytes of the stack that a child runs on until it has become the program; the child's frames take some hundreds.
const STACK: usize = 128 * 1024;
/// Below it, to be touched by nobody.
const GUARD: usize = 4096;

/// The stack that children start on, one after the other.
#[derive(Debug)]
pub(crate) struct Stack(NonNull<c_void>);

// SAFETY: the mapping belongs to this value alone and has no tie to the thread that made it.
unsafe impl Send for Stack {}

impl Stack {
    /// Maps a stack with a guard page below.
    pub(crate) fn new() -> rustix::io::Result<Self> {
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh private mapping, placed by the kernel, aliases nothing. No safe way: rustix maps memory
        // through this call only.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                GUARD + STACK,
                rw,
                MapFlags::PRIVATE | MapFlags::STACK,
            )
        }?;
        let stack = Self(NonNull::new(base).ok_or(rustix::io::Errno::NOMEM)?);
        // SAFETY: the first page of our own mapping, to which there is no reference.
        unsafe { mprotect(base, GUARD, MprotectFlags::empty()) }?;
        Ok(stack)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: unmapped once, and no child runs on it: `launch` borrows it until the child is off it.
        // A mapping that cannot be unmapped stays; there is nothing else to do about it.
        unsafe { munmap(self.0.as_ptr(), GUARD + STACK) }.ok();
    }
}

/// A descriptor and the number under which the program gets it.
#[derive(Debug)]
pub(crate) struct Wire {
    /// Ours; its number is above every `at`.
    pub(crate) from: OwnedFd,
    /// The program's.
    pub(crate) at: c_int,
}

/// Whom a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// All groups, `gid` among them.
    pub groups: Vec<u32>,
}

/// All that a child needs, prepared by the parent.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    /// The cgroup that the child is born into.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    pub(crate) argv: &'a [&'a CStr],
    pub(crate) env: &'a [&'a CStr],
    /// Where the program may be, tried in this order.
    pub(crate) paths: &'a [&'a CStr],
    pub(crate) cwd: &'a CStr,
    /// Go to `/` where `cwd` cannot be entered.
    pub(crate) cwd_or_root: bool,
    pub(crate) wires: &'a [Wire],
    /// What is to be its controlling terminal.
    pub(crate) tty: Option<BorrowedFd<'a>>,
    /// `None`: as silkd itself.
    pub(crate) ids: Option<&'a Ids>,
    /// Put down what silkd has for itself: OOM protection, priority, descriptor limits.
    pub(crate) plain: bool,
    /// Bit n-1: signal n is ignored here and must not be there.
    pub(crate) ignored: u64,
    /// Gets the child's number before the child runs.
    pub(crate) pid: &'a AtomicI32,
}

/// What a child was at when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The clone itself.
    Clone,
    /// Session, descriptors, limits.
    Setup,
    /// Becoming the user.
    User,
    /// Entering the working directory.
    Cwd,
    /// Becoming the program.
    Exec,
}

/// A start that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaunchFailure {
    pub(crate) stage: Stage,
    pub(crate) errno: i32,
}

#[repr(C)]
#[derive(Debug, Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

// Not taken from libc, where two of them overflow their type.
const CLONE_VM: u64 = 0x100;
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_VFORK: u64 = 0x4000;
const CLONE_PARENT_SETTID: u64 = 0x10_0000;
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

struct Order<'a> {
    launch: &'a Launch<'a>,
    groups: &'a [Gid],
    argv: &'a [*const c_char],
    env: &'a [*const c_char],
    /// Written by the child, which shares our memory, and read after it has left it.
    failed: AtomicI32,
    stage: AtomicI32,
}

/// Starts a program and waits until it has begun or failed to. Gives the child's pidfd.
///
/// The child is born into its cgroup and shares this memory until `execve`, so nothing is copied however large silkd
/// is; the calling thread alone rests meanwhile (`CLONE_VFORK`). A child that failed to become the program has
/// ended, and is reaped like any other: `launch.pid` names it. At [`Stage::Clone`] there is no child.
pub(crate) fn launch(stack: &mut Stack, launch: &Launch<'_>) -> Result<OwnedFd, LaunchFailure> {
    let groups = launch.ids.map_or(&[][..], |ids| &ids.groups);
    let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let order = Order {
        launch,
        groups: &groups,
        argv: &pointers(launch.argv),
        env: &pointers(launch.env),
        failed: AtomicI32::new(0),
        stage: AtomicI32::new(0),
    };
    let mut pidfd: c_int = -1;
    let mut args = CloneArgs {
        flags: CLONE_VM | CLONE_VFORK | CLONE_PIDFD | CLONE_PARENT_SETTID | CLONE_CLEAR_SIGHAND,
        pidfd: address(&raw mut pidfd),
        parent_tid: address(launch.pid.as_ptr()),
        exit_signal: 17, // SIGCHLD
        stack: address(stack.0.as_ptr()) + GUARD as u64,
        stack_size: STACK as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = launch.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or(0);
    }
    // SAFETY: the arguments are laid out as the kernel wants them and outlive the call; the stack is mapped and, as
    // `stack` is borrowed mutably, nobody else's; `child` never returns and touches what it shares with us only
    // through `order`, which stays in place until the child has left this memory (CLONE_VFORK). No safe way: libc has
    // no wrapper of clone3, and fork would copy silkd's page tables.
    let result = unsafe { clone3(&mut args, child, &raw const order) };
    if result < 0 {
        let errno = i32::try_from(-result).unwrap_or(i32::MAX);
        return Err(LaunchFailure {
            stage: Stage::Clone,
            errno,
        });
    }
    // SAFETY: a clone that succeeded with CLONE_PIDFD wrote a descriptor there that is nobody's yet.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    match order.failed.load(Ordering::Acquire) {
        0 => Ok(pidfd),
        errno => Err(LaunchFailure {
            stage: stage(order.stage.load(Ordering::Acquire)),
            errno,
        }),
    }
}

fn address<T>(of: *const T) -> u64 {
    of.expose_provenance() as u64
}

fn pointers(strings: &[&CStr]) -> Vec<*const c_char> {
    let ends = std::iter::once(ptr::null());
    strings.iter().map(|text| text.as_ptr()).chain(ends).collect()
}

fn stage(number: i32) -> Stage {
    let stages = [Stage::Setup, Stage::User, Stage::Cwd];
    let stage = stages.into_iter().find(|stage| *stage as i32 == number);
    stage.unwrap_or(Stage::Exec)
}

/// The system call, and in the child a call of `child` on its new stack.
///
/// # Safety
/// See the one call.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(
    args: &mut CloneArgs,
    child: extern "C" fn(*const Order<'_>) -> !,
    order: *const Order<'_>,
) -> c_long {
    let result: c_long;
    // SAFETY: the parent's registers are as the kernel leaves them (rax, rcx and r11 changed); the child, which has
    // the same registers and an empty, aligned stack, goes to `child` and never comes back here.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r9",
            "call r8",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_mut(args),
            in("rsi") size_of::<CloneArgs>(),
            in("r8") child,
            in("r9") order,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("silkd starts programs by a clone3 stub that is written for x86_64 only");

/// The child, from its birth to `execve`: system calls only, over what the parent prepared. It may neither allocate
/// nor take a lock nor panic: its memory is the parent's.
extern "C" fn child(order: *const Order<'_>) -> ! {
    // SAFETY: `launch` passes its order, which is in place until we have left this memory.
    let order = unsafe { &*order };
    let (stage, errno) = match become_program(order) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    order.stage.store(stage as i32, Ordering::Release);
    order.failed.store(errno.max(1), Ordering::Release);
    // SAFETY: ends this process alone: it shares memory, but is a thread group of its own.
    unsafe { libc::_exit(127) }
}

enum Never {}

fn become_program(order: &Order<'_>) -> Result<Never, (Stage, i32)> {
    let launch = order.launch;
    let at = |stage: Stage| move |errno: rustix::io::Errno| (stage, errno.raw_os_error());
    default_signals(launch.ignored);
    rustix::process::setsid().map_err(at(Stage::Setup))?;
    if let Some(tty) = launch.tty {
        rustix::process::ioctl_tiocsctty(tty).map_err(at(Stage::Setup))?;
    }
    wire(launch.wires).map_err(|errno| (Stage::Setup, errno))?;
    if launch.plain {
        put_down().map_err(at(Stage::Setup))?;
    }
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    if let Some(ids) = launch.ids {
        let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
        // The thread's own calls: those of libc would try to change every thread of the parent.
        rustix::thread::set_thread_groups(order.groups).map_err(at(Stage::User))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(at(Stage::User))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(at(Stage::User))?;
    }
    match rustix::process::chdir(launch.cwd) {
        Err(_reason) if launch.cwd_or_root => rustix::process::chdir(c"/"),
        other => other,
    }
    .map_err(at(Stage::Cwd))?;
    unblock_signals();
    Err((Stage::Exec, execute(order)))
}

/// Tries one path after the other, as a shell does; gives the error that says most.
fn execute(order: &Order<'_>) -> i32 {
    let mut denied = false;
    let mut last = libc::ENOENT;
    for path in order.launch.paths {
        // SAFETY: three NUL-ended arrays that outlive the call, which returns only when it failed. rustix has it
        // behind an interface that is not stable.
        unsafe { libc::execve(path.as_ptr(), order.argv.as_ptr(), order.env.as_ptr()) };
        match errno() {
            libc::EACCES => denied = true,
            missing @ (libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP) => last = missing,
            other => return other,
        }
    }
    if denied { libc::EACCES } else { last }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// What is ignored stays so over `clone` and `execve`; a program must find every signal as it is by default.
fn default_signals(ignored: u64) {
    // As the kernel has it: handler, flags, restorer, mask.
    let default = [0_u64; 4];
    for number in (1..=SIGNAL_MAX).filter(|number| ignored >> (number - 1) & 1 == 1) {
        // SAFETY: the kernel's own layout, read only. The child has its own table of handlers (no CLONE_SIGHAND).
        // libc's wrapper does more than the call.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                &raw const default,
                ptr::null::<u8>(),
                8,
            )
        };
    }
}

fn unblock_signals() {
    let none = 0_u64;
    // SAFETY: the kernel's own layout, read only. rustix has it behind an interface that is not stable.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            ptr::null::<u8>(),
            8,
        )
    };
}

fn wire(wires: &[Wire]) -> Result<(), i32> {
    const FIRST: c_int = 3;
    // Whatever was inherited from who started silkd ends here too.
    // SAFETY: marks descriptors of the child's own table. rustix has no such call.
    let marked = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST,
            c_int::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if marked < 0 {
        return Err(errno());
    }
    for wire in wires {
        // SAFETY: puts a copy at a number of the child's own table, where no owner of ours is. rustix's call wants an
        // owner of the target.
        if unsafe { libc::dup3(wire.from.as_raw_fd(), wire.at, 0) } < 0 {
            return Err(errno());
        }
    }
    Ok(())
}

/// Open files of a program.
const NOFILE: u64 = 1024;
/// What it may raise that to.
const NOFILE_MAX: u64 = 524_288;

fn put_down() -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    // The kernel leaves the parent's value alone, although the memory is shared: CLONE_VFORK is exempt.
    let adjust = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(adjust, b"0")?;
    rustix::process::setpriority_process(None, 0)?;
    let limit = |maximum: u64| Rlimit {
        current: Some(NOFILE.min(maximum)),
        maximum: Some(maximum),
    };
    match rustix::process::setrlimit(Resource::Nofile, limit(NOFILE_MAX)) {
        // Where silkd itself may not have more, neither may its programs.
        Err(rustix::io::Errno::PERM) => {
            let own = rustix::process::getrlimit(Resource::Nofile).maximum;
            rustix::process::setrlimit(Resource::Nofile, limit(own.unwrap_or(NOFILE_MAX)))
        }
        other => other,
    }
}

/// Bit n-1: signal n is ignored in this process.
pub(crate) fn ignored_signals() -> u64 {
    let mut ignored = 0;
    for number in 1..=SIGNAL_MAX {
        let mut action = [0_u64; 4];
        // SAFETY: the kernel writes its own layout, which fits; no action is given, so none changes. libc's wrapper
        // refuses the signals that it keeps for itself.
        let asked = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                ptr::null::<u8>(),
                &raw mut action,
                8,
            )
        };
        if asked == 0 && action.first() == Some(&1) {
            ignored |= 1 << (number - 1);
        }
    }
    ignored
}

// ---- Reaping ----

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// The last of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dead {
    pub(crate) how: How,
    pub(crate) usage: Usage,
}

/// What a process, and those of its children that it waited for, used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) user_us: u64,
    pub(crate) system_us: u64,
    pub(crate) max_rss_kib: u64,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
}

/// A child that has ended and is not reaped yet; it keeps its number until [`reap`].
pub(crate) fn peek_dead() -> Option<i32> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel fills a siginfo of ours. rustix's waitid does not tell whose status it is.
    let asked = unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags) };
    if asked != 0 {
        return None;
    }
    // SAFETY: all bytes were zero, which is a value of the type, and the kernel may have filled it.
    let info = unsafe { info.assume_init() };
    // SAFETY: waitid sets this field, or leaves it zero where no child has ended.
    let pid = unsafe { info.si_pid() };
    (pid > 0).then_some(pid)
}

/// Takes the status of a child that has ended; `None` if it has not, or is none of ours.
pub(crate) fn reap(pid: i32) -> Option<Dead> {
    let mut status: c_int = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills two values of ours. rustix has no wait that gives the usage.
    let reaped = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, usage.as_mut_ptr()) };
    if reaped != pid {
        return None;
    }
    // SAFETY: all bytes were zero, which is a value of the type, and the kernel may have filled it.
    let usage = unsafe { usage.assume_init() };
    let how = if libc::WIFSIGNALED(status) {
        How::Signal(libc::WTERMSIG(status))
    } else {
        How::Code(libc::WEXITSTATUS(status))
    };
    let micros = |time: libc::timeval| time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs();
    Some(Dead {
        how,
        usage: Usage {
            user_us: micros(usage.ru_utime),
            system_us: micros(usage.ru_stime),
            max_rss_kib: usage.ru_maxrss.unsigned_abs(),
            minor_faults: usage.ru_minflt.unsigned_abs(),
            major_faults: usage.ru_majflt.unsigned_abs(),
            voluntary_switches: usage.ru_nvcsw.unsigned_abs(),
            involuntary_switches: usage.ru_nivcsw.unsigned_abs(),
        },
    })
}

// ---- Users of threads ----

/// Makes this thread act on files as somebody else, until dropped. The other threads stay who they are.
#[derive(Debug)]
pub(crate) struct AsUser {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
    /// Its thread's alone.
    _here: PhantomData<*const ()>,
}

impl AsUser {
    /// Becomes these ids. One may be within another.
    ///
    /// # Errors
    /// The kernel's; the thread is who it was then.
    pub(crate) fn enter(ids: &Ids) -> rustix::io::Result<Self> {
        let groups: Vec<Gid> = ids.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        let before = Self {
            uid: fs_uid(NOBODY),
            gid: fs_gid(NOBODY),
            groups: rustix::process::getgroups()?,
            _here: PhantomData,
        };
        rustix::thread::set_thread_groups(&groups)?;
        fs_gid(ids.gid);
        fs_uid(ids.uid);
        // The two calls tell who it was before, and never that they failed.
        if (fs_uid(NOBODY), fs_gid(NOBODY)) == (ids.uid, ids.gid) {
            Ok(before)
        } else {
            Err(rustix::io::Errno::PERM)
        }
    }

    /// Becomes silkd itself again, for a moment within; `None` where it is already.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn leave() -> rustix::io::Result<Option<Self>> {
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        if (fs_uid(NOBODY), fs_gid(NOBODY)) == (uid, gid) {
            return Ok(None);
        }
        let groups = vec![gid];
        Self::enter(&Ids { uid, gid, groups }).map(Some)
    }
}

impl Drop for AsUser {
    fn drop(&mut self) {
        fs_uid(self.uid);
        fs_gid(self.gid);
        // Fails only without memory; what is left then are groups, beside an owner whom no group stops.
        rustix::thread::set_thread_groups(&self.groups).ok();
    }
}

/// The kernel's "no id": asks, and changes nothing.
const NOBODY: u32 = u32::MAX;

/// Sets the thread's user for files, and gives the one before.
fn fs_uid(uid: u32) -> u32 {
    // SAFETY: changes this thread's own credentials, and no memory. No safe wrapper.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

/// Sets the thread's group for files, and gives the one before.
fn fs_gid(gid: u32) -> u32 {
    // SAFETY: changes this thread's own credentials, and no memory. No safe wrapper.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

// ---- Descriptors ----

/// A descriptor that tells the runtime when it is ready; it does not block, or is only asked and never read.
///
/// # Errors
/// The kernel's: it cannot be watched.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is one open descriptor for as long as it lives, and the `AsyncFd` owns it. tokio's safe
    // constructor is deprecated, since it takes types that promise less.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(Into::into)
}

// ---- Pages ----

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// Memory that is there page by page: one that was never written, or was given back, takes none.
#[derive(Debug)]
pub(crate) struct Pages {
    base: NonNull<u8>,
    count: usize,
}

// SAFETY: the mapping belongs to this value alone and has no tie to the thread that made it.
unsafe impl Send for Pages {}

impl Pages {
    /// Room for so many pages, one at least.
    ///
    /// # Errors
    /// The kernel's: no address space.
    pub(crate) fn new(count: usize) -> rustix::io::Result<Self> {
        let count = count.max(1);
        let bytes = count.checked_mul(PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh private mapping, placed by the kernel, aliases nothing. No safe way: rustix maps memory
        // through this call only.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                rw,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        let pages = Self { base, count };
        // SAFETY: advice on our own mapping; a kernel without huge pages refuses it, and has none to give.
        unsafe { madvise(pages.base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) }.ok();
        Ok(pages)
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    fn at(&self, number: usize) -> Option<*mut u8> {
        let base = self.base.as_ptr();
        // Within the mapping, whose size did not overflow.
        (number < self.count).then(|| base.wrapping_add(number * PAGE))
    }

    /// One of them; none beyond the last.
    pub(crate) fn get(&self, number: usize) -> Option<&[u8; PAGE]> {
        let page = self.at(number)?;
        // SAFETY: a page of our mapping, which is readable and always initialised (the kernel fills it with zeros),
        // borrowed as long as `self` is.
        Some(unsafe { &*page.cast() })
    }

    /// One of them, to be written.
    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut [u8; PAGE]> {
        let page = self.at(number)?;
        // SAFETY: as in `get`, and nobody else has it while `self` is borrowed mutably.
        Some(unsafe { &mut *page.cast() })
    }

    /// Gives the memory of one back; it reads as zeros.
    pub(crate) fn release(&mut self, number: usize) {
        if let Some(page) = self.at(number) {
            // SAFETY: our own page, to which there is no reference while `self` is borrowed mutably. What the kernel
            // refuses to take stays ours.
            unsafe { madvise(page.cast(), PAGE, Advice::LinuxDontNeed) }.ok();
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: unmapped once, and every reference into it borrows this value. A mapping that cannot be unmapped
        // stays; there is nothing else to do about it.
        unsafe { munmap(self.base.as_ptr().cast(), self.count * PAGE) }.ok();
    }
}

// ---- Entropy, allocator ----

/// `RNDADDENTROPY` of `linux/random.h`.
const ADD_ENTROPY: libc::Ioctl = 0x4008_5203;
/// `RNDRESEEDCRNG` of `linux/random.h`.
const RESEED: libc::Ioctl = 0x5207;

#[repr(C)]
struct Pool {
    entropy_bits: c_int,
    bytes: c_int,
    seed: [u8; 32],
}

/// Credits 256 bits of entropy to the kernel; `random` is `/dev/urandom` or `/dev/random`.
///
/// # Errors
/// The kernel's; `EPERM` without the right to.
pub fn add_entropy(random: &File, seed: &[u8; 32]) -> io::Result<()> {
    let pool = Pool {
        entropy_bits: 256,
        bytes: 32,
        seed: *seed,
    };
    // SAFETY: the kernel reads a rand_pool_info with 32 bytes behind it, which is what `Pool` is. No safe wrapper.
    match unsafe { libc::ioctl(random.as_raw_fd(), ADD_ENTROPY, &raw const pool) } {
        0 => Ok(()),
        _failed => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel's generator draw a new key from its entropy at once.
///
/// # Errors
/// The kernel's; `EPERM` without the right to.
pub fn reseed(random: &File) -> io::Result<()> {
    // SAFETY: takes no argument. No safe wrapper.
    match unsafe { libc::ioctl(random.as_raw_fd(), RESEED) } {
        0 => Ok(()),
        _failed => Err(io::Error::last_os_error()),
    }
}

/// Gives free memory back to the kernel.
pub fn trim() {
    // SAFETY: the allocator's own call, safe from any thread. No safe wrapper.
    unsafe { libc::malloc_trim(0) };
}

/// One arena and fixed thresholds: the adaptive ones keep holes. Pieces of files and streams, up to 256 KiB with what they
/// grow by, are taken from the heap and a MiB of it is kept: memory that is mapped, or given back, for each of them costs a
/// fault for every page, which was a third of silkd's processor time while files were pushed and pulled. Once, at the
/// start, before other threads.
pub fn set_allocator() {
    let settings = [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, 1024 * 1024),
        (libc::M_TRIM_THRESHOLD, 1024 * 1024),
    ];
    for (name, value) in settings {
        // SAFETY: a setting of the allocator. No safe wrapper.
        unsafe { libc::mallopt(name, value) };
    }
}
