//! Values of the file: text into newtypes, with what is allowed said by whoever refuses.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    path::{Component, PathBuf},
    str::FromStr as _,
    time::Duration,
};

use toml::de::DeValue;

use super::{
    types::ImageName,
    walk::{Wrong, kind},
};
use crate::words::{MemBytes, Name};

/// Longest path that a Unix socket's address holds (`sun_path` less its NUL).
const SOCKET_PATH: usize = 107;
/// Longest run directory: below it lie `/run/<4 hex>/` and names of up to 17 bytes, all of which a socket's address
/// must hold.
const RUN_DIR: usize = SOCKET_PATH - 10 - 17;

type Parsed<T> = Result<T, Wrong>;

pub(super) fn text<'v>(value: &'v DeValue<'_>) -> Parsed<&'v str> {
    value
        .as_str()
        .ok_or_else(|| Wrong::new(format!("expected a string, found {}", kind(value)), ""))
}

pub(super) fn flag(value: &DeValue<'_>) -> Parsed<bool> {
    value.as_bool().ok_or_else(|| {
        Wrong::new(
            format!("expected a boolean, found {}", kind(value)),
            "true or false",
        )
    })
}

/// A whole number in a range.
pub(super) fn count(range: RangeInclusive<u32>) -> impl Fn(&DeValue<'_>) -> Parsed<u32> {
    move |value| {
        let allowed = format!("a whole number, {} to {}", range.start(), range.end());
        let Some(integer) = value.as_integer() else {
            return Err(Wrong::new(
                format!("expected an integer, found {}", kind(value)),
                allowed,
            ));
        };
        i64::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .and_then(|number| u32::try_from(number).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| Wrong::new(format!("{integer} is out of range"), allowed))
    }
}

/// The same, where a u16 holds the range.
pub(super) fn small_count(range: RangeInclusive<u16>) -> impl Fn(&DeValue<'_>) -> Parsed<u16> {
    move |value| {
        let number = count(u32::from(*range.start())..=u32::from(*range.end()))(value)?;
        Ok(u16::try_from(number).expect("count keeps within the range"))
    }
}

/// One of some words.
pub(super) fn word<T: Copy>(words: &'static [(&'static str, T)]) -> impl Fn(&DeValue<'_>) -> Parsed<T> {
    move |value| {
        let said = text(value)?;
        let found = words.iter().find(|(word, _)| *word == said);
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let allowed: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            Wrong::new(format!("\"{said}\" is not known"), allowed.join(" or "))
        })
    }
}

pub(super) fn name(value: &DeValue<'_>) -> Parsed<Name> {
    parse_name(text(value)?)
}

pub(super) fn parse_name(said: &str) -> Parsed<Name> {
    said.parse().map_err(|wrong: crate::words::NameError| {
        Wrong::new(format!("{said:?} is not a name"), wrong.to_string())
    })
}

/// A time in a range, such as `500ms`, `10s`, `1h30m`.
pub(super) fn duration(range: RangeInclusive<Duration>) -> impl Fn(&DeValue<'_>) -> Parsed<Duration> {
    move |value| {
        let said = text(value)?;
        let allowed = format!(
            "a time such as \"500ms\", \"10s\", \"1h30m\"; {} to {}",
            humantime::format_duration(*range.start()),
            humantime::format_duration(*range.end())
        );
        let time = humantime::parse_duration(said)
            .map_err(|wrong| Wrong::new(format!("\"{said}\" is not a time: {wrong}"), allowed.clone()))?;
        if range.contains(&time) {
            Ok(time)
        } else {
            Err(Wrong::new(format!("\"{said}\" is out of range"), allowed))
        }
    }
}

/// A time in whole seconds, as seconds.
pub(super) fn lease(most: Duration) -> impl Fn(&DeValue<'_>) -> Parsed<u32> {
    move |value| {
        let time = duration(Duration::from_secs(1)..=most)(value)?;
        u32::try_from(time.as_secs())
            .ok()
            .filter(|_| time.subsec_nanos() == 0)
            .ok_or_else(|| Wrong::new("a lease is whole seconds", "such as \"90s\", \"1h\""))
    }
}

const BYTES: &str = "bytes such as \"512MiB\", \"4GiB\"";

