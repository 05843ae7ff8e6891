//! Pax records (`LENGTH KEY=VALUE` and a line's end), read as they come: what no entry needs is passed over and never
//! held, so that an archive cannot make the reader keep what it likes.

use sandbox_protocol::limits::PATH;

/// Digits of a length, as 1 MiB has them and more.
const DIGITS: usize = 8;
/// Longest key that is looked at; the ones that count are shorter.
const KEY: usize = 32;

/// The records that count.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Pax {
    /// Of the entry.
    pub path: Option<Vec<u8>>,
    /// Where the link leads.
    pub link: Option<Vec<u8>>,
    /// In bytes.
    pub size: Option<u64>,
    /// Owner.
    pub uid: Option<u64>,
    /// Group.
    pub gid: Option<u64>,
    /// Seconds since 1970.
    pub mtime: Option<i64>,
    /// One of the forms of sparse files that nobody here reads.
    pub sparse: bool,
}

/// Reads records. Sans I/O.
#[derive(Debug, Default)]
pub struct PaxReader {
    at: At,
    pax: Pax,
}

#[derive(Debug)]
enum At {
    /// In the digits.
    Length { digits: usize, length: usize },
    /// In the key; `left` bytes of the record are to come.
    Key { key: Vec<u8>, left: usize },
    /// In the value; its last byte is the line's end.
    Value { key: Key, value: Vec<u8>, left: usize },
}

