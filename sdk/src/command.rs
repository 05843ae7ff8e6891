//! A command as Exec, Run and Spawn have it in common.
//!
//! May call: error.
//! Never inside: how it is started, and who reads what it says.

use std::time::Duration;

use bytes::Bytes;
use sandbox_protocol::v1;

use crate::error::Error;

/// A command in the making, and the first thing that was wrong with it.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) message: v1::Command,
    pub(crate) wrong: Option<(&'static str, &'static str)>,
}

impl Wanted {
    pub(crate) fn new<I>(argv: I) -> Self
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        let argv = argv
            .into_iter()
            .map(|arg| Bytes::copy_from_slice(arg.as_ref()))
            .collect();
        Self {
            message: v1::Command {
                argv,
                ..v1::Command::default()
            },
            wrong: None,
        }
    }

    pub(crate) fn timeout(&mut self, timeout: Duration) {
        match millis(timeout) {
            Some(ms) if ms > 0 => self.message.timeout_ms = ms,
            Some(_) | None => self.wrong = Some(("timeout_ms", "1 ms to 2^32 - 1 ms")),
        }
    }

    pub(crate) fn grace(&mut self, grace: Duration) {
        match millis(grace) {
            Some(ms) => self.message.grace_ms = Some(ms),
            None => self.wrong = Some(("grace_ms", "at most 2^32 - 1 ms")),
        }
    }

    pub(crate) fn tty(&mut self, cols: u32, rows: u32) {
        let tty = self.message.tty.get_or_insert_default();
        (tty.cols, tty.rows) = (cols, rows);
    }

    pub(crate) fn term(&mut self, term: Bytes) {
        match &mut self.message.tty {
            Some(tty) => tty.term = term,
            None => self.wrong = Some(("tty.term", "after `tty`")),
        }
    }

    /// The message, if nothing was wrong.
    pub(crate) fn checked(self) -> Result<v1::Command, Error> {
        match self.wrong {
            Some((field, allowed)) => Err(Error::invalid(field, allowed.to_owned())),
            None => Ok(self.message),
        }
    }
}

/// Whole milliseconds, rounded up.
pub(crate) fn millis(duration: Duration) -> Option<u32> {
    u32::try_from(duration.as_nanos().div_ceil(1_000_000)).ok()
}

/// The setters of a builder that has a field `wanted`.
macro_rules! command_setters {
    () => {
        /// An environment variable, over those of the claim and the image.
        pub fn env(mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
            let (key, value) = (key.into(), value.into());
            self.wanted
                .message
                .env
                .push(sandbox_protocol::v1::EnvVar { key, value });
            self
        }

        /// Starts from this request's variables alone.
        pub fn clear_env(mut self) -> Self {
            self.wanted.message.clear_env = true;
            self
        }

        /// Working directory, absolute. Default: the user's home, else `/`.
        pub fn cwd(mut self, path: impl Into<Bytes>) -> Self {
            self.wanted.message.cwd = path.into();
            self
        }

        /// Name or number, `[:group]`. Default: the claim's, else root.
        pub fn user(mut self, user: impl Into<Bytes>) -> Self {
            self.wanted.message.user = user.into();
            self
        }

        /// Time of the program: after it the [signal](Self::timeout_signal), and after the [grace](Self::grace) KILL.
        pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
            self.wanted.timeout(timeout);
            self
        }

        /// What the program gets when its time is over. Default: KILL.
        pub fn timeout_signal(mut self, number: i32) -> Self {
            self.wanted.message.timeout_signal = number;
            self
        }

        /// From the timeout signal to KILL; default 2 s.
        pub fn grace(mut self, grace: std::time::Duration) -> Self {
            self.wanted.grace(grace);
            self
        }

        /// Standard error goes where standard output goes, in exact order.
        pub fn merge_output(mut self) -> Self {
            self.wanted.message.merge_output = true;
            self
        }
    };
}
pub(crate) use command_setters;

/// The setters of a builder whose program can have a terminal.
macro_rules! tty_setters {
    () => {
        /// Runs the program on a terminal of this size, 1 to 4096 each way (else INVALID_SIZE). All it says comes as
        /// standard output.
        pub fn tty(mut self, cols: u32, rows: u32) -> Self {
            self.wanted.tty(cols, rows);
            self
        }

        /// Value of TERM on the terminal; default `xterm-256color`. After [`tty`](Self::tty).
        pub fn term(mut self, term: impl Into<Bytes>) -> Self {
            self.wanted.term(term.into());
            self
        }
    };
}
pub(crate) use tty_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_never_cut_short() {
        assert_eq!(millis(Duration::from_micros(1)), Some(1));
        assert_eq!(millis(Duration::from_millis(7)), Some(7));
        assert_eq!(millis(Duration::MAX), None);
    }

    #[test]
    fn what_was_wrong_is_told_by_its_field() {
        let mut wanted = Wanted::new(["x"]);
        wanted.term(Bytes::from_static(b"vt100"));
        let error = wanted.checked().unwrap_err();
        assert_eq!(error.fields()[0].field, "tty.term");
        let mut wanted = Wanted::new(["x"]);
        wanted.tty(80, 24);
        wanted.term(Bytes::from_static(b"vt100"));
        wanted.tty(100, 30);
        let tty = wanted.checked().unwrap().tty.unwrap();
        assert_eq!((tty.cols, tty.rows, &tty.term[..]), (100, 30, &b"vt100"[..]));
    }
}
