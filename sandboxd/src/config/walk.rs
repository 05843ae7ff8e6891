//! Walks toml's spanned table by hand: takes known keys, gathers every mistake, reports what is left as unknown.
//! (serde would stop at the first mistake.)

use std::{borrow::Cow, ops::Range};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::mistake::Mistake;

/// Why a value is wrong, in words, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) what: String,
    pub(super) allowed: Cow<'static, str>,
}

impl Wrong {
    pub(super) fn new(what: impl Into<String>, allowed: impl Into<Cow<'static, str>>) -> Self {
        Self {
            what: what.into(),
            allowed: allowed.into(),
        }
    }
}

/// A value with its place, so that a later check can still point at it.
#[derive(Debug, Clone)]
pub(super) struct Found<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
}

/// One table that is being read.
#[derive(Debug)]
pub(super) struct Section<'a> {
    /// Dotted, with a point at its end unless empty.
    path: String,
    span: Range<usize>,
    entries: Vec<(&'a str, Range<usize>, &'a Spanned<DeValue<'a>>)>,
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    pub(super) fn root(table: &'a DeTable<'a>) -> Self {
        Self::new(String::new(), 0..0, Some(table))
    }

    fn new(path: String, span: Range<usize>, table: Option<&'a DeTable<'a>>) -> Self {
        let entries = table
            .into_iter()
            .flat_map(DeTable::iter)
            .map(|(key, value)| (key.get_ref().as_ref(), key.span(), value))
            .collect();
        Self {
            path,
            span,
            entries,
            known: Vec::new(),
        }
    }

    /// The dotted path of a key of this table.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// Where the table begins.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.known.push(key);
        let at = self.entries.iter().position(|(name, ..)| *name == key)?;
        Some(self.entries.swap_remove(at).2)
    }
}

/// The mistakes so far.
#[derive(Debug, Default)]
pub(super) struct Walk {
    pub(super) mistakes: Vec<Mistake>,
}

impl Walk {
    pub(super) fn mistake(&mut self, span: Range<usize>, key: String, wrong: Wrong) {
        self.mistake_for("CONFIG_INVALID", span, key, wrong);
    }

    pub(super) fn mistake_for(
        &mut self,
        reason: &'static str,
        span: Range<usize>,
        key: String,
        wrong: Wrong,
    ) {
        self.mistakes.push(Mistake {
            span,
            key,
            what: wrong.what,
            allowed: wrong.allowed.into_owned(),
            reason,
        });
    }

    /// A value, if it is there and right.
    pub(super) fn get<'a, T>(
        &mut self,
        section: &mut Section<'a>,
        key: &'static str,
        parse: impl FnOnce(&DeValue<'a>) -> Result<T, Wrong>,
    ) -> Option<Found<T>> {
        let value = section.take(key)?;
        match parse(value.get_ref()) {
            Ok(parsed) => Some(Found {
                value: parsed,
                span: value.span(),
            }),
            Err(wrong) => {
                let what = format!("`{}`: {}", section.key(key), wrong.what);
                self.mistake(value.span(), section.key(key), Wrong { what, ..wrong });
                None
            }
        }
    }

    /// The right ones of a list's elements; `None` if the key is not there.
    pub(super) fn list<'a, T>(
        &mut self,
        section: &mut Section<'a>,
        key: &'static str,
        most: usize,
        parse: impl Fn(&DeValue<'a>) -> Result<T, Wrong>,
    ) -> Option<Vec<Found<T>>> {
        let found = self.elements(section, key, most)?;
        let path = section.key(key);
        let mut list = Vec::new();
        for value in found {
            match parse(value.get_ref()) {
                Ok(parsed) => list.push(Found {
                    value: parsed,
                    span: value.span(),
                }),
                Err(wrong) => {
                    let what = format!("`{path}`: {}", wrong.what);
                    self.mistake(value.span(), path.clone(), Wrong { what, ..wrong });
                }
            }
        }
        Some(list)
    }

