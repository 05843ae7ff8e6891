//! The spawn thread: the one place where programs start. A start rests the thread that makes it until the program has
//! begun, which can take as long as the guest's file systems like; the runtime never waits for that.

use std::{
    ffi::{CStr, OsStr},
    os::{
        fd::AsFd as _,
        unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::io::Errno;
use sandbox_protocol::reason::Reason;
use tokio::sync::{mpsc, oneshot};

use super::{command::Plan, job::Job};
use crate::{
    reap,
    refusal::{Escaped, Refusal},
    sys::{self, Launch, LaunchFailure, Stack, Stage, Wire},
};

/// One program to start.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) plan: Plan,
    /// Descriptors of the program, standard ones and others alike.
    pub(super) wires: Vec<Wire>,
    pub(super) job: Arc<Job>,
    pub(super) reply: oneshot::Sender<Result<(), Refusal>>,
}

/// What all starts have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner {
    /// Programs put down what silkd has for itself.
    pub(super) plain: bool,
    pub(super) ignored: u64,
}

/// Starts what is ordered, one after the other, until nobody can order any more.
pub(super) fn serve(mut orders: mpsc::Receiver<Order>, mut stack: Stack, manner: Manner) {
    while let Some(order) = orders.blocking_recv() {
        let Order {
            plan,
            wires,
            job,
            reply,
        } = order;
        let started = start(&mut stack, manner, &plan, &wires, &job);
        // Our copies go before anybody learns of the start, so that an end of file is one.
        drop(wires);
        // Nobody waits: the job was given up, which it knows by itself.
        drop(reply.send(started));
    }
}

fn start(
    stack: &mut Stack,
    manner: Manner,
    plan: &Plan,
    wires: &[Wire],
    job: &Arc<Job>,
) -> Result<(), Refusal> {
    let Ok(cgroup) = job.birthplace() else {
        job.unborn();
        return Err(Refusal::new(Reason::AgentBug, "the start was given up"));
    };
    let (argv, env, paths) = (plan.argv.list(), plan.env.list(), plan.paths.list());
    let cwd = plan.cwd.iter().next().unwrap_or(c"/");
    let launch = Launch {
        cgroup: cgroup.as_ref().map(|dir| dir.as_fd()),
        argv: &argv,
        env: &env,
        paths: &paths,
        cwd,
        cwd_or_root: plan.cwd_or_root,
        wires,
        tty: wires
            .first()
            .filter(|_| plan.terminal)
            .map(|wire| wire.from.as_fd()),
        ids: plan.ids.as_ref(),
        plain: manner.plain,
        ignored: manner.ignored,
        pid: job.pid(),
    };
    reap::expect(job.clone());
    let launched = sys::launch(stack, &launch);
    reap::started(job);
    match launched {
        Ok(pidfd) => {
            job.begun(pidfd);
            Ok(())
        }
        Err(failure) => {
            if failure.stage == Stage::Clone {
                job.unborn();
            }
            Err(explain(failure, plan, cwd, &paths))
        }
    }
}

/// The reason of a failed start. Looks at the paths once more: the kernel has one number for a missing program and a
/// missing interpreter.
fn explain(failure: LaunchFailure, plan: &Plan, cwd: &CStr, paths: &[&CStr]) -> Refusal {
    let errno = Errno::from_raw_os_error(failure.errno);
    let refuse = |reason, message: String| Refusal::new(reason, message).with_errno(failure.errno);
    let program = plan.argv.iter().next().unwrap_or_default().to_bytes();
    match (failure.stage, errno) {
        (_, Errno::AGAIN) => refuse(Reason::ProcessLimit, "the guest takes no more processes".into()),
        (_, Errno::NOMEM) => refuse(Reason::MemoryExhausted, "no memory for another process".into()),
        (_, Errno::MFILE | Errno::NFILE) => refuse(Reason::FdLimit, "no descriptor is left".into()),
        (Stage::Clone | Stage::Setup, _) => refuse(
            Reason::AgentBug,
            format!("a process could not be set up: {errno}"),
        ),
        (Stage::User, _) => {
            let message = format!("silkd may not become the user: {errno}");
            refuse(Reason::UserNotFound, message)
        }
        (Stage::Cwd, _) => {
            let reason = match errno {
                Errno::NOTDIR => Reason::NotADirectory,
                Errno::ACCESS | Errno::PERM => Reason::PathDenied,
                _ => Reason::CwdNotFound,
            };
            refuse(
                reason,
                format!("the working directory cannot be entered: {errno}"),
            )
            .with_path(cwd.to_bytes())
        }
        (Stage::Exec, Errno::TOOBIG) => refuse(
            Reason::ArgumentsTooLarge,
            "the kernel takes no arguments of this size".into(),
        ),
        (Stage::Exec, _) => {
            let (reason, what, path) = look(errno, cwd, paths);
            let path = path.unwrap_or_else(|| program.to_vec());
            refuse(reason, format!("`{}` {what}", Escaped(program, 128))).with_path(&path)
        }
    }
}

fn look(errno: Errno, cwd: &CStr, paths: &[&CStr]) -> (Reason, &'static str, Option<Vec<u8>>) {
    let cwd = Path::new(OsStr::from_bytes(cwd.to_bytes()));
    let whole = |path: &CStr| cwd.join(OsStr::from_bytes(path.to_bytes()));
    let there: Vec<(PathBuf, std::fs::Metadata)> = paths
        .iter()
        .filter_map(|path| {
            let path = whole(path);
            let meta = std::fs::metadata(&path).ok()?;
            Some((path, meta))
        })
        .collect();
    let bytes = |path: &Path| Some(path.as_os_str().as_bytes().to_vec());
    let first = there.first().map(|(path, _)| path.as_path());
    match errno {
        Errno::ACCESS | Errno::PERM => {
            if let Some((path, _)) = there.iter().find(|(_, meta)| meta.is_dir()) {
                return (Reason::NotExecutable, "is a directory", bytes(path));
            }
            let executable =
                |meta: &std::fs::Metadata| meta.is_file() && meta.permissions().mode() & 0o111 != 0;
            if let Some((path, _)) = there.iter().find(|(_, meta)| !executable(meta)) {
                return (Reason::NotExecutable, "may not be executed", bytes(path));
            }
            (
                Reason::PathDenied,
                "is out of the user's reach",
                first.and_then(bytes),
            )
        }
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::LOOP => {
            let file = there.iter().find(|(_, meta)| meta.is_file());
            match file {
                Some((path, _)) => (
                    Reason::BadInterpreter,
                    "needs an interpreter that is missing",
                    bytes(path),
                ),
                None => (Reason::ProgramNotFound, "was not found", None),
            }
        }
        Errno::NOEXEC => (
            Reason::NotExecutable,
            "is no program of this machine",
            first.and_then(bytes),
        ),
        Errno::TXTBSY => (Reason::NotExecutable, "is being written", first.and_then(bytes)),
        _ => (
            Reason::NotExecutable,
            "could not be executed",
            first.and_then(bytes),
        ),
    }
}
