//! From a client's command to what the spawn thread takes: every check that needs no system call. Pure.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use sandbox_protocol::{
    limits::{ARG_STRING, ARGS_TOTAL, GRACE_DEFAULT_MS, PATH as PATH_MAX},
    reason::Reason,
    v1::{Command, Descendants, EnvVar, ExecStart, OnDisconnect, Tty},
};

use super::{
    ClaimDefaults,
    entry::{ARGV_LIVE, Argv},
    env,
    pty::{self, Screen},
    strings::Strings,
    users::User,
};
use crate::{
    refusal::{Escaped, Refusal},
    sys::{self, Ids},
};

const KILL: i32 = 9;

/// A program, ready to be started.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) argv: Strings,
    pub(super) env: Strings,
    /// Where it may be, in this order; relative ones from `cwd`.
    pub(super) paths: Strings,
    /// One path.
    pub(super) cwd: Strings,
    /// The default was taken: `/` will do where it is missing.
    pub(super) cwd_or_root: bool,
    pub(super) ids: Option<Ids>,
    /// Its standard input is to be its controlling terminal.
    pub(super) terminal: bool,
}

/// When a program's time is over, and how it ends then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timeout {
    pub(super) after: Duration,
    pub(super) signal: i32,
    pub(super) grace: Duration,
}

/// A command that passed.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) plan: Plan,
    /// What is shown of it where it is listed.
    pub(super) argv: Argv,
    pub(super) uid: u32,
    pub(super) merge: bool,
    pub(super) keep: bool,
    pub(super) tty: Option<Screen>,
    pub(super) timeout: Option<Timeout>,
}

fn refuse(reason: Reason, message: impl Into<String>) -> Refusal {
    Refusal::new(reason, message)
}

/// The command of a request.
///
/// # Errors
/// `INVALID_COMMAND`.
pub(super) fn taken(command: &mut Option<Command>) -> Result<Command, Refusal> {
    command
        .take()
        .ok_or_else(|| refuse(Reason::InvalidCommand, "no command in the request"))
}

/// What becomes of the program of an Exec whose caller is gone.
///
/// # Errors
/// `INVALID_COMMAND`.
pub(super) fn on_disconnect(start: &ExecStart) -> Result<OnDisconnect, Refusal> {
    OnDisconnect::try_from(start.on_disconnect).map_err(|_unknown| {
        let message = format!("{} is no value of `on_disconnect`", start.on_disconnect);
        refuse(Reason::InvalidCommand, message)
    })
}

/// Who the command is to run as; empty: nobody was named.
pub(super) fn user_of<'a>(command: &'a Command, claim: &'a ClaimDefaults) -> &'a [u8] {
    if command.user.is_empty() {
        &claim.user
    } else {
        &command.user
    }
}

/// Checks a command and works out what the kernel is to be given.
///
/// # Errors
/// `INVALID_COMMAND`, `INVALID_ENV`, `INVALID_PATH`, `INVALID_SIGNAL`, `INVALID_SIZE`, `ARGUMENTS_TOO_LARGE`.
pub(super) fn plan(
    command: &Command,
    image: &[EnvVar],
    claim: &ClaimDefaults,
    user: User,
) -> Result<Wanted, Refusal> {
    let argv = argv(&command.argv)?;
    let screen = |tty: &Tty| {
        let owner = user.ids.as_ref().map(|ids| ids.uid);
        pty::size(tty.cols, tty.rows).map(|size| Screen { size, owner })
    };
    let tty = command.tty.as_ref().map(screen).transpose()?;
    let built = env::build(
        &user,
        &[image, &claim.env, &requested(command)],
        command.clear_env,
    )?;
    let total = argv.size().saturating_add(built.env.size());
    if total > ARGS_TOTAL {
        let message = format!("arguments and environment take {total} bytes");
        return Err(refuse(Reason::ArgumentsTooLarge, message));
    }
    let program = command.argv.first().cloned().unwrap_or_default();
    let (cwd, cwd_or_root) = cwd(&command.cwd, &user.home)?;
    let keep = match Descendants::try_from(command.descendants) {
        Ok(Descendants::Unspecified | Descendants::Kill) => false,
        Ok(Descendants::Keep) => true,
        Err(_unknown) => {
            let message = format!("{} is no value of `descendants`", command.descendants);
            return Err(refuse(Reason::InvalidCommand, message));
        }
    };
    Ok(Wanted {
        argv: Argv::pack(&command.argv, ARGV_LIVE),
        uid: user
            .ids
            .as_ref()
            .map_or_else(|| rustix::process::geteuid().as_raw(), |ids| ids.uid),
        merge: command.merge_output,
        keep,
        tty,
        timeout: timeout(command)?,
        plan: Plan {
            paths: paths(&program, &built.path)?,
            argv,
            env: built.env,
            cwd,
            cwd_or_root,
            ids: user.ids,
            terminal: tty.is_some(),
        },
    })
}

