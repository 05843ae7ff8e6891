use sandbox_protocol::id::ClaimId;

use super::*;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn access() -> Access {
    let grant = |text: &str, role| Grant {
        name: name("it"),
        hash: TokenHash::of(text),
        role,
    };
    Access {
        grants: vec![
            grant("sba_op", Role::Operator),
            grant("sba_ten", Role::Tenant(name("acme"))),
        ],
        operator_gid: Some(77),
        daemon_uid: 990,
    }
}

fn peer(uid: u32, gid: u32, groups: &[u32]) -> PeerIds {
    PeerIds {
        uid,
        gid,
        groups: groups.to_vec(),
    }
}

#[test]
fn a_claim_token_is_the_same_each_time_and_never_shown() {
    let key = HostKey::from_bytes([1; 32]);
    let claim = ClaimId::from_random([2; 16]);
    let token = ClaimToken::new(&key, claim);
    assert_eq!(token.as_str().len(), 47);
    assert!(token.as_str().starts_with("sbt_"));
    assert_eq!(token.as_str(), ClaimToken::new(&key, claim).as_str());
    assert_ne!(
        token.as_str(),
        ClaimToken::new(&HostKey::from_bytes([3; 32]), claim).as_str()
    );
    assert_ne!(
        token.as_str(),
        ClaimToken::new(&key, ClaimId::from_random([4; 16])).as_str()
    );
    let shown = format!("{token:?} {key:?} {:?}", token.hash());
    assert_eq!(shown, "ClaimToken(..) HostKey(..) TokenHash(..)");
    // RFC 4231's way of checking: the construction, not a copy of it.
    assert_eq!(
        ClaimToken::new(&HostKey::from_bytes([0; 32]), ClaimId::from_random([0; 16])).as_str(),
        KNOWN
    );
}

/// By `printf cl_00..0 | openssl dgst -sha256 -mac HMAC -macopt hexkey:00..0`, in base64url.
const KNOWN: &str = "sbt_xk-9rXvyPwgVbAgDtD2AeLFjre0PB-xaCXNUEHZpf6U";

#[test]
fn hashes_have_one_text() {
    let hash = TokenHash::of("sba_x");
    assert_eq!(TokenHash::from_hex(&hash.to_hex()), Some(hash));
    assert_eq!(
        TokenHash::of("").to_hex(),
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    for bad in ["", "00", &"+f".repeat(32), &"zz".repeat(32), &"\u{e4}".repeat(32)] {
        assert_eq!(TokenHash::from_hex(bad), None, "{bad}");
    }
    assert_eq!(AccessToken::from_random(&[9; 32]).as_str().len(), 47);
}

#[test]
fn a_token_decides_alone_and_else_the_peer() {
    let access = access();
    let root = peer(0, 0, &[]);
    assert_eq!(access.caller(Some("sba_wrong"), Some(&root)), Caller::Stranger);
    assert_eq!(access.caller(Some(""), Some(&root)), Caller::Stranger);
    assert_eq!(
        access.caller(Some("sba_op"), None),
        Caller::Known(Principal::Operator(Operator::Token(name("it"))))
    );
    assert_eq!(
        access.caller(Some("sba_ten"), Some(&root)),
        Caller::Known(Principal::Tenant {
            name: name("it"),
            tenant: name("acme")
        })
    );
    assert_eq!(
        access.caller(Some("sbt_x"), None),
        Caller::Claim(TokenHash::of("sbt_x"))
    );
    for operator in [
        root,
        peer(990, 5, &[]),
        peer(1000, 77, &[]),
        peer(1000, 5, &[6, 77]),
    ] {
        assert_eq!(
            access.caller(None, Some(&operator)),
            Caller::Known(Principal::Operator(Operator::Uid(operator.uid)))
        );
    }
    assert_eq!(access.caller(None, Some(&peer(1000, 1000, &[7]))), Caller::Nobody);
    assert_eq!(access.caller(None, None), Caller::Nobody);
}

#[test]
fn who_opens_what() {
    let sandbox = SandboxId::from_random([1; 16]);
    let lock = Lock {
        sandbox,
        token: Some(TokenHash::of("sbt_right")),
        tenant: Some(name("acme")),
    };
    let warm = Lock {
        sandbox,
        token: None,
        tenant: None,
    };
    let access = access();
    let by = |token: &str| access.caller(Some(token), None);
    assert_eq!(
        by("sbt_right").opens(Some(&lock)),
        Some(Principal::Claimer { sandbox })
    );
    assert!(by("sba_op").opens(Some(&warm)).is_some());
    assert!(by("sba_ten").opens(Some(&lock)).is_some());
    for (caller, lock) in [
        (by("sbt_wrong"), Some(&lock)),
        (by("sbt_right"), Some(&warm)),
        (by("sbt_right"), None),
        (by("sba_ten"), Some(&warm)),
        (by("sba_op"), None),
        (by("sba_wrong"), Some(&lock)),
        (Caller::Nobody, Some(&lock)),
        (Caller::Claim(TokenHash::NONE), None),
        (Caller::Claim(TokenHash::NONE), Some(&warm)),
    ] {
        assert_eq!(caller.opens(lock), None, "{caller:?} {lock:?}");
    }
    let other = Lock {
        tenant: Some(name("other")),
        ..lock
    };
    assert_eq!(by("sba_ten").opens(Some(&other)), None);
}

#[test]
fn the_key_is_made_once_and_must_be_ours_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let made = HostKey::open(dir.path(), [5; 32]).unwrap();
    let again = HostKey::open(dir.path(), [6; 32]).unwrap();
    assert_eq!(made.as_bytes(), again.as_bytes());
    let path = dir.path().join(HostKey::FILE);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(matches!(
        HostKey::open(dir.path(), [6; 32]),
        Err(AccessError::KeyExposed { mode: 0o640, .. })
    ));
    crate::disk::write_atomic(&path, b"short", 0o600).unwrap();
    assert!(matches!(
        HostKey::open(dir.path(), [6; 32]),
        Err(AccessError::KeyDamaged { .. })
    ));
}

#[test]
fn groups_are_found_by_their_whole_name() {
    let file = "root:x:0:\nsandboxd-x:x:5:\nsandboxd:x:77:ann,bob\nbroken\n";
    assert_eq!(group_id(file, "sandboxd"), Some(77));
    assert_eq!(group_id(file, "sandbox"), None);
    assert_eq!(group_id(file, "broken"), None);
}
