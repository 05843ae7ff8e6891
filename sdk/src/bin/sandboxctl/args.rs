//! The command line. Help texts are part of the interface.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use sandbox_sdk::{Client, v1};

use crate::{
    cp::CpArgs,
    egress::EgressVerb,
    find::FindArgs,
    forward::ForwardArgs,
    git::GitArgs,
    ls::LsArgs,
    lsp::LspArgs,
    process::{AttachArgs, KillArgs, LogsArgs, ProcessArgs, PsArgs, SpawnArgs, WaitArgs},
    replace::ReplaceArgs,
    session::SessionVerb,
    shell::ShellArgs,
    terminal::Keys,
    watch_files::WatchFilesArgs,
};

/// Claims sandboxes of a sandboxd, runs programs in them, and looks after pools and templates.
#[derive(Debug, Parser)]
#[command(
    name = "sandboxctl",
    version,
    max_term_width = 100,
    after_help = "Examples:\n  sandboxctl run -- uname -a\n  id=$(sandboxctl --json claim | jq -r .sandbox)\n  \
                  sandboxctl exec $id -- sh -c 'echo hello'\n  sandboxctl release $id\n\n\
                  Exit codes: 0 done; 1 refused or failed; 2 usage; 3 no daemon, or time over.\n\
                  exec, run, shell, attach, session run: the command's own; 128+n for signal n; 124 its timeout; 126 cannot be executed;\n\
                  127 not found; 125 every fault of ours."
)]
pub(crate) struct Cli {
    /// Where the daemon listens: unix:PATH, `http://127.0.0.1:PORT` or `https://HOST:PORT`.
    #[arg(long, global = true, env = "SANDBOXD_ADDR", default_value = Client::DEFAULT_ADDRESS, value_name = "A")]
    pub(crate) addr: String,
    /// Token of a sandbox or of an access; over the Unix socket an operator needs none.
    #[arg(
        long,
        global = true,
        env = "SANDBOXD_TOKEN",
        hide_env_values = true,
        value_name = "T"
    )]
    pub(crate) token: Option<String>,
    /// PEM file with certificates to trust beside the host's own, for https addresses.
    #[arg(long, global = true, env = "SANDBOXD_CA", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// One JSON object on stdout (streams: one a line); errors as JSON on stderr.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Claim a sandbox and print its id and token.
    #[command(after_help = "Example:\n  sandboxctl claim --pool default --lease 10m --label job=42")]
    Claim(ClaimArgs),
    /// Run a command in a sandbox; its output, its exit code.
    #[command(
        after_help = "Examples:\n  sandboxctl exec sb_... -- ls -l /\n  tar c . | sandboxctl exec -i sb_... -- tar x -C /work\n  \
                      sandboxctl exec -i -t sb_... -- vi /etc/motd"
    )]
    Exec(ExecArgs),
    /// Open a shell, or another command, on this terminal.
    #[command(after_help = "Examples:\n  sandboxctl shell sb_...\n  sandboxctl shell sb_... -- python3")]
    Shell(ShellArgs),
    /// Start a process that nobody waits for; print its id.
    #[command(
        after_help = "Example:\n  sandboxctl spawn --name web sb_... -- python3 -m http.server\n  \
                      sandboxctl logs -f sb_... web"
    )]
    Spawn(SpawnArgs),
    /// List the processes of a sandbox.
    #[command(after_help = "Example:\n  sandboxctl ps --running sb_...")]
    Ps(PsArgs),
    /// Signal processes and all that they started. What has ended already is no error.
    #[command(after_help = "Example:\n  sandboxctl kill --signal TERM --scope leader sb_... web")]
    Kill(KillArgs),
    /// Print what a process says.
    #[command(
        after_help = "Examples:\n  sandboxctl logs sb_... web\n  sandboxctl logs -f --from live sb_... 17"
    )]
    Logs(LogsArgs),
    /// Go to a process: its output from now on, its input, its exit code.
    #[command(
        after_help = "Examples:\n  sandboxctl attach sb_... 17\n  sandboxctl attach --no-stdin --from oldest sb_... web"
    )]
    Attach(AttachArgs),
    /// Wait for the end of a process and print its exit code.
    #[command(after_help = "Example:\n  code=$(sandboxctl wait sb_... web)")]
    Wait(WaitArgs),
    /// Drop what is kept of processes that have ended.
    #[command(after_help = "Example:\n  sandboxctl forget sb_... web")]
    Forget(ProcessArgs),
    /// Use shells that keep their state between commands.
    #[command(subcommand)]
    Session(SessionVerb),
    /// Claim a sandbox, run a command in it, release it.
    #[command(after_help = "Example:\n  sandboxctl run --pool default -- sh -c 'echo hello'")]
    Run(RunArgs),
    /// End sandboxes. What has ended already is no error.
    Release(ReleaseArgs),
    /// Set a sandbox's lease anew, from now on.
    Renew(RenewArgs),
    /// List sandboxes.
    List(ListArgs),
    /// Show one sandbox.
    Inspect(InspectArgs),
    /// Follow sandboxes as they change.
    Watch(WatchArgs),
    /// Copy files and directories into a sandbox or out of it.
    ///
    /// The rules are docker's. SRC itself is followed if it is a link; links in a tree stay links. A directory goes into
    /// a directory that is there, unless SRC ends with `/.`: then what is in it does. With - a directory is a tar archive
    /// and a file its plain content; stdin is taken for an archive if DST is a directory, or ends with a slash.
    /// Modes are kept.
    #[command(
        after_help = "Examples:\n  sandboxctl cp report.pdf sb_...:/tmp/\n  sandboxctl cp sb_...:/srv/out ./out\n  \
                      tar c src | sandboxctl cp - sb_...:/srv/\n  sandboxctl cp sb_...:/etc/os-release -"
    )]
    Cp(CpArgs),
    /// List files of a sandbox.
    #[command(
        after_help = "Examples:\n  sandboxctl ls -l sb_... /etc\n  sandboxctl --json ls -R sb_... /work"
    )]
    Ls(LsArgs),
    /// Find lines that match, in files of a sandbox.
    #[command(
        after_help = "Examples:\n  sandboxctl find sb_... 'fn main' /work -g '*.rs'\n  sandboxctl find sb_... -F 'a.b' /etc -C 2"
    )]
    Find(FindArgs),
    /// Replace what matches in files of a sandbox: in all of them or in none.
    #[command(
        after_help = "Examples:\n  sandboxctl replace sb_... --dry-run 'v(\\d+)' 'version $1' /work -g '*.md'\n  \
                      sandboxctl replace sb_... -F http:// https:// /etc/app.conf"
    )]
    Replace(ReplaceArgs),
    /// Follow changes of files in a sandbox.
    #[command(after_help = "Example:\n  sandboxctl watch-files -r --exclude target sb_... /work")]
    WatchFiles(WatchFilesArgs),
    /// Listen on local ports and pass connections on to ports of a sandbox.
    #[command(
        after_help = "Examples:\n  sandboxctl forward sb_... 8080:80\n  sandboxctl forward sb_... :5432 --address 0.0.0.0"
    )]
    Forward(ForwardArgs),
    /// Use the git of a sandbox. There are no credentials in a sandbox: its door adds them.
    #[command(
        after_help = "Examples:\n  sandboxctl git sb_... clone https://example.com/x.git /work\n  \
                      sandboxctl git sb_... -C /work status\n  sandboxctl git sb_... -C /work commit -a -m 'done'"
    )]
    Git(GitArgs),
    /// Speak to a language server of a sandbox on stdin and stdout, as an editor does.
    #[command(after_help = "Example:\n  sandboxctl lsp sb_... rust --root /work")]
    Lsp(LspArgs),
    /// Look after the stocks of warm clones.
    #[command(subcommand)]
    Pool(PoolVerb),
    /// Look at what sandboxes may reach, and change it.
    #[command(subcommand)]
    Egress(EgressVerb),
    /// Look after what clones start from.
    #[command(subcommand)]
    Template(TemplateVerb),
    /// Look at the host and its daemon.
    #[command(subcommand)]
    Node(NodeVerb),
    /// Wait until the daemon is there and a pool has warm stock.
    #[command(after_help = "Example:\n  sandboxctl wait-ready --pool default --warm 4 --timeout 2m")]
    WaitReady(ReadyArgs),
    /// Count the exact work of one operation.
    #[command(subcommand)]
    Trace(TraceVerb),
    /// Measure a running daemon.
    #[command(subcommand)]
    Bench(BenchVerb),
    /// Print completions for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages.
    Man {
        /// Folder that gets them.
        dir: PathBuf,
    },
}

