use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

use super::*;

fn build(dir: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    disk(dir, "vmlinuz", b"kernel");
    disk(dir, "initrd", b"initrd");
    let mut json = serde_json::json!({
        "format": 1, "name": "busybox",
        "kernel": {"file": "vmlinuz", "sha256": Digest::of(b"kernel").to_string(), "version": "6.12"},
        "initrd": {"file": "initrd", "sha256": Digest::of(b"initrd").to_string()},
        "rootfs": null, "cmdline": "console=ttyS0 quiet", "proto_min": 1, "proto_max": 1,
        "silkd_version": "0.1.0", "built_at": "2026-01-01T00:00:00Z", "new_key": [1, 2],
    });
    edit(&mut json);
    disk(dir, "manifest.json", json.to_string().as_bytes());
}

fn disk(dir: &Path, name: &str, bytes: &[u8]) {
    crate::disk::write_atomic(&dir.join(name), bytes, 0o644).unwrap();
}

#[test]
fn what_was_checked_is_what_is_handed_out() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), |_| {});
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().name, "busybox");
    // The name may point elsewhere by now; the descriptor does not.
    std::fs::remove_file(dir.path().join("vmlinuz")).unwrap();
    disk(dir.path(), "vmlinuz", b"forged");
    let kernel = File::from(image.kernel().unwrap().try_clone_to_owned().unwrap());
    let mut bytes = [0; 6];
    kernel.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"kernel");
}

#[test]
fn damage_is_told_by_file() {
    for (file, content) in [
        ("initrd", Some(&b"other"[..])),
        ("vmlinuz", None),
        ("manifest.json", Some(&b"{"[..])),
    ] {
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), |_| {});
        match content {
            Some(bytes) => disk(dir.path(), file, bytes),
            None => std::fs::remove_file(dir.path().join(file)).unwrap(),
        }
        match Image::open(dir.path()) {
            Err(ImageError::Damaged { file: told, .. }) => assert_eq!(told, file),
            other => panic!("{file}: {other:?}"),
        }
    }
}

#[test]
fn a_manifest_that_points_out_of_its_directory_or_contradicts_itself_is_refused() {
    let edits: [fn(&mut serde_json::Value); 6] = [
        |json| json["kernel"]["file"] = "../vmlinuz".into(),
        |json| json["initrd"]["file"] = "".into(),
        |json| json["format"] = 2.into(),
        |json| json["proto_min"] = 2.into(),
        |json| json["cmdline"] = "a\nb".into(),
        |json| json["rootfs"] = serde_json::json!({"file": "r", "sha256": "00", "serial": "r"}),
    ];
    for edit in edits {
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), edit);
        assert!(matches!(Image::open(dir.path()), Err(ImageError::Damaged { .. })));
    }
}

#[test]
fn a_manifest_of_any_length_is_read_in_bounds() {
    let dir = tempfile::tempdir().unwrap();
    disk(dir.path(), "manifest.json", &vec![b' '; 70_000]);
    assert!(matches!(Image::open(dir.path()), Err(ImageError::Damaged { .. })));
}

#[test]
fn the_catalog_finds_by_name_or_path_and_hashes_once() {
    let state = tempfile::tempdir().unwrap();
    let dir = state.path().join("images/busybox");
    std::fs::create_dir_all(&dir).unwrap();
    build(&dir, |_| {});
    let catalog = Catalog::new(state.path());
    let image = catalog.find("busybox").unwrap();
    // Damaged behind an unchanged manifest: the checked descriptors are still those of the first look.
    disk(&dir, "vmlinuz", b"forged");
    assert_eq!(catalog.find("busybox").unwrap().digest(), image.digest());
    build(&dir, |json| json["built_at"] = "later".into());
    assert_ne!(
        catalog.find(dir.to_str().unwrap()).unwrap().digest(),
        image.digest()
    );
    for missing in ["debian", "../busybox", "", "/nowhere"] {
        assert!(
            matches!(catalog.find(missing), Err(ImageError::NotFound { .. })),
            "{missing}"
        );
    }
}

#[test]
fn digests_have_one_spelling() {
    let text = Digest::of(b"").to_string();
    assert_eq!(
        text,
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    assert_eq!(text.parse(), Ok(Digest::of(b"")));
    for bad in ["", "00", &text.to_uppercase(), &text.replacen("e", "", 1)] {
        assert_eq!(bad.parse::<Digest>(), Err(DigestError));
    }
}

#[tokio::test]
async fn an_image_is_opened_once_however_many_ask_and_closed_when_nothing_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("images").join("busybox");
    std::fs::create_dir_all(&home).unwrap();
    build(&home, |_| {});
    let catalog = Catalog::new(dir.path());
    // The descriptor tells one opening from another, for as long as both are open.
    let file = |image: &Image| std::os::fd::AsRawFd::as_raw_fd(&image.kernel().unwrap());
    let asking: Vec<_> = (0..8)
        .map(|_| {
            let catalog = catalog.clone();
            crate::tasks::blocking("find", move || catalog.find("busybox").unwrap())
        })
        .collect();
    let mut images = Vec::new();
    for asked in asking {
        images.push(asked.await.unwrap());
    }
    assert!(images.iter().all(|image| file(image) == file(&images[0])));
    catalog.keep_only(["../x", "busybox"].into_iter());
    assert_eq!(file(&catalog.find("busybox").unwrap()), file(&images[0]));
    catalog.keep_only(std::iter::empty());
    assert_ne!(file(&catalog.find("busybox").unwrap()), file(&images[0]));
}
