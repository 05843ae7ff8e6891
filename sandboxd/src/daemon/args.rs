//! The command line and the environment: the only place that reads either.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::{
    config::{self, StubAgent},
    words::{EngineKind, Name},
};

/// Keeps warm microVM clones and hands one over per claim.
#[derive(Debug, Parser)]
#[command(
    name = "sandboxd",
    version,
    after_help = "Examples:\n  \
        sandboxd serve --dev                         try it: no root, no configuration\n  \
        sandboxd serve                               by /etc/sandboxd/sandboxd.toml\n  \
        sandboxd check-config ./sandboxd.toml        every mistake, with its line\n  \
        sandboxd doctor                              what this host lacks\n\n\
        SANDBOXD_LOG sets the log's filter (such as `info,sandboxd::pool=debug`) and wins over the file."
)]
pub struct Args {
    /// Results and errors as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `sandboxd` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon.
    Serve(Serve),
    /// Check a configuration file and tell every mistake.
    CheckConfig {
        /// The file.
        #[arg(default_value = config::DEFAULT_FILE)]
        file: PathBuf,
    },
    /// Check this host: QEMU, KVM, memory, control groups, folders, images.
    Doctor {
        /// The configuration file; without it the default one if it is there, else the defaults.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Read a journal; the daemon need not run.
    #[command(subcommand)]
    Journal(Journal),
    /// The record of what guests reached out for; the daemon need not run.
    #[command(subcommand)]
    Audit(Audit),
    /// The network of lane guarded; the daemon need not run.
    #[command(subcommand)]
    Net(Net),
    /// Access tokens.
    #[command(subcommand)]
    Token(Token),
    /// The certificates by which doors look into TLS; the daemon need not run.
    #[command(
        subcommand,
        after_help = "Examples:\n  \
            sandboxd ca init                             once for all nodes: the root that guests trust\n  \
            sandboxd ca issue-node                       on each node, with the root's key at hand\n  \
            sandboxd ca issue-node --root-key /media/usb/root-0a1b2c3d.key\n  \
            sandboxd ca check                            chain, dates, modes, and which templates trust it\n  \
            sandboxd ca rotate                           a new root beside the old one\n  \
            sandboxd ca rotate --finish                  drop the old one"
    )]
    Ca(Ca),
}

/// `sandboxd ca`.
#[derive(Debug, Subcommand)]
pub enum Ca {
    /// Make the root, unless there is one. Nothing is overwritten.
    Init {
        /// Where.
        #[command(flatten)]
        at: CaArgs,
        /// Where the root's key is put, which belongs off the nodes; beside the bundle unless given.
        #[arg(long, value_name = "FILE")]
        root_key: Option<PathBuf>,
    },
    /// Issue this node's intermediate (90 days), unless it has one of the newest root that holds for 30 days yet.
    IssueNode {
        /// Where.
        #[command(flatten)]
        at: CaArgs,
        /// The newest root's key; the one beside the bundle unless given.
        #[arg(long, value_name = "FILE")]
        root_key: Option<PathBuf>,
        /// The node's name in the certificate; `node.name` of the configuration unless given.
        #[arg(long)]
        name: Option<String>,
        /// Replace a good one.
        #[arg(long)]
        renew: bool,
    },
    /// Print the roots and the intermediate.
    Show {
        /// Where.
        #[command(flatten)]
        at: CaArgs,
    },
    /// Check chain, dates, modes, and whether templates trust the root; exit code 1 if something fails.
    Check {
        /// Where.
        #[command(flatten)]
        at: CaArgs,
    },
    /// Make a new root beside the old one, unless both are there.
    Rotate {
        /// Where.
        #[command(flatten)]
        at: CaArgs,
        /// Where the new root's key is put; beside the bundle unless given.
        #[arg(long, value_name = "FILE", conflicts_with = "finish")]
        root_key: Option<PathBuf>,
        /// The old root's key, by which it vouches for the new one to guests that know it alone; the one beside the bundle
        /// unless given.
        #[arg(long, value_name = "FILE", conflicts_with = "finish")]
        old_root_key: Option<PathBuf>,
        /// Drop the old root instead.
        #[arg(long)]
        finish: bool,
    },
}

