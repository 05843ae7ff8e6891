//! `ls`: what is in a guest's directories.

use std::{
    ffi::{OsStr, OsString},
    time::{Duration, UNIX_EPOCH},
};

use clap::Args;
use sandbox_sdk::{
    Files,
    v1::{FileEntry, FileKind, FileStat},
};
use serde_json::{Value, json};

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    guest::{self, As},
    print::{self, Out},
    text::{harmless, time, word},
};

/// Entries that are held to be sorted; a directory with more is shown as it comes, so that a guest cannot fill our memory.
const SORTED: usize = 100_000;
/// Levels that `-R` shows: all that the guest allows.
const LEVELS: u32 = 64;

#[derive(Debug, Clone, Args)]
pub(crate) struct LsArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Files and directories, absolute.
    #[arg(value_name = "PATH", default_value = "/")]
    paths: Vec<OsString>,
    /// Kind and mode, links, owner, size, time of change.
    #[arg(short = 'l', long)]
    long: bool,
    /// All levels below, 64 at most.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Names that begin with a dot, too.
    #[arg(short = 'a', long)]
    all: bool,
    #[command(flatten)]
    user: As,
    #[command(flatten)]
    limit: Limit,
}

pub(crate) async fn ls(reach: &Reach, args: LsArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    crate::within(limit, list(reach, args, out)).await
}

async fn list(reach: &Reach, args: LsArgs, out: Out) -> Result<(), Fault> {
    let files = guest::files(reach, args.sandbox.clone(), args.user.clone()).await?;
    let several = args.paths.len() > 1;
    for path in &args.paths {
        let stat = files.stat(path).await?;
        // A link to a directory is gone into, as `ls` does.
        let directory = stat.kind() == FileKind::Directory
            || (stat.kind() == FileKind::Link
                && !args.long
                && matches!(
                    files.stat_target(path).await,
                    Ok(target) if target.kind() == FileKind::Directory
                ));
        if directory {
            if several && !out.json {
                print::line(&format!("{}:", guest::shown(path.as_encoded_bytes())))?;
            }
            self::directory(&files, path, &args, out).await?;
        } else {
            let name = bytes::Bytes::copy_from_slice(path.as_encoded_bytes());
            let entry = FileEntry {
                name,
                stat: Some(stat),
            };
            show(&entry, &args, out)?;
        }
    }
    Ok(())
}

async fn directory(files: &Files, path: &OsStr, args: &LsArgs, out: Out) -> Result<(), Fault> {
    let depth = if args.recursive { LEVELS } else { 1 };
    let mut entries = files.list(path).depth(depth).stream().await?;
    let mut held = Vec::new();
    while let Some(entry) = entries.next().await {
        let entry = entry?;
        if !args.all
            && entry
                .name
                .split(|byte| *byte == b'/')
                .any(|name| name.first() == Some(&b'.'))
        {
            continue;
        }
        held.push(entry);
        if held.len() >= SORTED {
            held.drain(..).try_for_each(|entry| show(&entry, args, out))?;
        }
    }
    held.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    held.iter().try_for_each(|entry| show(entry, args, out))?;
    if entries.unreadable() > 0 {
        print::stderr(&format!(
            "sandboxctl: {} directories could not be read",
            entries.unreadable()
        ));
        return Err(Fault::Told);
    }
    Ok(())
}

fn show(entry: &FileEntry, args: &LsArgs, out: Out) -> Result<(), Fault> {
    let stat = entry.stat.clone().unwrap_or_default();
    if out.json {
        return print::line(&json(&entry.name, &stat).to_string());
    }
    let name = guest::shown(&entry.name);
    if !args.long {
        return print::line(&name);
    }
    let arrow = if stat.kind() == FileKind::Link {
        format!(" -> {}", guest::shown(&stat.target))
    } else {
        String::new()
    };
    let owner = format!("{}:{}", stat.uid, stat.gid);
    print::line(&format!(
        "{} {:>3} {owner:<11} {:>10} {} {name}{arrow}",
        modes(&stat),
        stat.links,
        stat.size,
        harmless(&modified(&stat).unwrap_or_else(|| "-".to_owned())),
    ))
}

/// A time that this machine and RFC 3339 have: from 1970 to 9999.
fn modified(stat: &FileStat) -> Option<String> {
    let since = Duration::from_nanos(u64::try_from(stat.mtime_ns).ok()?);
    Some(time(UNIX_EPOCH.checked_add(since)?))
}

/// `drwxr-xr-x`, as everybody knows it.
fn modes(stat: &FileStat) -> String {
    let kind = match stat.kind() {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Link => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::Block => 'b',
        FileKind::Char => 'c',
        FileKind::Unspecified => '?',
    };
    let mut text = String::from(kind);
    for (shift, special, set, unset) in [
        (6, 0o4000, 's', 'S'),
        (3, 0o2000, 's', 'S'),
        (0, 0o1000, 't', 'T'),
    ] {
        let bits = stat.mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (stat.mode & special != 0, bits & 1 != 0) {
            (false, true) => 'x',
            (false, false) => '-',
            (true, true) => set,
            (true, false) => unset,
        });
    }
    text
}

fn json(name: &[u8], stat: &FileStat) -> Value {
    let kind = stat.kind().as_str_name();
    let mut object = guest::object([("name", name)]);
    if stat.kind() == FileKind::Link {
        object.append(&mut guest::object([("target", &stat.target)]));
    }
    let fields = json!({
        "kind": kind.strip_prefix("FILE_").and_then(word),
        "size": stat.size,
        "mode": format!("{:04o}", stat.mode & 0o7777),
        "uid": stat.uid,
        "gid": stat.gid,
        "mtime_ns": stat.mtime_ns,
        "modified_at": modified(stat),
        "inode": stat.inode,
        "links": stat.links,
        "allocated": stat.allocated,
    });
    if let Value::Object(mut fields) = fields {
        object.append(&mut fields);
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_look_as_everywhere() {
        for (kind, mode, expected) in [
            (FileKind::Regular, 0o644, "-rw-r--r--"),
            (FileKind::Directory, 0o1777, "drwxrwxrwt"),
            (FileKind::Regular, 0o4755, "-rwsr-xr-x"),
            (FileKind::Regular, 0o6644, "-rwSr-Sr--"),
            (FileKind::Directory, 0o1000, "d--------T"),
            (FileKind::Link, 0o777, "lrwxrwxrwx"),
        ] {
            let stat = FileStat {
                kind: kind.into(),
                mode,
                ..FileStat::default()
            };
            assert_eq!(modes(&stat), expected);
        }
    }

    #[test]
    fn times_that_nobody_has_are_nothing() {
        let stat = |mtime_ns| FileStat {
            mtime_ns,
            ..FileStat::default()
        };
        assert_eq!(modified(&stat(0)).as_deref(), Some("1970-01-01T00:00:00.000Z"));
        assert_eq!(modified(&stat(-1)), None);
        // The latest that fits is in the year 2262.
        assert!(modified(&stat(i64::MAX)).is_some());
    }

    #[test]
    fn odd_names_are_told_apart_in_json() {
        let stat = FileStat {
            kind: FileKind::Regular.into(),
            ..FileStat::default()
        };
        assert_eq!(json(b"a\n", &stat)["name"], "a\n");
        let odd = json(b"\xff", &stat);
        assert_eq!(
            (&odd["name_base64"], &odd["kind"]),
            (&"/w==".into(), &"regular".into())
        );
    }
}
