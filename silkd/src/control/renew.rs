//! Renewal: a guest's new identity, step by step, and the opening of the gate.
//!
//! May call: clock, control/*, door, gate, refusal, run.
//! Never inside: a generator of random numbers of silkd's own; ids are drawn from the kernel after it was reseeded.
//! Invariant 14: nothing runs in a restored guest before it is renewed: programs stay frozen until seed, clock, names
//! and generation are new, and the gate opens last.

use std::{
    ffi::OsString,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_protocol::{reason::Reason, v1::EnvVar};

use super::{
    actor::{Actor, Renewed},
    files::{name_in_hosts, put_in_place, tell_generation},
    order::{Mode, Renewal},
};
use crate::{
    clock,
    door::Said,
    gate::{State, Turn},
    refusal::{Escaped, Refusal, chain},
    run::{HookEnd, HookOutcome, RunError},
};

/// For one hook, and for all of a renewal.
const HOOK: Duration = Duration::from_secs(5);
const HOOKS: Duration = Duration::from_secs(10);
/// Hooks that are run at most; a folder with more fails the renewal.
const HOOKS_MOST: usize = 64;
/// How many ports a guest's connections leave from, and the lowest that may be one.
const PORTS: u16 = 4096;
const PORTS_FROM: u16 = 0x8000;
/// Bytes of a hook's output that are shown.
const OUTPUT: usize = 512;

/// Why a renewal failed; the guest is of no use then.
#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    /// A change of the machine or of a file.
    #[error("{step}")]
    Step {
        /// Which.
        step: &'static str,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// Programs could not be thawed, or a hook could not be started.
    #[error("{step}")]
    Run {
        /// What was tried.
        step: String,
        /// Why it failed.
        #[source]
        source: RunError,
    },
    /// A hook of the image did not succeed.
    #[error("hook {name}: {how}; its output ended: {output}")]
    Hook {
        /// Its file name, escaped.
        name: String,
        /// How it ended.
        how: String,
        /// The end of what it said, escaped.
        output: String,
    },
    /// Hooks took too long together, or there are too many.
    #[error("hook {name}: {limit}")]
    Limit {
        /// The first that was not run.
        name: String,
        /// Which limit.
        limit: &'static str,
    },
}

impl From<RenewError> for Refusal {
    fn from(error: RenewError) -> Self {
        Self::new(Reason::RenewFailed, chain(&error))
    }
}

fn step(step: &'static str) -> impl FnOnce(io::Error) -> RenewError {
    move |source| RenewError::Step { step, source }
}

impl Actor {
    /// Does it, whole, or leaves the gate shut. A repeated id only answers again.
    pub(super) async fn renew(&mut self, renewal: Renewal) -> Result<Renewed, Refusal> {
        if let Some((id, renewed)) = &self.renewed
            && *id == renewal.id
            && self.gate.state() == State::Ready
        {
            return Ok(renewed.clone());
        }
        self.fits(renewal.mode)?;
        self.gate.turn(Turn::Renew)?;
        let done = self.renew_steps(&renewal).await;
        match done {
            Ok(renewed) => {
                self.gate.turn(Turn::Renewed)?;
                self.rest = None;
                self.events.log(&format!(
                    "renewed ({}), generation {}",
                    renewal.mode.as_str(),
                    renewed.generation
                ));
                self.renewed = Some((renewal.id, renewed.clone()));
                Ok(renewed)
            }
            Err(error) => {
                // Back to rest: whatever was thawed for the hooks stands still again.
                let still = self.runner.freeze().await;
                self.gate.turn(Turn::RenewFailed)?;
                let refusal = Refusal::from(error);
                self.events.log(&format!("renewal failed: {}", refusal.message));
                if let Err(error) = still {
                    self.events
                        .log(&format!("after a failed renewal: {}", chain(&error)));
                }
                Err(refusal)
            }
        }
    }

    /// Waking is going on with a life; there has to be one.
    fn fits(&self, mode: Mode) -> Result<(), Refusal> {
        let lived = self.renewed.is_some();
        match mode {
            Mode::Boot | Mode::Clone => Ok(()),
            Mode::Wake if lived => Ok(()),
            Mode::Wake => Err(Refusal::new(
                Reason::NotReady,
                "a guest that was never renewed cannot wake",
            )),
        }
    }

    async fn renew_steps(&mut self, renewal: &Renewal) -> Result<Renewed, RenewError> {
        self.machine.reseed(&renewal.seed).map_err(step("entropy"))?;
        self.machine.set_clock(renewal.host_time).map_err(step("clock"))?;
        if renewal.mode.changes_identity() {
            self.new_identity(renewal)?;
        }
        let generation = self
            .facts
            .renewed(&renewal.sandbox, renewal.mode.changes_identity());
        tell_generation(&self.places, generation, &self.facts.sandbox()).map_err(step("generation"))?;
        self.runner.thaw().await.map_err(|source| RenewError::Run {
            step: "thaw".to_owned(),
            source,
        })?;
        // Neither waits for the other: most images have no hooks, and a door has its answer ready.
        let (hooks, doors) = tokio::join!(self.run_hooks(renewal, generation), self.ask_doors(renewal));
        hooks?;
        Ok(Renewed { generation, doors })
    }

    async fn ask_doors(&self, renewal: &Renewal) -> Option<Said> {
        let probe = self.doors.as_ref().filter(|_| renewal.ask_doors)?;
        Some(probe.ask().await)
    }

    fn new_identity(&self, renewal: &Renewal) -> Result<(), RenewError> {
        if let Some(hostname) = &renewal.hostname {
            self.machine.set_hostname(hostname).map_err(step("host name"))?;
            name_in_hosts(&self.places.hosts, hostname).map_err(step("hosts"))?;
        }
        let random = random_bytes().map_err(step("getrandom"))?;
        let [machine, boot, ports] = random;
        self.machine
            .set_ports(port_range(u128::from_be_bytes(ports)))
            .map_err(step("port range"))?;
        put_in_place(&self.places.machine_id, machine_id(machine).as_bytes()).map_err(step("machine-id"))?;
        put_in_place(&self.places.boot_id, uuid(boot).as_bytes()).map_err(step("boot id"))
    }

    /// Tells programs of the image that this is another life; in lexical order.
    async fn run_hooks(&self, renewal: &Renewal, generation: u64) -> Result<(), RenewError> {
        let hooks = hooks(&self.places.hooks()).map_err(step("hooks"))?;
        let env = [
            var("SANDBOX_ID", self.facts.sandbox().to_string()),
            var("SANDBOX_GENERATION", generation.to_string()),
            var("SANDBOX_RENEWAL", renewal.mode.as_str().to_owned()),
        ];
        let end = clock::since_boot() + HOOKS;
        for (place, path) in hooks.iter().enumerate() {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            let name = Escaped(name, OUTPUT).to_string();
            let limit = |limit| RenewError::Limit {
                name: name.clone(),
                limit,
            };
            let left = end.saturating_sub(clock::since_boot()).min(HOOK);
            if left.is_zero() {
                return Err(limit("all hooks together took more than 10 s"));
            }
            if place >= HOOKS_MOST {
                return Err(limit("more than 64 hooks"));
            }
            let outcome = self.runner.run_hook(path, &env, left).await;
            let outcome = outcome.map_err(|source| RenewError::Run {
                step: format!("hook {name}"),
                source,
            })?;
            judged(name, &outcome)?;
        }
        Ok(())
    }
}

fn judged(name: String, outcome: &HookOutcome) -> Result<(), RenewError> {
    let how = match outcome.end {
        HookEnd::Code(0) => return Ok(()),
        HookEnd::Code(code) => format!("exit code {code}"),
        HookEnd::Signal(signal) => format!("ended by signal {signal}"),
        HookEnd::TimedOut => "took more than its time".to_owned(),
    };
    let from = outcome.output.len().saturating_sub(OUTPUT);
    let tail = outcome.output.get(from..).unwrap_or_default();
    Err(RenewError::Hook {
        name,
        how,
        output: Escaped(tail, OUTPUT).to_string(),
    })
}

fn var(key: &'static str, value: String) -> EnvVar {
    EnvVar {
        key: key.into(),
        value: value.into(),
    }
}

/// The executable files of a folder, in the order of their names; no folder, no hooks.
fn hooks(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names: Vec<OsString> = Vec::new();
    for entry in entries {
        let entry = entry?;
        let meta = std::fs::metadata(entry.path())?;
        if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
            names.push(entry.file_name());
        }
        // One more than are run, so that the limit is told by name.
        if names.len() > HOOKS_MOST {
            break;
        }
    }
    names.sort();
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Three draws of the kernel's generator.
fn random_bytes() -> io::Result<[[u8; 16]; 3]> {
    let mut all = [[0; 16]; 3];
    for bytes in &mut all {
        // The kernel never gives less of so little.
        let n = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())?;
        if n < bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(all)
}

/// The ports that connections of this guest leave from, first and last. Clones of one template have one address and would
/// choose the same ports in the same order: on lane guarded the host would look through all of those connections for each
/// packet. Above 32,768, where no service is expected; the two differ in parity, as the kernel wants them.
fn port_range(random: u128) -> (u16, u16) {
    let starts = u128::from(u16::MAX - PORTS_FROM - PORTS + 2);
    // Below 2^16 by the remainder.
    let offset = u16::try_from(random % starts).unwrap_or(0);
    let first = PORTS_FROM + offset;
    (first, first + (PORTS - 1))
}

/// As `/etc/machine-id` has it: 32 hexadecimal digits.
fn machine_id(random: [u8; 16]) -> String {
    format!("{:032x}\n", u128::from_be_bytes(variant_4(random)))
}

/// As the kernel's boot id has it.
fn uuid(random: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(variant_4(random)));
    let mut text = String::with_capacity(37);
    for (place, digit) in hex.chars().enumerate() {
        if matches!(place, 8 | 12 | 16 | 20) {
            text.push('-');
        }
        text.push(digit);
    }
    text.push('\n');
    text
}

