//! Faults by script, so that tests meet a machine that fails, hangs, dies or stays mute when they want it.

use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The operation fails.
    Fail(Op),
    /// The operation never ends.
    Hang(Op),
    /// The machine dies right after its start.
    Die,
    /// Its agent never answers.
    Mute,
}

/// Operations that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Boot,
    Clone,
}

/// One line of the script: `fail boot N`, `fail clone N`, `hang boot N`, `hang clone N`, `die N`, `mute N`, where the count
/// is of boots, of clones, or of machines, from 1 on, and `N` can also be `N-M` or `*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StubFault {
    fault: Fault,
    from: u64,
    to: u64,
}

/// Text that is no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no fault: expected `fail|hang boot|clone N` or `die|mute N`, where N is a number from 1 on, `N-M` or `*`"
)]
pub struct StubFaultError(String);

impl StubFault {
    /// Reads a script: faults with commas between. Empty text is an empty script.
    ///
    /// # Errors
    /// [`StubFaultError`] with the first that is wrong.
    pub fn parse_all(script: &str) -> Result<Vec<Self>, StubFaultError> {
        let faults = script.split(',').map(str::trim).filter(|fault| !fault.is_empty());
        faults.map(str::parse).collect()
    }
}

impl FromStr for StubFault {
    type Err = StubFaultError;

    fn from_str(text: &str) -> Result<Self, StubFaultError> {
        let wrong = || StubFaultError(text.to_owned());
        let words: Vec<&str> = text.split_whitespace().collect();
        let (fault, count) = match *words.as_slice() {
            ["fail", "boot", count] => (Fault::Fail(Op::Boot), count),
            ["fail", "clone", count] => (Fault::Fail(Op::Clone), count),
            ["hang", "boot", count] => (Fault::Hang(Op::Boot), count),
            ["hang", "clone", count] => (Fault::Hang(Op::Clone), count),
            ["die", count] => (Fault::Die, count),
            ["mute", count] => (Fault::Mute, count),
            _ => return Err(wrong()),
        };
        let number = |text: &str| text.parse().ok().filter(|number: &u64| *number > 0);
        let (from, to) = match count.split_once('-') {
            _ if count == "*" => (1, u64::MAX),
            Some((from, to)) => (number(from).ok_or_else(wrong)?, number(to).ok_or_else(wrong)?),
            None => {
                let at = number(count).ok_or_else(wrong)?;
                (at, at)
            }
        };
        if from > to {
            return Err(wrong());
        }
        Ok(Self { fault, from, to })
    }
}

impl fmt::Display for StubFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Fail(Op::Boot) => write!(f, "fail boot ")?,
            Fault::Fail(Op::Clone) => write!(f, "fail clone ")?,
            Fault::Hang(Op::Boot) => write!(f, "hang boot ")?,
            Fault::Hang(Op::Clone) => write!(f, "hang clone ")?,
            Fault::Die => write!(f, "die ")?,
            Fault::Mute => write!(f, "mute ")?,
        }
        match (self.from, self.to) {
            (1, u64::MAX) => write!(f, "*"),
            (from, to) if from == to => write!(f, "{from}"),
            (from, to) => write!(f, "{from}-{to}"),
        }
    }
}

/// A script and how far it is.
#[derive(Debug, Default)]
pub(super) struct Script {
    faults: Vec<StubFault>,
    boots: AtomicU64,
    clones: AtomicU64,
    machines: AtomicU64,
}

/// What the script wants of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Go,
    Fail,
    Hang,
}

/// What the script wants of a new machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Fate {
    pub(super) die: bool,
    pub(super) mute: bool,
}

impl Script {
    pub(super) fn new(faults: Vec<StubFault>) -> Self {
        Self {
            faults,
            ..Self::default()
        }
    }

    fn wants(&self, fault: Fault, at: u64) -> bool {
        let hit = |line: &StubFault| line.fault == fault && (line.from..=line.to).contains(&at);
        self.faults.iter().any(hit)
    }

    /// Counts an operation.
    pub(super) fn operation(&self, op: Op) -> Verdict {
        let counter = match op {
            Op::Boot => &self.boots,
            Op::Clone => &self.clones,
        };
        let at = counter.fetch_add(1, Ordering::Relaxed) + 1;
        if self.wants(Fault::Fail(op), at) {
            Verdict::Fail
        } else if self.wants(Fault::Hang(op), at) {
            Verdict::Hang
        } else {
            Verdict::Go
        }
    }

    /// Counts a machine.
    pub(super) fn machine(&self) -> Fate {
        let at = self.machines.fetch_add(1, Ordering::Relaxed) + 1;
        Fate {
            die: self.wants(Fault::Die, at),
            mute: self.wants(Fault::Mute, at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_reads_and_prints_the_same() {
        let text = "fail boot 1, hang clone 2-4,die *,mute 7";
        let script = StubFault::parse_all(text).unwrap();
        let printed: Vec<String> = script.iter().map(ToString::to_string).collect();
        assert_eq!(printed, ["fail boot 1", "hang clone 2-4", "die *", "mute 7"]);
        assert_eq!(StubFault::parse_all(" ").unwrap(), []);
        for bad in [
            "fail 1",
            "die",
            "die 0",
            "die 3-2",
            "die -1",
            "explode 1",
            "die 1 2",
            "mute x",
        ] {
            assert_eq!(StubFault::parse_all(bad), Err(StubFaultError(bad.to_owned())));
        }
    }

    #[test]
    fn each_kind_counts_for_itself() {
        let script = Script::new(StubFault::parse_all("fail clone 2,hang clone 3,die 2,mute 1-2").unwrap());
        assert_eq!(script.operation(Op::Boot), Verdict::Go);
        let clones = [(); 4].map(|()| script.operation(Op::Clone));
        assert_eq!(clones, [Verdict::Go, Verdict::Fail, Verdict::Hang, Verdict::Go]);
        let fates = [(); 3].map(|()| script.machine());
        let fate = |die, mute| Fate { die, mute };
        assert_eq!(fates, [fate(false, true), fate(true, true), fate(false, false)]);
    }
}
