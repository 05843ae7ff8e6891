//! Where values come from, and what becomes of them.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use http::HeaderMap;

use super::{source::SecretError, *};
use crate::policy::{HostPattern, Opening, SecretSource};

fn terms(source: SecretSource) -> SecretTerms {
    SecretTerms {
        header: Some(http::header::AUTHORIZATION),
        prefix: "Bearer ".into(),
        source,
        hosts: vec![HostPattern::parse("a.b").unwrap()],
        tenants: Opening::All,
    }
}

fn read(source: SecretSource, var: impl Fn(&str) -> Option<OsString>) -> Result<String, SecretError> {
    let text = source::read(&terms(source), var)?;
    Ok(String::from_utf8(text.to_vec()).unwrap())
}

fn file(path: &Path, bytes: &[u8], mode: u32) -> PathBuf {
    fs::File::create(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    std::io::Write::write_all(&mut fs::File::options().write(true).open(path).unwrap(), bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_owned()
}

#[test]
fn values_are_read_from_three_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    for mode in [0o600, 0o400] {
        for (bytes, value) in [
            (&b"hush"[..], "hush"),
            (b"hush\n", "hush"),
            (b"a b\tc\r\n", "a b\tc"),
        ] {
            let path = file(&path, bytes, mode);
            let text = read(SecretSource::File(path.clone()), |_| None).unwrap();
            assert_eq!(text, format!("Bearer {value}"));
            fs::remove_file(path).unwrap();
        }
    }
    file(&path, b"from systemd", 0o400);
    let folder = folder.path().as_os_str().to_owned();
    let given = move |name: &str| match name {
        "CREDENTIALS_DIRECTORY" => Some(folder.clone()),
        "TOKEN" => Some("from the environment".into()),
        _ => None,
    };
    let read = |source| read(source, &given).unwrap();
    assert_eq!(
        read(SecretSource::Credential("token".into())),
        "Bearer from systemd"
    );
    assert_eq!(
        read(SecretSource::Env("TOKEN".into())),
        "Bearer from the environment"
    );
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[test]
fn places_are_strict() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = |path: PathBuf| read(SecretSource::File(path), |_| None).unwrap_err();
    let good = file(&at("good"), b"hush", 0o600);
    symlink(&good, at("link")).unwrap();
    let twice = file(&at("twice"), b"hush", 0o600);
    fs::hard_link(&twice, at("hard")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from(0o600),
        0,
    )
    .unwrap();
    for name in ["link", "twice", "hard", "pipe", "."] {
        let error = from(at(name));
        assert!(matches!(error, SecretError::NotRegular(_)), "{name}: {error:?}");
    }
    for mode in [0o644, 0o640, 0o660, 0o700, 0o4600, 0o200] {
        let error = from(file(&at("mode"), b"hush", mode));
        assert!(
            matches!(error, SecretError::Mode { .. } | SecretError::Read { .. }),
            "{mode:o}: {error:?}"
        );
    }
    for bytes in [
        &b""[..],
        b"\n",
        b"a\0b",
        b"a\nb",
        &[b'x'; 8 * 1024 + 1],
        &[b'x'; 100_000],
    ] {
        let error = from(file(&at("text"), bytes, 0o600));
        assert!(matches!(error, SecretError::NotText), "{error:?}");
    }
    drop(
        read(
            SecretSource::File(file(&at("long"), &[b'x'; 8 * 1024], 0o600)),
            |_| None,
        )
        .unwrap(),
    );
    assert!(matches!(from(at("nowhere")), SecretError::Read { .. }));
    assert!(matches!(
        source::is_private(&good, 7, 0o600, 8),
        Err(SecretError::Owner { uid: 7, .. })
    ));
    for uid in [0, 8] {
        source::is_private(&good, uid, 0o600, 8).unwrap();
    }
    for source in [
        SecretSource::Env("X".into()),
        SecretSource::Credential("x".into()),
    ] {
        let error = read(source, |_| None).unwrap_err();
        assert!(matches!(error, SecretError::NotSet(_)), "{error:?}");
    }
    // Nothing of a value is told.
    let (secrets, unreadable) = Secrets::read(
        &BTreeMap::from([
            ("bad".parse().unwrap(), terms(SecretSource::Env("BAD".into()))),
            ("good".parse().unwrap(), terms(SecretSource::File(good))),
        ]),
        |_| Some("hush\0".into()),
    );
    let told = format!(
        "{secrets:?} {unreadable:?} {}",
        crate::telemetry::chain(&unreadable[0])
    );
    assert!(
        told.contains("is_there: false") && told.contains("is_there: true"),
        "{told}"
    );
    assert!(!told.contains("hush"), "{told}");
}

#[test]
fn inv_13_a_value_has_one_place_in_memory() {
    let storage = source::read(&terms(SecretSource::Env("S".into())), |_| Some("hush".into())).unwrap();
    let place = storage.as_ptr();
    let value = header_value(Bytes::from_owner(storage)).unwrap();
    assert_eq!(value.as_bytes().as_ptr(), place, "what is wiped is what is sent");
    let (secrets, _) = Secrets::read(
        &BTreeMap::from([("s".parse().unwrap(), terms(SecretSource::Env("S".into())))]),
        |_| Some("hush".into()),
    );
    let name: Name = "s".parse().unwrap();
    let [one, two] = [(); 2].map(|()| secrets.credentials(&name).unwrap());
    assert_eq!(one, "Bearer hush");
    assert_eq!(one.as_bytes().as_ptr(), two.as_bytes().as_ptr());
    assert!(one.is_sensitive() && !format!("{one:?}").contains("hush"));
    let mut headers = HeaderMap::new();
    let given = Given {
        name: "s".into(),
        header: http::header::AUTHORIZATION,
        value: one,
    };
    assert!(!format!("{given:?}").contains("hush"));
    given.write(&mut headers);
    let written = &headers[http::header::AUTHORIZATION];
    assert_eq!(written.as_bytes().as_ptr(), two.as_bytes().as_ptr());
    assert!(written.is_sensitive());
}
