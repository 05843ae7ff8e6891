//! Things with one home: crates that touch kernel, disk or wire, and `unsafe`.

use crate::{
    none, rust,
    tree::{self, File},
};

/// A crate's name in code, and where it may be named (prefixes of paths).
const HOMES: &[(&str, &[&str])] = &[
    ("sled", &["sandboxd/src/journal/store.rs"]),
    ("prometheus_client", &["sandboxd/src/telemetry/"]),
    ("toml", &["sandboxd/src/config/"]),
    (
        "hickory_resolver",
        &[
            "sandboxd/src/egress/resolve.rs",
            "sandboxd/src/egress/door/dns.rs",
        ],
    ),
    ("idna", &["sandboxd/src/policy/authority.rs"]),
    ("x509_parser", &["sandboxd/src/ca/"]),
    ("clap", &["sandboxd/src/daemon/", "sdk/src/bin/sandboxctl/"]),
    (
        "rustls",
        &[
            "sandboxd/src/api/listen.rs",
            "sandboxd/src/api/tls.rs",
            "sandboxd/src/egress/door/intercept/",
            "sdk/src/dial/",
        ],
    ),
    (
        "tokio_rustls",
        &[
            "sandboxd/src/api/listen.rs",
            "sandboxd/src/api/tls.rs",
            "sandboxd/src/egress/door/intercept/",
            "sdk/src/dial/",
        ],
    ),
];

/// The only files with unsafe code.
const UNSAFE: &[&str] = &["sandboxd/src/sys.rs", "silkd/src/sys.rs"];

fn astray(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && !file.is_test()) {
        let code = rust::code(&file.text);
        let tokens = rust::tokens(&code);
        for (name, homes) in HOMES {
            let named = tokens
                .windows(3)
                .any(|three| three[0] != "::" && three[1] == *name && three[2] == "::")
                || tokens
                    .windows(2)
                    .any(|two| two == [*name, "::"] && tokens.first() == Some(name))
                || tokens.windows(2).any(|two| two == ["use", *name]);
            if named && !homes.iter().any(|home| file.path.starts_with(home)) {
                complaints.push(format!(
                    "{}: {name} has its home in {}",
                    file.path,
                    homes.join(", ")
                ));
            }
        }
        if tokens.contains(&"unsafe") && !UNSAFE.contains(&file.path.as_str()) {
            complaints.push(format!(
                "{}: unsafe code lives in {}",
                file.path,
                UNSAFE.join(", ")
            ));
        }
    }
    complaints
}

#[test]
fn things_stay_in_their_homes() {
    none(astray(tree::files()));
}

#[test]
fn things_outside_their_homes_are_told() {
    let files = [
        File::new("sandboxd/src/journal/store.rs", "use sled::Db; unsafe_name();"),
        File::new("sandboxd/src/journal/fold.rs", "fn f(db: &sled::Db) {} // unsafe"),
        File::new(
            "sandboxd/src/pool/mod.rs",
            "use prometheus_client as p; let s = \"toml::x\"; crate::toml::y();",
        ),
        File::new("silkd/src/run/spawn.rs", "fn f() { unsafe { g() } }"),
        File::new("silkd/src/sys.rs", "fn f() { unsafe { g() } }"),
        File::new("tests/contract/x.rs", "toml::parse(); unsafe {}"),
    ];
    let told = astray(&files);
    assert_eq!(told.len(), 3, "{told:#?}");
    assert!(told[0].starts_with("sandboxd/src/journal/fold.rs: sled"));
    assert!(told[1].starts_with("sandboxd/src/pool/mod.rs: prometheus_client"));
    assert!(told[2].starts_with("silkd/src/run/spawn.rs: unsafe"));
}
