//! Promises of the pages: each names tests that exist, or says *pending*; and links between pages lead somewhere.

use std::collections::BTreeSet;

use crate::{
    none, rust,
    tree::{self, File},
};

/// Pages that name tests as `path.rs::function`.
const PAGES: &[&str] = &["ARCHITECTURE.md", "SPECIFICATION.md"];
/// The page whose list items are promises.
const SPECIFICATION: &str = "SPECIFICATION.md";

/// Every `path::function` of the tree.
fn functions(files: &[File]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for pair in rust::tokens(&rust::code(&file.text)).windows(2) {
            if let ["fn", name] = *pair {
                found.insert(format!("{}::{name}", file.path));
            }
        }
    }
    found
}

/// What stands between backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

fn broken_promises(files: &[File]) -> Vec<String> {
    let functions = functions(files);
    let mut complaints = Vec::new();
    for page in files.iter().filter(|file| PAGES.contains(&file.path.as_str())) {
        let mut numbers = BTreeSet::new();
        for (at, line) in page.text.lines().enumerate() {
            let here = format!("{}:{}", page.path, at + 1);
            let named: Vec<&str> = quoted(line).filter(|text| text.contains(".rs::")).collect();
            for test in &named {
                if !functions.contains(*test) {
                    complaints.push(format!("{here}: there is no {test}"));
                }
            }
            let Some(promise) = line.strip_prefix("- **").filter(|_| page.path == SPECIFICATION) else {
                continue;
            };
            let number = promise.split('.').next().unwrap_or_default();
            if !numbers.insert(number) {
                complaints.push(format!("{here}: {number} stands twice"));
            }
            if named.is_empty() && !line.contains("*pending*") {
                complaints.push(format!("{here}: {number} names no test and is not *pending*"));
            }
        }
    }
    complaints
}

/// Targets of the links of a page, without anchors: files of this repository alone.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?.split('#').next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

fn dead_links(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for page in files.iter().filter(|file| file.path.ends_with(".md")) {
        let folder = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for link in links(&page.text) {
            let mut path: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
            for part in link.split('/') {
                match part {
                    "." | "" => {}
                    ".." => drop(path.pop()),
                    part => path.push(part),
                }
            }
            let path = path.join("/");
            let inside = format!("{path}/");
            if !files
                .iter()
                .any(|file| file.path == path || file.path.starts_with(&inside))
            {
                complaints.push(format!("{}: no {link}", page.path));
            }
        }
    }
    complaints
}

#[test]
fn every_promise_names_tests_that_exist() {
    none(broken_promises(tree::files()));
}

#[test]
fn every_link_leads_somewhere() {
    none(dead_links(tree::files()));
}

#[test]
fn empty_promises_and_dead_links_are_told() {
    let files = [
        File::new("a/b.rs", "fn proof() {} // fn comment()"),
        File::new(
            SPECIFICATION,
            "- **A1.** Kept. Proof: `a/b.rs::proof`\n- **A2.** `a/b.rs::comment`\n- **A1.** *pending*\n- **A3.** Hm.\nText.",
        ),
        File::new(
            "docs/x.md",
            "[a](../a) [b](../a/b.rs#x) [c](y.md) [d](https://x.y/z) [e](#here)",
        ),
    ];
    assert_eq!(
        broken_promises(&files),
        [
            "SPECIFICATION.md:2: there is no a/b.rs::comment",
            "SPECIFICATION.md:3: A1 stands twice",
            "SPECIFICATION.md:4: A3 names no test and is not *pending*",
        ]
    );
    assert_eq!(dead_links(&files), ["docs/x.md: no y.md"]);
}
