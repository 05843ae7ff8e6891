//! Replay: segments to state, with every byte accounted for.
//!
//! Invariant 07: any cut of the log replays; damage costs its sandbox only. A cut end is dropped ([`Torn`]): its record
//! was never answered. Damage before the end is told ([`Damage`]) and its sandbox is to be quarantined: the one that the
//! damaged bytes name, or, where they name none, each that stands unclaimed in the record and might have been claimed.

use std::{
    collections::BTreeSet,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use sandbox_protocol::id::SandboxId;

use super::{
    OpenError, Transition,
    fold::{GONE_MAX, RowState, State, fold},
    record,
    segment::{self, Found, HEADER, Header, is_zero, read_header, scan},
};

/// A place in the log that cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The segment.
    pub file: PathBuf,
    /// Where in it.
    pub offset: u64,
    /// Whose record stood there, as far as the bytes tell.
    pub sandbox: Option<SandboxId>,
    /// What is wrong.
    pub what: String,
    /// Whether something that was recorded may be missing from the state: what is on the host and in no row is then
    /// not to be taken for nobody's.
    pub lost: bool,
}

/// A last record that is not all there. Nobody was answered for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torn {
    /// The segment.
    pub file: PathBuf,
    /// Where the record begins.
    pub offset: u64,
    /// How much of it there is.
    pub bytes: u64,
}

/// A segment's file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Segment {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    /// It is kept for its damage and never deleted by the daemon.
    pub(super) kept: bool,
    /// It was allocated and never used.
    pub(super) unused: bool,
    /// This replay found damage in it.
    pub(super) damaged: bool,
}

/// What replay found.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) state: State,
    pub(super) damage: Vec<Damage>,
    pub(super) torn: Option<Torn>,
    /// Records folded.
    pub(super) replayed: u64,
    /// Number of the last record.
    pub(super) last_seq: u64,
    pub(super) segments: Vec<Segment>,
    /// Sandboxes to quarantine, and why.
    pub(super) suspects: Vec<(SandboxId, String)>,
}

/// The segments of a directory, oldest first.
pub(super) fn list(dir: &Path) -> io::Result<Vec<Segment>> {
    let mut segments = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let number = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .and_then(|stem| stem.parse().ok());
        let kept = match path.extension().and_then(|extension| extension.to_str()) {
            Some("seg") => false,
            Some("damaged") => true,
            Some(_) | None => continue,
        };
        if let Some(number) = number {
            segments.push(Segment {
                number,
                path,
                kept,
                unused: false,
                damaged: false,
            });
        }
    }
    segments.sort();
    Ok(segments)
}

/// Reads the segments after `state`, which holds all records through `applied`.
pub(super) fn replay(dir: &Path, state: State, applied: u64) -> Result<Replay, OpenError> {
    let list = list(dir).map_err(|source| OpenError::Io {
        what: "list",
        path: dir.to_owned(),
        source,
    })?;
    let mut reader = Reader {
        out: Replay {
            state,
            damage: Vec::new(),
            torn: None,
            replayed: 0,
            last_seq: applied,
            segments: Vec::new(),
            suspects: Vec::new(),
        },
        unknown_before: None,
        began: applied > 0,
        told: 0,
        gone: 0,
    };
    for mut segment in list {
        let path = segment.path.clone();
        let bytes = fs::read(&path).map_err(|source| OpenError::Io {
            what: "read",
            path,
            source,
        })?;
        reader.segment(&mut segment, &bytes)?;
        reader.out.segments.push(segment);
    }
    reader.out.last_seq += reader.told;
    reader.suspect_unclaimed();
    Ok(reader.out)
}

#[derive(Debug)]
struct Reader {
    out: Replay,
    /// Records with a lower number than this may have been followed by a lost one of the same sandbox.
    unknown_before: Option<(u64, String)>,
    /// Something came before: a store, or a segment.
    began: bool,
    /// Records that were told as damaged behind the last one: their numbers are used up.
    told: u64,
    /// Sandboxes gone since the state was last pruned.
    gone: usize,
}

/// A stretch that is no record, before the next that is.
type Stretch = Range<usize>;

