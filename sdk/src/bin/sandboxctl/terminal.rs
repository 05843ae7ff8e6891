//! The local terminal: its size, raw mode that is given back on every way out, and the keys that leave a program alone.

use std::{
    io::{self, IsTerminal as _, Write as _},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Mutex, Once, PoisonError},
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::{fault::Fault, print::Out};

/// Size of a terminal that does not say one.
const SIZE: (u32, u32) = (80, 24);
/// Largest side of a terminal that a guest takes.
const SIDE: u32 = 4096;
/// What a full-screen program may have set and only itself would undo: the other screen, the mouse, bracketed paste,
/// application keys, a hidden cursor, colours. The line that it was on is over.
const UNDO: &[u8] =
    b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m\r\n";
/// Keys that leave, unless others are named; docker's.
pub(crate) const DETACH: &str = "ctrl-p,ctrl-q";

/// Refuses a terminal that is not there: `input`, whether what is typed goes on.
pub(crate) fn check(what: &str, input: bool, out: Out) -> Result<(), Fault> {
    let wrong = if out.json {
        "cannot be with --json: what a terminal shows is no JSON"
    } else if input && !io::stdin().is_terminal() {
        "needs a terminal, and stdin is none; use exec, with -i if it is to read stdin"
    } else if !io::stdout().is_terminal() {
        "needs a terminal, and stdout is none; use exec without -t"
    } else {
        return Ok(());
    };
    Err(Fault::Usage(format!("{what} {wrong}")))
}

/// Columns and rows of the terminal that output goes to.
pub(crate) fn size() -> (u32, u32) {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (u32::from(size.ws_col).min(SIDE), u32::from(size.ws_row).min(SIDE))
        }
        Ok(_) | Err(_) => SIZE,
    }
}

/// A terminal, and how it was before; nothing while it is that way.
static BEFORE: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

fn give_back() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((terminal, before)) = before {
        // A terminal that is gone needs nothing.
        tcsetattr(terminal, OptionalActions::Now, &before).ok();
    }
}

/// Raw mode of a terminal; there is one at a time. It is given back when this is dropped, and before a panic is told.
#[derive(Debug)]
pub(crate) struct Raw(OwnedFd);

impl Raw {
    /// Of the terminal on stdin.
    pub(crate) fn enter() -> Result<Self, Fault> {
        Self::of(io::stdin().as_fd()).map_err(|error| Fault::io("terminal", error))
    }

    fn of(terminal: BorrowedFd<'_>) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let told = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                give_back();
                told(panic);
            }));
        });
        let before = tcgetattr(terminal)?;
        let raw = Self(terminal.try_clone_to_owned()?);
        let kept = (terminal.try_clone_to_owned()?, before.clone());
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
        raw.set(before)?;
        Ok(raw)
    }

    fn set(&self, mut mode: Termios) -> io::Result<()> {
        mode.make_raw();
        Ok(tcsetattr(&self.0, OptionalActions::Now, &mode)?)
    }

    /// After a pause in which a shell had the terminal.
    pub(crate) fn again(&self) {
        if let Ok(now) = tcgetattr(&self.0) {
            // A terminal that is gone is told by its end of input.
            self.set(now).ok();
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        give_back();
    }
}

/// Undoes on the screen what a program that goes on elsewhere, or is lost, can no longer undo.
pub(crate) fn clean() {
    if io::stdout().is_terminal() {
        let mut stdout = io::stdout().lock();
        // A terminal that is gone shows nothing.
        stdout.write_all(UNDO).and_then(|()| stdout.flush()).ok();
    }
}

/// Finds the keys that leave in what is typed. Pure.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys {
    keys: Vec<u8>,
    /// Typed so far of them.
    held: usize,
}

/// What to do with what was typed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Typed {
    /// Goes to the program.
    pub(crate) pass: Vec<u8>,
    /// The keys were typed: leave.
    pub(crate) leave: bool,
}

impl std::str::FromStr for Keys {
    type Err = String;

    /// `a` or `ctrl-a`, several with commas between; empty: none.
    fn from_str(text: &str) -> Result<Self, String> {
        let key = |name: &str| match name.as_bytes() {
            [b'c', b't', b'r', b'l', b'-', key] if matches!(key, b'a'..=b'z' | b'@' | b'['..=b'_') => {
                Ok(key & 0x1f)
            }
            [key] if key.is_ascii_graphic() => Ok(*key),
            _ => Err(format!(
                "{name:?} is no key: use a character, or ctrl- with one of a-z @ [ \\ ] ^ _, and commas between them"
            )),
        };
        let names = text.split(',').filter(|_name| !text.is_empty());
        let keys = names.map(key).collect::<Result<_, _>>()?;
        Ok(Self { keys, held: 0 })
    }
}

