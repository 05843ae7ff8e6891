//! Licences of what is linked: permissive ones only. `deny.toml` has the same list.

use crate::{
    crates::{self, Package},
    none, tree,
};

/// What a package may be under.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression can be met with allowed licences alone. `/` is the old way to write OR.
fn permissive(expression: &str) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let met = either(&mut words);
    met && words.next().is_none()
}

type Words<'a, 'b> = &'a mut std::iter::Peekable<std::str::SplitWhitespace<'b>>;

fn either(words: Words<'_, '_>) -> bool {
    let mut met = both(words);
    while words.next_if_eq(&"OR").is_some() {
        met |= both(words);
    }
    met
}

fn both(words: Words<'_, '_>) -> bool {
    let mut met = one(words);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words);
    }
    met
}

fn one(words: Words<'_, '_>) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let met = either(words);
        return words.next_if_eq(&")").is_some() && met;
    }
    let Some(name) = words.next() else { return false };
    let name = match words.next_if_eq(&"WITH").and_then(|_| words.next()) {
        Some(exception) => format!("{name} WITH {exception}"),
        None => name.to_owned(),
    };
    ALLOWED.contains(&name.as_str())
}

fn refused(packages: &[Package]) -> Vec<String> {
    packages
        .iter()
        .filter(|package| !package.license.as_deref().is_some_and(permissive))
        .map(|package| {
            format!(
                "{} {}: licence {:?}",
                package.name, package.version, package.license
            )
        })
        .collect()
}

#[test]
fn every_licence_is_permissive() {
    none(refused(&crates::packages()));
}

#[test]
fn deny_toml_has_the_same_list() {
    let text = &tree::file("deny.toml").text;
    let (_, list) = text.split_once("allow = [").expect("deny.toml allows licences");
    let (list, _) = list.split_once(']').expect("the list ends");
    let listed: Vec<&str> = list
        .split(',')
        .map(|name| name.trim().trim_matches('"'))
        .filter(|name| !name.is_empty())
        .collect();
    assert_eq!(listed, ALLOWED);
}

#[test]
fn copyleft_and_unknown_licences_are_told() {
    for met in [
        "MIT",
        "MIT OR GPL-3.0",
        "MIT/GPL-2.0",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception",
    ] {
        assert!(permissive(met), "{met}");
    }
    for unmet in [
        "GPL-3.0",
        "MIT AND LGPL-2.1",
        "MPL-2.0",
        "",
        "MIT AND",
        "(MIT",
        "MIT GPL-3.0",
        "GPL-2.0 WITH Classpath",
    ] {
        assert!(!permissive(unmet), "{unmet}");
    }
    let package = |license: Option<&str>| Package {
        name: "x".to_owned(),
        version: "1.0.0".to_owned(),
        license: license.map(str::to_owned),
        ours: false,
        dependencies: Vec::new(),
    };
    assert_eq!(
        refused(&[package(None), package(Some("MIT")), package(Some("AGPL-3.0"))]).len(),
        2
    );
}