impl Default for At {
    fn default() -> Self {
        Self::Length { digits: 0, length: 0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Path,
    Link,
    Size,
    Uid,
    Gid,
    Mtime,
    Sparse,
    Other,
}

/// What is no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its extension header makes no sense")]
pub struct BadPax;

impl PaxReader {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// [`BadPax`].
    pub fn feed(&mut self, mut data: &[u8]) -> Result<(), BadPax> {
        while let Some((first, rest)) = data.split_first() {
            match &mut self.at {
                At::Length { digits, length } => {
                    data = rest;
                    match first {
                        b'0'..=b'9' if *digits < DIGITS => {
                            *digits += 1;
                            *length = *length * 10 + usize::from(first - b'0');
                        }
                        // Some end the last record with zeros.
                        0 if *digits == 0 => {}
                        b' ' if *digits > 0 => {
                            let left = length.checked_sub(*digits + 1).filter(|left| *left > 0);
                            self.at = At::Key {
                                key: Vec::new(),
                                left: left.ok_or(BadPax)?,
                            };
                        }
                        _ => return Err(BadPax),
                    }
                }
                At::Key { key, left } => {
                    data = rest;
                    *left -= 1;
                    if *left == 0 {
                        return Err(BadPax);
                    }
                    if *first == b'=' {
                        self.at = At::Value {
                            key: meaning(key),
                            value: Vec::new(),
                            left: *left,
                        };
                    } else if key.len() < KEY {
                        key.push(*first);
                    }
                }
                At::Value { key, value, left } => {
                    let part = data
                        .split_at_checked((*left).min(data.len()))
                        .unwrap_or((data, &[]));
                    data = part.1;
                    *left -= part.0.len();
                    if *key != Key::Other {
                        value.extend_from_slice(part.0);
                        if value.len() > PATH + 1 {
                            return Err(BadPax);
                        }
                    }
                    if *left == 0 {
                        if part.0.last() != Some(&b'\n') {
                            return Err(BadPax);
                        }
                        value.pop();
                        let (key, value) = (*key, std::mem::take(value));
                        self.at = At::default();
                        self.keep(key, value)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// All has come.
    ///
    /// # Errors
    /// [`BadPax`] when it ends within a record.
    pub fn finish(self) -> Result<Pax, BadPax> {
        match self.at {
            At::Length { digits: 0, .. } => Ok(self.pax),
            At::Length { .. } | At::Key { .. } | At::Value { .. } => Err(BadPax),
        }
    }

    fn keep(&mut self, key: Key, value: Vec<u8>) -> Result<(), BadPax> {
        match key {
            Key::Path => self.pax.path = Some(value),
            Key::Link => self.pax.link = Some(value),
            Key::Size => self.pax.size = Some(number(&value)?),
            Key::Uid => self.pax.uid = Some(number(&value)?),
            Key::Gid => self.pax.gid = Some(number(&value)?),
            Key::Mtime => self.pax.mtime = Some(seconds(&value)?),
            Key::Sparse => self.pax.sparse = true,
            Key::Other => {}
        }
        Ok(())
    }
}

fn meaning(key: &[u8]) -> Key {
    match key {
        b"path" => Key::Path,
        b"linkpath" => Key::Link,
        b"size" => Key::Size,
        b"uid" => Key::Uid,
        b"gid" => Key::Gid,
        b"mtime" => Key::Mtime,
        key if key.starts_with(b"GNU.sparse.") => Key::Sparse,
        _ => Key::Other,
    }
}

fn number(value: &[u8]) -> Result<u64, BadPax> {
    let text = std::str::from_utf8(value).map_err(|_text| BadPax)?;
    text.parse().map_err(|_number| BadPax)
}

/// Of a time with a fraction the whole seconds.
fn seconds(value: &[u8]) -> Result<i64, BadPax> {
    let whole = value.split(|byte| *byte == b'.').next().unwrap_or_default();
    let text = std::str::from_utf8(whole).map_err(|_text| BadPax)?;
    text.parse().map_err(|_number| BadPax)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(data: &[u8], cut: usize) -> Result<Pax, BadPax> {
        let mut reader = PaxReader::default();
        for part in data.chunks(cut.max(1)) {
            reader.feed(part)?;
        }
        reader.finish()
    }

    fn record(key: &str, value: &[u8]) -> Vec<u8> {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length.to_string().len() + rest != length {
            length += 1;
        }
        let mut out = format!("{length} {key}=").into_bytes();
        out.extend_from_slice(value);
        out.push(b'\n');
        out
    }

    #[test]
    fn what_counts_is_kept_and_the_rest_passed_over() {
        let mut data = record("path", b"a\nb=c");
        data.extend(record("comment", &vec![b'x'; 100_000]));
        data.extend(record("mtime", b"-5.25"));
        data.extend(record("size", b"77"));
        let pax = read(&data, 1000).unwrap();
        assert_eq!(pax.path.as_deref(), Some(&b"a\nb=c"[..]));
        assert_eq!((pax.mtime, pax.size, pax.sparse), (Some(-5), Some(77), false));
        assert!(read(&record("GNU.sparse.map", b"0,1"), 7).unwrap().sparse);
        for bad in [
            &b"5 a=b"[..],
            b"x",
            b"3 a",
            b"99999999999 a=b\n",
            b"6 size=\n",
            b"4 a=\nb",
        ] {
            assert_eq!(read(bad, 100), Err(BadPax), "{bad:?}");
        }
        assert_eq!(read(&record("path", &vec![b'x'; PATH + 2]), 100), Err(BadPax));
    }

    proptest! {
        /// The same as the crate `tar` reads, wherever the bytes are cut.
        #[test]
        fn records_are_read_as_tar_reads_them(
            records in proptest::collection::vec(("(path|linkpath|x.y)", "[^\n\0]{0,40}"), 0..8),
            cut in 1..80_usize,
        ) {
            let data: Vec<u8> = records.iter().flat_map(|(key, value)| record(key, value.as_bytes())).collect();
            let pax = read(&data, cut).unwrap();
            let theirs: Vec<_> = tar::PaxExtensions::new(&data).map(Result::unwrap).collect();
            for (key, ours) in [("path", &pax.path), ("linkpath", &pax.link)] {
                let last = theirs.iter().rev().find(|record| record.key() == Ok(key));
                prop_assert_eq!(ours.as_deref(), last.map(tar::PaxExtension::value_bytes));
            }
        }

        #[test]
        fn rubbish_is_refused_or_read_but_never_more(data in proptest::collection::vec(any::<u8>(), 0..200), cut in 1..50_usize) {
            prop_assert_eq!(read(&data, cut), read(&data, 1));
        }
    }
}
