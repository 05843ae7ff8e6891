//! Just enough of Rust's grammar to look at code without comments and strings, and at module docs.

/// The code of a file: comments and the content of strings are blanked, line breaks stay.
pub(crate) fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' | b'b' | b'c' if !part_of_word(bytes, at) => match raw_end(bytes, at) {
                Some(end) => end,
                None => at,
            },
            b'\'' => char_end(bytes, at).unwrap_or(at),
            _ => at,
        };
        if end == at {
            out.push(bytes[at]);
            at += 1;
        } else {
            out.extend(
                bytes[at..end]
                    .iter()
                    .map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }),
            );
            at = end;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn part_of_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..]
        .iter()
        .position(|byte| *byte == b'\n')
        .map_or(bytes.len(), |n| at + n)
}

fn comment_end(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0_usize;
    let mut i = at;
    while i < bytes.len() {
        if bytes[i..].starts_with(b"/*") {
            depth += 1;
            i += 2;
        } else if bytes[i..].starts_with(b"*/") {
            depth -= 1;
            i += 2;
            if depth == 0 {
                return i;
            }
        } else {
            i += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], at: usize) -> usize {
    let mut i = at + 1;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

/// Past `r"..."`, `br#"..."#`, `b"..."`, `c"..."`; none where it is an ordinary word.
fn raw_end(bytes: &[u8], at: usize) -> Option<usize> {
    let mut i = at;
    if matches!(bytes[i], b'b' | b'c') {
        i += 1;
    }
    if bytes.get(i) == Some(&b'"') {
        return Some(string_end(bytes, i));
    }
    if bytes.get(i) == Some(&b'\'') && bytes[at] == b'b' {
        return char_end(bytes, i);
    }
    if bytes.get(i) != Some(&b'r') {
        return None;
    }
    i += 1;
    let hashes = bytes[i..].iter().take_while(|byte| **byte == b'#').count();
    i += hashes;
    if bytes.get(i) != Some(&b'"') {
        return None;
    }
    let close: Vec<u8> = std::iter::once(b'"')
        .chain(std::iter::repeat_n(b'#', hashes))
        .collect();
    let found = bytes[i + 1..]
        .windows(close.len())
        .position(|window| window == close)?;
    Some(i + 1 + found + close.len())
}

/// Past a character; none where it is a lifetime.
fn char_end(bytes: &[u8], at: usize) -> Option<usize> {
    let next = *bytes.get(at + 1)?;
    if next == b'\\' {
        let close = bytes[at + 3..].iter().position(|byte| *byte == b'\'')?;
        return Some(at + 3 + close + 1);
    }
    let width = match next {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => 1,
    };
    (bytes.get(at + 1 + width) == Some(&b'\'')).then_some(at + width + 2)
}

/// The code without what is there only for tests: items under `#[cfg(test)]`.
pub(crate) fn without_tests(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("#[cfg(test)]") {
        out.push_str(&rest[..at]);
        let item = &rest[at..];
        let end = item_end(item);
        rest = &item[end..];
    }
    out.push_str(rest);
    out
}

/// Past the item that begins here: its `;`, or the brace that closes its body.
fn item_end(item: &str) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in item.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    item.len()
}

/// The `//!` lines that open a file, joined by spaces.
pub(crate) fn module_doc(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .take_while(|line| line.starts_with("//!") || line.is_empty())
        .filter_map(|line| line.strip_prefix("//!"))
        .map(str::trim)
        .collect();
    lines.join(" ")
}

/// The words and punctuation of code, without spaces: what the checks match against.
pub(crate) fn tokens(code: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let end = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        out.push(&rest[..end]);
        rest = rest[end..].trim_start();
    }
    out
}

#[test]
fn code_loses_comments_and_strings_alone() {
    let text = r##"let a = "crate::x"; // crate::y
/* crate::z /* nested */ */ let b = 'c'; let c: &'static str = r#"crate::w"#; b"q" b'"' '\'' rest"##;
    let code = code(text);
    assert!(!code.contains("crate"));
    for kept in ["let a =", "let b =", "'static str", "rest"] {
        assert!(code.contains(kept), "{kept} is gone from {code}");
    }
    assert_eq!(code.lines().count(), text.lines().count());
}

#[test]
fn items_for_tests_are_left_out() {
    let code = "use a;\n#[cfg(test)]\nmod tests { fn x() { y(); } }\nuse b;\n#[cfg(test)] mod t;\nuse c;";
    let kept = without_tests(code);
    assert!(kept.contains("use a;") && kept.contains("use b;") && kept.contains("use c;"));
    assert!(!kept.contains("y()") && !kept.contains("mod t"));
}
