//! Tests of the whole room.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use super::*;
use crate::{disk, policy::Host, verdict::Verdict};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// 2026-01-01.
const NOW: WallTime = WallTime::from_micros(1_767_225_600_000_000);

/// A folder with a root and an intermediate.
fn made() -> (tempfile::TempDir, Dir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = Dir::new(temp.path().join("ca"));
    dir.init(None, [1; 16], NOW).unwrap();
    dir.issue_node(None, "n", false, [2; 16], NOW).unwrap();
    (temp, dir)
}

fn verdicts(findings: &[Finding]) -> Vec<(&str, Verdict)> {
    findings
        .iter()
        .map(|found| (found.what.split(' ').next().unwrap(), found.verdict))
        .collect()
}

#[test]
fn commands_repeat_safely_and_overwrite_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let dir = Dir::new(temp.path().join("ca"));
    assert!(matches!(
        dir.issue_node(None, "n", false, [2; 16], NOW),
        Err(CaError::NoBundle { .. })
    ));
    let first = dir.init(None, [1; 16], NOW).unwrap();
    let key = first.key.clone().unwrap();
    assert!(first.changed && key.exists());
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o7777, 0o600);
    let again = dir.init(None, [3; 16], NOW).unwrap();
    assert_eq!((again.changed, again.root), (false, first.root));

    let issued = dir.issue_node(None, "n", false, [2; 16], NOW).unwrap();
    let mode = fs::metadata(dir.node_file()).unwrap().permissions().mode();
    assert!(issued.changed && mode & 0o7777 == 0o600);
    let again = dir.issue_node(None, "n", false, [4; 16], NOW).unwrap();
    assert_eq!((again.changed, again.cert), (false, issued.cert.clone()));
    // Renewed where it is asked for, and where it would end soon.
    for (renew, now) in [(true, NOW), (false, NOW.plus(DAY * 61))] {
        let renewed = dir.issue_node(None, "n", renew, [5; 16], now).unwrap();
        assert!(renewed.changed);
        assert_eq!(renewed.cert.not_after(), now.plus(DAY * 90));
    }
    // A key that is there is no place for another.
    let other = Dir::new(temp.path().join("other"));
    assert!(matches!(
        other.init(Some(key.clone()), [1; 16], NOW),
        Err(CaError::Exists { path }) if path == key
    ));
    other.init(None, [6; 16], NOW).unwrap();
    assert!(matches!(
        other.issue_node(Some(key), "n", false, [2; 16], NOW),
        Err(CaError::OtherKey { .. })
    ));
}

#[test]
fn a_rotation_goes_step_by_step() {
    let (_temp, dir) = made();
    let old = dir.open(NOW).unwrap().unwrap().root();
    let rotated = dir.rotate(None, None, [7; 16], NOW).unwrap();
    assert!(rotated.changed && rotated.root != old);
    assert_eq!(rotated.bundle, [rotated.root, old]);
    assert!(!dir.rotate(None, None, [8; 16], NOW).unwrap().changed);
    // The intermediate stays what it was until another is issued.
    let node = dir.open(NOW).unwrap().unwrap();
    assert_eq!((node.root(), node.bundle().roots().len()), (old, 2));
    assert!(matches!(dir.finish(), Err(CaError::StillUsed)));
    assert!(dir.issue_node(None, "n", false, [9; 16], NOW).unwrap().changed);
    assert_eq!(dir.open(NOW).unwrap().unwrap().root(), rotated.root);
    assert_eq!(dir.finish().unwrap().bundle, [rotated.root]);
    assert!(!dir.finish().unwrap().changed);
    assert_eq!(dir.open(NOW).unwrap().unwrap().root(), rotated.root);
}

/// Depth of each certificate that a leaf is shown with.
fn chain(dir: &Dir) -> Vec<Option<cert::Depth>> {
    let (node, key) = (dir.open(NOW).unwrap().unwrap(), LeafKey::new().unwrap());
    let leaf = node
        .leaf(&Host::parse("a.test").unwrap(), &key, [3; 16], NOW)
        .unwrap();
    let certs: Vec<Cert> = leaf
        .chain
        .into_iter()
        .map(|der| Cert::new(der).unwrap())
        .collect();
    assert!(certs.windows(2).all(|pair| pair[0].is_signed_by(&pair[1])));
    certs.iter().map(Cert::depth).collect()
}

