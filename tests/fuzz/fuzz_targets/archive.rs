//! What a client sends as an archive: read to the end or refused, whatever the bytes and wherever they are cut, and what
//! comes of a name leads down.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use silkd::fs::archive::{
    names::place,
    reader::{Event, Reader},
};

/// Everything that the archive says, up to its fault.
fn read(data: &[u8], cut: usize) -> (Vec<Event>, bool) {
    let mut reader = Reader::default();
    let mut events: Vec<Event> = Vec::new();
    for part in data.chunks(cut) {
        let mut part = Bytes::copy_from_slice(part);
        loop {
            match reader.next(&mut part) {
                Ok(None) => break,
                Ok(Some(Event::Data(offset, data))) => join(&mut events, offset, data),
                Ok(Some(event)) => events.push(event),
                Err(_refused) => return (events, false),
            }
        }
        assert!(part.is_empty());
    }
    (events, reader.finish().is_ok())
}

/// Bytes that follow each other are told as one, so that the cuts do not show.
fn join(events: &mut Vec<Event>, offset: u64, data: Bytes) {
    if let Some(Event::Data(at, last)) = events.last_mut()
        && *at + last.len() as u64 == offset
    {
        *last = [last.as_ref(), data.as_ref()].concat().into();
        return;
    }
    events.push(Event::Data(offset, data));
}

fuzz_target!(|input: (u16, &[u8])| {
    let (cut, data) = input;
    let whole = read(data, data.len().max(1));
    assert_eq!(read(data, usize::from(cut).max(1)), whole);
    for event in &whole.0 {
        if let Event::Entry(entry) = event
            && let Ok(Some(path)) = place(&entry.path, 0)
        {
            let down = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
            assert!(path.split(|byte| *byte == b'/').all(down));
        }
    }
});
