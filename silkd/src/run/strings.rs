//! Byte strings for the kernel: NUL-ended, end to end in one buffer. Pure.

use std::ffi::CStr;

/// A string that holds a NUL, which no argument of a program can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a NUL in it")]
pub(super) struct HasNul;

/// A list of byte strings without NUL.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Strings(Vec<u8>);

impl Strings {
    /// Adds one string, put together from `parts`.
    ///
    /// # Errors
    /// [`HasNul`]; the list is as it was then.
    pub(super) fn push(&mut self, parts: &[&[u8]]) -> Result<(), HasNul> {
        if parts.iter().any(|part| part.contains(&0)) {
            return Err(HasNul);
        }
        parts.iter().for_each(|part| self.0.extend_from_slice(part));
        self.0.push(0);
        Ok(())
    }

    /// Bytes that all take, their ends included.
    pub(super) const fn size(&self) -> usize {
        self.0.len()
    }

    /// As the kernel takes them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &CStr> {
        // Each piece that ends with a NUL has one there and nowhere else.
        self.0
            .split_inclusive(|byte| *byte == 0)
            .filter_map(|piece| CStr::from_bytes_with_nul(piece).ok())
    }

    /// All of them.
    pub(super) fn list(&self) -> Vec<&CStr> {
        self.iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_goes_in_comes_out(texts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..20)) {
            let mut strings = Strings::default();
            let mut taken = Vec::new();
            for text in &texts {
                let (a, b) = text.split_at(text.len() / 2);
                let before = strings.size();
                match strings.push(&[a, b]) {
                    Ok(()) => taken.push(text.as_slice()),
                    Err(HasNul) => {
                        prop_assert!(text.contains(&0));
                        prop_assert_eq!(before, strings.size());
                    }
                }
            }
            let out: Vec<&[u8]> = strings.iter().map(CStr::to_bytes).collect();
            prop_assert_eq!(out, taken);
        }
    }
}