    fn elements<'a>(
        &mut self,
        section: &mut Section<'a>,
        key: &'static str,
        most: usize,
    ) -> Option<Vec<&'a Spanned<DeValue<'a>>>> {
        let value = section.take(key)?;
        let path = section.key(key);
        let wrong = match value.get_ref().as_array() {
            Some(array) if array.len() <= most => return Some(array.iter().collect()),
            Some(array) => Wrong::new(
                format!("`{path}` has {} elements", array.len()),
                format!("at most {most}"),
            ),
            None => Wrong::new(
                format!("`{path}`: expected a list, found {}", kind(value.get_ref())),
                "",
            ),
        };
        self.mistake(value.span(), path, wrong);
        None
    }

    /// A table, empty if it is not there.
    pub(super) fn section<'a>(&mut self, section: &mut Section<'a>, key: &'static str) -> Section<'a> {
        let path = section.key(key);
        let Some(value) = section.take(key) else {
            return Section::new(format!("{path}."), section.span(), None);
        };
        self.table(path, value)
            .unwrap_or_else(|| Section::new(String::new(), value.span(), None))
    }

    /// The tables of a list of tables.
    pub(super) fn sections<'a>(
        &mut self,
        section: &mut Section<'a>,
        key: &'static str,
        most: usize,
    ) -> Vec<Section<'a>> {
        let path = section.key(key);
        let found = self.elements(section, key, most).unwrap_or_default();
        found
            .into_iter()
            .filter_map(|value| self.table(path.clone(), value))
            .collect()
    }

    /// The tables below a table, with their names.
    pub(super) fn named<'a>(
        &mut self,
        section: &mut Section<'a>,
        key: &'static str,
    ) -> Vec<(Found<&'a str>, Section<'a>)> {
        let mut all = self.section(section, key);
        let mut entries = std::mem::take(&mut all.entries);
        entries.sort_by_key(|(_, span, _)| span.start);
        entries
            .into_iter()
            .filter_map(|(name, span, value)| {
                let table = self.table(all.key(name), value)?;
                Some((Found { value: name, span }, table))
            })
            .collect()
    }

    fn table<'a>(&mut self, path: String, value: &'a Spanned<DeValue<'a>>) -> Option<Section<'a>> {
        if let Some(table) = value.get_ref().as_table() {
            return Some(Section::new(format!("{path}."), value.span(), Some(table)));
        }
        let what = format!("`{path}`: expected a table, found {}", kind(value.get_ref()));
        self.mistake(value.span(), path, Wrong::new(what, ""));
        None
    }

    /// Ends a table: what nobody took is unknown.
    pub(super) fn done(&mut self, mut section: Section<'_>) {
        for (name, span, _) in std::mem::take(&mut section.entries) {
            let path = section.key(name);
            let allowed = match closest(name, &section.known) {
                Some(key) => format!("did you mean `{key}`?"),
                None => format!("known keys: {}", section.known.join(", ")),
            };
            let wrong = Wrong::new(format!("unknown key `{path}`"), allowed);
            self.mistake(span, path, wrong);
        }
    }
}

/// `a string`, `an integer`.
pub(super) fn kind(value: &DeValue<'_>) -> String {
    let kind = value.type_str();
    let article = if kind.starts_with(['a', 'i']) { "an" } else { "a" };
    format!("{article} {kind}")
}

/// The key that was probably meant.
fn closest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    known
        .iter()
        .map(|key| (distance(name, key), *key))
        .filter(|(distance, key)| *distance <= 2 && *distance < key.len())
        .min()
        .map(|(_, key)| key)
}

/// Edit distance; names longer than 64 bytes are nobody's typing mistake.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(b.bytes()) {
            let best = (diagonal + usize::from(x != y)).min(left + 1).min(*cell + 1);
            diagonal = *cell;
            *cell = best;
            left = best;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}
