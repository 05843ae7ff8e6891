//! Everything that is printed.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::{fault::Fault, text::harmless};

/// How results are printed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out {
    pub(crate) json: bool,
}

impl Out {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json }
    }

    /// A result: the JSON of it, or the text for people.
    pub(crate) fn result(
        self,
        json: impl FnOnce() -> Value,
        human: impl FnOnce() -> String,
    ) -> Result<(), Fault> {
        let text = if self.json { json().to_string() } else { human() };
        if text.is_empty() { Ok(()) } else { line(&text) }
    }
}

/// A line on stdout, at once.
pub(crate) fn line(text: &str) -> Result<(), Fault> {
    raw(format!("{text}\n").as_bytes())
}

/// Bytes on stdout, at once.
pub(crate) fn raw(bytes: &[u8]) -> Result<(), Fault> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|error| Fault::io("stdout", error))
}

/// A line on stderr. Where nobody reads it, there is nobody to tell either.
pub(crate) fn stderr(text: &str) {
    writeln!(io::stderr().lock(), "{text}").ok();
}

/// Text on stderr as it is, harmless already.
pub(crate) fn stderr_raw(text: &str) {
    let mut stderr = io::stderr().lock();
    stderr
        .write_all(text.as_bytes())
        .and_then(|()| stderr.flush())
        .ok();
}

/// A table for people: no lines, two spaces between columns. Cells may hold text of guests.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(head);
    for row in rows {
        table.add_row(row.map(|cell| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                harmless(&cell)
            }
        }));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Names and values, one a line. Empty values are left out.
pub(crate) fn fields(rows: &[(&str, String)]) -> String {
    let shown = rows.iter().filter(|(_name, value)| !value.is_empty());
    let width = shown.clone().map(|(name, _value)| name.len()).max().unwrap_or(0);
    shown
        .map(|(name, value)| format!("{name:width$}  {}", harmless(value)))
        .collect::<Vec<_>>()
        .join("\n")
}

/// A line that moves while something takes long; only on a terminal.
#[derive(Debug)]
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn start(out: Out, text: &str) -> Self {
        if out.json || !io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(100));
        bar.set_message(harmless(text));
        Self(Some(bar))
    }

    /// What it is at now.
    pub(crate) fn say(&self, text: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(harmless(text));
        }
    }

    /// A line that stays: above the moving one, or on stderr by itself.
    pub(crate) fn note(&self, text: &str) {
        match &self.0 {
            Some(bar) => bar.println(harmless(text)),
            None => stderr(&harmless(text)),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