impl Reader {
    fn segment(&mut self, segment: &mut Segment, bytes: &[u8]) -> Result<(), OpenError> {
        let first = match read_header(bytes) {
            Header::Unused => {
                segment.unused = true;
                return Ok(());
            }
            Header::Newer(found) => {
                let what = format!("its format is version {found}, and this is {}", segment::VERSION);
                return Err(OpenError::Newer {
                    path: segment.path.clone(),
                    what,
                });
            }
            Header::First(first) => Some(first),
            Header::Damaged => None,
        };
        // Whether what was torn before was the end shows by the numbers that follow.
        let torn_before = self.out.torn.take();
        let scanned = scan(bytes, HEADER);
        let before = self.out.damage.len();
        if let Some(first) = first {
            self.follow(segment, first, torn_before)?;
        } else if is_zero(bytes.get(HEADER..).unwrap_or_default()) {
            // Its first write was cut inside the header.
            let len = bytes
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(0, |last| last + 1);
            self.torn(segment, &(0..len));
            return Ok(());
        } else {
            let readable = scanned
                .found
                .iter()
                .any(|one| matches!(one, Found::Record { .. }));
            self.tell(segment, 0, None, "damaged header".to_owned(), !readable);
            if !readable {
                self.suspect_before(u64::MAX, self.why(segment, 0));
            }
        }
        self.began = true;
        self.records(
            segment,
            bytes,
            &scanned.found,
            first.map(|first| first.saturating_sub(1)),
        )?;
        if let Some(torn) = scanned.torn {
            self.torn(segment, &torn);
        }
        segment.damaged = self.out.damage.iter().skip(before).any(|damage| damage.lost);
        if segment.kept && !segment.damaged {
            self.tell(
                segment,
                0,
                None,
                "kept for its damage, found at an earlier start".to_owned(),
                true,
            );
        }
        Ok(())
    }

    /// A segment says that it begins with record `first`.
    fn follow(&mut self, segment: &Segment, first: u64, torn: Option<Torn>) -> Result<(), OpenError> {
        let missing = first.saturating_sub(self.out.last_seq + 1);
        let told = std::mem::take(&mut self.told);
        if missing == 0 {
            return Ok(());
        }
        if missing != told {
            self.missing_between(segment, first, torn)?;
        }
        self.out.last_seq = first - 1;
        Ok(())
    }

    /// Records that are in no segment and not in the store.
    fn missing_between(
        &mut self,
        segment: &Segment,
        first: u64,
        torn: Option<Torn>,
    ) -> Result<(), OpenError> {
        let what = format!(
            "records {} to {} are missing before it",
            self.out.last_seq + 1,
            first - 1
        );
        if !self.began {
            // The store is gone, or another one's: everything that lived could be unknown.
            return Err(OpenError::Damaged {
                path: segment.path.clone(),
                what,
            });
        }
        let (file, offset) = torn.map_or((segment.path.clone(), 0), |torn| (torn.file, torn.offset));
        self.out.damage.push(Damage {
            file,
            offset,
            sandbox: None,
            what: what.clone(),
            lost: true,
        });
        self.suspect_before(first, what);
        Ok(())
    }

    /// Folds what was found, behind record `before` as the header says.
    fn records(
        &mut self,
        segment: &Segment,
        bytes: &[u8],
        found: &[Found],
        before: Option<u64>,
    ) -> Result<(), OpenError> {
        let mut records: Vec<(u64, usize, Range<usize>)> = Vec::new();
        let mut stretches: Vec<Stretch> = Vec::new();
        for one in found {
            match one {
                Found::Record { offset, seq, json } => records.push((*seq, *offset, json.clone())),
                Found::Damaged(stretch) => stretches.push(stretch.clone()),
            }
        }
        if !records.is_sorted_by_key(|(seq, ..)| *seq) {
            self.tell(
                segment,
                HEADER,
                None,
                "records out of order, put in order".to_owned(),
                false,
            );
            records.sort_by_key(|(seq, offset, _json)| (*seq, *offset));
        }
        let mut stretches = stretches.into_iter().peekable();
        let mut last = None;
        for (seq, offset, json) in records {
            let mut ahead = Vec::new();
            while let Some(stretch) = stretches.next_if(|stretch| stretch.start < offset) {
                ahead.push(stretch);
            }
            let json = bytes.get(json).unwrap_or_default();
            if last == Some(seq) {
                self.tell(
                    segment,
                    offset,
                    None,
                    format!("record {seq} a second time, left out"),
                    false,
                );
            }
            last = Some(seq);
            let expected = self.out.last_seq + 1;
            self.damaged(
                segment,
                bytes,
                &ahead,
                (seq.saturating_sub(expected), seq, offset),
            );
            if seq >= expected {
                self.fold(segment, seq, offset, json)?;
            }
        }
        let rest: Vec<Stretch> = stretches.collect();
        if let Some(end) = rest.last().map(|stretch| stretch.end) {
            // Whole to its end and behind every record: one that was recorded, unless the store has its number.
            let number = last.or(before).unwrap_or(self.out.last_seq) + 1;
            self.told = u64::from(number > self.out.last_seq);
            self.damaged(segment, bytes, &rest, (self.told, number + 1, end));
        }
        Ok(())
    }

    fn fold(&mut self, segment: &Segment, seq: u64, offset: usize, json: &[u8]) -> Result<(), OpenError> {
        let record = record::decode(seq, json).map_err(|error| {
            let cause = std::error::Error::source(&error)
                .map(ToString::to_string)
                .unwrap_or_default();
            let what = format!("its record {seq} at byte {offset} is not of this version: {cause}");
            OpenError::Newer {
                path: segment.path.clone(),
                what,
            }
        })?;
        fold(&mut self.out.state, &record);
        if record.transition == Transition::Gone {
            self.gone += 1;
            if self.gone > 2 * GONE_MAX {
                // A long history needs the memory of what it left, not of all that ever was.
                self.gone = 0;
                self.out.state.prune(record.at);
            }
        }
        self.out.last_seq = seq;
        self.out.replayed += 1;
        Ok(())
    }

