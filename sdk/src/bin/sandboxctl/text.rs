//! Small pieces of text: words of enums, times, and what strangers said.

use std::time::{Duration, SystemTime};

/// Seconds of the year 10000, which RFC 3339 does not have.
const YEAR_10000: i64 = 253_402_300_800;

/// Text of strangers, harmless for a terminal: what is not plainly printable is escaped.
pub(crate) fn harmless(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control()
            || (c.is_whitespace() && c != ' ')
            || matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if hidden(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// `STATE_CLAIMED` as `claimed`; an unset one is nothing.
pub(crate) fn word(name: &str) -> Option<String> {
    let (_kind, word) = name.split_once('_')?;
    (word != "UNSPECIFIED").then(|| word.to_ascii_lowercase())
}

/// `PROCESS_STATE_RUNNING` as `running`; an unset one is nothing.
pub(crate) fn last_word(name: &str) -> Option<String> {
    word(&format!("_{}", name.rsplit_once('_')?.1))
}

/// RFC 3339, UTC, milliseconds.
pub(crate) fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

/// As [`time`]; a time that RFC 3339 does not have is nothing.
pub(crate) fn stamp(at: Option<&prost_types::Timestamp>) -> Option<String> {
    let at = at.filter(|at| (0..YEAR_10000).contains(&at.seconds))?;
    SystemTime::try_from(*at).ok().map(time)
}

/// Bytes as text, where they are text.
pub(crate) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `1h 30m`.
pub(crate) fn span(secs: u32) -> String {
    humantime::format_duration(Duration::from_secs(secs.into())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_move_no_cursor() {
        assert_eq!(
            harmless("a\u{1b}[2Jb\nc\u{202e}d \u{e4}"),
            "a\\u{1b}[2Jb\\nc\\u{202e}d \u{e4}"
        );
    }

    #[test]
    fn words_and_times() {
        assert_eq!(word("STATE_CLAIMED").as_deref(), Some("claimed"));
        assert_eq!(word("TIER_UNSPECIFIED"), None);
        assert_eq!(last_word("PROCESS_STATE_RUNNING").as_deref(), Some("running"));
        assert_eq!(last_word("PROCESS_STATE_UNSPECIFIED"), None);
        let at = |seconds| prost_types::Timestamp {
            seconds,
            nanos: 5_000_000,
        };
        assert_eq!(
            stamp(Some(&at(1_700_000_000))).as_deref(),
            Some("2023-11-14T22:13:20.005Z")
        );
        assert_eq!(stamp(Some(&at(YEAR_10000))), None);
        assert_eq!(stamp(Some(&at(-1))), None);
        assert_eq!(span(5_400), "1h 30m");
    }
}