#[test]
fn the_old_root_vouches_for_the_new_one_until_the_rotation_ends() {
    use cert::Depth::Most;
    let (_temp, dir) = made();
    let old = dir.bundle().unwrap().roots()[0].clone();
    let plain = vec![None, Some(Most(0))];
    assert_eq!(chain(&dir), plain);
    let key = dir.key_file(old.fingerprint());
    let away = dir.path().join("away.key");
    disk::rename_synced(&key, &away).unwrap();
    // Without the old root's key there is a rotation all the same, and a word of it.
    let rotated = dir.rotate(None, None, [7; 16], NOW).unwrap();
    assert!(rotated.changed && rotated.cross.is_none());
    let told = dir.check(&[], NOW);
    assert!(
        verdicts(&told).contains(&("cross.pem", Verdict::Warn)),
        "{told:#?}"
    );
    let wrong = dir.rotate(None, Some(&rotated.key.unwrap()), [8; 16], NOW);
    assert!(matches!(wrong, Err(CaError::OtherKey { root, .. }) if root == old.fingerprint()));
    assert!(!dir.cross_file().exists());
    let vouched = dir.rotate(None, Some(&away), [8; 16], NOW).unwrap();
    assert!(vouched.changed && vouched.cross.as_ref() == Some(&dir.cross_file()));
    let again = dir.rotate(None, Some(&away), [9; 16], NOW).unwrap();
    assert!(!again.changed && again.cross == vouched.cross);
    let told = dir.check(&[], NOW);
    assert!(verdicts(&told).contains(&("cross.pem", Verdict::Ok)), "{told:#?}");
    // It is shown with what the new root signs, and the old root's needs none.
    assert_eq!(chain(&dir), plain);
    dir.issue_node(None, "n", false, [9; 16], NOW).unwrap();
    assert_eq!(chain(&dir), [None, Some(Most(0)), Some(Most(1))]);
    let cross = dir.cross(&dir.bundle().unwrap(), NOW).unwrap().unwrap();
    assert!(cross.is_signed_by(&old) && cross.not_after() == old.not_after());
    // One that is no certificate is a fault; one of other roots, or that has ended, is left aside.
    let text = fs::read_to_string(dir.cross_file()).unwrap();
    disk::write_atomic(
        &dir.cross_file(),
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        0o644,
    )
    .unwrap();
    assert!(matches!(dir.open(NOW), Err(CaError::Damaged { path, .. }) if path == dir.cross_file()));
    let newest = dir.bundle().unwrap().roots()[0].clone();
    for other in [&old, &newest] {
        disk::write_atomic(&dir.cross_file(), other.pem().as_bytes(), 0o644).unwrap();
        assert_eq!(chain(&dir), plain);
    }
    disk::write_atomic(&dir.cross_file(), text.as_bytes(), 0o644).unwrap();
    let bundle = dir.bundle().unwrap();
    assert!(dir.cross(&bundle, old.not_after().plus(DAY)).unwrap().is_none());
    dir.finish().unwrap();
    assert!(!dir.cross_file().exists());
    assert_eq!(chain(&dir), plain);
    // A rotation at once, with the key beside the bundle.
    let rotated = dir.rotate(None, None, [10; 16], NOW).unwrap();
    assert_eq!(rotated.cross, Some(dir.cross_file()));
}

#[test]
fn a_root_that_allows_one_certificate_below_it_vouches_for_none() {
    let temp = tempfile::tempdir().unwrap();
    let dir = Dir::new(temp.path().to_owned());
    let key = make::key().unwrap();
    let mut params = make::params("old", [1; 16], NOW, NOW.plus(DAY * 900)).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(1));
    let old = Cert::new(params.self_signed(&key).unwrap().der().clone()).unwrap();
    disk::write_atomic(&dir.bundle_file(), old.pem().as_bytes(), 0o644).unwrap();
    let path = dir.key_file(old.fingerprint());
    disk::write_atomic(&path, key.serialize_pem().as_bytes(), 0o600).unwrap();
    let told = dir.rotate(None, Some(&path), [7; 16], NOW);
    assert!(matches!(told, Err(CaError::Shallow { root }) if root == old.fingerprint()));
    assert_eq!(dir.bundle().unwrap().roots().len(), 1, "nothing was made");
    assert_eq!(dir.rotate(None, None, [7; 16], NOW).unwrap().cross, None);
}

