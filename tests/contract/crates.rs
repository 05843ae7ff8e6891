//! Crates: which of ours may depend on which, what each may bring along, and what may be there only once.

use std::{collections::BTreeMap, process::Command};

use serde_json::Value;

use crate::{none, tree};

/// Our crates, and which of the others each may depend on. Nothing depends on the tests.
const EDGES: &[(&str, &[&str])] = &[
    ("sandbox-protocol", &[]),
    ("silkd", &["sandbox-protocol"]),
    ("sandboxd", &["sandbox-protocol"]),
    ("sandbox-sdk", &["sandbox-protocol"]),
    (
        "sandbox-tests",
        &["sandbox-protocol", "silkd", "sandboxd", "sandbox-sdk"],
    ),
];

/// A second TLS, or a C library for it.
const BANNED: &[&str] = &["aws-lc-rs", "aws-lc-sys", "native-tls", "openssl", "openssl-sys"];

/// Two versions of these would be two protocols, two pools of connections or two sets of types in one program.
const ONCE: &[&str] = &[
    "bytes", "h2", "http", "hyper", "prost", "rustls", "tokio", "tonic",
];

/// What the normal dependencies of a crate must not hold, however they come in.
const WITHOUT: &[(&str, &[&str])] = &[
    // No transport, and nothing that runs.
    ("sandbox-protocol", &["axum", "h2", "hyper", "mio", "rustls"]),
    // Small, and without TLS or configuration.
    (
        "silkd",
        &[
            "axum",
            "clap",
            "ring",
            "rustls",
            "serde_json",
            "sled",
            "toml",
            "tracing-subscriber",
        ],
    ),
    // The library's users do not pay for the command.
    ("sandbox-sdk", &["axum", "clap", "comfy-table", "indicatif"]),
];

/// One package of cargo's answer.
#[derive(Debug, Clone)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// Of this workspace.
    pub(crate) ours: bool,
    pub(crate) dependencies: Vec<String>,
}

fn cargo(args: &[&str]) -> String {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(program)
        .args(args)
        .current_dir(tree::root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "cargo {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("cargo prints UTF-8")
}

/// Every package that is built on Linux, ours included.
pub(crate) fn packages() -> Vec<Package> {
    // Packages of other platforms are not looked at: cargo would fetch them for it.
    let platform = ["--filter-platform", "x86_64-unknown-linux-gnu"];
    let args = [&["metadata", "--format-version", "1", "--locked"][..], &platform].concat();
    let metadata: Value = serde_json::from_str(&cargo(&args)).expect("cargo prints JSON");
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let packages = metadata["packages"].as_array().expect("it lists packages");
    packages
        .iter()
        .map(|package| Package {
            name: text(&package["name"]).expect("a package has a name"),
            version: text(&package["version"]).expect("a package has a version"),
            license: text(&package["license"]),
            ours: package["source"].is_null(),
            dependencies: package["dependencies"]
                .as_array()
                .map(|all| all.iter().filter_map(|one| text(&one["name"])).collect())
                .unwrap_or_default(),
        })
        .collect()
}

fn wrong_edges(packages: &[Package]) -> Vec<String> {
    let mut complaints = Vec::new();
    for package in packages.iter().filter(|package| package.ours) {
        let Some((_, allowed)) = EDGES.iter().find(|(name, _)| *name == package.name) else {
            complaints.push(format!(
                "{}: a crate that tests/contract does not know",
                package.name
            ));
            continue;
        };
        for target in &package.dependencies {
            if EDGES.iter().any(|(name, _)| name == target) && !allowed.contains(&target.as_str()) {
                complaints.push(format!("{} must not depend on {target}", package.name));
            }
        }
    }
    complaints
}

fn banned(packages: &[Package]) -> Vec<String> {
    let found = packages
        .iter()
        .filter(|package| BANNED.contains(&package.name.as_str()));
    found
        .map(|package| format!("{} is in the tree: TLS is rustls with ring", package.name))
        .collect()
}

fn doubled(packages: &[Package]) -> Vec<String> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().push(&package.version);
    }
    ONCE.iter()
        .filter_map(|name| match versions.get(name)?.as_slice() {
            [_] => None,
            several => Some(format!("{name} is there more than once: {}", several.join(", "))),
        })
        .collect()
}

/// `tree` lists a crate's normal dependencies, a name and a version a line.
fn brought_along(name: &str, tree: &str, without: &[&str]) -> Vec<String> {
    without
        .iter()
        .filter(|banned| tree.lines().any(|line| line.split(' ').next() == Some(banned)))
        .map(|banned| format!("{name} brings {banned} along"))
        .collect()
}

#[test]
fn crates_depend_one_way() {
    none(wrong_edges(&packages()));
}

#[test]
fn there_is_one_tls() {
    none(banned(&packages()));
}

#[test]
fn protocol_crates_are_there_once() {
    let packages = packages();
    let missing = ONCE
        .iter()
        .filter(|name| packages.iter().all(|package| package.name != **name));
    none(missing.map(|name| format!("{name} is not in the tree: take it off the list")));
    none(doubled(&packages));
}

#[test]
fn crates_bring_only_what_they_may() {
    for (name, without) in WITHOUT {
        let tree = cargo(&[
            "tree", "--locked", "-p", name, "-e", "normal", "--prefix", "none", "--format", "{p}",
        ]);
        assert!(tree.lines().count() > 5, "cargo tree says nothing of {name}");
        none(brought_along(name, &tree, without));
    }
}

#[test]
fn wrong_crates_are_told() {
    let package = |name: &str, version: &str, ours, dependencies: &[&str]| Package {
        name: name.to_owned(),
        version: version.to_owned(),
        license: None,
        ours,
        dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
    };
    let packages = [
        package("sandbox-protocol", "0.1.0", true, &["prost", "silkd"]),
        package("sandboxd", "0.1.0", true, &["sandbox-protocol", "tonic"]),
        package("sandbox-rig", "0.1.0", true, &[]),
        package("tonic", "0.14.1", false, &[]),
        package("tonic", "0.13.0", false, &[]),
        package("openssl-sys", "0.9.0", false, &[]),
    ];
    assert_eq!(wrong_edges(&packages).len(), 2);
    assert_eq!(banned(&packages).len(), 1);
    assert_eq!(
        doubled(&packages),
        ["tonic is there more than once: 0.14.1, 0.13.0"]
    );
    let tree = "silkd v0.1.0\nrustls v0.23.0\nrustls-pki-types v1.0.0\n";
    assert_eq!(
        brought_along("silkd", tree, &["rustls", "clap"]),
        ["silkd brings rustls along"]
    );
}
