//! What went wrong, as an exit code and on stderr.

use std::{
    error::Error as _,
    ffi::{OsStr, OsString},
    io,
    process::ExitCode,
};

use sandbox_sdk::{Error, ErrorKind, Reason};
use serde_json::{Value, json};

use crate::{
    print::{self, Out},
    text::harmless,
};

/// Refused by the daemon, or failed.
const FAILED: u8 = 1;
/// The command line is wrong.
const USAGE: u8 = 2;
/// No daemon, or time over.
const ABSENT: u8 = 3;
/// Verbs that pass a command's code on: every fault that is not the command's.
pub(crate) const OURS: u8 = 125;
/// The same verbs: it cannot be executed.
const CANNOT: u8 = 126;
/// The same verbs: it is not there.
const NOT_FOUND: u8 = 127;
/// What a shell shows for SIGPIPE.
const PIPE: u8 = 128 + 13;

/// Why a verb did not do what it should.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The SDK says.
    Sdk(Error),
    /// The command line is wrong in a way that clap does not see.
    Usage(String),
    /// `--timeout` is over.
    TimeOver(String),
    /// Local input or output.
    Io(&'static str, io::Error),
    /// Nobody reads stdout any more; that is told to nobody.
    Closed,
    /// A signal ended the verb.
    Signal(u8),
    /// The verb failed and has said all there is to say.
    Told,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Sdk(error)
    }
}

impl Fault {
    pub(crate) fn io(what: &'static str, error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::Closed
        } else {
            Self::Io(what, error)
        }
    }

    /// Tells on stderr, and gives the exit code. `ours` stands for all faults of verbs that pass a command's code on.
    pub(crate) fn report(&self, out: Out, ours: Option<u8>) -> ExitCode {
        let told = match self {
            Self::Closed | Self::Signal(_) | Self::Told => None,
            Self::Sdk(_) | Self::Usage(_) | Self::TimeOver(_) | Self::Io(..) => Some(self.shown()),
        };
        if let Some(shown) = told {
            shown.print(out);
        }
        self.code(ours).into()
    }

    fn code(&self, ours: Option<u8>) -> u8 {
        match (self, ours) {
            (Self::Closed, _) => PIPE,
            (Self::Signal(number), _) => number.saturating_add(128),
            (Self::Sdk(error), Some(ours)) => start_code(error).unwrap_or(ours),
            (Self::Usage(_) | Self::TimeOver(_) | Self::Io(..) | Self::Told, Some(ours)) => ours,
            (Self::Sdk(error), None) => match error.kind() {
                ErrorKind::Unreachable | ErrorKind::Broken | ErrorKind::TimedOut => ABSENT,
                ErrorKind::Invalid => USAGE,
                // With the kinds of a later SDK.
                ErrorKind::Refused | ErrorKind::Unfinished | _ => FAILED,
            },
            (Self::Usage(_), None) => USAGE,
            (Self::TimeOver(_), None) => ABSENT,
            (Self::Io(..) | Self::Told, None) => FAILED,
        }
    }

    fn shown(&self) -> Shown {
        match self {
            Self::Sdk(error) => Shown::of(error),
            Self::Usage(message) => Shown::new(Some(Reason::FieldInvalid), message.clone()),
            Self::TimeOver(message) => Shown::new(Some(Reason::Deadline), message.clone()),
            Self::Io(what, error) => Shown::new(None, format!("{what}: {error}")),
            Self::Closed | Self::Signal(_) | Self::Told => Shown::new(None, String::new()),
        }
    }
}

/// The code of a program that could not be started, as shells have it.
fn start_code(error: &Error) -> Option<u8> {
    if error.is(Reason::ProgramNotFound) {
        return Some(NOT_FOUND);
    }
    let cannot = [Reason::NotExecutable, Reason::BadInterpreter, Reason::PathDenied];
    cannot
        .into_iter()
        .any(|reason| error.is(reason))
        .then_some(CANNOT)
}

/// An error as it is shown. Its texts may be a guest's, so they are escaped for people; JSON escapes by itself.
struct Shown {
    reason: Option<String>,
    message: String,
    remedy: Option<String>,
    retry_after_ms: Option<u64>,
    request_id: Option<String>,
    fields: Vec<String>,
}