/// Where a CA's files are.
#[derive(Debug, ClapArgs)]
pub struct CaArgs {
    /// The configuration file; without it the default one if it is there, else the defaults.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// This folder, whatever the configuration says.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// `sandboxd serve`.
#[derive(Debug, ClapArgs)]
pub struct Serve {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = config::DEFAULT_FILE, conflicts_with = "dev")]
    pub config: PathBuf,
    /// Dev mode: no root, no configuration, everything below one folder.
    #[arg(long)]
    pub dev: bool,
    /// Options of dev mode.
    #[command(flatten)]
    pub options: Dev,
}

/// Options of `serve --dev`.
#[derive(Debug, ClapArgs)]
pub struct Dev {
    /// What runs the guests; `stub` isolates nothing.
    #[arg(long, value_enum, default_value = "qemu", requires = "dev")]
    pub engine: EngineArg,
    /// The folder; `$XDG_STATE_HOME/sandboxd` or `~/.local/state/sandboxd` unless given.
    #[arg(long, value_name = "DIR", requires = "dev")]
    pub state_dir: Option<PathBuf>,
    /// Warm sandboxes to keep; 2 with qemu and 32 with stub unless given.
    #[arg(long, value_name = "N", requires = "dev", value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub warm: Option<u32>,
    /// The image's folder.
    #[arg(long, value_name = "DIR", requires = "dev")]
    pub image: Option<PathBuf>,
    /// Leave the sandboxes running at a clean stop.
    #[arg(long, requires = "dev")]
    pub keep: bool,
    /// What answers for the stub engine's guests; `in-process` is for load tests.
    #[arg(long, value_enum, default_value = "process", requires = "dev")]
    pub stub_agent: StubAgentArg,
    /// The silkd that the stub engine runs; the one beside this program unless given.
    #[arg(long, value_name = "PATH", requires = "dev")]
    pub stub_silkd: Option<PathBuf>,
    /// Faults that the stub engine makes, for tests.
    #[arg(
        long,
        value_name = "SCRIPT",
        default_value = "",
        hide_default_value = true,
        requires = "dev"
    )]
    pub stub_faults: String,
}

/// `--engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineArg {
    /// Virtual machines by QEMU.
    Qemu,
    /// No isolation; for tests and load.
    Stub,
}

impl From<EngineArg> for EngineKind {
    fn from(arg: EngineArg) -> Self {
        match arg {
            EngineArg::Qemu => Self::Qemu,
            EngineArg::Stub => Self::Stub,
        }
    }
}

/// `--stub-agent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StubAgentArg {
    /// A silkd per sandbox.
    Process,
    /// The daemon itself.
    InProcess,
}

impl From<StubAgentArg> for StubAgent {
    fn from(arg: StubAgentArg) -> Self {
        match arg {
            StubAgentArg::Process => Self::Process,
            StubAgentArg::InProcess => Self::InProcess,
        }
    }
}

/// `sandboxd journal`.
#[derive(Debug, Subcommand)]
pub enum Journal {
    /// Print the records, one a line.
    Cat(JournalArgs),
    /// Read everything and tell what is damaged.
    Check(JournalArgs),
}

/// Options of `sandboxd journal`.
#[derive(Debug, ClapArgs)]
pub struct JournalArgs {
    /// The state directory.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/sandboxd")]
    pub state_dir: PathBuf,
    /// Only what concerns this sandbox.
    #[arg(long, value_name = "ID")]
    pub sandbox: Option<String>,
}

/// `sandboxd audit`.
#[derive(Debug, Subcommand)]
pub enum Audit {
    /// Follow the chains of lines and tell what was edited, removed, moved or cut off; exits with 1 where something was.
    Verify {
        /// A state directory, whose journal is asked how far the chains go; or a folder that files were moved to.
        #[arg(default_value = "/var/lib/sandboxd")]
        dir: PathBuf,
    },
}