    /// Damaged stretches in front of a record (`seq` at `offset`), with so many records missing there.
    fn damaged(
        &mut self,
        segment: &Segment,
        bytes: &[u8],
        stretches: &[Stretch],
        (missing, seq, offset): (u64, u64, usize),
    ) {
        let mut named = 0;
        let lost = missing > 0;
        for stretch in stretches {
            let ids = ids_in(bytes.get(stretch.clone()).unwrap_or_default(), &self.out.state);
            let what = format!("{} bytes that are no record", stretch.len());
            if ids.is_empty() {
                self.tell(segment, stretch.start, None, what.clone(), lost);
            }
            for id in ids {
                named += 1;
                self.tell(segment, stretch.start, Some(id), what.clone(), lost);
                if lost {
                    let why = self.why(segment, stretch.start);
                    self.out.suspects.push((id, why));
                }
            }
        }
        if stretches.is_empty() && missing > 0 {
            self.tell(
                segment,
                offset,
                None,
                format!("{missing} records are missing before {seq}"),
                true,
            );
        }
        if missing > named {
            let at = stretches.first().map_or(offset, |stretch| stretch.start);
            self.suspect_before(seq, self.why(segment, at));
        }
    }

    /// A record before that number is lost, and nobody knows whose.
    fn suspect_before(&mut self, seq: u64, why: String) {
        if self
            .unknown_before
            .as_ref()
            .is_none_or(|(known, _why)| *known < seq)
        {
            self.unknown_before = Some((seq, why));
        }
    }

    fn tell(
        &mut self,
        segment: &Segment,
        offset: usize,
        sandbox: Option<SandboxId>,
        what: String,
        lost: bool,
    ) {
        let offset = u64::try_from(offset).unwrap_or(u64::MAX);
        self.out.damage.push(Damage {
            file: segment.path.clone(),
            offset,
            sandbox,
            what,
            lost,
        });
    }

    fn torn(&mut self, segment: &Segment, bytes: &Range<usize>) {
        self.out.torn = Some(Torn {
            file: segment.path.clone(),
            offset: u64::try_from(bytes.start).unwrap_or(u64::MAX),
            bytes: u64::try_from(bytes.len()).unwrap_or(u64::MAX),
        });
    }

    fn why(&self, segment: &Segment, offset: usize) -> String {
        let name = segment.path.file_name().unwrap_or_default();
        format!("its record may be damaged: {} at byte {offset}", name.display())
    }

    /// A lost record may have been the claim of any sandbox that looks unclaimed: such a one is given to nobody.
    fn suspect_unclaimed(&mut self) {
        if let Some((before, why)) = &self.unknown_before {
            let unclaimed =
                self.out.state.sandboxes.values().filter(|row| {
                    row.seq < *before && matches!(row.state, RowState::Making | RowState::Warm)
                });
            self.out
                .suspects
                .extend(unclaimed.map(|row| (row.id, why.clone())));
        }
        let mut seen = BTreeSet::new();
        let rows = &self.out.state.sandboxes;
        self.out.suspects.retain(|(id, _why)| {
            let lives = rows
                .get(id)
                .is_some_and(|row| !matches!(row.state, RowState::Gone | RowState::Quarantined));
            lives && seen.insert(*id)
        });
    }
}

/// Longest stretch in which misspelt ids are looked for: the search takes its length times the sandboxes.
const SPELL_MAX: usize = 64 * 1024;

/// The sandboxes that some damaged bytes name, each once: those in the state, by their id or by one that at most two
/// bytes of damage turned into another; and the one that a record of a beginning names.
fn ids_in(bytes: &[u8], state: &State) -> BTreeSet<SandboxId> {
    let prefix = SandboxId::PREFIX.as_bytes();
    let len = prefix.len() + 32;
    let texts = bytes.windows(len).filter(|text| text.starts_with(prefix));
    let exact = texts.filter_map(|text| std::str::from_utf8(text).ok()?.parse::<SandboxId>().ok());
    let begins = bytes.windows(BEGINS.len()).any(|text| text == BEGINS);
    let mut ids: BTreeSet<SandboxId> = exact
        .filter(|id| begins || state.sandboxes.contains_key(id))
        .collect();
    if ids.is_empty() && bytes.len() <= SPELL_MAX {
        for id in state.sandboxes.keys() {
            let text = id.to_string();
            let near =
                |window: &[u8]| window.iter().zip(text.as_bytes()).filter(|(a, b)| a != b).count() <= 2;
            if bytes.windows(len).any(near) {
                ids.insert(*id);
            }
        }
    }
    ids
}

/// What the record of a sandbox's beginning has in it.
const BEGINS: &[u8] = b"\"do\":{\"making\":";
