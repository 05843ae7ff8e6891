//! Signals to this process, for whoever passes them on.

use std::future::Future;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::fault::Fault;

/// Those that end a remote command as they would end a local one.
#[derive(Debug)]
pub(crate) struct Signals([(u8, Signal); 4]);

impl Signals {
    /// From now on they no longer end this process.
    pub(crate) fn catch() -> Result<Self, Fault> {
        let catch = |kind: SignalKind| signal(kind).map_err(|error| Fault::io("signals", error));
        Ok(Self([
            (1, catch(SignalKind::hangup())?),
            (2, catch(SignalKind::interrupt())?),
            (3, catch(SignalKind::quit())?),
            (15, catch(SignalKind::terminate())?),
        ]))
    }

    /// The next one's number. Cancel safe.
    pub(crate) fn next(&mut self) -> impl Future<Output = u8> {
        std::future::poll_fn(|cx| {
            for (number, signal) in &mut self.0 {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(cx) {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
    }
}

/// Names of signals, from 1 on.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// The highest number.
const HIGHEST: i32 = 64;

/// The number of a signal that is named: `TERM`, `SIGTERM`, `15`.
pub(crate) fn number(text: &str) -> Result<i32, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let named = (1..).zip(NAMES).find(|(_number, known)| *known == name);
    match (named, text.parse()) {
        (Some((number, _name)), _) => Ok(number),
        (None, Ok(number)) if (1..=HIGHEST).contains(&number) => Ok(number),
        (None, Ok(_) | Err(_)) => Err("expected a name, as TERM, or a number from 1 to 64".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn signals_go_by_name_and_number() {
        for (text, expected) in [
            ("TERM", 15),
            ("sigkill", 9),
            ("HUP", 1),
            ("SYS", 31),
            ("WINCH", 28),
            ("64", 64),
            ("17", 17),
        ] {
            assert_eq!(number(text), Ok(expected), "{text}");
        }
        for bad in ["", "SIG", "0", "65", "-9", "NOPE"] {
            assert!(number(bad).is_err(), "{bad:?}");
        }
    }
}