/// `sandboxd net`.
#[derive(Debug, Subcommand)]
pub enum Net {
    /// Make what is missing of namespace and packet filter; needs root. Does nothing where the lane is off.
    Prepare(NetArgs),
    /// Drop the namespace with every network card in it; needs root.
    Purge(NetArgs),
}

/// Options of `sandboxd net`.
#[derive(Debug, ClapArgs)]
pub struct NetArgs {
    /// The configuration file; without it the default one if it is there, else the defaults.
    #[arg(long, value_name = "FILE", conflicts_with = "namespace")]
    pub config: Option<PathBuf>,
    /// This namespace, whatever the configuration says.
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<Name>,
}

/// `sandboxd token`.
#[derive(Debug, Subcommand)]
pub enum Token {
    /// Make an access token: prints it once, and the lines for the configuration file.
    New {
        /// Who will hold it.
        #[arg(long)]
        name: Name,
        /// What it may do.
        #[arg(long, value_enum, default_value = "operator")]
        role: RoleArg,
        /// The tenant, with `--role tenant`.
        #[arg(long, required_if_eq("role", "tenant"))]
        tenant: Option<Name>,
    },
}

/// `--role`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// Everything.
    Operator,
    /// What its tenant may.
    Tenant,
}

/// What the environment says.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `SANDBOXD_LOG`.
    pub log: Option<String>,
    /// `XDG_STATE_HOME`.
    pub state_home: Option<PathBuf>,
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `NOTIFY_SOCKET`.
    pub notify_socket: Option<OsString>,
    /// `WATCHDOG_USEC`, if meant for this process: the time in which systemd wants to hear of us.
    pub watchdog: Option<Duration>,
    /// `LISTEN_FDS`, if meant for this process: sockets from descriptor 3 on.
    pub listen_fds: u16,
}

impl Environment {
    /// Reads the environment of this process.
    #[must_use]
    pub fn look() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get().to_string();
        Self::read(&pid, |name| std::env::var_os(name))
    }

    /// A variable that the configuration names: where a secret's value is.
    #[must_use]
    pub fn named(name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    /// The same from elsewhere; variables for another process (`*_PID`) are not for us.
    fn read(pid: &str, var: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| var(name).and_then(|value| value.into_string().ok());
        let filled = |name: &str| var(name).filter(|value| !value.is_empty());
        let ours = |name: &str| text(name).is_none_or(|wanted| wanted == pid);
        let number = |name: &str| text(name)?.parse::<u64>().ok();
        let watchdog = number("WATCHDOG_USEC").filter(|usec| *usec > 0 && ours("WATCHDOG_PID"));
        let listen_fds = number("LISTEN_FDS").filter(|_| text("LISTEN_PID").as_deref() == Some(pid));
        Self {
            log: text("SANDBOXD_LOG").filter(|filter| !filter.is_empty()),
            // A relative one is to be ignored, says its specification.
            state_home: filled("XDG_STATE_HOME")
                .map(PathBuf::from)
                .filter(|path| path.is_absolute()),
            home: filled("HOME").map(PathBuf::from),
            notify_socket: filled("NOTIFY_SOCKET"),
            watchdog: watchdog.map(Duration::from_micros),
            listen_fds: listen_fds
                .and_then(|count| u16::try_from(count).ok())
                .unwrap_or(0),
        }
    }

    /// Where dev mode keeps its state unless told. `None`: there is no home.
    #[must_use]
    pub fn dev_state_dir(&self) -> Option<PathBuf> {
        let home = || self.home.as_ref().map(|home| home.join(".local/state"));
        self.state_home
            .clone()
            .or_else(home)
            .map(|dir| dir.join("sandboxd"))
    }
}

