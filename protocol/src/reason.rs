//! The closed set of reasons that errors carry (`google.rpc.ErrorInfo.reason`, domain `sandbox.v1`), with their
//! status, remedy and retry advice: the only home of these strings. `docs/reasons.md` is compared with it by a test.

use std::time::Duration;

use tonic::Code;

/// Domain of every ErrorInfo.
pub const DOMAIN: &str = "sandbox.v1";

macro_rules! reasons {
    ($($name:ident = $text:literal, $code:ident, $retry_ms:expr, $remedy:literal;)*) => {
        /// Why a call was refused or failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $remedy] $name,)*
        }

        impl Reason {
            /// Every reason, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Stable upper-case text.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// gRPC status.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$name => Code::$code,)* }
            }

            /// What the reader can do about it.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }

            /// Present: nothing happened, ask again after about this time.
            #[must_use]
            pub const fn retry_after(self) -> Option<Duration> {
                let ms: u64 = match self { $(Self::$name => $retry_ms,)* };
                if ms == 0 { None } else { Some(Duration::from_millis(ms)) }
            }

            /// The reason of this text.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| reason.as_str() == text)
            }
        }
    };
}

reasons! {
    // The host's.
    FieldInvalid = "FIELD_INVALID", InvalidArgument, 0, "correct the named field; the message says what is allowed";
    LeaseOutOfRange = "LEASE_OUT_OF_RANGE", InvalidArgument, 0, "ask for a lease between 1 second and the pool's lease_max";
    PageTokenInvalid = "PAGE_TOKEN_INVALID", InvalidArgument, 0, "pass next_page_token of the previous reply unchanged, or start again without one";
    AddressInvalid = "ADDRESS_INVALID", InvalidArgument, 0, "use unix:PATH, http://127.0.0.1:PORT or https://HOST:PORT";
    PolicyInvalid = "POLICY_INVALID", InvalidArgument, 0, "correct the named rule of the egress policy; docs/egress.md says what a rule may hold";
    TokenRequired = "TOKEN_REQUIRED", Unauthenticated, 0, "send `authorization: Bearer <token>`, or connect over the Unix socket as an operator";
    TokenInvalid = "TOKEN_INVALID", Unauthenticated, 0, "check the token; access tokens are made with `sandboxd token new` and listed in the configuration";
    NotAllowed = "NOT_ALLOWED", PermissionDenied, 0, "use a token or user that has the role this call needs";
    SandboxNotFound = "SANDBOX_NOT_FOUND", NotFound, 0, "check the sandbox id, the token (missing and wrong read the same), and whether it ended more than 10 minutes ago";
    PoolNotFound = "POOL_NOT_FOUND", NotFound, 0, "see `sandboxctl pool list`, or make it with `sandboxctl pool apply`";
    TemplateNotFound = "TEMPLATE_NOT_FOUND", NotFound, 0, "see `sandboxctl template list`, or make it with `sandboxctl template build`";
    ImageNotFound = "IMAGE_NOT_FOUND", NotFound, 0, "build it with `make image`, or name a folder that holds an image's manifest.json";
    SizeNotFound = "SIZE_NOT_FOUND", NotFound, 0, "use small, medium, large, or a size of the configuration";
    KeyReused = "KEY_REUSED", AlreadyExists, 0, "a request key belongs to one request: use a fresh one";
    TemplateExists = "TEMPLATE_EXISTS", AlreadyExists, 0, "pass --rebuild to replace it";
    LeaseExpired = "LEASE_EXPIRED", FailedPrecondition, 0, "its lease is over and the sandbox has ended: claim another, with a longer lease or renewed in time";
    SandboxEnded = "SANDBOX_ENDED", FailedPrecondition, 0, "the sandbox was released: claim another";
    SandboxFailed = "SANDBOX_FAILED", FailedPrecondition, 0, "the sandbox died (see `why`): release it and claim another";
    PoolFromFile = "POOL_FROM_FILE", FailedPrecondition, 0, "change the pool in the configuration file and reload";
    PolicyChanged = "POLICY_CHANGED", FailedPrecondition, 0, "the policy is no longer the one you read: get it again and repeat the change";
    TemplateInUse = "TEMPLATE_IN_USE", FailedPrecondition, 0, "remove the pools and release the sandboxes that use it first";
    TemplateStale = "TEMPLATE_STALE", FailedPrecondition, 0, "it is being rebuilt; `sandboxctl template inspect` says why";
    TemplateFailed = "TEMPLATE_FAILED", FailedPrecondition, 0, "the message holds the end of the build's output; mend image or warm-up and build again";
    TemplateTooOld = "TEMPLATE_TOO_OLD", FailedPrecondition, 0, "rebuild the image and the template with this version's silkd";
    CaNotInTemplate = "CA_NOT_IN_TEMPLATE", FailedPrecondition, 0, "a rule looks into TLS: the node needs an intermediate, and the template its root; see `sandboxd ca check`, then build the template anew";
    AgentTooOld = "AGENT_TOO_OLD", FailedPrecondition, 0, "the guest's silkd is older than this call: rebuild the template and claim another sandbox";
    ImageDamaged = "IMAGE_DAMAGED", FailedPrecondition, 0, "its files do not match the manifest: build the image again";
    LaneUnavailable = "LANE_UNAVAILABLE", FailedPrecondition, 0, "use lane none; `sandboxctl node doctor` says which lanes this host has";
    ReloadRefused = "RELOAD_REFUSED", FailedPrecondition, 0, "correct the configuration (see `sandboxd check-config`); the old one stays in force";
    PoolEmpty = "POOL_EMPTY", ResourceExhausted, 500, "wait longer, allow clones on demand, or raise the pool's warm";
    Capacity = "CAPACITY", ResourceExhausted, 2_000, "release sandboxes, or raise node.memory or node.max_sandboxes";
    Busy = "BUSY", ResourceExhausted, 200, "a bounded queue is full: try again";
    Starting = "STARTING", Unavailable, 500, "the daemon is taking up its claims: try again";
    Draining = "DRAINING", Unavailable, 1_000, "the daemon is stopping: try again, or use another host";
    LaneUnlocked = "LANE_UNLOCKED", Unavailable, 1_000, "the packet filter of the guests' network is not in force: try again, and see the daemon's log for who changed it";
    TemplateBuilding = "TEMPLATE_BUILDING", Unavailable, 2_000, "the template is being built: try again";
    JournalFull = "JOURNAL_FULL", Unavailable, 5_000, "make room in the state directory; changes are taken again then";
    JournalFailed = "JOURNAL_FAILED", Unavailable, 0, "a write to the journal failed: mend the disk and restart the daemon; endings still work";
    AgentLost = "AGENT_LOST", Unavailable, 0, "the connection to the guest broke in the middle of the call: ask `sandboxctl inspect` whether it lives";
    Deadline = "DEADLINE", DeadlineExceeded, 0, "allow more time";
    Bug = "BUG", Internal, 0, "report it, with the request id and the daemon's log";
    // The guest's.
    InvalidCommand = "INVALID_COMMAND", InvalidArgument, 0, "give a program and arguments without NUL";
    InvalidEnv = "INVALID_ENV", InvalidArgument, 0, "environment keys are not empty and hold no `=` or NUL; values hold no NUL";
    InvalidPath = "INVALID_PATH", InvalidArgument, 0, "paths are absolute, at most 4095 bytes, without NUL";
    InvalidSignal = "INVALID_SIGNAL", InvalidArgument, 0, "signals are 1 to 64";
    InvalidSize = "INVALID_SIZE", InvalidArgument, 0, "columns and rows are 1 to 4096";
    InvalidPattern = "INVALID_PATTERN", InvalidArgument, 0, "correct the regular expression or glob; a match lies within one line, and 1 MiB compiled is the most";
    ArchiveRefused = "ARCHIVE_REFUSED", InvalidArgument, 0, "the message names the entry: names are relative without `..`, devices and FIFOs stay out, hard links lead to the archive's own entries";
    SizeMismatch = "SIZE_MISMATCH", InvalidArgument, 0, "what came is not what was announced: nothing was changed, send it again whole";
    ArgumentsTooLarge = "ARGUMENTS_TOO_LARGE", InvalidArgument, 0, "one string is below 128 KiB, arguments and environment together at most 1 MiB: pass more by stdin";
    NotATty = "NOT_A_TTY", InvalidArgument, 0, "only a program started with a tty can be resized";
    ProgramNotFound = "PROGRAM_NOT_FOUND", NotFound, 0, "check the name and PATH, or install it in the image";
    BadInterpreter = "BAD_INTERPRETER", NotFound, 0, "the interpreter of its first line is missing";
    CwdNotFound = "CWD_NOT_FOUND", NotFound, 0, "make the directory first, or choose another";
    UserNotFound = "USER_NOT_FOUND", NotFound, 0, "use a name of the guest's passwd, or a number";
    PathNotFound = "PATH_NOT_FOUND", NotFound, 0, "check the path, or ask for missing directories to be made";
    ProcessNotFound = "PROCESS_NOT_FOUND", NotFound, 0, "see `sandboxctl ps`; exited processes are kept for a while only";
    SessionNotFound = "SESSION_NOT_FOUND", NotFound, 0, "open a session first; one that ended is gone";
    LspUnknown = "LSP_UNKNOWN", NotFound, 0, "languages are files of /etc/silkd/lsp.d in the image, named [a-z0-9_-]; servers end when nobody comes back in time";
    PathExists = "PATH_EXISTS", AlreadyExists, 0, "remove it first, or allow it to be replaced";
    NameTaken = "NAME_TAKEN", AlreadyExists, 0, "choose another name, or end and forget the process that has it";
    SessionExists = "SESSION_EXISTS", AlreadyExists, 0, "choose another id, or close the session that has it";
    PathDenied = "PATH_DENIED", PermissionDenied, 0, "the user may not do that to this path";
    PathEscapes = "PATH_ESCAPES", PermissionDenied, 0, "the path leads out of the directory that was promised";
    LinkRefused = "LINK_REFUSED", PermissionDenied, 0, "it is a link, and links were not to be followed: name what it leads to";
    NotExecutable = "NOT_EXECUTABLE", FailedPrecondition, 0, "it is not a program that this guest can run, or lacks the execute bit";
    NotADirectory = "NOT_A_DIRECTORY", FailedPrecondition, 0, "the path leads to something else";
    NotRegularFile = "NOT_REGULAR_FILE", FailedPrecondition, 0, "it is a directory, link, pipe, socket or device: name a plain file";
    DirectoryNotEmpty = "DIRECTORY_NOT_EMPTY", FailedPrecondition, 0, "remove what it holds first, or ask for it to be removed recursively";
    CrossDevice = "CROSS_DEVICE", FailedPrecondition, 0, "another file system begins there: copy, then remove";
    MtimeChanged = "MTIME_CHANGED", FailedPrecondition, 0, "somebody has changed the file: read it again";
    SessionEnded = "SESSION_ENDED", FailedPrecondition, 0, "its shell has ended: open another session";
    GitMissing = "GIT_MISSING", FailedPrecondition, 0, "install git in the image";
    GitFailed = "GIT_FAILED", FailedPrecondition, 0, "the message holds git's exit code and the end of what it said";
    LspBroken = "LSP_BROKEN", FailedPrecondition, 0, "what its file in /etc/silkd/lsp.d starts is no language server on stdin and stdout: correct its arguments";
    RenewFailed = "RENEW_FAILED", FailedPrecondition, 0, "the message names the step or the hook: mend the image, and destroy this guest";
    QuiesceBusy = "QUIESCE_BUSY", FailedPrecondition, 0, "end what is open first; the message lists it";
    ProcessLimit = "PROCESS_LIMIT", ResourceExhausted, 1_000, "end programs first: at most 1024 run, and the guest's pids limit holds";
    MemoryExhausted = "MEMORY_EXHAUSTED", ResourceExhausted, 1_000, "free memory in the guest, or use a larger size";
    FdLimit = "FD_LIMIT", ResourceExhausted, 1_000, "close streams to this guest first";
    StreamLimit = "STREAM_LIMIT", ResourceExhausted, 1_000, "at most 192 streams with input per guest: end some first";
    NoSpace = "NO_SPACE", ResourceExhausted, 0, "the guest's disk or memory is full: remove files, or use a larger size";
    SessionLimit = "SESSION_LIMIT", ResourceExhausted, 1_000, "at most 64 sessions per guest: close some first";
    TtyLimit = "TTY_LIMIT", ResourceExhausted, 1_000, "at most 64 terminals per guest: end some first";
    WatchLimit = "WATCH_LIMIT", ResourceExhausted, 1_000, "at most 64 watches over 65,536 directories per guest: end some, or exclude directories";
    RunBufferFull = "RUN_BUFFER_FULL", ResourceExhausted, 1_000, "all Runs of a guest hold at most 32 MiB: wait for some, or use Exec";
    SessionBusy = "SESSION_BUSY", Aborted, 1_000, "one command at a time runs in a session: wait for it or cancel it";
    InputBusy = "INPUT_BUSY", Aborted, 1_000, "another client gives input to this process: attach without input, or wait";
    LspBusy = "LSP_BUSY", Aborted, 1_000, "another client speaks to this server: wait, or start one of your own";
    PortReset = "PORT_RESET", Aborted, 0, "the program in the guest has reset the connection";
    PortRefused = "PORT_REFUSED", Unavailable, 0, "nothing listens there on the guest's loopback: start the program first";
    StillRunning = "STILL_RUNNING", DeadlineExceeded, 0, "it has not ended yet: wait on, or end it first";
    OffsetOutOfRange = "OFFSET_OUT_OF_RANGE", OutOfRange, 0, "the log is shorter: read from an offset that was told, or from live";
    NotReady = "NOT_READY", Unavailable, 200, "the guest is being renewed or captured: try again";
    SandboxHibernating = "SANDBOX_HIBERNATING", Unavailable, 1_000, "the sandbox is going to sleep: call again to wake it";
    AgentBug = "AGENT_BUG", Internal, 0, "report it with the guest's console";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_distinct_upper_case_and_parse_back() {
        let mut seen = std::collections::HashSet::new();
        for reason in Reason::ALL {
            assert!(seen.insert(reason.as_str()), "{reason:?} stands twice");
            assert!(
                reason
                    .as_str()
                    .bytes()
                    .all(|b| b.is_ascii_uppercase() || b == b'_')
            );
            assert_eq!(Reason::parse(reason.as_str()), Some(*reason));
            assert!(!reason.remedy().is_empty());
        }
        assert_eq!(Reason::parse("NO_SUCH"), None);
    }
}
