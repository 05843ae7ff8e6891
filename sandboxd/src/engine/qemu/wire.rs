//! What is spoken over QMP: commands as types, lines as values. Pure.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::telemetry::GuestText;

/// Longest line that is taken; the longest real one, a version greeting, has 200 bytes.
pub(super) const LINE_MOST: usize = 64 * 1024;

/// A command and its reply.
pub(super) trait Command: Serialize + Send + Sync {
    const NAME: &'static str;
    type Reply: DeserializeOwned;
}

/// A reply without content.
#[derive(Debug, Deserialize)]
pub(super) struct Done {}

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident $({ $($field:ident : $type:ty = $key:literal),* })? => $command:literal -> $reply:ty;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Serialize)]
        pub(super) struct $name { $($(#[serde(rename = $key)] pub(super) $field: $type),*)? }
        impl Command for $name {
            const NAME: &'static str = $command;
            type Reply = $reply;
        }
    )*};
}

commands! {
    /// Ends the greeting.
    Capabilities => "qmp_capabilities" -> Done;
    /// Turns on an ability of migration.
    MigrateCapabilities { capabilities: Vec<Capability> = "capabilities" } => "migrate-set-capabilities" -> Done;
    /// Keeps the descriptor sent along under a name.
    GetFd { name: &'static str = "fdname" } => "getfd" -> Done;
    /// Loads state.
    MigrateIncoming { uri: &'static str = "uri" } => "migrate-incoming" -> Done;
    /// Why a migration failed.
    QueryMigrate => "query-migrate" -> MigrateInfo;
    /// What the guest does.
    QueryStatus => "query-status" -> Status;
    /// Stops the processors.
    Stop => "stop" -> Done;
    /// Lets them go on.
    Cont => "cont" -> Done;
    /// Keeps the descriptor sent along in a set, which has a file name.
    AddFd { what: &'static str = "opaque" } => "add-fd" -> FdSet;
    /// Closes the descriptors of a set.
    RemoveFd { set: i64 = "fdset-id" } => "remove-fd" -> Done;
    /// Writes the state of all devices to a file.
    SaveDevices { file: String = "filename", live: bool = "live" } => "xen-save-devices-state" -> Done;
}

/// An ability of migration, on or off.
#[derive(Debug, Serialize)]
pub(super) struct Capability {
    pub(super) capability: &'static str,
    pub(super) state: bool,
}

/// Reply to [`AddFd`].
#[derive(Debug, Deserialize)]
pub(super) struct FdSet {
    #[serde(rename = "fdset-id")]
    pub(super) set: i64,
}

/// Reply to [`QueryStatus`].
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub(super) status: String,
}

impl Status {
    /// Why this guest will never run again, if so. Its processor stopped on an error of the host or of hardware
    /// virtualisation, or it was reset (which `-no-reboot` makes an end).
    pub(super) fn dead(&self) -> Option<&'static str> {
        match &*self.status {
            "internal-error" => Some("the accelerator gave up on the guest (internal-error)"),
            "io-error" => Some("a disk of the guest failed (io-error)"),
            "guest-panicked" => Some("the guest panicked"),
            "shutdown" => Some("the guest shut down"),
            "watchdog" => Some("the guest's watchdog fired"),
            _ => None,
        }
    }
}

/// Reply to [`QueryMigrate`].
#[derive(Debug, Deserialize)]
pub(super) struct MigrateInfo {
    #[serde(rename = "error-desc", default)]
    pub(super) error: Option<String>,
}

/// A command as a line.
pub(super) fn encode<C: Command>(id: u64, command: &C) -> serde_json::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Line<'a, C> {
        execute: &'static str,
        id: u64,
        arguments: &'a C,
    }
    let mut line = serde_json::to_vec(&Line {
        execute: C::NAME,
        id,
        arguments: command,
    })?;
    line.push(b'\n');
    Ok(line)
}

/// What a load of state has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Migration {
    /// Under way.
    Active,
    /// Loaded; the guest runs.
    Completed,
    /// Not loaded.
    Failed,
}

/// Something that happened between replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The processors stopped; ask why.
    Stopped,
    /// A load of state went on.
    Migration(Migration),
    /// Nothing that matters here.
    Other,
}

/// A line from QEMU.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    /// The first one: version with package.
    Greeting(String),
    /// A reply; an error as text, escaped and cut.
    Reply {
        id: Option<u64>,
        result: Result<serde_json::Value, String>,
    },
    /// An event.
    Event(Event),
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "QMP")]
    greeting: Option<RawGreeting>,
    event: Option<String>,
    #[serde(default)]
    data: serde_json::Value,
    id: Option<u64>,
    #[serde(rename = "return")]
    done: Option<serde_json::Value>,
    error: Option<RawError>,
}

#[derive(Deserialize)]
struct RawGreeting {
    version: RawVersion,
}

#[derive(Deserialize)]
struct RawVersion {
    qemu: RawTriple,
    #[serde(default)]
    package: String,
}

#[derive(Deserialize)]
struct RawTriple {
    major: u32,
    minor: u32,
    micro: u32,
}