/// A path as seen from `current`, without `.` and `..` resolved by their names.
#[must_use]
pub fn absolute(current: &Path, path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in current.join(path).components() {
        match part {
            std::path::Component::ParentDir => {
                whole.pop();
            }
            std::path::Component::CurDir => {}
            std::path::Component::Normal(_)
            | std::path::Component::RootDir
            | std::path::Component::Prefix(_) => whole.push(part),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_commands_are_those_of_the_pages() {
        Args::command().debug_assert();
        for line in [
            "sandboxd serve",
            "sandboxd serve --config /x",
            "sandboxd serve --dev --engine stub --state-dir D --warm 32 --image I --keep",
            "sandboxd serve --dev --stub-agent in-process",
            "sandboxd check-config",
            "sandboxd check-config f --json",
            "sandboxd doctor",
            "sandboxd journal cat --state-dir D --sandbox sb_x",
            "sandboxd journal check",
            "sandboxd audit verify",
            "sandboxd audit verify DIR --json",
            "sandboxd net prepare",
            "sandboxd net prepare --config /x --json",
            "sandboxd net purge --namespace n",
            "sandboxd ca init --dir D --root-key K",
            "sandboxd ca issue-node --config /x --name n --renew",
            "sandboxd ca show --json",
            "sandboxd ca check",
            "sandboxd ca rotate --finish",
            "sandboxd ca rotate --root-key N --old-root-key O",
            "sandboxd token new --name ci",
            "sandboxd --json token new --name ci --role tenant --tenant acme",
        ] {
            assert!(parse(line).is_ok(), "{line}: {}", parse(line).unwrap_err());
        }
        for line in [
            "sandboxd",
            "sandboxd serve --dev --config /x",
            "sandboxd serve --warm 3",
            "sandboxd serve --dev --warm 5000",
            "sandboxd serve --dev --engine xen",
            "sandboxd token new --name ci --role tenant",
            "sandboxd audit",
            "sandboxd net",
            "sandboxd ca",
            "sandboxd ca rotate --finish --root-key K",
            "sandboxd ca rotate --finish --old-root-key K",
            "sandboxd net purge --namespace N",
            "sandboxd net prepare --config /x --namespace n",
            "sandboxd token new --name Bad",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        let Command::Serve(serve) = parse("sandboxd serve --dev").unwrap().command else {
            panic!("serve");
        };
        assert!(serve.dev && serve.options.engine == EngineArg::Qemu);
    }

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        Environment::read("42", |name| {
            let pair = pairs.iter().find(|(key, _)| *key == name)?;
            Some(OsString::from(pair.1))
        })
    }

    #[test]
    fn the_environment_is_read_once_and_only_what_is_ours() {
        let ours = environment(&[
            ("SANDBOXD_LOG", "debug"),
            ("WATCHDOG_USEC", "30000000"),
            ("LISTEN_FDS", "2"),
            ("LISTEN_PID", "42"),
            ("XDG_STATE_HOME", "/x"),
        ]);
        assert_eq!(ours.log.as_deref(), Some("debug"));
        assert_eq!(ours.watchdog, Some(Duration::from_secs(30)));
        assert_eq!(ours.listen_fds, 2);
        assert_eq!(ours.dev_state_dir(), Some("/x/sandboxd".into()));
        let theirs = environment(&[
            ("WATCHDOG_USEC", "30000000"),
            ("WATCHDOG_PID", "1"),
            ("LISTEN_FDS", "2"),
            ("LISTEN_PID", "1"),
            ("XDG_STATE_HOME", "relative"),
            ("HOME", "/h"),
            ("SANDBOXD_LOG", ""),
        ]);
        assert_eq!((theirs.watchdog, theirs.listen_fds, theirs.log), (None, 0, None));
        assert_eq!(
            environment(&[("HOME", "/h")]).dev_state_dir(),
            Some("/h/.local/state/sandboxd".into())
        );
        assert_eq!(environment(&[]).dev_state_dir(), None);
    }

    #[test]
    fn paths_become_absolute() {
        let current = Path::new("/a/b");
        for (path, whole) in [
            ("d", "/a/b/d"),
            ("../d/./e", "/a/d/e"),
            ("/x/../y", "/y"),
            (".", "/a/b"),
        ] {
            assert_eq!(absolute(current, Path::new(path)), Path::new(whole));
        }
    }
}