#[test]
fn what_does_not_hold_is_not_used() {
    let (_temp, dir) = made();
    assert!(dir.open(NOW).unwrap().is_some());
    assert!(matches!(dir.open(NOW.plus(DAY * 91)), Err(CaError::Dates { .. })));
    let node = fs::read_to_string(dir.node_file()).unwrap();
    let set = |text: &str, mode: u32| {
        disk::write_atomic(&dir.node_file(), text.as_bytes(), mode).unwrap();
    };
    set(&node, 0o640);
    assert!(matches!(dir.open(NOW), Err(CaError::Exposed { .. })));
    set("nonsense", 0o600);
    assert!(matches!(dir.open(NOW), Err(CaError::Damaged { .. })));
    // A root that signs leaves itself has no bound on what it signs.
    let root = fs::read_to_string(dir.bundle_file()).unwrap();
    let key = fs::read_to_string(dir.key_file(dir.bundle().unwrap().fingerprints()[0])).unwrap();
    set(&format!("{root}{key}"), 0o600);
    assert!(matches!(dir.open(NOW), Err(CaError::Damaged { .. })));
    set(&node, 0o600);
    assert!(dir.open(NOW).unwrap().is_some());
    // A root of the same kind, that did not sign it.
    let other = tempfile::tempdir().unwrap();
    let other = Dir::new(other.path().join("ca"));
    other.init(None, [1; 16], NOW).unwrap();
    fs::copy(other.bundle_file(), dir.bundle_file()).unwrap();
    assert!(matches!(dir.open(NOW), Err(CaError::Unsigned { .. })));
    fs::remove_file(dir.node_file()).unwrap();
    assert!(dir.open(NOW).unwrap().is_none());
}

#[test]
fn check_tells_chain_dates_modes_and_templates() {
    let (_temp, dir) = made();
    let root = dir.bundle().unwrap().fingerprints()[0];
    let templates = [
        ("t-none-small".to_owned(), vec![root]),
        ("u-none-small".to_owned(), vec![]),
    ];
    let found = dir.check(&templates, NOW);
    let all = [
        Verdict::Ok,
        Verdict::Ok,
        Verdict::Warn,
        Verdict::Ok,
        Verdict::Ok,
        Verdict::Warn,
    ];
    let told: Vec<Verdict> = found.iter().map(|found| found.verdict).collect();
    assert_eq!(told, all, "{found:#?}");
    fs::remove_file(dir.key_file(root)).unwrap();
    let late = dir.check(&[], NOW.plus(DAY * 80));
    assert!(
        verdicts(&late).contains(&("node.pem", Verdict::Warn)),
        "{late:#?}"
    );
    let late = dir.check(&[], NOW.plus(DAY * 100));
    assert!(
        verdicts(&late).contains(&("node.pem", Verdict::Fail)),
        "{late:#?}"
    );
    for (years, verdict) in [(9, Verdict::Ok), (10, Verdict::Warn), (11, Verdict::Fail)] {
        let late = dir.check(&[], NOW.plus(DAY * 365 * years - DAY * 100));
        assert!(verdicts(&late).contains(&("root", verdict)), "{years}: {late:#?}");
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(dir.check(&[], NOW)[0].verdict, Verdict::Fail);
}

#[test]
fn a_leaf_is_of_its_host_alone_and_ends_with_its_intermediate() {
    let (_temp, dir) = made();
    let node = dir.open(NOW).unwrap().unwrap();
    let key = LeafKey::new().unwrap();
    let leaf = |host: &str, now: WallTime| {
        node.leaf(&Host::parse(host).unwrap(), &key, [3; 16], now)
            .unwrap()
    };
    let dates = |leaf: &Leaf| {
        let cert = Cert::new(leaf.chain[0].clone()).unwrap();
        assert!(cert.depth().is_none() && cert.is_signed_by(node.intermediate()));
        (cert.not_before(), cert.not_after())
    };
    let whole = leaf("a.test", NOW);
    assert_eq!(dates(&whole), (make::before(NOW, DAY / 24), NOW.plus(DAY)));
    assert_eq!(whole.renew_at, NOW.plus(DAY / 2));
    let late = NOW.plus(DAY * 90 - DAY / 6);
    let short = leaf("[2001:db8::1]", late);
    assert_eq!(dates(&short).1, NOW.plus(DAY * 90));
    assert_eq!(short.renew_at, late.plus(DAY / 12));
    let (_, x509) = x509_parser::parse_x509_certificate(&whole.chain[0]).unwrap();
    let names = x509.subject_alternative_name().unwrap().unwrap();
    let names: Vec<String> = names
        .value
        .general_names
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(names, ["DNSName(a.test)"]);
}

#[test]
fn fingerprints_read_as_they_are_written() {
    let print = Fingerprint::of(b"x");
    assert_eq!(print.to_string().parse(), Ok(print));
    for bad in ["", "00", &"g".repeat(64), &"+1".repeat(32)] {
        assert_eq!(bad.parse::<Fingerprint>(), Err(NotAFingerprint), "{bad}");
    }
}
