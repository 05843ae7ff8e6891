//! How long files are kept: which of them have outlived it. Pure.

use std::path::PathBuf;

use crate::policy::Keep;

/// A file, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) path: PathBuf,
    /// Its first number.
    pub(super) first: u64,
    /// Seconds since 1970.
    pub(super) begun: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// Files that are to go, and the numbers of their lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outlived {
    pub(super) files: Vec<PathBuf>,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// Which of these files, in their order, have outlived what is kept at `now` (seconds since 1970). Only lines up to `synced`
/// may go: what lies behind may be nowhere else yet. Files that do not follow one another are nobody's to judge: none goes.
pub(super) fn outlived(files: &[Stored], keep: Keep, now: u64, synced: u64) -> Option<Outlived> {
    let follow = |(one, next): (&Stored, &Stored)| one.first < next.first && one.begun <= next.begun;
    if !files.iter().zip(files.iter().skip(1)).all(follow) {
        return None;
    }
    let mut left: u64 = files.iter().map(|file| file.len).fold(0, u64::saturating_add);
    let mut gone: Option<Outlived> = None;
    for (file, next) in files.iter().zip(files.iter().skip(1)) {
        // The next begins behind its last line.
        let is_old = now.saturating_sub(next.begun) >= keep.time.as_secs();
        let to = next.first.saturating_sub(1);
        if !(is_old || left > keep.size) || to > synced {
            break;
        }
        left = left.saturating_sub(file.len);
        let gone = gone.get_or_insert_with(|| Outlived {
            files: Vec::new(),
            from: file.first,
            to,
        });
        gone.files.push(file.path.clone());
        gone.to = to;
    }
    gone
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DAY: u64 = 24 * 3600;
    const NOW: u64 = 1_000 * DAY;

    /// Files of ten lines and a hundred bytes, begun so many days ago.
    fn files(ages: &[u64]) -> Vec<Stored> {
        let file = |(at, age): (usize, &u64)| Stored {
            path: format!("{at}").into(),
            first: 10 * at as u64 + 1,
            begun: NOW - age * DAY,
            len: 100,
        };
        ages.iter().enumerate().map(file).collect()
    }

    fn gone(files: &[Stored], days: u64, size: u64, synced: u64) -> Option<(usize, u64, u64)> {
        let keep = Keep {
            time: Duration::from_secs(days * DAY),
            size,
        };
        let gone = outlived(files, keep, NOW, synced)?;
        Some((gone.files.len(), gone.from, gone.to))
    }

    #[test]
    fn whole_files_go_from_the_oldest_on_and_never_the_last() {
        let five = files(&[9, 7, 5, 3, 1]);
        let all = u64::MAX;
        // A file is as old as its last line, behind which the next begins.
        assert_eq!(gone(&five, 8, all, 50), None);
        assert_eq!(gone(&five, 7, all, 50), Some((1, 1, 10)));
        assert_eq!(gone(&five, 4, all, 50), Some((2, 1, 20)));
        assert_eq!(gone(&five, 0, all, 50), Some((4, 1, 40)));
        assert_eq!(gone(&five, 99, 500, 50), None);
        assert_eq!(gone(&five, 99, 499, 50), Some((1, 1, 10)));
        assert_eq!(gone(&five, 99, 0, 50), Some((4, 1, 40)));
        assert_eq!(gone(&five, 4, 250, 50), Some((3, 1, 30)));
        assert_eq!(gone(&files(&[9]), 0, 0, 50), None);
        assert_eq!(gone(&[], 0, 0, 50), None);
    }

    #[test]
    fn what_is_not_clear_stays() {
        let mut five = files(&[9, 7, 5, 3, 1]);
        // Lines that the disk may not have.
        assert_eq!(gone(&five, 0, 0, 29), Some((2, 1, 20)));
        assert_eq!(gone(&five, 0, 0, 9), None);
        // A clock that went back.
        assert_eq!(outlived(&five, Keep::ALL, 0, 50), None);
        // Files that do not follow one another.
        five.swap(1, 2);
        assert_eq!(gone(&five, 0, 0, 50), None);
    }
}