fn parse_bytes(said: &str) -> Option<MemBytes> {
    let digits = said.find(|c: char| !c.is_ascii_digit()).unwrap_or(said.len());
    let (number, unit) = said.split_at_checked(digits)?;
    let shift = match unit.trim_start_matches(' ') {
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    u64::from_str(number)
        .ok()?
        .checked_mul(1_u64 << shift)
        .map(MemBytes)
}

/// Memory of a guest: whole MiB in a range.
pub(super) fn memory(range: RangeInclusive<MemBytes>) -> impl Fn(&DeValue<'_>) -> Parsed<MemBytes> {
    move |value| {
        let said = text(value)?;
        let allowed = format!(
            "{BYTES}; whole MiB, {} MiB to {} MiB",
            range.start().mib(),
            range.end().mib()
        );
        let Some(bytes) = parse_bytes(said) else {
            return Err(Wrong::new(format!("\"{said}\" is not a size"), allowed));
        };
        if range.contains(&bytes) && bytes.0.is_multiple_of(1 << 20) {
            Ok(bytes)
        } else {
            Err(Wrong::new(format!("\"{said}\" is out of range"), allowed))
        }
    }
}

/// Memory of the node: bytes, or percent of what there is.
pub(super) fn budget(all: MemBytes) -> impl Fn(&DeValue<'_>) -> Parsed<MemBytes> {
    move |value| {
        let said = text(value)?;
        let allowed = format!("percent of the host's memory (\"1%\" to \"100%\"), or {BYTES}");
        let percent = |text: &str| {
            let number = u64::from_str(text).ok()?;
            (1..=100)
                .contains(&number)
                .then(|| MemBytes(all.0 / 100 * number))
        };
        let bytes = match said.strip_suffix('%') {
            Some(number) => percent(number),
            None => parse_bytes(said).filter(|bytes| bytes.0 > 0),
        };
        bytes.ok_or_else(|| Wrong::new(format!("\"{said}\" is not an amount of memory"), allowed))
    }
}

/// An absolute path without `.`, `..` and NUL.
pub(super) fn path(value: &DeValue<'_>) -> Parsed<PathBuf> {
    let said = text(value)?;
    let path = PathBuf::from(said);
    let plain = path
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if path.is_absolute() && plain && !said.contains('\0') {
        Ok(path)
    } else {
        Err(Wrong::new(
            format!("{said:?} is not an absolute path"),
            "an absolute path without `..`",
        ))
    }
}

/// The same, or nothing for an empty string.
pub(super) fn path_or_none(value: &DeValue<'_>) -> Parsed<Option<PathBuf>> {
    if text(value)?.is_empty() {
        return Ok(None);
    }
    path(value).map(Some)
}

pub(super) fn socket_path(value: &DeValue<'_>) -> Parsed<PathBuf> {
    short(path(value)?, SOCKET_PATH)
}

pub(super) fn run_dir(value: &DeValue<'_>) -> Parsed<PathBuf> {
    short(path(value)?, RUN_DIR)
}

fn short(path: PathBuf, most: usize) -> Parsed<PathBuf> {
    check_length(&path, most).map(|()| path)
}

fn check_length(path: &std::path::Path, most: usize) -> Parsed<()> {
    match path.as_os_str().len() {
        length if length <= most => Ok(()),
        length => Err(Wrong::new(
            format!("the path has {length} bytes, more than a socket's address can hold"),
            format!("at most {most} bytes"),
        )),
    }
}

/// Whether sockets fit below a run directory; for paths that do not come from a file.
pub(super) fn fits_sockets(run_dir: &std::path::Path) -> Result<(), String> {
    check_length(run_dir, RUN_DIR).map_err(|wrong| format!("{}: {}", wrong.what, wrong.allowed))
}

/// A program: a name to find in PATH, or an absolute path.
pub(super) fn program(value: &DeValue<'_>) -> Parsed<PathBuf> {
    let said = text(value)?;
    if !said.is_empty() && !said.contains(['/', '\0']) {
        return Ok(PathBuf::from(said));
    }
    path(value).map_err(|_not_absolute| {
        Wrong::new(
            format!("{said:?} is not a program"),
            "a name that is found in PATH, or an absolute path",
        )
    })
}

/// An image: a folder's name, or an absolute path.
pub(super) fn image(value: &DeValue<'_>) -> Parsed<ImageName> {
    let said = text(value)?;
    if said.starts_with('/') {
        return path(value).map(ImageName::At);
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=64).contains(&said.len()) && said.chars().all(plain) && !said.starts_with('.') {
        Ok(ImageName::Named(said.to_owned()))
    } else {
        Err(Wrong::new(
            format!("{said:?} is not an image"),
            "a folder's name below state_dir/images (letters, digits, `.`, `_`, `-`; at most 64), or an absolute path",
        ))
    }
}

/// An argument of a program.
pub(super) fn argument(value: &DeValue<'_>) -> Parsed<String> {
    let said = text(value)?;
    if said.contains('\0') || said.len() > sandbox_protocol::limits::ARG_STRING {
        return Err(Wrong::new("not an argument", "at most 128 KiB, without NUL"));
    }
    Ok(said.to_owned())
}

/// A user or group of the host, or nothing for an empty string.
pub(super) fn account(value: &DeValue<'_>) -> Parsed<Option<String>> {
    let said = text(value)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    if said.is_empty() {
        Ok(None)
    } else if said.len() <= 32 && said.starts_with(first) && said.chars().all(plain) {
        Ok(Some(said.to_owned()))
    } else {
        Err(Wrong::new(
            format!("{said:?} is not a name of the host"),
            "a user's or group's name, or \"\" for none",
        ))
    }
}

/// The node's name, or nothing for an empty string.
pub(super) fn node_name(value: &DeValue<'_>) -> Parsed<Option<String>> {
    let said = text(value)?;
    if said.len() <= 64 && said.chars().all(|c| c.is_ascii_graphic()) {
        Ok((!said.is_empty()).then(|| said.to_owned()))
    } else {
        Err(Wrong::new(
            format!("{said:?} is not a node's name"),
            "at most 64 printable ASCII characters without spaces, or \"\" for the host's name",
        ))
    }
}

/// `HOST:PORT`, or nothing for an empty string.
pub(super) fn address(value: &DeValue<'_>) -> Parsed<Option<SocketAddr>> {
    let said = text(value)?;
    if said.is_empty() {
        return Ok(None);
    }
    let localhost = said
        .strip_prefix("localhost:")
        .and_then(|port| u16::from_str(port).ok())
        .map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    localhost.or_else(|| said.parse().ok()).map(Some).ok_or_else(|| {
        Wrong::new(
            format!("{said:?} is not an address"),
            "such as \"127.0.0.1:9640\", \"[::]:8443\", \"localhost:9640\", or \"\" for none",
        )
    })
}

/// A SHA-256 in hexadecimal digits.
pub(super) fn sha256(value: &DeValue<'_>) -> Parsed<[u8; 32]> {
    let said = text(value)?;
    let wrong = || {
        Wrong::new(
            "not a SHA-256",
            "64 hexadecimal digits, as `sandboxd token new` prints",
        )
    };
    if said.len() != 64 || !said.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let mut hash = [0; 32];
    for (byte, at) in hash.iter_mut().zip((0..64).step_by(2)) {
        let digits = said.get(at..at + 2).ok_or_else(wrong)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_not_hex| wrong())?;
    }
    Ok(hash)
}

/// Filter directives of the log.
pub(super) fn filter(value: &DeValue<'_>) -> Parsed<String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let said = text(value)?;
    let allowed =
        "a level (off, error, warn, info, debug, trace), or directives such as \"info,sandboxd::pool=debug\"";
    // A bare word is taken for a target by the parser, so that "inof" would silently log everything of it.
    let bare = said.split(',').map(str::trim).find(|directive| {
        !directive.contains(['=', '[']) && !LEVELS.contains(&directive.to_ascii_lowercase().as_str())
    });
    if let Some(bare) = bare {
        return Err(Wrong::new(format!("{bare:?} is not a level"), allowed));
    }
    tracing_subscriber::filter::EnvFilter::builder()
        .parse(said)
        .map(|_parsed| said.to_owned())
        .map_err(|wrong| Wrong::new(format!("{said:?} is not a filter: {wrong}"), allowed))
}