/// The request's own part of the environment: what it says outright goes over what its terminal implies.
fn requested(command: &Command) -> Cow<'_, [EnvVar]> {
    let Some(tty) = &command.tty else {
        return Cow::Borrowed(&command.env);
    };
    let term = EnvVar {
        key: Bytes::from_static(b"TERM"),
        value: Bytes::copy_from_slice(pty::term(tty)),
    };
    let all = std::iter::once(term).chain(command.env.iter().cloned());
    Cow::Owned(all.collect())
}

fn argv(list: &[Bytes]) -> Result<Strings, Refusal> {
    if list.first().is_none_or(Bytes::is_empty) {
        return Err(refuse(
            Reason::InvalidCommand,
            "no program: argv[0] is missing or empty",
        ));
    }
    let mut argv = Strings::default();
    for (place, text) in list.iter().enumerate() {
        if text.len() > ARG_STRING {
            let message = format!("argv[{place}] takes {} bytes", text.len());
            return Err(refuse(Reason::ArgumentsTooLarge, message));
        }
        argv.push(&[text])
            .map_err(|_has_nul| refuse(Reason::InvalidCommand, format!("argv[{place}] holds NUL")))?;
    }
    Ok(argv)
}

fn cwd(wanted: &[u8], home: &[u8]) -> Result<(Strings, bool), Refusal> {
    let mut cwd = Strings::default();
    let default = wanted.is_empty();
    let path = if default { home } else { wanted };
    let fits = path.first() == Some(&b'/') && path.len() <= PATH_MAX && cwd.push(&[path]).is_ok();
    match (fits, default) {
        (true, default) => Ok((cwd, default)),
        // A passwd file with rubbish in it is no fault of the caller.
        (false, true) => {
            let mut root = Strings::default();
            root.push(&[b"/"])
                .map_err(|_has_nul| refuse(Reason::AgentBug, "a NUL in `/`"))?;
            Ok((root, true))
        }
        (false, false) => {
            let message = format!("cwd is no absolute path of at most {PATH_MAX} bytes");
            Err(refuse(Reason::InvalidPath, message).with_path(path))
        }
    }
}

/// A name without `/` is looked for along PATH; an empty entry of PATH is the working directory.
fn paths(program: &[u8], path: &[u8]) -> Result<Strings, Refusal> {
    let nul = |_has_nul| refuse(Reason::InvalidCommand, "the program's name or PATH holds NUL");
    let mut paths = Strings::default();
    if program.contains(&b'/') {
        paths.push(&[program]).map_err(nul)?;
        return Ok(paths);
    }
    for folder in path.split(|byte| *byte == b':') {
        let (folder, slash): (_, &[u8]) = if folder.is_empty() {
            (&b"."[..], b"/")
        } else {
            (folder, b"/")
        };
        if folder.len().saturating_add(program.len()) >= PATH_MAX {
            continue;
        }
        paths.push(&[folder, slash, program]).map_err(nul)?;
        if paths.size() > ARGS_TOTAL {
            let message = format!("PATH has too many entries to look for `{}`", Escaped(program, 64));
            return Err(refuse(Reason::ArgumentsTooLarge, message));
        }
    }
    Ok(paths)
}

