//! `journal cat`, which reads segments beside a living daemon, and `journal check`, which wants it dead.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, fs, io,
    path::{Path, PathBuf},
};

use sandbox_protocol::id::SandboxId;
use serde::Deserialize;

use super::{
    Damage, Heads, OpenError, RowState, Torn, Transition, lock_state_dir,
    open::{dirs, read},
    record,
    replay::{Segment, list},
    segment::{Found, HEADER, Header, read_header, scan},
};

/// What to show.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Records of this sandbox only; damage is shown all the same.
    pub sandbox: Option<SandboxId>,
}

/// A line of `journal cat`. Its Display is one line of printable ASCII, a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A record.
    Record {
        /// Its number.
        seq: u64,
        /// Its JSON as it stands in the file, unknown fields included.
        json: String,
    },
    /// Bytes that are no whole record.
    Damaged {
        /// The segment.
        file: PathBuf,
        /// Where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Whether they are the cut end of the log, perhaps of a record that is being written.
        torn: bool,
    },
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record { seq, json } => {
                write!(f, "{{\"seq\":{seq},")?;
                ascii(f, json.strip_prefix('{').unwrap_or(json))
            }
            Self::Damaged {
                file,
                offset,
                bytes,
                torn,
            } => {
                let name = file
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .escape_default()
                    .to_string();
                write!(
                    f,
                    "{{\"damaged\":\"{name}\",\"offset\":{offset},\"bytes\":{bytes},\"torn\":{torn}}}"
                )
            }
        }
    }
}

/// Labels are the claimer's: what could colour or reorder a terminal is written as JSON escapes.
fn ascii(f: &mut fmt::Formatter<'_>, json: &str) -> fmt::Result {
    for c in json.chars() {
        if c == ' ' || c.is_ascii_graphic() {
            write!(f, "{c}")?;
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(f, "\\u{unit:04x}")?;
            }
        }
    }
    Ok(())
}

/// The lines of a log, oldest first; a segment is read when its turn comes. Ends after an error.
#[derive(Debug)]
pub struct Cat {
    segments: VecDeque<Segment>,
    lines: VecDeque<Line>,
    filter: Filter,
}

/// Shows what the segments of a state directory hold, beside a daemon that writes to it or not. Records that were
/// folded long ago are not there any more.
///
/// # Errors
/// [`OpenError::Io`] when there is no journal; each item likewise for its segment, or [`OpenError::Newer`].
pub fn cat(state_dir: &Path, filter: Filter) -> Result<Cat, OpenError> {
    let (dir, _store) = dirs(state_dir);
    let segments = list(&dir)
        .map_err(|source| OpenError::Io {
            what: "list",
            path: dir,
            source,
        })?
        .into();
    Ok(Cat {
        segments,
        lines: VecDeque::new(),
        filter,
    })
}

impl Iterator for Cat {
    type Item = Result<Line, OpenError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(Ok(line));
            }
            let segment = self.segments.pop_front()?;
            if let Err(error) = self.read(segment) {
                self.segments.clear();
                return Some(Err(error));
            }
        }
    }
}

