//! Sizes: a file that outgrows them is two files, and the door of a room is short enough to be read whole.

use crate::{
    none,
    tree::{self, File},
};

/// Lines of any Rust file, its tests included.
const FILE: usize = 800;
/// Lines of a room's door, in the daemon and in the agent.
const DOOR: usize = 150;

fn too_long(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let lines = file.text.lines().count();
        let house = file.path.starts_with("sandboxd/src/") || file.path.starts_with("silkd/src/");
        let door = house && file.path.ends_with("/mod.rs") && !file.is_test();
        let limit = if door { DOOR } else { FILE };
        if lines > limit {
            complaints.push(format!("{}: {lines} lines, at most {limit}", file.path));
        }
    }
    complaints
}

#[test]
fn files_and_doors_are_short() {
    none(too_long(tree::files()));
}

#[test]
fn long_files_and_doors_are_told() {
    let files = [
        File::new("sandboxd/src/a.rs", &"x\n".repeat(FILE)),
        File::new("sandboxd/src/b.rs", &"x\n".repeat(FILE + 1)),
        File::new("sandboxd/src/c/mod.rs", &"x\n".repeat(DOOR + 1)),
        File::new("sandboxd/src/d/mod.rs", &"x\n".repeat(DOOR)),
        File::new("docs/long.md", &"x\n".repeat(FILE + 1)),
    ];
    let told = too_long(&files);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with("sandboxd/src/b.rs") && told[1].starts_with("sandboxd/src/c/mod.rs"));
}