impl Verb {
    /// Exit code of a fault that is not the command's, for verbs that pass the command's own code on.
    pub(crate) const fn fault_code(&self) -> Option<u8> {
        match self {
            Self::Exec(_)
            | Self::Run(_)
            | Self::Shell(_)
            | Self::Attach(_)
            | Self::Session(SessionVerb::Run(_)) => Some(crate::fault::OURS),
            Self::Claim(_)
            | Self::Spawn(_)
            | Self::Ps(_)
            | Self::Kill(_)
            | Self::Logs(_)
            | Self::Wait(_)
            | Self::Forget(_)
            | Self::Session(SessionVerb::Open(_) | SessionVerb::List(_) | SessionVerb::Close(_))
            | Self::Release(_)
            | Self::Renew(_)
            | Self::List(_)
            | Self::Inspect(_)
            | Self::Watch(_)
            | Self::Cp(_)
            | Self::Ls(_)
            | Self::Find(_)
            | Self::Replace(_)
            | Self::WatchFiles(_)
            | Self::Forward(_)
            | Self::Git(_)
            | Self::Lsp(_)
            | Self::Pool(_)
            | Self::Egress(_)
            | Self::Template(_)
            | Self::Node(_)
            | Self::WaitReady(_)
            | Self::Trace(_)
            | Self::Bench(_)
            | Self::Completions { .. }
            | Self::Man { .. } => None,
        }
    }
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error} (as in 500ms, 10s, 1h30m)"))
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected k=v")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Time of a verb.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Limit {
    /// Whole time of the verb [default: 60s; none for streams].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
}

