//! What the commands print: results on stdout, everything else on stderr. Nobody else prints.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use serde::Serialize;
use serde_json::json;

use crate::{
    config::ConfigError,
    doctor::{Check, Verdict},
};

/// Why the daemon, or a command of it, does not even begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartReason {
    /// The configuration is wrong.
    ConfigInvalid,
    /// Another daemon has the state directory.
    StateLocked,
    /// The state is that of a newer version.
    StateNewer,
    /// The journal is damaged where a start would be a guess.
    JournalDamaged,
    /// The engine is not there.
    EngineMissing,
    /// There is no image.
    ImageNotFound,
    /// It needs rights that this process does not have.
    NeedsRoot,
    /// Another daemon has the network namespace.
    NetHeld,
    /// The network of lane guarded cannot be had.
    NetUnavailable,
    /// The certificates by which doors look into TLS, or their files, are not what they should be.
    CaFault,
    /// Something of the host failed.
    HostFault,
}

impl StartReason {
    /// Upper-case text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigInvalid => "CONFIG_INVALID",
            Self::StateLocked => "STATE_LOCKED",
            Self::StateNewer => "STATE_NEWER",
            Self::JournalDamaged => "JOURNAL_DAMAGED",
            Self::EngineMissing => "ENGINE_MISSING",
            Self::ImageNotFound => "IMAGE_NOT_FOUND",
            Self::NeedsRoot => "NEEDS_ROOT",
            Self::NetHeld => "NET_HELD",
            Self::NetUnavailable => "NET_UNAVAILABLE",
            Self::CaFault => "CA_FAULT",
            Self::HostFault => "HOST_FAULT",
        }
    }

    /// What to do.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::ConfigInvalid => "correct the file; `sandboxd check-config` tells every mistake",
            Self::StateLocked => "stop the other daemon, or use another state directory",
            Self::StateNewer => "run the version that wrote it, or use another state directory",
            Self::JournalDamaged => {
                "see `sandboxd journal check`; restore the state directory, or move it away"
            }
            Self::EngineMissing => "install qemu-system-x86, or set engine.qemu; see `sandboxd doctor`",
            Self::ImageNotFound => "`make image`, or name one that is there",
            Self::NeedsRoot => {
                "run it as root, or by its unit; without lane guarded (net.slots = 0) no root is needed"
            }
            Self::NetHeld => "stop the other daemon, or use another net.namespace",
            Self::NetUnavailable => {
                "see `sandboxd doctor`; without lane guarded (net.slots = 0) nothing of it is needed"
            }
            Self::CaFault => "see `sandboxd ca check` and `sandboxd ca --help`",
            Self::HostFault => "see `sandboxd doctor`",
        }
    }
}

/// A refusal to begin, as it is printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its reason.
    pub reason: StartReason,
    /// File or folder that it is about, if any.
    pub place: Option<PathBuf>,
    /// What is wrong, with its causes.
    pub message: String,
}

impl Refusal {
    /// An error with all its causes, in one line.
    #[must_use]
    pub fn new(reason: StartReason, place: Option<PathBuf>, error: &dyn std::error::Error) -> Self {
        Self {
            reason,
            place,
            message: chain(error),
        }
    }
}

/// An error with its causes, outermost first.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<_> = causes.map(ToString::to_string).collect();
    texts.join(": ")
}

/// Prints; as text or as JSON.
#[derive(Debug, Clone, Copy)]
pub struct Printer {
    json: bool,
}

impl Printer {
    /// A printer for people, or for programs.
    #[must_use]
    pub const fn new(json: bool) -> Self {
        Self { json }
    }

    /// One result: `value` for programs, `text` for people.
    ///
    /// # Errors
    /// Stdout's (whoever read it may be gone).
    pub fn result(self, value: &impl Serialize, text: &str) -> io::Result<()> {
        let line = if self.json {
            serde_json::to_string(value).map_err(io::Error::other)?
        } else {
            text.to_owned()
        };
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()
    }

