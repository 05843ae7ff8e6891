//! Rooms: every door has its signs, nobody calls a room that its sign does not name, and no two rooms of sandboxd call
//! each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    none, rust,
    tree::{self, File},
};

/// Rooms of sandboxd's ground floor that any other room may call unsaid; among themselves they say it.
const GROUND: &[&str] = &[
    "clock",
    "disk",
    "faults",
    "feed",
    "names",
    "random",
    "sys",
    "tasks",
    "telemetry",
    "words",
    "work",
];

/// A crate whose rooms are checked.
struct House<'a> {
    /// Folder of its sources, with a slash at the end.
    sources: &'a str,
    ground: &'a [&'a str],
}

const HOUSES: [House<'static>; 3] = [
    House {
        sources: "sandboxd/src/",
        ground: GROUND,
    },
    House {
        sources: "silkd/src/",
        ground: &[],
    },
    House {
        sources: "sdk/src/",
        ground: &[],
    },
];

impl House<'_> {
    /// Path below the sources, without `.rs`; none for what is no room: other crates, tests, binaries, `lib.rs`.
    fn inside<'f>(&self, file: &'f File) -> Option<&'f str> {
        let path = file.path.strip_prefix(self.sources)?.strip_suffix(".rs")?;
        let roomless = file.is_test() || path.starts_with("bin/") || path == "lib" || path == "main";
        (!roomless).then_some(path)
    }

    fn rooms(&self, files: &[File]) -> BTreeSet<String> {
        files
            .iter()
            .filter_map(|file| self.inside(file))
            .map(|path| first(path).to_owned())
            .collect()
    }
}

fn first(path: &str) -> &str {
    path.split_once('/').map_or(path, |(room, _)| room)
}

/// The rooms that a door's `May call:` names; none where it has no such sign.
fn may_call(text: &str) -> Option<BTreeSet<String>> {
    let doc = rust::module_doc(text);
    let (_, said) = doc.split_once("May call:")?;
    let mut names = String::new();
    let mut depth = 0;
    for c in said.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            '.' if depth == 0 => break,
            '`' => {}
            _ if depth == 0 => names.push(c),
            _ => {}
        }
    }
    let names = names.split(',').map(|name| first(name.trim()).to_owned());
    Some(
        names
            .filter(|name| !name.is_empty() && name != "nothing")
            .collect(),
    )
}

/// The names directly below `crate` that code uses: `crate::a`, `crate::{a, b::c}`, and `super::` up to the root.
fn uses(code: &str, depth: usize) -> BTreeSet<String> {
    let tokens = rust::tokens(code);
    let mut found = BTreeSet::new();
    for at in 0..tokens.len() {
        let after = if tokens[at] == "crate" && at.checked_sub(1).is_none_or(|i| tokens[i] != "$") {
            at + 1
        } else if tokens[at] == "super" && at.checked_sub(1).is_none_or(|i| tokens[i] != "::") {
            let ups = (0..).take_while(|i| {
                tokens.get(at + 2 * i) == Some(&"super") && tokens.get(at + 2 * i + 1) == Some(&"::")
            });
            let ups = ups.count();
            if ups < depth {
                continue;
            }
            at + 2 * ups - 1
        } else {
            continue;
        };
        if tokens.get(after) != Some(&"::") {
            continue;
        }
        match tokens.get(after + 1) {
            Some(&"{") => found.extend(group(&tokens[after + 2..])),
            Some(name) => {
                found.insert((*name).to_owned());
            }
            None => {}
        }
    }
    found
}

/// First segments of the paths in a group, from behind its brace on.
fn group(tokens: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let (mut depth, mut begins) = (1, true);
    for token in tokens {
        match *token {
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            "," if depth == 1 => {
                begins = true;
                continue;
            }
            name if depth == 1 && begins => {
                found.insert(name.to_owned());
            }
            _ => {}
        }
        begins = false;
    }
    found
}

/// Which room uses which others, each with the files that do.
fn graph(house: &House<'_>, files: &[File]) -> BTreeMap<(String, String), Vec<String>> {
    let rooms = house.rooms(files);
    let mut graph: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for file in files {
        let Some(path) = house.inside(file) else { continue };
        let depth = path.split('/').filter(|part| *part != "mod").count();
        for used in uses(&rust::without_tests(&rust::code(&file.text)), depth) {
            if used != first(path) && rooms.contains(&used) {
                let edge = (first(path).to_owned(), used);
                graph.entry(edge).or_default().push(file.path.clone());
            }
        }
    }
    graph
}