impl Cat {
    fn read(&mut self, segment: Segment) -> Result<(), OpenError> {
        let bytes = match fs::read(&segment.path) {
            Ok(bytes) => bytes,
            // The daemon folded and deleted it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => {
                return Err(OpenError::Io {
                    what: "read",
                    path: segment.path,
                    source,
                });
            }
        };
        let damaged = |offset: usize, end: usize, torn| Line::Damaged {
            file: segment.path.clone(),
            offset: u64::try_from(offset).unwrap_or(u64::MAX),
            bytes: u64::try_from(end - offset).unwrap_or(u64::MAX),
            torn,
        };
        match read_header(&bytes) {
            Header::Unused => return Ok(()),
            Header::First(_) => {}
            Header::Damaged => {
                self.lines
                    .push_back(damaged(0, HEADER.min(bytes.len()), bytes.len() < HEADER))
            }
            Header::Newer(version) => {
                let what = format!("its format is version {version}");
                return Err(OpenError::Newer {
                    path: segment.path,
                    what,
                });
            }
        }
        let scanned = scan(&bytes, HEADER);
        for found in scanned.found {
            match found {
                Found::Damaged(stretch) => self.lines.push_back(damaged(stretch.start, stretch.end, false)),
                Found::Record { seq, json, .. } => {
                    let json = String::from_utf8_lossy(bytes.get(json).unwrap_or_default()).into_owned();
                    if self.filter.sandbox.is_none_or(|id| is_about(&json, id)) {
                        self.lines.push_back(Line::Record { seq, json });
                    }
                }
            }
        }
        if let Some(torn) = scanned.torn {
            self.lines.push_back(damaged(torn.start, torn.end, true));
        }
        Ok(())
    }
}

/// Whether a record is about that sandbox; its transition may be one that this version does not know.
fn is_about(json: &str, id: SandboxId) -> bool {
    #[derive(Deserialize)]
    struct About {
        sandbox: Option<String>,
    }
    let about = serde_json::from_str::<About>(json).ok();
    about
        .and_then(|about| about.sandbox)
        .is_some_and(|sandbox| sandbox == id.to_string())
}

/// What `journal check` found.
#[derive(Debug)]
pub struct Report {
    /// Segments with records.
    pub segments: usize,
    /// Records that the store does not hold yet.
    pub unfolded: u64,
    /// Number of the last record.
    pub last_seq: u64,
    /// Sandboxes by where they stand.
    pub sandboxes: BTreeMap<RowState, usize>,
    /// Pools made through the API.
    pub pools: usize,
    /// Places that cannot be trusted.
    pub damage: Vec<Damage>,
    /// A last record that was cut.
    pub torn: Option<Torn>,
}

/// Reads a whole state directory as a start would, and leaves it as it is.
///
/// # Errors
/// As [`Journal::open`](super::Journal::open) would say; [`OpenError::Locked`] while a daemon has the directory.
pub fn check(state_dir: &Path) -> Result<Report, OpenError> {
    let _held = lock_state_dir(state_dir)?;
    let (store, found) = read(state_dir)?;
    store.close()?;
    let mut sandboxes = BTreeMap::new();
    for row in found.state.sandboxes.values() {
        *sandboxes.entry(row.state).or_default() += 1;
    }
    Ok(Report {
        segments: found.segments.iter().filter(|segment| !segment.unused).count(),
        unfolded: found.replayed,
        last_seq: found.last_seq,
        sandboxes,
        pools: found.state.pools.len(),
        damage: found.damage,
        torn: found.torn,
    })
}

/// How far the journal knows the files of the audit: by its segments, which can be read beside a daemon, and where they say
/// nothing by its store, which cannot.
///
/// # Errors
/// As [`cat`] and [`check`] would say; [`OpenError::Locked`] where a daemon has what is to be read.
pub fn heads(state_dir: &Path) -> Result<Heads, OpenError> {
    let mut heads = Heads::default();
    for line in cat(state_dir, Filter::default())? {
        if let Line::Record { seq, json } = line?
            && let Ok(record) = record::decode(seq, json.as_bytes())
            && let Transition::Audited { audit, usage } = &record.transition
        {
            heads.take(audit.as_ref(), usage.as_ref());
        }
    }
    if heads.audit.is_some() && heads.usage.is_some() {
        return Ok(heads);
    }
    let _held = match lock_state_dir(state_dir).map_err(OpenError::from) {
        Ok(held) => held,
        Err(OpenError::Locked { .. }) if heads != Heads::default() => return Ok(heads),
        Err(error) => return Err(error),
    };
    let (store, found) = read(state_dir)?;
    store.close()?;
    Ok(found.state.heads)
}
