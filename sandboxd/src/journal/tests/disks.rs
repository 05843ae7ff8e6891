//! File systems that refuse: full, read-only, in the way.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use super::{
    options,
    samples::{self, id},
};
use crate::journal::{AppendError, Health, Journal, OpenError, Options, RowState, Transition};

/// A small file system of its own; needs root, as every test of a mount does.
struct Small(tempfile::TempDir);

impl Small {
    fn new(kib: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let size = std::ffi::CString::new(format!("size={kib}k")).unwrap();
        mount(
            "none",
            dir.path(),
            "tmpfs",
            MountFlags::empty(),
            Some(size.as_c_str()),
        )
        .expect("root");
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all the room that is left, until the file is removed.
    fn fill(&self) -> PathBuf {
        let path = self.path().join("ballast");
        let mut file = fs::File::create(&path).unwrap();
        let page = [7_u8; 4096];
        while std::io::Write::write(&mut file, &page).is_ok() {}
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        unmount(self.path(), UnmountFlags::DETACH).unwrap();
    }
}

#[tokio::test]
async fn a_full_disk_refuses_changes_and_takes_endings() {
    let disk = Small::new(32768);
    let options = Options {
        segment_bytes: 64 * 1024,
        ..options(disk.path())
    };
    let (journal, _opened) = Journal::open(options.clone()).unwrap();
    drop(journal.append(Some(id(1)), &samples::making(1)).unwrap());
    journal.folded().await.unwrap();
    let ballast = disk.fill();
    let mut health = journal.health();
    let mut taken = 0_u16;
    let refused = loop {
        match journal.append(Some(id(taken + 2)), &samples::making(taken + 2)) {
            Ok(written) => drop(written),
            Err(error) => break error,
        }
        taken += 1;
    };
    assert_eq!(refused, AppendError::Full);
    health.wait_for(|now| *now == Health::Full).await.unwrap();
    // The first refusal came with the segment at hand not used up: endings have that.
    let ended = (2..taken)
        .take_while(|n| journal.append(Some(id(*n)), &samples::ending()).is_ok())
        .count();
    assert_eq!(
        journal.append(Some(id(1)), &samples::warmed()).unwrap_err(),
        AppendError::Full
    );
    fs::remove_file(ballast).unwrap();
    drop(journal.append(Some(id(1)), &samples::warmed()).unwrap());
    assert_eq!(*health.borrow(), Health::Ok);
    drop(journal);

    let (journal, opened) = Journal::open(options.clone()).unwrap();
    let rows = &opened.state.sandboxes;
    assert_eq!(
        rows.len(),
        usize::from(taken) + 1,
        "what was refused is not there"
    );
    assert_eq!(rows[&id(1)].state, RowState::Warm);
    assert_eq!(
        rows.values().filter(|row| row.state == RowState::Ending).count(),
        ended
    );
    journal.close().await.unwrap();

    // A start on a full disk brings back what there is and says that it is full.
    for file in fs::read_dir(disk.path().join("journal")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some() {
            fs::remove_file(path).unwrap();
        }
    }
    let ballast = disk.fill();
    let (journal, opened) = Journal::open(options).unwrap();
    assert_eq!(opened.state.sandboxes.len(), usize::from(taken) + 1);
    assert_eq!(*journal.health().borrow(), Health::Full);
    assert_eq!(
        journal.append(Some(id(1)), &Transition::Gone).unwrap_err(),
        AppendError::Full
    );
    fs::remove_file(ballast).unwrap();
    drop(journal.append(Some(id(1)), &Transition::Gone).unwrap());
    journal.close().await.unwrap();
}

#[test]
fn a_read_only_disk_is_named() {
    let disk = Small::new(4096);
    fs::create_dir(disk.path().join("journal")).unwrap();
    mount_remount(disk.path(), MountFlags::RDONLY, "").unwrap();
    let refused = Journal::open(options(disk.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Io { .. }), "{refused}");
}

#[test]
fn what_is_no_file_is_not_taken_for_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("journal/000000000001.seg")).unwrap();
    let refused = Journal::open(options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Io { what: "read", .. }), "{refused}");

    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path()).unwrap();
    fs::File::create(dir.path().join("journal")).unwrap();
    let refused = Journal::open(options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Io { what: "make", .. }), "{refused}");
}

#[tokio::test]
async fn a_store_that_cannot_be_read_is_not_taken_for_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _opened) = Journal::open(options(dir.path())).unwrap();
    drop(journal.append(Some(id(1)), &samples::making(1)).unwrap());
    journal.close().await.unwrap();
    let conf = dir.path().join("store/conf");
    let mut bytes = fs::read(&conf).unwrap();
    bytes[..12].copy_from_slice(b"segment_syze");
    std::io::Write::write_all(&mut fs::File::create(&conf).unwrap(), &bytes).unwrap();
    let refused = Journal::open(options(dir.path())).unwrap_err();
    assert!(matches!(refused, OpenError::Damaged { .. }), "{refused}");
}
