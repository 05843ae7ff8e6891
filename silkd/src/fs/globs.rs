//! Globs of a request over paths relative to where it begins.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use sandbox_protocol::reason::Reason;

use crate::refusal::{Escaped, Refusal};

/// Globs of one request.
const GLOBS: usize = 256;
/// Longest glob.
const GLOB: usize = 1024;

/// Compiles globs; `*` does not match a slash, `**` does. Pure.
///
/// # Errors
/// `INVALID_PATTERN`, with the glob.
pub(super) fn globs<T: AsRef<[u8]>>(globs: &[T]) -> Result<GlobSet, Refusal> {
    if globs.len() > GLOBS {
        return Err(invalid(b"", "at most 256 globs"));
    }
    let mut set = GlobSetBuilder::new();
    for glob in globs.iter().map(AsRef::as_ref) {
        let text = text(glob)?;
        let glob = GlobBuilder::new(text).literal_separator(true).build();
        set.add(glob.map_err(|bad| invalid(text.as_bytes(), &bad.kind().to_string()))?);
    }
    set.build().map_err(|bad| invalid(b"", &bad.kind().to_string()))
}

/// A glob as text, which it must be; the names that it matches need not.
///
/// # Errors
/// `INVALID_PATTERN`.
pub(super) fn text(glob: &[u8]) -> Result<&str, Refusal> {
    if glob.len() > GLOB {
        return Err(invalid(glob, "at most 1024 bytes"));
    }
    std::str::from_utf8(glob).map_err(|_bytes| invalid(glob, "not UTF-8"))
}

/// A pattern that is refused.
pub(super) fn invalid(pattern: &[u8], why: &str) -> Refusal {
    Refusal::new(
        Reason::InvalidPattern,
        format!("`{}`: {why}", Escaped(pattern, 128)),
    )
}

/// Whether one of them matches.
pub(super) fn matches(globs: &GlobSet, path: &[u8]) -> bool {
    globs.is_match(OsStr::from_bytes(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_relative_paths_of_any_bytes() {
        let set = globs(&["*.o", "**/target", "a?/[bc]"]).unwrap();
        for (path, expected) in [
            (&b"x.o"[..], true),
            (b"d/x.o", false),
            (b"target", true),
            (b"d/e/target", true),
            (b"target/x", false),
            (b"a\xff/b", true),
            (b"a//b", false),
        ] {
            assert_eq!(matches(&set, path), expected, "{path:?}");
        }
        for bad in [&b"[a"[..], b"{a", b"\xff", &[b'a'; GLOB + 1]] {
            assert_eq!(
                globs(&[bad]).unwrap_err().reason,
                Reason::InvalidPattern,
                "{bad:?}"
            );
        }
        assert!(globs(&vec!["a"; GLOBS + 1]).is_err());
        assert!(!matches(&globs::<&[u8]>(&[]).unwrap(), b""));
    }
}
