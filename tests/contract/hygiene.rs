//! Nothing of the machine that it was written on, and no address of a package registry, is in the tree.

use crate::{
    none,
    tree::{self, File},
};

/// Beginnings of absolute paths that exist on one machine only.
const PATHS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/tmp/", "wt"),
    concat!("/tmp/", "tgt"),
    concat!("/tmp/", "brief"),
    concat!("/root", "/."),
    concat!("/home/", "runner"),
];

/// Hosts of package registries and mirrors: which one is used is the machine's matter.
const HOSTS: &[&str] = &[
    concat!("crates", ".io"),
    concat!("deb.", "debian.org"),
    concat!("security.", "debian.org"),
    concat!("archive.", "ubuntu.com"),
    concat!("static.rust-", "lang.org"),
    concat!("pypi", ".org"),
    concat!("npmjs", ".org"),
];

fn traces(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    // Lock files name the registry that cargo itself writes there.
    for file in files.iter().filter(|file| !file.path.ends_with("Cargo.lock")) {
        for (number, line) in file.text.lines().enumerate() {
            let found = PATHS.iter().find(|path| begins(line, path));
            let found = found.or_else(|| HOSTS.iter().find(|host| line.contains(*host)));
            if let Some(found) = found {
                complaints.push(format!("{}:{}: {found}", file.path, number + 1));
            }
        }
    }
    complaints
}

/// Whether an absolute path that begins so is in the line.
fn begins(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !"/._-})>*~".contains(c))
    })
}

#[test]
fn no_trace_of_a_machine_or_registry() {
    none(traces(tree::files()));
}

#[test]
fn traces_are_told() {
    let work = concat!("/wo", "rk/");
    let files = [
        File::new(
            "a.rs",
            &format!("let a = \"{work}main\";\nlet b = \"cgroup{work}l1\";"),
        ),
        File::new("b.md", concat!("from crates", ".io")),
        File::new("Cargo.lock", concat!("from crates", ".io")),
    ];
    let told = traces(&files);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with("a.rs:1") && told[1].starts_with("b.md:1"));
}
