//! A guest's `/etc/passwd` and `/etc/group`, and a user that a client asks for: anything. Who is found is found again by
//! number, and is in bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use silkd::run::users::find;

fuzz_target!(|input: (&[u8], &[u8], &[u8])| {
    let (spec, passwd, group) = input;
    let Ok(user) = find(spec, passwd, group) else { return };
    let ids = user.ids.expect("somebody was asked for");
    // The kernel takes these for "leave it as it is".
    assert!(ids.uid != u32::MAX && ids.gid != u32::MAX);
    assert!(ids.groups.contains(&ids.gid) && ids.groups.is_sorted());
    assert!(!ids.groups.contains(&u32::MAX));
    assert!(!user.name.is_empty() && !user.name.contains(&b':') && !user.name.contains(&b'\n'));
    let own = find(ids.uid.to_string().as_bytes(), b"", b"").expect("a number needs no line");
    assert_eq!(own.ids.map(|ids| (ids.uid, ids.gid)), Some((ids.uid, ids.uid)));
});