fn timeout(command: &Command) -> Result<Option<Timeout>, Refusal> {
    let signal = match command.timeout_signal {
        0 => KILL,
        number => number,
    };
    if sys::signal(signal).is_none() {
        let message = format!("{signal} is no signal");
        return Err(refuse(Reason::InvalidSignal, message));
    }
    let millis = |ms: u32| Duration::from_millis(ms.into());
    Ok((command.timeout_ms != 0).then(|| Timeout {
        after: millis(command.timeout_ms),
        signal,
        grace: millis(command.grace_ms.unwrap_or(GRACE_DEFAULT_MS)),
    }))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::run::users;

    fn command(argv: &[&[u8]]) -> Command {
        Command {
            argv: argv.iter().map(|text| Bytes::copy_from_slice(text)).collect(),
            ..Command::default()
        }
    }

    fn planned(command: &Command) -> Result<Wanted, Refusal> {
        let user = users::own(0, b"root:x:0:0::/root:/bin/sh\n");
        plan(command, &[], &ClaimDefaults::default(), user)
    }

    fn reason(command: &Command) -> Reason {
        planned(command).unwrap_err().reason
    }

    fn texts(strings: &Strings) -> Vec<&[u8]> {
        strings.iter().map(CStr::to_bytes).collect()
    }

    #[test]
    fn what_no_kernel_would_take_is_refused_by_name() {
        assert_eq!(reason(&command(&[])), Reason::InvalidCommand);
        assert_eq!(reason(&command(&[b""])), Reason::InvalidCommand);
        assert_eq!(reason(&command(&[b"a", b"b\0c"])), Reason::InvalidCommand);
        assert_eq!(
            reason(&command(&[b"a", &[b'x'; ARG_STRING + 1]])),
            Reason::ArgumentsTooLarge
        );
        let many = vec![&[b'x'; ARG_STRING][..]; 9];
        assert_eq!(reason(&command(&many)), Reason::ArgumentsTooLarge);
        let with = |change: fn(&mut Command)| {
            let mut command = command(&[b"true"]);
            change(&mut command);
            reason(&command)
        };
        assert_eq!(with(|c| c.cwd = "relative".into()), Reason::InvalidPath);
        assert_eq!(
            with(|c| c.cwd = vec![b'/'; PATH_MAX + 1].into()),
            Reason::InvalidPath
        );
        assert_eq!(
            with(|c| c.cwd = Bytes::from_static(b"/a\0b")),
            Reason::InvalidPath
        );
        assert_eq!(with(|c| c.timeout_signal = 65), Reason::InvalidSignal);
        assert_eq!(with(|c| c.timeout_signal = -1), Reason::InvalidSignal);
        assert_eq!(with(|c| c.descendants = 9), Reason::InvalidCommand);
    }

    #[test]
    fn a_request_has_a_command_and_a_known_end() {
        let mut start = ExecStart::default();
        let refused = taken(&mut start.command).unwrap_err();
        assert_eq!(refused.reason, Reason::InvalidCommand);
        assert_eq!(on_disconnect(&start).unwrap(), OnDisconnect::Unspecified);
        start.on_disconnect = 77;
        assert_eq!(on_disconnect(&start).unwrap_err().reason, Reason::InvalidCommand);
    }

    #[test]
    fn programs_are_looked_for_along_the_requests_path() {
        assert_eq!(
            texts(&paths(b"ls", b"/a::/b").unwrap()),
            [&b"/a/ls"[..], b"./ls", b"/b/ls"]
        );
        assert_eq!(texts(&paths(b"./ls", b"/a").unwrap()), [b"./ls"]);
        assert!(texts(&paths(&[b'x'; PATH_MAX], b"/a").unwrap()).is_empty());
        assert_eq!(
            paths(&[b'x'; 4000], &b":/a".repeat(400)).unwrap_err().reason,
            Reason::ArgumentsTooLarge
        );
    }

    #[test]
    fn a_terminal_brings_its_name_and_a_size_that_can_be() {
        let with = |cols, term: &'static [u8]| {
            let mut command = command(&[b"sh"]);
            let term = Bytes::from_static(term);
            command.tty = Some(Tty { cols, rows: 24, term });
            command
        };
        let terms = |command: &Command| -> Vec<Vec<u8>> {
            let planned = planned(command).unwrap();
            let env = texts(&planned.plan.env).into_iter().map(<[u8]>::to_vec);
            env.filter(|text| text.starts_with(b"TERM=")).collect()
        };
        assert_eq!(reason(&with(0, b"")), Reason::InvalidSize);
        assert_eq!(terms(&with(80, b"")), [b"TERM=xterm-256color"]);
        let mut wanted = with(80, b"vt100");
        wanted.clear_env = true;
        assert_eq!(terms(&wanted), [b"TERM=vt100"]);
        wanted.env = vec![EnvVar {
            key: "TERM".into(),
            value: "dumb".into(),
        }];
        assert_eq!(terms(&wanted), [b"TERM=dumb"]);
        assert_eq!(terms(&command(&[b"sh"])), [b""; 0]);
    }

    #[test]
    fn defaults_are_home_kill_and_two_seconds() {
        let mut wanted = command(&[b"true"]);
        wanted.timeout_ms = 5;
        let planned = planned(&wanted).unwrap();
        assert_eq!(texts(&planned.plan.cwd), [b"/root"]);
        assert!(planned.plan.cwd_or_root && !planned.keep && !planned.merge);
        let timeout = planned.timeout.unwrap();
        assert_eq!((timeout.after, timeout.signal), (Duration::from_millis(5), KILL));
        assert_eq!(timeout.grace, Duration::from_secs(2));
    }
}
