//! What a language's server is started with: a file of the image, one argument a line.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use bytes::Bytes;
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use sandbox_protocol::{limits::NAME, reason::Reason};

use crate::refusal::{Escaped, Refusal};

/// Longest file.
const FILE: u64 = 64 * 1024;

/// The arguments for this language. Blocks, as files do.
///
/// # Errors
/// `LSP_UNKNOWN`, with what is wrong with the name or the file.
pub(super) fn argv(dir: &Path, language: &str) -> Result<Vec<Bytes>, Refusal> {
    let shown = Escaped(language.as_bytes(), 64).to_string();
    let unknown = |what: &str| Refusal::new(Reason::LspUnknown, format!("language `{shown}`: {what}"));
    let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    if language.is_empty() || language.len() > NAME || !language.bytes().all(fits) {
        return Err(unknown("not a name of [a-z0-9_-]{1,32}"));
    }
    let text = read(dir, language).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOENT) => unknown("the image has no such file"),
        Some(Errno::LOOP | Errno::XDEV) => unknown("its file is a link"),
        Some(_) | None => unknown(&format!("its file cannot be used: {error}")),
    })?;
    let argv = parse(&text);
    if argv.is_empty() {
        return Err(unknown("its file names no program"));
    }
    Ok(argv)
}

/// The file of that name and no other: neither a link nor what a link leads to, and judged once it is open.
fn read(dir: &Path, name: &str) -> io::Result<Vec<u8>> {
    let dir = rustix::fs::openat(
        CWD,
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(rustix::fs::openat2(&dir, name, flags, Mode::empty(), resolve)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    let mut text = Vec::new();
    let length = file.take(FILE + 1).read_to_end(&mut text)?;
    match u64::try_from(length) {
        Ok(length) if length <= FILE => Ok(text),
        Ok(_) | Err(_) => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

/// One argument a line, as bytes; empty lines and those that begin with `#` are passed over. Pure.
fn parse(text: &[u8]) -> Vec<Bytes> {
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty() && !line.starts_with(b"#"))
        .map(Bytes::copy_from_slice)
        .collect()
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests write files")]
mod tests {
    use super::*;

    fn refused(dir: &Path, language: &str) -> String {
        let refusal = argv(dir, language).unwrap_err();
        assert_eq!(refusal.reason, Reason::LspUnknown);
        refusal.message
    }

    #[test]
    fn lsp_name_cannot_traverse() {
        let dir = tempfile::tempdir().unwrap();
        let languages = dir.path().join("lsp.d");
        std::fs::create_dir(&languages).unwrap();
        std::fs::write(dir.path().join("x"), "/bin/evil\n").unwrap();
        for name in [
            "../x",
            "..",
            ".",
            "",
            "a/b",
            "/etc/passwd",
            "A",
            "a\0",
            "\u{e9}",
            &"a".repeat(33),
        ] {
            assert!(refused(&languages, name).contains("not a name"), "{name:?}");
        }
        std::os::unix::fs::symlink(dir.path().join("x"), languages.join("link")).unwrap();
        std::os::unix::fs::symlink("real", languages.join("within")).unwrap();
        std::fs::write(languages.join("real"), "# a comment\nserver\n\n--stdio now\n").unwrap();
        for name in ["link", "within"] {
            assert!(refused(&languages, name).contains("a link"), "{name}");
        }
        assert_eq!(
            argv(&languages, "real").unwrap(),
            [&b"server"[..], b"--stdio now"]
        );
    }

    #[test]
    fn what_is_no_file_of_arguments_is_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refused(dir.path(), "none").contains("no such file"));
        assert!(refused(&dir.path().join("nowhere"), "none").contains("no such file"));
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        assert!(refused(dir.path(), "folder").contains("no plain file"));
        let made = rustix::fs::mknodat(
            CWD,
            dir.path().join("pipe"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        );
        made.unwrap();
        assert!(refused(dir.path(), "pipe").contains("no plain file"));
        std::fs::write(dir.path().join("empty"), "#\n\n").unwrap();
        assert!(refused(dir.path(), "empty").contains("names no program"));
        std::fs::write(dir.path().join("long"), "x".repeat(70_000)).unwrap();
        assert!(refused(dir.path(), "long").contains("cannot be used"));
    }
}
