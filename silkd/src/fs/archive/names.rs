//! Where an entry of an archive may go. Pure.

use sandbox_protocol::limits::PATH;

/// A name that leads out, or nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// Begins with a slash.
    #[error("its name is absolute")]
    Absolute,
    /// Holds `..`.
    #[error("its name holds `..`")]
    Up,
    /// Holds a NUL.
    #[error("its name holds a NUL")]
    Nul,
    /// Longer than a path may be.
    #[error("its name is too long")]
    Long,
}

/// The parts of a name without its first `strip`, joined; `None` when nothing is left.
///
/// # Errors
/// [`BadName`].
pub fn place(name: &[u8], strip: u32) -> Result<Option<Vec<u8>>, BadName> {
    if name.starts_with(b"/") {
        return Err(BadName::Absolute);
    }
    if name.contains(&0) {
        return Err(BadName::Nul);
    }
    if name.len() > PATH {
        return Err(BadName::Long);
    }
    let parts = name.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(BadName::Up);
    }
    let strip = usize::try_from(strip).unwrap_or(usize::MAX);
    let kept = parts.get(strip..).filter(|kept| !kept.is_empty());
    Ok(kept.map(|kept| kept.join(&b'/')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_lead_down_or_nowhere() {
        assert_eq!(place(b"./a//b/", 0), Ok(Some(b"a/b".to_vec())));
        assert_eq!(place(b"a/b/c", 2), Ok(Some(b"c".to_vec())));
        assert_eq!(place(b"a/b", 2), Ok(None));
        assert_eq!(place(b"./", 0), Ok(None));
        assert_eq!(place(b"..a/b..", 0), Ok(Some(b"..a/b..".to_vec())));
        assert_eq!(place(b"/a", 1), Err(BadName::Absolute));
        assert_eq!(place(b"a/../b", 0), Err(BadName::Up));
        assert_eq!(place(b"a/b/../c", 1), Err(BadName::Up));
        assert_eq!(place(b"..", 0), Err(BadName::Up));
        assert_eq!(place(b"a\0b", 0), Err(BadName::Nul));
        assert_eq!(place(&[b'a'; PATH + 1], 0), Err(BadName::Long));
    }

    proptest! {
        /// Whatever a name says, what comes of it is a chain of plain names that leads down.
        #[test]
        fn tar_entry_names_lead_down(name in "[/.a\\x00\\PC]{0,24}", strip in 0..4_u32) {
            if let Ok(Some(placed)) = place(name.as_bytes(), strip) {
                for part in placed.split(|byte| *byte == b'/') {
                    prop_assert!(!part.is_empty() && part != b"." && part != b".." && !part.contains(&0));
                }
                prop_assert!(placed.len() <= name.len());
            }
        }
    }
}
