//! Patterns of Find and Replace: what matches within a line. Pure.

use std::fmt::Write as _;

use grep_regex::{RegexMatcher, RegexMatcherBuilder};

use super::globs::invalid;
use crate::refusal::Refusal;

/// Longest pattern.
const LENGTH: usize = 64 * 1024;
/// Bytes that a compiled pattern may take, and again what it may cache while it searches.
const COMPILED: usize = 1024 * 1024;
/// Groups within groups. Each takes some of a thread's 256 KiB of stack while it is compiled.
const NESTED: u32 = 24;

/// Compiles a pattern; `fixed` takes it as it is. A match never holds a line's end.
///
/// # Errors
/// `INVALID_PATTERN`.
pub(super) fn compile(pattern: &[u8], fixed: bool, ignore_case: bool) -> Result<RegexMatcher, Refusal> {
    if pattern.is_empty() || pattern.len() > LENGTH {
        return Err(invalid(pattern, "1 to 65,536 bytes"));
    }
    if fixed && pattern.contains(&b'\n') {
        return Err(invalid(pattern, "a match lies within one line"));
    }
    let mut builder = RegexMatcherBuilder::new();
    builder
        .case_insensitive(ignore_case)
        .multi_line(true)
        .size_limit(COMPILED)
        .dfa_size_limit(COMPILED)
        .nest_limit(NESTED)
        .line_terminator(Some(b'\n'));
    let text = match (std::str::from_utf8(pattern), fixed) {
        (Ok(text), false) => text.to_owned(),
        (Ok(text), true) => {
            builder.fixed_strings(true);
            text.to_owned()
        }
        (Err(_bytes), true) => bytes_as_pattern(pattern),
        (Err(_bytes), false) => return Err(invalid(pattern, "not UTF-8: write `(?-u:\\xff)` for a byte")),
    };
    builder
        .build(&text)
        .map_err(|bad| invalid(pattern, &bad.to_string()))
}

/// Bytes that are no text, each by its number.
fn bytes_as_pattern(bytes: &[u8]) -> String {
    let mut text = "(?-u:".to_owned();
    for byte in bytes {
        // Writing to a string never fails.
        write!(text, "\\x{byte:02x}").ok();
    }
    text.push(')');
    text
}

#[cfg(test)]
mod tests {
    use grep_matcher::Matcher as _;
    use sandbox_protocol::reason::Reason;

    use super::*;

    #[test]
    fn patterns_match_bytes_within_a_line() {
        let found = |pattern: &[u8], fixed, case, line: &[u8]| {
            let matcher = compile(pattern, fixed, case).unwrap();
            matcher
                .find(line)
                .unwrap()
                .map(|found| (found.start(), found.end()))
        };
        assert_eq!(found(b"a.c", false, false, b"xabcx"), Some((1, 4)));
        assert_eq!(found(b"a.c", true, false, b"xabcx a.c"), Some((6, 9)));
        assert_eq!(found(b"A.C", true, true, b"xabcx a.c"), Some((6, 9)));
        assert_eq!(found(b"\xff.", true, false, b"\xff\xff."), Some((1, 3)));
        assert_eq!(found(b"(?-u:\\xfe)", false, false, b"\xff\xfe"), Some((1, 2)));
        assert_eq!(found(b"^b", false, false, b"ab"), None);
        for (bad, fixed) in [
            (&b"("[..], false),
            (b"", false),
            (b"a\nb", true),
            (b"a\\nb", false),
            (b"\xff", false),
            (b"\\w{100000}", false),
            (&[b'a'; LENGTH + 1], true),
        ] {
            let refusal = compile(bad, fixed, false).unwrap_err();
            assert_eq!(refusal.reason, Reason::InvalidPattern, "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn the_deepest_pattern_fits_a_files_thread() {
        let nested = |depth: usize| {
            let (open, close) = ("(?:a|(b".repeat(depth / 2), ")+){2,3}".repeat(depth / 2));
            format!("{open}c{close}").into_bytes()
        };
        let on_thread = |pattern: Vec<u8>| {
            let thread = crate::tasks::small_thread("files", 256 * 1024, move || {
                compile(&pattern, false, true).map(|matcher| matcher.is_match(b"xabcabcx").unwrap())
            });
            thread.unwrap().join().unwrap()
        };
        // A concatenation, an alternation and a repetition are levels too.
        assert!(on_thread(nested(4)).is_ok());
        for depth in 5..60 {
            drop(on_thread(nested(depth)));
        }
        assert!(on_thread("(".repeat(20_000).into_bytes()).is_err());
        assert!(on_thread(nested(60)).is_err());
    }
}
