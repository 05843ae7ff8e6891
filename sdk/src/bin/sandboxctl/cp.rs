//! `cp`, with the rules of docker's: `SANDBOX:PATH` on one side, a local path or `-` on the other.

use std::{
    ffi::{OsStr, OsString},
    fs::Metadata,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
};

use clap::Args;
use sandbox_sdk::{
    Files, Reason,
    files::{Unpack, pack, save},
    v1::{FileKind, FileStat},
};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    guest::{self, As},
    meter::Meter,
    print::{self, Out},
    signals::Signals,
};

/// Bytes that one read takes at most.
const PIECE: usize = 256 * 1024;

#[derive(Debug, Clone, Args)]
pub(crate) struct CpArgs {
    /// What to copy: `SANDBOX:PATH`, a local path, or - for stdin.
    #[arg(value_name = "SRC")]
    source: OsString,
    /// Where to: `SANDBOX:PATH`, a local path, or - for stdout.
    #[arg(value_name = "DST")]
    destination: OsString,
    /// Keep owners and set-id bits of a directory's files; for root.
    #[arg(short = 'a', long)]
    archive: bool,
    /// No progress bar.
    #[arg(short = 'q', long)]
    quiet: bool,
    #[command(flatten)]
    user: As,
    #[command(flatten)]
    limit: Limit,
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Std,
    Local(PathBuf),
    Guest { sandbox: String, path: Vec<u8> },
}

impl Place {
    /// As docker reads it: `./a:b` and `/a:b` are local, and a guest's path without a slash begins at its root.
    fn read(text: OsString) -> Result<Self, Fault> {
        if text == "-" {
            return Ok(Self::Std);
        }
        let bytes = text.as_bytes();
        let colon = bytes.iter().position(|byte| *byte == b':');
        let Some((sandbox, [_colon, path @ ..])) = colon.and_then(|at| bytes.split_at_checked(at)) else {
            return Ok(Self::Local(text.into()));
        };
        if sandbox.is_empty() || sandbox.first() == Some(&b'.') || sandbox.contains(&b'/') {
            return Ok(Self::Local(text.into()));
        }
        if path.is_empty() {
            return Err(Fault::Usage("no path after SANDBOX:".to_owned()));
        }
        let sandbox = String::from_utf8(sandbox.to_vec())
            .map_err(|_bytes| Fault::Usage("no sandbox has such an id".to_owned()))?;
        let root: &[u8] = if path.first() == Some(&b'/') { b"" } else { b"/" };
        Ok(Self::Guest {
            sandbox,
            path: [root, path].concat(),
        })
    }
}

/// What was copied.
#[derive(Debug, Default)]
struct Copied {
    entries: u64,
    bytes: u64,
    skipped: u64,
    /// Files that changed while they were read.
    changed: u64,
}

struct Copy {
    files: Files,
    /// Bytes of the guest's path.
    path: Vec<u8>,
    archive: bool,
    quiet: bool,
    out: Out,
}

pub(crate) async fn cp(reach: &Reach, args: CpArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    let mut signals = Signals::catch()?;
    // What is dropped cleans up, here and in the guest; what is killed does not.
    tokio::select! {
        copied = crate::within(limit, copy(reach, args, out)) => copied,
        number = signals.next() => Err(Fault::Signal(number)),
    }
}

async fn copy(reach: &Reach, args: CpArgs, out: Out) -> Result<(), Fault> {
    let (source, destination) = (Place::read(args.source)?, Place::read(args.destination)?);
    let begin = async |sandbox, path| {
        Ok::<_, Fault>(Copy {
            files: guest::files(reach, sandbox, args.user).await?,
            path,
            archive: args.archive,
            quiet: args.quiet,
            out,
        })
    };
    let to_stdout = destination == Place::Std;
    let copied = match (source, destination) {
        (Place::Guest { sandbox, path }, Place::Std) => begin(sandbox, path).await?.print().await,
        (Place::Guest { sandbox, path }, Place::Local(local)) => {
            begin(sandbox, path).await?.download(&local).await
        }
        (Place::Std, Place::Guest { sandbox, path }) => begin(sandbox, path).await?.upload_stdin().await,
        (Place::Local(local), Place::Guest { sandbox, path }) => {
            begin(sandbox, path).await?.upload(&local).await
        }
        (Place::Guest { .. }, Place::Guest { .. }) => Err(Fault::Usage(
            "between sandboxes, go through a pipe: cp A:PATH - | cp - B:PATH".to_owned(),
        )),
        (Place::Std | Place::Local(_), Place::Std | Place::Local(_)) => {
            Err(Fault::Usage("one of SRC and DST is SANDBOX:PATH".to_owned()))
        }
    }?;
    for (count, what) in [
        (
            copied.skipped,
            "left out: sockets, devices, pipes, unreadable files",
        ),
        (copied.changed, "changed while they were read"),
    ] {
        if count > 0 && !out.json {
            print::stderr(&format!("sandboxctl: {count} {what}"));
        }
    }
    if to_stdout {
        // It is the content's.
        return Ok(());
    }
    let json = || {
        json!({
            "entries": copied.entries,
            "bytes": copied.bytes,
            "skipped": copied.skipped,
            "changed": copied.changed,
        })
    };
    out.result(json, String::new)
}