impl Limit {
    /// For a verb that answers once.
    pub(crate) fn or_default(self) -> Duration {
        self.timeout.unwrap_or(crate::TIMEOUT)
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Lane {
    /// No network device.
    None,
    /// A network device that reaches only the doors.
    Guarded,
}

impl From<Lane> for v1::Lane {
    fn from(lane: Lane) -> Self {
        match lane {
            Lane::None => Self::None,
            Lane::Guarded => Self::Guarded,
        }
    }
}

pub(crate) fn lane(lane: Option<Lane>) -> i32 {
    lane.map_or(v1::Lane::Unspecified, v1::Lane::from).into()
}

/// What to claim, and for how long.
#[derive(Debug, Clone, Args)]
pub(crate) struct Wanted {
    /// Pool to claim from [default: default, unless a template is named].
    #[arg(long, value_name = "P", conflicts_with = "template")]
    pub(crate) pool: Option<String>,
    /// Claim by template, lane and size, from the first pool that has them or made on demand.
    #[arg(long, value_name = "T")]
    pub(crate) template: Option<String>,
    /// Lane, with --template.
    #[arg(long, requires = "template")]
    pub(crate) lane: Option<Lane>,
    /// Size, with --template.
    #[arg(long, value_name = "S", requires = "template")]
    pub(crate) size: Option<String>,
    /// How long it lives unless renewed [default: the pool's].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) lease: Option<Duration>,
    /// Request key: the same key is the same claim.
    #[arg(long, value_name = "K")]
    pub(crate) key: Option<String>,
    /// Label to find it by; may be repeated.
    #[arg(long = "label", value_name = "k=v", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Time in line when the pool is empty [default: 2s].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) wait: Option<Duration>,
    /// Only a warm clone will do.
    #[arg(long)]
    pub(crate) warm_only: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ClaimArgs {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Environment variable of all that runs in it; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    pub(crate) env: Vec<OsString>,
    /// User of commands that name none: name or number, with `:group` if wanted.
    #[arg(long, value_name = "U")]
    pub(crate) user: Option<OsString>,
    /// JSON file with what it may reach, of what pool and tenant allow: {"rules":[{"id":"git","host":["example.org"]}]}.
    #[arg(long, value_name = "FILE")]
    pub(crate) egress: Option<PathBuf>,
    /// Count the exact work.
    #[arg(long)]
    pub(crate) trace: bool,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

/// How to run a command.
#[derive(Debug, Clone, Args)]
pub(crate) struct How {
    /// Pass stdin on; without it the command reads /dev/null.
    #[arg(short = 'i', long = "stdin")]
    pub(crate) stdin: bool,
    /// Run it on a terminal, and with -i put this one before it.
    #[arg(short = 't', long = "tty")]
    pub(crate) tty: bool,
    /// Value of TERM on the terminal [default: that of this one].
    #[arg(long, value_name = "T", env = "TERM", hide_env = true)]
    pub(crate) term: Option<OsString>,
    /// Working directory in the sandbox.
    #[arg(long, value_name = "DIR")]
    pub(crate) cwd: Option<OsString>,
    /// Environment variable; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    pub(crate) env: Vec<OsString>,
    /// User: name or number, with `:group` if wanted.
    #[arg(long, value_name = "U")]
    pub(crate) user: Option<OsString>,
    /// Kill the command after this time and exit with 124.
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// Count the exact work; to stderr, or as `work` in the JSON.
    #[arg(long)]
    pub(crate) trace: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ExecArgs {
    /// Id of the sandbox.
    pub(crate) sandbox: String,
    #[command(flatten)]
    pub(crate) how: How,
    /// Keys that leave the command running, with -i -t; it then stays too when the connection is lost.
    #[arg(long, value_name = "KEYS")]
    pub(crate) detach_keys: Option<Keys>,
    /// The command and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    #[command(flatten)]
    pub(crate) how: How,
    /// Leave the sandbox alive; its id and token go to stderr.
    #[arg(long)]
    pub(crate) keep: bool,
    /// The command and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ReleaseArgs {
    /// Ids of the sandboxes.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) sandboxes: Vec<String>,
    /// All that the caller may see.
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RenewArgs {
    /// Id of the sandbox.
    pub(crate) sandbox: String,
    /// How long it lives from now on.
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) lease: Duration,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum State {
    Making,
    Warm,
    Claimed,
    Ending,
    Failed,
    Quarantined,
    Gone,
}

impl From<State> for v1::State {
    fn from(state: State) -> Self {
        match state {
            State::Making => Self::Making,
            State::Warm => Self::Warm,
            State::Claimed => Self::Claimed,
            State::Ending => Self::Ending,
            State::Failed => Self::Failed,
            State::Quarantined => Self::Quarantined,
            State::Gone => Self::Gone,
        }
    }
}

/// Which sandboxes.
#[derive(Debug, Clone, Args)]
pub(crate) struct Filter {
    /// State; may be repeated [default: claimed, ending, failed].
    #[arg(long = "state", value_name = "S")]
    pub(crate) states: Vec<State>,
    /// Pool; may be repeated.
    #[arg(long = "pool", value_name = "P")]
    pub(crate) pools: Vec<String>,
    /// Label that it has; may be repeated, all must fit.
    #[arg(long = "label", value_name = "k=v", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// Owner.
    #[arg(long, value_name = "O")]
    pub(crate) owner: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) filter: Filter,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) filter: Filter,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct InspectArgs {
    /// Id of the sandbox.
    pub(crate) sandbox: String,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolVerb {
    /// List the pools.
    List(Limit),
    /// Make a pool, or change it.
    #[command(after_help = "Example:\n  sandboxctl pool apply web --template default --warm 8 --lease 10m")]
    Apply(PoolApplyArgs),
    /// End a pool's warm stock; its claims live on.
    Rm(NameArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PoolApplyArgs {
    /// Name of the pool.
    pub(crate) name: String,
    /// Template of its clones.
    #[arg(long, value_name = "T", default_value = "default")]
    pub(crate) template: String,
    /// Lane of its clones [default: none].
    #[arg(long)]
    pub(crate) lane: Option<Lane>,
    /// Size of its clones.
    #[arg(long, value_name = "S", default_value = "small")]
    pub(crate) size: String,
    /// Warm clones to keep at least.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) warm: u32,
    /// Warm clones to keep at most [default: twice --warm].
    #[arg(long, value_name = "N")]
    pub(crate) warm_max: Option<u32>,
    /// Lease of claims that ask for none [default: 1h].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) lease: Option<Duration>,
    /// Longest lease [default: 24h].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) lease_max: Option<Duration>,
    /// Egress policy of the configuration; none: its sandboxes reach nothing.
    #[arg(long, value_name = "P")]
    pub(crate) egress: Option<String>,
    /// A claim must bring an egress policy of its own.
    #[arg(long)]
    pub(crate) require_claim_policy: bool,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct NameArgs {
    /// Its name.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateVerb {
    /// Boot an image, warm it up, capture it. Interrupting leaves nothing behind.
    #[command(
        after_help = "Example:\n  sandboxctl template build py --image debian --warmup python3 -- -c 'import json'"
    )]
    Build(TemplateBuildArgs),
    /// List the templates.
    List(Limit),
    /// Show one template.
    Inspect(NameArgs),
    /// Remove a template that nothing uses.
    Rm(NameArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct TemplateBuildArgs {
    /// Name of the template.
    pub(crate) name: String,
    /// Image: a name under the daemon's images, or an absolute path.
    #[arg(long, value_name = "I", default_value = "busybox")]
    pub(crate) image: String,
    /// Lane of the clones [default: none].
    #[arg(long)]
    pub(crate) lane: Option<Lane>,
    /// Size of the clones.
    #[arg(long, value_name = "S", default_value = "small")]
    pub(crate) size: String,
    /// Program to run once before the capture; its arguments follow `--`.
    #[arg(long, value_name = "CMD")]
    pub(crate) warmup: Option<OsString>,
    /// Arguments of the warm-up.
    #[arg(last = true, requires = "warmup", value_name = "ARGS")]
    pub(crate) warmup_args: Vec<OsString>,
    /// Time of the warm-up [default: 30s].
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) warmup_timeout: Option<Duration>,
    /// Replace one that exists.
    #[arg(long)]
    pub(crate) rebuild: bool,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeVerb {
    /// Show the daemon and its host.
    Info(Limit),
    /// Check the host; exit 1 if a check fails.
    Doctor(Limit),
    /// Read the configuration file again: all of it or nothing.
    Reload(Limit),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ReadyArgs {
    /// Pool to wait for.
    #[arg(long, value_name = "P", default_value = "default")]
    pub(crate) pool: String,
    /// Warm clones that it must have.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) warm: u32,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TraceVerb {
    /// Claim a sandbox, count the work, release it.
    Claim(ClaimArgs),
    /// Run a command in a sandbox and count the work; its output is dropped.
    Exec(ExecArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// Warm claims beside empty calls on the same connection.
    Claim(BenchArgs),
    /// `true` in a sandbox beside empty calls.
    Exec(BenchArgs),
    /// Empty a pool and time its refill.
    Refill(BenchArgs),
    /// Many claims at once.
    Burst(BenchArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// Pool to measure.
    #[arg(long, value_name = "P", default_value = "default")]
    pub(crate) pool: String,
    /// Samples of each arm; rounds of refill and burst [default: 1000; refill 3, burst 10].
    #[arg(long, value_name = "N")]
    pub(crate) n: Option<u32>,
    /// Calls at once [default: 1; burst 64].
    #[arg(long, value_name = "C")]
    pub(crate) concurrency: Option<u32>,
    #[command(flatten)]
    pub(crate) limit: Limit,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
