//! Text across pieces: a character cut in two by a chunk is still one character.

/// Turns pieces of bytes into text; what is not UTF-8 becomes U+FFFD, as in `String::from_utf8_lossy` of the whole.
#[derive(Debug, Clone, Default)]
pub struct TextDecoder {
    /// The beginning of a character, at most 3 bytes.
    held: Vec<u8>,
}

impl TextDecoder {
    /// Starts anew.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The text of a piece; the beginning of a character at its end waits for the next.
    pub fn push(&mut self, piece: &[u8]) -> String {
        self.held.extend_from_slice(piece);
        let bytes = std::mem::take(&mut self.held);
        let mut text = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(good) => {
                    text.push_str(good);
                    return text;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    // `valid_up_to` is what from_utf8 found good.
                    text.push_str(&String::from_utf8_lossy(good));
                    let Some(length) = error.error_len() else {
                        self.held = bad.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = bad.get(length..).unwrap_or_default();
                }
            }
        }
    }

    /// The text of what was left incomplete: nothing, or one U+FFFD.
    #[must_use]
    pub fn finish(self) -> &'static str {
        if self.held.is_empty() { "" } else { "\u{fffd}" }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(bytes: &[u8], size: usize) {
        let mut decoder = TextDecoder::new();
        let mut text: String = bytes.chunks(size).map(|piece| decoder.push(piece)).collect();
        assert!(decoder.held.len() <= 3);
        text.push_str(decoder.finish());
        assert_eq!(text, String::from_utf8_lossy(bytes));
    }

    proptest! {
        #[test]
        fn text_survives_any_cut(text: String, size in 1_usize..9) {
            check(text.as_bytes(), size);
        }

        #[test]
        fn bytes_read_as_the_whole_would(bytes: Vec<u8>, size in 1_usize..9) {
            check(&bytes, size);
        }
    }
}
