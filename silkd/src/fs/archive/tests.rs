//! The reader of archives against the one of the crate `tar`, and against itself.

use std::io::Read as _;

use bytes::Bytes;
use proptest::prelude::*;
use tar::{Builder, EntryType, Header};

use super::reader::{BadArchive, Event, Kind, Reader};

/// A file, a directory or a link.
#[derive(Debug, Clone)]
struct Made {
    name: String,
    what: EntryType,
    data: Vec<u8>,
    pax: bool,
}

fn made() -> impl Strategy<Value = Made> {
    let what = prop_oneof![
        Just(EntryType::Regular),
        Just(EntryType::Directory),
        Just(EntryType::Symlink),
    ];
    // Short, and longer than a header has room for.
    let name = prop_oneof!["[a-z.]{1,20}", "[a-z/]{90,300}"];
    let data = proptest::collection::vec(any::<u8>(), 0..1500);
    (name, what, data, any::<bool>()).prop_map(|(name, what, data, pax)| Made {
        name: format!("x{name}"),
        data: if what == EntryType::Regular {
            data
        } else {
            Vec::new()
        },
        what,
        pax,
    })
}

fn build(all: &[Made]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for made in all {
        if made.pax {
            let records = [("path", made.name.as_bytes()), ("comment", b"any")];
            builder.append_pax_extensions(records).unwrap();
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(made.what);
        header.set_size(made.data.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        if made.what == EntryType::Symlink {
            builder.append_link(&mut header, &made.name, "to").unwrap();
        } else {
            builder.append_data(&mut header, &made.name, &*made.data).unwrap();
        }
    }
    builder.into_inner().unwrap()
}

/// Name, kind, content.
type Told = (Vec<u8>, Kind, Vec<u8>);

/// Names, kinds and contents, as our reader tells them when the bytes come in pieces.
fn ours(archive: &[u8], cut: usize) -> Result<Vec<Told>, BadArchive> {
    let mut reader = Reader::default();
    let mut told: Vec<Told> = Vec::new();
    for part in archive.chunks(cut) {
        let mut part = Bytes::copy_from_slice(part);
        while let Some(event) = reader.next(&mut part)? {
            match event {
                Event::Entry(entry) => told.push((entry.path, entry.kind, Vec::new())),
                Event::Data(offset, data) => {
                    let content = &mut told.last_mut().unwrap().2;
                    assert_eq!(content.len() as u64, offset);
                    content.extend_from_slice(&data);
                }
                Event::Over => {}
            }
        }
        assert!(part.is_empty());
    }
    reader.finish()?;
    Ok(told)
}

proptest! {
    #[test]
    fn archives_are_read_as_tar_reads_them(all in proptest::collection::vec(made(), 0..6), cut in 1..2000_usize) {
        let archive = build(&all);
        let mut theirs = Vec::new();
        for entry in tar::Archive::new(&*archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            theirs.push((entry.path_bytes().into_owned(), content));
        }
        let told = ours(&archive, cut).unwrap();
        prop_assert_eq!(told.len(), all.len());
        for ((told, theirs), made) in told.iter().zip(&theirs).zip(&all) {
            prop_assert_eq!((&told.0, &told.2), (&theirs.0, &theirs.1));
            let kind = if made.what == EntryType::Symlink {
                Kind::Link
            } else if made.what == EntryType::Regular && !(told.0.ends_with(b"/") && told.2.is_empty()) {
                Kind::File
            } else {
                Kind::Directory
            };
            prop_assert_eq!(told.1, kind);
        }
        // Cut off anywhere, it is none.
        let end = archive.len() - 1024;
        let short = archive.get(..cut.min(end)).unwrap();
        prop_assert!(ours(short, 512).is_err());
    }

    /// Whatever comes is read or refused, and the cuts make no difference.
    #[test]
    fn rubbish_is_refused_or_read(
        all in proptest::collection::vec(made(), 1..4),
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
        cut in 1..700_usize,
        sums in any::<bool>(),
    ) {
        let mut archive = build(&all);
        for (at, byte) in flips {
            let at = at.index(archive.len());
            archive[at] = byte;
        }
        if sums {
            // With sums that are right again, so that what is behind them is looked at.
            for block in archive.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
                block[148..156].fill(b' ');
                let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
        }
        prop_assert_eq!(ours(&archive, cut), ours(&archive, archive.len()));
    }
}