/// The sign that holds for a file: its own, else that of the nearest door above it.
fn sign<'f>(house: &House<'_>, files: &'f [File], file: &'f File) -> Option<BTreeSet<String>> {
    let mut folder = file.path.as_str();
    if let Some(names) = may_call(&file.text) {
        return Some(names);
    }
    while let Some((above, _)) = folder.rsplit_once('/') {
        if above.len() < house.sources.len() {
            break;
        }
        let door = format!("{above}/mod.rs");
        if let Some(names) = files
            .iter()
            .find(|other| other.path == door)
            .and_then(|door| may_call(&door.text))
        {
            return Some(names);
        }
        folder = above;
    }
    None
}

fn broken_signs(house: &House<'_>, files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for ((room, used), users) in graph(house, files) {
        if house.ground.contains(&used.as_str()) && !house.ground.contains(&room.as_str()) {
            continue;
        }
        for user in users {
            let file = files
                .iter()
                .find(|file| file.path == user)
                .expect("it was listed");
            match sign(house, files, file) {
                Some(names) if names.contains(&used) || names.contains("everything") => {}
                Some(_) => complaints.push(format!(
                    "{user}: calls {used}, which its `May call:` does not name"
                )),
                // Missing signs are told once, below.
                None => {}
            }
        }
    }
    complaints
}

/// Doors without their signs: a `mod.rs` at the top, or a room that is one file.
fn missing_signs(house: &House<'_>, files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        let Some(path) = house.inside(file) else { continue };
        let door = !path.contains('/') || path.strip_suffix("/mod").is_some_and(|room| !room.contains('/'));
        if !door {
            continue;
        }
        let doc = rust::module_doc(&file.text);
        for sign in ["May call:", "Never inside:"] {
            if !doc.contains(sign) {
                complaints.push(format!("{}: no `{sign}` in its module doc", file.path));
            }
        }
    }
    complaints
}

/// Rooms that call each other, directly or around corners.
fn circles(house: &House<'_>, files: &[File]) -> Vec<String> {
    let graph = graph(house, files);
    let mut reach: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (room, used) in graph.keys() {
        reach.entry(room).or_default().insert(used);
    }
    loop {
        let mut grown = reach.clone();
        for targets in grown.values_mut() {
            let further: Vec<&str> = targets
                .iter()
                .filter_map(|room| reach.get(room))
                .flatten()
                .copied()
                .collect();
            targets.extend(further);
        }
        if grown == reach {
            break;
        }
        reach = grown;
    }
    graph
        .iter()
        .filter(|((room, used), _)| {
            reach
                .get(used.as_str())
                .is_some_and(|all| all.contains(room.as_str()))
        })
        .map(|((room, used), users)| format!("{room} calls {used} and is called by it: {}", users.join(", ")))
        .collect()
}

#[test]
fn every_door_has_its_signs() {
    none(
        HOUSES
            .iter()
            .flat_map(|house| missing_signs(house, tree::files())),
    );
}

#[test]
fn rooms_call_only_what_their_sign_names() {
    none(HOUSES.iter().flat_map(|house| broken_signs(house, tree::files())));
}

#[test]
fn no_two_rooms_of_sandboxd_call_each_other() {
    none(circles(&HOUSES[0], tree::files()));
}

#[test]
fn broken_rooms_are_told() {
    let house = &HOUSES[0];
    let files = [
        File::new(
            "sandboxd/src/pool/mod.rs",
            "//! Pool.\n//!\n//! May call: words, `net` (slots.\n//! and so on).\n//! Never inside: I/O.\n",
        ),
        File::new(
            "sandboxd/src/pool/core.rs",
            "//! Core.\nuse crate::{api::{x, y}, net, words};",
        ),
        File::new(
            "sandboxd/src/pool/deep/inner.rs",
            "fn f() { super::super::super::api::x(); super::core::y(); }",
        ),
        File::new(
            "sandboxd/src/api.rs",
            "//! May call: pool.\n//! Never inside: x.\nfn f() { crate::pool::x() }",
        ),
        File::new(
            "sandboxd/src/net.rs",
            "//! Net.\n// crate::api\n#[cfg(test)]\nmod tests { use crate::api; }",
        ),
        File::new(
            "sandboxd/src/words.rs",
            "//! May call: nothing.\n//! Never inside: x.\nuse crate::clock;",
        ),
        File::new(
            "sandboxd/src/clock.rs",
            "//! May call: nothing.\n//! Never inside: x.\n",
        ),
    ];
    let told = broken_signs(house, &files);
    assert_eq!(told.len(), 3, "{told:#?}");
    assert!(told[0].starts_with("sandboxd/src/pool/core.rs: calls api"));
    assert!(told[1].starts_with("sandboxd/src/pool/deep/inner.rs: calls api"));
    assert!(told[2].starts_with("sandboxd/src/words.rs: calls clock"));
    assert_eq!(
        missing_signs(house, &files),
        [
            "sandboxd/src/net.rs: no `May call:` in its module doc",
            "sandboxd/src/net.rs: no `Never inside:` in its module doc"
        ]
    );
    assert_eq!(circles(house, &files).len(), 2);
}