#[derive(Deserialize)]
struct RawError {
    desc: String,
}

impl Line {
    /// Reads a line; `None` if it is nothing that QMP says.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let raw: Raw = serde_json::from_slice(line).ok()?;
        if let Some(RawGreeting { version }) = raw.greeting {
            let RawTriple { major, minor, micro } = version.qemu;
            let number = format!("{major}.{minor}.{micro}");
            return Some(Self::Greeting(match &*version.package {
                "" => number,
                package => format!("{number} ({})", GuestText::head(package.as_bytes())),
            }));
        }
        if let Some(event) = raw.event {
            return Some(Self::Event(Event::of(&event, &raw.data)));
        }
        let result = match (raw.done, raw.error) {
            (Some(value), None) => Ok(value),
            (None, Some(error)) => Err(GuestText::head(error.desc.as_bytes()).to_string()),
            (Some(_), Some(_)) | (None, None) => return None,
        };
        Some(Self::Reply { id: raw.id, result })
    }
}

impl Event {
    fn of(name: &str, data: &serde_json::Value) -> Self {
        match name {
            "STOP" | "SHUTDOWN" | "GUEST_PANICKED" => Self::Stopped,
            "MIGRATION" => Self::Migration(match data.get("status").and_then(serde_json::Value::as_str) {
                Some("completed") => Migration::Completed,
                Some("failed" | "cancelled") => Migration::Failed,
                Some(_) | None => Migration::Active,
            }),
            _ => Self::Other,
        }
    }
}

/// Takes the first whole line off a buffer, without its end.
pub(super) fn take_line(buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = buffer.iter().position(|byte| *byte == b'\n')?;
    let mut line: Vec<u8> = buffer.drain(..=end).collect();
    while line.last().is_some_and(u8::is_ascii_whitespace) {
        line.pop();
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_their_names_and_keys() {
        let text = |line: serde_json::Result<Vec<u8>>| String::from_utf8(line.unwrap()).unwrap();
        assert_eq!(
            text(encode(7, &Cont {})),
            "{\"execute\":\"cont\",\"id\":7,\"arguments\":{}}\n"
        );
        assert_eq!(
            text(encode(8, &GetFd { name: "state" })),
            "{\"execute\":\"getfd\",\"id\":8,\"arguments\":{\"fdname\":\"state\"}}\n"
        );
        let save = SaveDevices {
            file: "/dev/fdset/0".to_owned(),
            live: false,
        };
        assert!(text(encode(9, &save)).contains("{\"filename\":\"/dev/fdset/0\",\"live\":false}"));
    }

    #[test]
    fn every_kind_of_line_is_told() {
        let cases: [(&str, Option<Line>); 8] = [
            (
                r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7"}, "capabilities": ["oob"]}}"#,
                Some(Line::Greeting("7.2.22 (Debian 1:7)".to_owned())),
            ),
            (
                r#"{"return": {}, "id": 3}"#,
                Some(Line::Reply {
                    id: Some(3),
                    result: Ok(serde_json::json!({})),
                }),
            ),
            (
                r#"{"id": 4, "error": {"class": "GenericError", "desc": "no\u001b[31m"}}"#,
                Some(Line::Reply {
                    id: Some(4),
                    result: Err("no\\u{1b}[31m".to_owned()),
                }),
            ),
            (
                r#"{"timestamp": {"seconds": 1}, "event": "STOP"}"#,
                Some(Line::Event(Event::Stopped)),
            ),
            (
                r#"{"event": "MIGRATION", "data": {"status": "completed"}}"#,
                Some(Line::Event(Event::Migration(Migration::Completed))),
            ),
            (
                r#"{"event": "RTC_CHANGE", "data": {"offset": 1}}"#,
                Some(Line::Event(Event::Other)),
            ),
            (r#"{"something": "else"}"#, None),
            ("HTTP/1.1 200", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Line::parse(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn lines_come_off_whole_in_any_portion() {
        let text = b"{\"a\":1}\r\n\n{\"b\":2}\n{\"c\"";
        for portion in 1..text.len() {
            let (mut buffer, mut lines) = (Vec::new(), Vec::new());
            for part in text.chunks(portion) {
                buffer.extend_from_slice(part);
                while let Some(line) = take_line(&mut buffer) {
                    lines.push(String::from_utf8(line).unwrap());
                }
            }
            assert_eq!(lines, ["{\"a\":1}", "", "{\"b\":2}"]);
            assert_eq!(buffer, b"{\"c\"");
        }
    }

    #[test]
    fn a_guest_that_never_runs_again_is_told_from_one_that_waits() {
        let dead = |status: &str| {
            Status {
                status: status.to_owned(),
            }
            .dead()
            .is_some()
        };
        for status in [
            "internal-error",
            "shutdown",
            "guest-panicked",
            "io-error",
            "watchdog",
        ] {
            assert!(dead(status), "{status}");
        }
        for status in ["running", "paused", "inmigrate", "prelaunch", "postmigrate"] {
            assert!(!dead(status), "{status}");
        }
    }
}
