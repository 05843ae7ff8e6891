//! Mistakes of a file: where, what, and what would be right; for people like a compiler tells them, and as JSON.

use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

use serde_json::json;

/// Columns of a source line that are shown; a longer one is cut.
const SHOWN: usize = 160;

/// Mistakes that are told; nobody reads more at once, and each costs a look at the text.
const TOLD: usize = 100;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Where in the text, in bytes.
    pub(super) span: Range<usize>,
    /// Dotted key; empty where the text is no TOML.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// What is allowed, or what to do; may be empty.
    pub allowed: String,
    /// `CONFIG_INVALID`, or the reason that an API call would give.
    pub reason: &'static str,
}

/// Line and column, from 1; a column is a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place<'t> {
    line: usize,
    column: usize,
    text: &'t str,
}

/// The mistakes of a file, in its order: all of them, or the first hundred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistakes {
    path: PathBuf,
    text: String,
    all: Vec<Mistake>,
    /// Mistakes that are not told.
    more: usize,
}

impl Mistakes {
    pub(super) fn new(path: &Path, text: &str, mut all: Vec<Mistake>) -> Self {
        all.sort_by_key(|mistake| mistake.span.start);
        let more = all.len().saturating_sub(TOLD);
        all.truncate(TOLD);
        Self {
            more,
            path: path.to_owned(),
            text: text.to_owned(),
            all,
        }
    }

    /// The mistakes, at least one.
    #[must_use]
    pub fn all(&self) -> &[Mistake] {
        &self.all
    }

    /// Line and column of a mistake, from 1; a column is a character.
    #[must_use]
    pub fn place(&self, mistake: &Mistake) -> (usize, usize) {
        let place = place(&self.text, mistake.span.start);
        (place.line, place.column)
    }

    /// `{"file":..,"mistakes":[{"line","column","key","reason","what","allowed"}],"more":n}`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mistakes: Vec<_> = self
            .all
            .iter()
            .map(|mistake| {
                let (line, column) = self.place(mistake);
                json!({
                    "line": line, "column": column, "key": mistake.key, "reason": mistake.reason,
                    "what": mistake.what, "allowed": mistake.allowed,
                })
            })
            .collect();
        json!({ "file": self.path.to_string_lossy(), "mistakes": mistakes, "more": self.more })
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for mistake in &self.all {
            let place = place(&self.text, mistake.span.start);
            let gutter = place.line.to_string().len();
            writeln!(f, "error[{}]: {}", mistake.reason, mistake.what)?;
            writeln!(
                f,
                "{:gutter$}--> {}:{}:{}",
                "",
                self.path.display(),
                place.line,
                place.column
            )?;
            writeln!(f, "{:gutter$} |", "")?;
            if may_hold_secret(&mistake.key) {
                writeln!(f, "{} | (not shown: a secret may stand there)", place.line)?;
            } else {
                writeln!(f, "{} | {}", place.line, printable(place.text))?;
                let (before, under) = underline(&place, mistake.span.len());
                writeln!(f, "{:gutter$} | {:before$}{:^<under$}", "", "", "")?;
            }
            if !mistake.allowed.is_empty() {
                writeln!(f, "{:gutter$} = help: {}", "", mistake.allowed)?;
            }
            writeln!(f)?;
        }
        match self.all.len() + self.more {
            1 => write!(f, "1 mistake in {}", self.path.display()),
            n if self.more > 0 => write!(
                f,
                "{n} mistakes in {}, {} of them told",
                self.path.display(),
                self.all.len()
            ),
            n => write!(f, "{n} mistakes in {}", self.path.display()),
        }
    }
}

/// Whether people write passwords into lines of this key. A mistake is printed, answered and logged.
fn may_hold_secret(key: &str) -> bool {
    ["egress.secret.", "egress.upstream."]
        .iter()
        .any(|table| key.starts_with(table))
}

fn place(text: &str, at: usize) -> Place<'_> {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = text
        .get(line_start..)
        .and_then(|rest| rest.lines().next())
        .unwrap_or_default();
    Place {
        line: before.matches('\n').count() + 1,
        column: before.get(line_start..).unwrap_or_default().chars().count() + 1,
        text: line,
    }
}

/// Columns of space and of carets, in characters as [`printable`] shows them.
fn underline(place: &Place<'_>, bytes: usize) -> (usize, usize) {
    let before: String = place.text.chars().take(place.column - 1).collect();
    let rest = place.text.get(before.len()..).unwrap_or_default();
    let end = (0..=bytes.min(rest.len()))
        .rev()
        .find(|end| rest.is_char_boundary(*end))
        .unwrap_or(0);
    let marked = rest.get(..end).unwrap_or_default();
    let column = printable(&before).chars().count();
    (
        column,
        printable(marked)
            .chars()
            .count()
            .min(SHOWN.saturating_sub(column))
            .max(1),
    )
}

/// One line, cut, that can neither colour a terminal nor forge another line. A tab is one space.
fn printable(line: &str) -> String {
    let mut shown = String::new();
    for c in line.chars().take(SHOWN) {
        if c == '\t' {
            shown.push(' ');
        } else if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}
