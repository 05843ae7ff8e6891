//! Text of a guest, made harmless for logs and errors: escaped and cut.

use std::fmt;

/// Bytes kept of a guest's text.
const GUEST_TEXT: usize = 1024;

/// What a guest said, at most 1 KiB of it, printable.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct GuestText(String);

impl GuestText {
    /// Takes the last bytes of what was said.
    #[must_use]
    pub fn tail(bytes: &[u8]) -> Self {
        let from = bytes.len().saturating_sub(GUEST_TEXT);
        Self::escape(bytes.get(from..).unwrap_or_default(), from > 0, false)
    }

    /// Takes the first bytes of what was said.
    #[must_use]
    pub fn head(bytes: &[u8]) -> Self {
        let to = bytes.len().min(GUEST_TEXT);
        Self::escape(bytes.get(..to).unwrap_or_default(), false, to < bytes.len())
    }

    fn escape(bytes: &[u8], cut_before: bool, cut_behind: bool) -> Self {
        let mut text = String::with_capacity(bytes.len() + 6);
        text.push_str(if cut_before { "..." } else { "" });
        for chunk in bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                if c == ' ' || (!c.is_control() && !c.is_whitespace() && !is_format(c)) {
                    text.push(c);
                } else {
                    text.extend(c.escape_default());
                }
            }
            for byte in chunk.invalid() {
                text.push_str(&format!("\\x{byte:02x}"));
            }
        }
        text.push_str(if cut_behind { "..." } else { "" });
        Self(text)
    }

    /// The harmless text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// An error and its causes in one line, for a record or a reply.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Characters without a shape of their own that reorder or hide what stands beside them.
fn is_format(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

impl fmt::Display for GuestText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for GuestText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_forge_a_line_or_colour_a_terminal_is_escaped() {
        let said = b"ok\n2026 ERROR forged\x1b[31m\xff\xe2\x80\xae";
        assert_eq!(
            GuestText::head(said).as_str(),
            "ok\\n2026 ERROR forged\\u{1b}[31m\\xff\\u{202e}"
        );
        let long = vec![b'a'; 5000];
        assert_eq!(GuestText::tail(&long).as_str().len(), GUEST_TEXT + 3);
        assert!(GuestText::tail(&long).as_str().starts_with("..."));
        assert!(GuestText::head(&long).as_str().ends_with("..."));
    }
}