impl Keys {
    /// Nobody can leave.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys that begin like those that leave are held until it is clear what they are.
    pub(crate) fn typed(&mut self, bytes: &[u8]) -> Typed {
        let mut pass = Vec::with_capacity(bytes.len());
        if self.keys.is_empty() {
            pass.extend_from_slice(bytes);
            return Typed { pass, leave: false };
        }
        for byte in bytes {
            let mut seen = self.keys.get(..self.held).unwrap_or_default().to_vec();
            seen.push(*byte);
            // The longest end of what was typed that begins the keys stays held.
            let from = (0..=seen.len()).find(|from| {
                let end = seen.get(*from..).unwrap_or_default();
                self.keys.starts_with(end)
            });
            let (gone, held) = seen.split_at(from.unwrap_or(seen.len()));
            pass.extend_from_slice(gone);
            self.held = held.len();
            if self.held == self.keys.len() {
                self.held = 0;
                return Typed { pass, leave: true };
            }
        }
        Typed { pass, leave: false }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(text: &str) -> Keys {
        text.parse().unwrap()
    }

    #[test]
    fn keys_have_docker_s_names() {
        assert_eq!(keys(DETACH).keys, [16, 17]);
        assert_eq!(keys("ctrl-@,ctrl-[,ctrl-_,x").keys, [0, 27, 31, b'x']);
        assert!(keys("").keys.is_empty());
        for bad in ["ctrl-", "ctrl-A", "ctrl-pp", "ab", ",", "\u{e4}", "ctrl-1"] {
            assert!(bad.parse::<Keys>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_only_begins_like_the_keys_is_passed_on() {
        let mut leave = keys(DETACH);
        let typed = leave.typed(b"ls\x10");
        assert_eq!((&typed.pass[..], typed.leave), (&b"ls"[..], false));
        // ctrl-p twice: the first goes on, as in docker.
        let typed = leave.typed(b"\x10");
        assert_eq!((&typed.pass[..], typed.leave), (&b"\x10"[..], false));
        let typed = leave.typed(b"\x11rest");
        assert_eq!((&typed.pass[..], typed.leave), (&b""[..], true));
        // The start of the keys lies within a false start of them.
        let mut leave = keys("a,a,b");
        let typed = leave.typed(b"aaab");
        assert_eq!((&typed.pass[..], typed.leave), (&b"a"[..], true));
        let typed = keys("").typed(b"\x10\x11");
        assert_eq!((&typed.pass[..], typed.leave), (&b"\x10\x11"[..], false));
    }

    #[test]
    fn a_terminal_is_as_it_was_before_a_panic_is_told_and_after_a_drop() {
        use rustix::{
            fs::{Mode, OFlags},
            pty,
            termios::LocalModes,
        };

        let master = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).unwrap();
        pty::grantpt(&master).unwrap();
        pty::unlockpt(&master).unwrap();
        let name = pty::ptsname(&master, Vec::new()).unwrap();
        let terminal = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let echoes = |terminal: &OwnedFd| {
            let modes = tcgetattr(terminal).unwrap().local_modes;
            modes.contains(LocalModes::ECHO)
        };
        let raw = Raw::of(terminal.as_fd()).unwrap();
        assert!(!echoes(&terminal));
        drop(raw);
        assert!(echoes(&terminal));

        // The hook that tells of a panic finds the terminal given back.
        static TOLD: Mutex<Option<(OwnedFd, bool)>> = Mutex::new(None);
        *TOLD.lock().unwrap() = Some((terminal.try_clone().unwrap(), false));
        let raw = Raw::of(terminal.as_fd()).unwrap();
        let ours = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            ours(panic);
            if let Some((terminal, echoed)) = TOLD.lock().unwrap().as_mut() {
                *echoed = echoes(terminal);
            }
        }));
        assert!(!echoes(&terminal));
        let panicked = std::panic::catch_unwind(|| {
            let _raw = raw;
            panic!("on purpose");
        });
        drop(std::panic::take_hook());
        assert!(panicked.is_err() && echoes(&terminal));
        assert!(
            TOLD.lock().unwrap().as_ref().unwrap().1,
            "told before it was given back"
        );
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_added_by_any_cut(typed in "[abc]{0,40}", size in 1_usize..9) {
            let mut leave = keys("a,b,a,c");
            let mut passed = Vec::new();
            let mut left = false;
            for piece in typed.as_bytes().chunks(size) {
                let typed = leave.typed(piece);
                passed.extend(typed.pass);
                if typed.leave {
                    left = true;
                    break;
                }
            }
            match typed.find("abac") {
                Some(at) => {
                    prop_assert!(left);
                    prop_assert_eq!(&passed[..], &typed.as_bytes()[..at]);
                }
                None => {
                    prop_assert!(!left);
                    let held = &leave.keys[..leave.held];
                    prop_assert_eq!([&passed[..], held].concat(), typed.as_bytes());
                }
            }
        }
    }
}