/// Random bits as a UUID of version 4, which is what both files promise.
fn variant_4(random: [u8; 16]) -> [u8; 16] {
    let bits = u128::from_be_bytes(random);
    let version = (bits & !(0xf << 76)) | (0x4 << 76);
    ((version & !(0b11 << 62)) | (0b10 << 62)).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_the_form_that_programs_check() {
        let id = uuid([0xff; 16]);
        assert_eq!(id, "ffffffff-ffff-4fff-bfff-ffffffffffff\n");
        assert_eq!(uuid([0; 16]), "00000000-0000-4000-8000-000000000000\n");
        assert_eq!(machine_id([0xab; 16]).len(), 33);
        let [a, b, c] = random_bytes().unwrap();
        assert!(a != b && b != c);
    }

    #[test]
    fn a_port_range_is_4096_ports_anywhere_above_the_services() {
        let last = u128::from(u16::MAX - 0x8000 - 4095);
        assert_eq!(port_range(0), (32_768, 36_863));
        assert_eq!(port_range(last), (61_440, 65_535));
        assert_eq!(port_range(last + 1), port_range(0));
        for random in [1, 77, 28_000, u128::MAX] {
            let (first, end) = port_range(random);
            assert_eq!(end - first, 4_095, "{random}");
            assert_ne!(first % 2, end % 2, "{random}");
        }
    }

    #[test]
    fn hooks_are_executable_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(hooks(&dir.path().join("absent")).unwrap(), Vec::<PathBuf>::new());
        for (name, mode) in [("20-b", 0o755), ("10-a", 0o700), ("README", 0o644)] {
            let path = dir.path().join(name);
            drop(std::fs::File::create(&path).unwrap());
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        std::fs::create_dir(dir.path().join("30-dir")).unwrap();
        let expected = ["10-a", "20-b"].map(|name| dir.path().join(name));
        assert_eq!(hooks(dir.path()).unwrap(), expected);
    }

    #[test]
    fn a_hook_is_judged_by_its_end() {
        let outcome = |end| HookOutcome {
            end,
            output: b"last\nwords".to_vec(),
        };
        assert!(judged("x".into(), &outcome(HookEnd::Code(0))).is_ok());
        for (outcome, words) in [
            (outcome(HookEnd::Code(3)), "exit code 3"),
            (outcome(HookEnd::Signal(9)), "signal 9"),
            (outcome(HookEnd::TimedOut), "more than its time"),
        ] {
            let refusal = Refusal::from(judged("10-a".into(), &outcome).unwrap_err());
            assert_eq!(refusal.reason, Reason::RenewFailed);
            for part in ["10-a", words, "last\\nwords"] {
                assert!(refusal.message.contains(part), "{refusal}");
            }
        }
    }
}