    /// A line that is the same for people and programs.
    ///
    /// # Errors
    /// Stdout's.
    pub fn line(self, line: &impl std::fmt::Display) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()
    }

    /// A line of progress on stderr; nothing for programs.
    pub fn progress(self, text: &str) {
        if !self.json {
            stderr(text);
        }
    }

    /// Why nothing began.
    pub fn refusal(self, refusal: &Refusal) {
        stderr(&self.render_refusal(refusal));
    }

    /// A wrong configuration: every mistake.
    pub fn config_error(self, error: &ConfigError) {
        stderr(&self.render_config_error(error));
    }

    fn render_refusal(self, refusal: &Refusal) -> String {
        let Refusal {
            reason,
            place,
            message,
        } = refusal;
        if self.json {
            let error = json!({
                "reason": reason.as_str(), "message": message, "remedy": reason.remedy(),
                "place": place.as_ref().map(|place| place.to_string_lossy()),
            });
            return json!({ "error": error }).to_string();
        }
        let place = place.as_ref().map(|place| format!("\n --> {}", place.display()));
        format!(
            "error[{}]: {message}{}\n  = help: {}",
            reason.as_str(),
            place.unwrap_or_default(),
            reason.remedy()
        )
    }

    fn render_config_error(self, error: &ConfigError) -> String {
        let reason = StartReason::ConfigInvalid;
        match error {
            ConfigError::Wrong(mistakes) if self.json => {
                let mut error = mistakes.to_json();
                if let Some(fields) = error.as_object_mut() {
                    fields.insert("reason".to_owned(), reason.as_str().into());
                    fields.insert("message".to_owned(), "the configuration is wrong".into());
                    fields.insert("remedy".to_owned(), reason.remedy().into());
                }
                json!({ "error": error }).to_string()
            }
            ConfigError::Wrong(mistakes) => mistakes.to_string(),
            ConfigError::Read { .. } | ConfigError::TooLong { .. } => {
                self.render_refusal(&Refusal::new(reason, None, error))
            }
        }
    }

    /// What the doctor found.
    ///
    /// # Errors
    /// Stdout's.
    pub fn checks(self, checks: &[Check]) -> io::Result<()> {
        self.result(&json!({ "checks": checks }), &table(checks))
    }
}

fn table(checks: &[Check]) -> String {
    let wide = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        lines.push(format!(
            "{:4}  {:wide$}  {}",
            check.verdict.as_str(),
            check.name,
            check.found
        ));
        if !check.remedy.is_empty() {
            lines.push(format!("{:4}  {:wide$}  -> {}", "", "", check.remedy));
        }
    }
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    lines.push(format!(
        "{} ok, {} warn, {} fail",
        count(Verdict::Ok),
        count(Verdict::Warn),
        count(Verdict::Fail)
    ));
    lines.join("\n")
}

fn stderr(text: &str) {
    // Nobody is left to be told that stderr is gone.
    drop(writeln!(io::stderr().lock(), "{text}"));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Config, Host};

    #[test]
    fn a_refusal_names_reason_place_and_remedy() {
        let refusal = Refusal {
            reason: StartReason::StateLocked,
            place: Some("/s".into()),
            message: "daemon 42 has it".to_owned(),
        };
        assert_eq!(
            Printer::new(false).render_refusal(&refusal),
            "error[STATE_LOCKED]: daemon 42 has it\n --> /s\n  = help: stop the other daemon, or use another state directory"
        );
        let json: serde_json::Value =
            serde_json::from_str(&Printer::new(true).render_refusal(&refusal)).unwrap();
        assert_eq!(json["error"]["reason"], "STATE_LOCKED");
        assert_eq!(json["error"]["place"], "/s");
    }

    #[test]
    fn a_wrong_file_is_told_whole() {
        let host = Host {
            name: "h".to_owned(),
            memory: crate::words::MemBytes::from_mib(100),
            cores: 1,
        };
        let wrong = |text: &str| ConfigError::Wrong(Config::parse(text, Path::new("f"), &host).unwrap_err());
        let error = wrong("x = 1\ny = 2\n");
        let json: serde_json::Value =
            serde_json::from_str(&Printer::new(true).render_config_error(&error)).unwrap();
        assert_eq!(json["error"]["mistakes"].as_array().unwrap().len(), 2);
        let text = Printer::new(false).render_config_error(&error);
        assert!(text.ends_with("2 mistakes in f"), "{text}");
        let missing = Config::read(Path::new("/nowhere/f"), &host).unwrap_err();
        let text = Printer::new(false).render_config_error(&missing);
        assert!(
            text.starts_with("error[CONFIG_INVALID]: cannot read /nowhere/f: No such file"),
            "{text}"
        );
    }

    #[test]
    fn checks_are_a_table() {
        let checks = [
            Check {
                name: "qemu",
                verdict: Verdict::Ok,
                found: "7.2".to_owned(),
                remedy: String::new(),
            },
            Check {
                name: "state_dir",
                verdict: Verdict::Fail,
                found: "gone".to_owned(),
                remedy: "make it".to_owned(),
            },
        ];
        assert_eq!(
            table(&checks),
            "ok    qemu       7.2\nfail  state_dir  gone\n                 -> make it\n1 ok, 0 warn, 1 fail"
        );
    }
}
