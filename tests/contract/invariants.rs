//! Invariants: each is quoted at its home, and has a test that is named for it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    none, rust,
    tree::{self, File},
};

/// How many there are (ARCHITECTURE.md).
const LAST: u32 = 24;
/// Those that are not built or not proved yet.
const PENDING: &[u32] = &[];

/// Numbers that module docs quote as `Invariant NN:`, with the file that does.
fn homes(files: &[File]) -> BTreeMap<u32, String> {
    let mut homes = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust() && !file.is_test()) {
        let doc = rust::module_doc(&file.text);
        for said in doc.split("Invariant ").skip(1) {
            let digits: String = said.chars().take_while(char::is_ascii_digit).collect();
            if let (Ok(number), Some(':')) = (digits.parse(), said.chars().nth(digits.len())) {
                homes.insert(number, file.path.clone());
            }
        }
    }
    homes
}

/// Numbers of functions `inv_NN_..`.
fn tests(files: &[File]) -> BTreeSet<u32> {
    let mut tests = BTreeSet::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for pair in rust::tokens(&rust::code(&file.text)).windows(2) {
            if let ["fn", name] = *pair
                && let Some((number, rest)) = name.strip_prefix("inv_").and_then(|name| name.split_once('_'))
                && !rest.is_empty()
                && let Ok(number) = number.parse()
            {
                tests.insert(number);
            }
        }
    }
    tests
}

fn unkept(files: &[File], pending: &[u32]) -> Vec<String> {
    let (homes, tests) = (homes(files), tests(files));
    let mut complaints = Vec::new();
    for number in 1..=LAST {
        let proved = tests.contains(&number);
        match (homes.get(&number), pending.contains(&number)) {
            (Some(_), false) if proved => {}
            (Some(home), false) => {
                complaints.push(format!(
                    "{home}: invariant {number} has no test inv_{number:02}_.."
                ));
            }
            (None, false) => complaints.push(format!("invariant {number} has no home")),
            (Some(_), true) if proved => {
                complaints.push(format!(
                    "invariant {number} has home and test: take it off PENDING"
                ));
            }
            (_, true) => {}
        }
    }
    for (number, home) in homes.iter().filter(|(number, _)| !(1..=LAST).contains(*number)) {
        complaints.push(format!("{home}: there is no invariant {number}"));
    }
    for number in tests.difference(&homes.keys().copied().collect()) {
        complaints.push(format!(
            "inv_{number:02}_..: no module doc says `Invariant {number}:`"
        ));
    }
    complaints
}

#[test]
fn every_invariant_has_a_home_and_a_test() {
    none(unkept(tree::files(), PENDING));
}

#[test]
fn invariants_without_home_or_test_are_told() {
    let pending: Vec<u32> = (3..=LAST).filter(|number| *number != 6).collect();
    let files = [
        File::new(
            "sandboxd/src/a.rs",
            "//! Invariant 1: x. Invariant 2: y.\nfn f() {} // fn inv_02_in_a_comment()",
        ),
        File::new(
            "sandboxd/src/b.rs",
            "//! Invariant 3: z. Invariant 99: w. Invariant 4 is not quoted. Invariant 5: pending.\n",
        ),
        File::new(
            "tests/c/main.rs",
            "//! Invariant 6: not a home.\nfn inv_01_x() {} fn inv_03_x() {} fn inv_07_x() {}",
        ),
    ];
    assert_eq!(
        unkept(&files, &pending),
        [
            "sandboxd/src/a.rs: invariant 2 has no test inv_02_..",
            "invariant 3 has home and test: take it off PENDING",
            "invariant 6 has no home",
            "sandboxd/src/b.rs: there is no invariant 99",
            "inv_07_..: no module doc says `Invariant 7:`",
        ]
    );
}