/// The last name of a path, if the path itself is to be copied and not only what is in it.
fn last_name(path: &[u8]) -> Option<&OsStr> {
    let trimmed = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    let name = path.get(..trimmed)?.rsplit(|byte| *byte == b'/').next()?;
    (!matches!(name, b"" | b"." | b"..")).then(|| OsStr::from_bytes(name))
}

fn join(directory: &[u8], name: &OsStr) -> Vec<u8> {
    let slash: &[u8] = if directory.ends_with(b"/") { b"" } else { b"/" };
    [directory, slash, name.as_bytes()].concat()
}

fn file_fault(path: &Path, error: &std::io::Error) -> Fault {
    let text = format!("{}: {error}", path.display());
    Fault::Io("cp", std::io::Error::new(error.kind(), text))
}

fn no_directory(path: &[u8]) -> Fault {
    Fault::Usage(format!("{} is no directory", guest::shown(path)))
}

impl Copy {
    fn guest_path(&self) -> &OsStr {
        OsStr::from_bytes(&self.path)
    }

    /// What the guest has at the path, if anything.
    async fn there(&self) -> Result<Option<FileStat>, Fault> {
        match self.files.stat_target(self.guest_path()).await {
            Ok(stat) => Ok(Some(stat)),
            Err(error) if error.is(Reason::PathNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn meter(&self, total: Option<u64>) -> Meter {
        Meter::start(self.out, self.quiet, total)
    }

    async fn upload_stdin(self) -> Result<Copied, Fault> {
        let directory = match self.there().await? {
            Some(stat) => stat.kind() == FileKind::Directory,
            None => self.path.ends_with(b"/"),
        };
        let meter = self.meter(None);
        let stdin = meter.over(tokio::io::stdin());
        if directory {
            return self.push(stdin).await;
        }
        let written = Box::pin(self.files.write(self.guest_path()).reader(stdin)).await?;
        Ok(Copied {
            entries: 1,
            bytes: written.bytes,
            ..Copied::default()
        })
    }

    async fn push(&self, archive: impl AsyncRead + Send + 'static) -> Result<Copied, Fault> {
        let mut push = self.files.push(self.guest_path());
        if self.archive {
            push = push.keep_owner();
        }
        let pushed = Box::pin(push.tar(archive)).await?;
        Ok(Copied {
            entries: pushed.entries,
            bytes: pushed.bytes,
            ..Copied::default()
        })
    }

    async fn upload(mut self, local: &Path) -> Result<Copied, Fault> {
        // What is named is followed; links in a tree stay links.
        let stat = tokio::fs::metadata(local).await;
        let stat = stat.map_err(|error| file_fault(local, &error))?;
        let there = self.there().await?.map(|there| there.kind());
        let into = match there {
            Some(FileKind::Directory) => true,
            Some(_) if stat.is_dir() => return Err(no_directory(&self.path)),
            None if self.path.ends_with(b"/") && !stat.is_dir() => return Err(no_directory(&self.path)),
            Some(_) | None => false,
        };
        if into && let Some(name) = last_name(local.as_os_str().as_bytes()) {
            self.path = join(&self.path, name);
        }
        if stat.is_dir() {
            let meter = self.meter(None);
            let source = pack(local);
            let skipped = source.skipped();
            let copied = self.push(meter.over(source)).await?;
            return Ok(Copied {
                skipped: skipped.get(),
                ..copied
            });
        }
        self.write(local, &stat).await
    }

    async fn write(&self, local: &Path, stat: &Metadata) -> Result<Copied, Fault> {
        let file = tokio::fs::File::open(local).await;
        let file = file.map_err(|error| file_fault(local, &error))?;
        let mut write = self
            .files
            .write(self.guest_path())
            .mode(stat.permissions().mode() & 0o777);
        // A pipe or device does not know.
        let total = stat.is_file().then_some(stat.len());
        if let Some(total) = total {
            write = write.size(total);
        }
        let meter = self.meter(total);
        // A file that grows is cut at the size that was announced.
        let content = meter.over(file.take(total.unwrap_or(u64::MAX)));
        let written = Box::pin(write.reader(content)).await?;
        Ok(Copied {
            entries: 1,
            bytes: written.bytes,
            ..Copied::default()
        })
    }

    async fn print(self) -> Result<Copied, Fault> {
        let directory = matches!(self.there().await?, Some(stat) if stat.kind() == FileKind::Directory);
        let mut stdout = tokio::io::stdout();
        if !directory {
            let mut reader = self.files.read(self.guest_path()).stream().await?;
            let meter = self.meter(Some(reader.stat().size));
            let bytes = pour(meter.over(&mut reader), &mut stdout).await?;
            return Ok(Copied {
                entries: 1,
                bytes,
                changed: reader.changed().into(),
                ..Copied::default()
            });
        }
        let mut tree = self.files.pull(self.guest_path()).tar().await?;
        let meter = self.meter(None);
        pour(meter.over(&mut tree), &mut stdout).await?;
        let end = tree.end().copied().unwrap_or_default();
        Ok(Copied {
            entries: end.entries,
            bytes: end.bytes,
            skipped: end.skipped,
            changed: end.shrunk.saturating_add(end.grown),
        })
    }

    async fn download(self, local: &Path) -> Result<Copied, Fault> {
        let directory = matches!(self.there().await?, Some(stat) if stat.kind() == FileKind::Directory);
        let here = match tokio::fs::metadata(local).await {
            Ok(stat) => Some(stat),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(file_fault(local, &error)),
        };
        let named = local.as_os_str().as_bytes();
        let into = match here {
            Some(stat) if stat.is_dir() => true,
            Some(_) if directory => return Err(no_directory(named)),
            None if named.ends_with(b"/") && !directory => return Err(no_directory(named)),
            Some(_) | None => false,
        };
        let mut target = local.to_owned();
        if into && let Some(name) = last_name(&self.path) {
            target.push(name);
        }
        if directory {
            return self.unpack(&target).await;
        }
        let mut reader = self.files.read(self.guest_path()).stream().await?;
        let stat = reader.stat().clone();
        // Files of /proc say that they are empty.
        let meter = self.meter((stat.size > 0).then_some(stat.size));
        let bytes = Box::pin(save(meter.over(&mut reader), &target, stat.mode & 0o777)).await?;
        Ok(Copied {
            entries: 1,
            bytes,
            changed: reader.changed().into(),
            ..Copied::default()
        })
    }

    async fn unpack(&self, target: &Path) -> Result<Copied, Fault> {
        let mut tree = self.files.pull(self.guest_path()).tar().await?;
        if tree.stat().kind() != FileKind::Directory {
            return Err(no_directory(&self.path));
        }
        let meter = self.meter(None);
        let mut unpack = Unpack::new(target);
        if self.archive {
            unpack = unpack.keep_owner();
        }
        let unpacked = Box::pin(unpack.reader(meter.over(&mut tree))).await?;
        let end = tree.end().copied().unwrap_or_default();
        Ok(Copied {
            entries: unpacked.entries,
            bytes: unpacked.bytes,
            skipped: end.skipped,
            changed: end.shrunk.saturating_add(end.grown),
        })
    }
}

/// Writes all of it, and gives the number of bytes.
async fn pour(
    mut from: impl AsyncRead + Unpin,
    to: &mut (impl tokio::io::AsyncWrite + Unpin),
) -> Result<u64, Fault> {
    let mut piece = vec![0; PIECE];
    let mut count = 0_u64;
    loop {
        let length = match from.read(&mut piece).await {
            Ok(length) => length,
            Err(error) => {
                // What came before it is passed on; that it was not all is told by the error.
                to.flush().await.ok();
                return Err(match error.downcast::<sandbox_sdk::Error>() {
                    Ok(error) => Fault::Sdk(error),
                    Err(error) => Fault::Io("cp", error),
                });
            }
        };
        let Some(data @ [_, ..]) = piece.get(..length) else {
            break;
        };
        let written = to.write_all(data).await;
        written.map_err(|error| Fault::io("stdout", error))?;
        count = count.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }
    to.flush().await.map_err(|error| Fault::io("stdout", error))?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    fn read(text: &str) -> Place {
        Place::read(text.into()).unwrap()
    }

    fn guest(sandbox: &str, path: &str) -> Place {
        Place::Guest {
            sandbox: sandbox.to_owned(),
            path: path.into(),
        }
    }

    #[test]
    fn places_are_read_as_docker_reads_them() {
        assert_eq!(read("-"), Place::Std);
        assert_eq!(read("sb_1:/etc/a:b"), guest("sb_1", "/etc/a:b"));
        assert_eq!(read("sb_1:tmp/"), guest("sb_1", "/tmp/"));
        for local in ["a", "./a:b", "/a:b", "a/b:c", ":a", "..:a", "--"] {
            assert_eq!(read(local), Place::Local(local.into()), "{local}");
        }
        let odd = OsString::from_vec(b"sb_1:/\xff\n".to_vec());
        let Place::Guest { path, .. } = Place::read(odd).unwrap() else {
            panic!("it is a guest's");
        };
        assert_eq!(path, b"/\xff\n");
        assert!(Place::read("sb_1:".into()).is_err());
        assert!(Place::read(OsString::from_vec(b"\xff:/a".to_vec())).is_err());
    }

    #[test]
    fn what_is_named_or_what_is_in_it() {
        for (path, expected) in [
            ("a", Some("a")),
            ("/a/b", Some("b")),
            ("/a/b//", Some("b")),
            ("a/.", None),
            (".", None),
            ("..", None),
            ("/", None),
            ("", None),
            ("/.hidden", Some(".hidden")),
        ] {
            assert_eq!(last_name(path.as_bytes()), expected.map(OsStr::new), "{path}");
        }
        assert_eq!(join(b"/a", OsStr::new("b")), b"/a/b");
        assert_eq!(join(b"/", OsStr::new("b")), b"/b");
    }
}