impl Shown {
    fn new(reason: Option<Reason>, message: String) -> Self {
        Self {
            reason: reason.map(|reason| reason.as_str().to_owned()),
            message,
            remedy: None,
            retry_after_ms: None,
            request_id: None,
            fields: Vec::new(),
        }
    }

    fn of(error: &Error) -> Self {
        let mut message = error.message().to_owned();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !message.contains(&cause_text) {
                message = format!("{message}: {cause_text}");
            }
            source = cause.source();
        }
        if let Some(why) = error.why().filter(|why| !message.contains(why)) {
            message = format!("{message} (why: {why})");
        }
        let after = error.retry_after();
        Self {
            reason: error.reason().map(|reason| reason.as_str().to_owned()),
            message,
            remedy: error.remedy().map(str::to_owned),
            retry_after_ms: after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX)),
            request_id: error.request_id().map(str::to_owned),
            fields: error
                .fields()
                .iter()
                .map(|field| format!("{}: {}", field.field, field.description))
                .collect(),
        }
    }

    fn json(&self) -> Value {
        json!({ "error": {
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "retry_after_ms": self.retry_after_ms,
            "request_id": self.request_id,
        }})
    }

    fn print(&self, out: Out) {
        if out.json {
            return print::stderr(&self.json().to_string());
        }
        let mut text = String::from("sandboxctl: ");
        if let Some(reason) = &self.reason {
            text.push_str(&harmless(reason));
            text.push_str(": ");
        }
        text.push_str(&harmless(&self.message));
        for field in &self.fields {
            text.push_str("\n  field ");
            text.push_str(&harmless(field));
        }
        if let Some(remedy) = &self.remedy {
            text.push_str("\n  remedy: ");
            text.push_str(&harmless(remedy));
        }
        if let Some(id) = &self.request_id {
            text.push_str("\n  request: ");
            text.push_str(&harmless(id));
        }
        print::stderr(&text);
    }
}

/// What clap says: help and version on stdout with 0, the rest on stderr, with 125 where a command's code is passed on.
pub(crate) fn usage(raw: &[OsString], error: &clap::Error) -> ExitCode {
    let wrong = error.use_stderr();
    let shown = if wrong
        && raw
            .iter()
            .take_while(|arg| *arg != "--")
            .any(|arg| arg == "--json")
    {
        let text = error.render().to_string();
        print::stderr(&Shown::new(None, text.trim_end().to_owned()).json().to_string());
        Ok(())
    } else {
        error.print()
    };
    match (shown, wrong) {
        (Err(error), _) if error.kind() == io::ErrorKind::BrokenPipe => PIPE.into(),
        (Err(_), _) => FAILED.into(),
        (Ok(()), false) => ExitCode::SUCCESS,
        (Ok(()), true) if passes_codes_on(raw) => OURS.into(),
        (Ok(()), true) => USAGE.into(),
    }
}

/// Whether the verb of a command line, which may be wrong elsewhere, passes a command's code on.
fn passes_codes_on(raw: &[OsString]) -> bool {
    let mut words = words(raw);
    match words.next() {
        Some("exec" | "run" | "shell" | "attach") => true,
        Some("session") => words.next() == Some("run"),
        Some(_) | None => false,
    }
}

/// The words of a command line that are no options.
fn words(raw: &[OsString]) -> impl Iterator<Item = &str> {
    let mut args = raw.iter().skip(1).filter_map(|arg| OsStr::to_str(arg));
    std::iter::from_fn(move || {
        loop {
            match args.next()? {
                "--addr" | "--token" | "--ca" => drop(args.next()),
                flag if flag.starts_with('-') => {}
                word => return Some(word),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_is_found_whatever_stands_before_it() {
        let verb = |line: &str| {
            let raw: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            words(&raw).next().map(str::to_owned)
        };
        assert_eq!(verb("sandboxctl --json exec").as_deref(), Some("exec"));
        assert_eq!(
            verb("sandboxctl --addr run --token=x list run").as_deref(),
            Some("list")
        );
        assert_eq!(verb("sandboxctl --json").as_deref(), None);
        for (line, expected) in [
            ("sandboxctl --json session run", true),
            ("sandboxctl session --addr x run", true),
            ("sandboxctl session open run", false),
            ("sandboxctl attach", true),
            ("sandboxctl ps exec", false),
        ] {
            let raw: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(passes_codes_on(&raw), expected, "{line}");
        }
    }
}
