//! The files of the repository, as git knows them: tracked, or new and not ignored.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// A file of the tree.
#[derive(Debug, Clone)]
pub(crate) struct File {
    /// Path from the root of the repository.
    pub(crate) path: String,
    /// Its text; empty where it is none.
    pub(crate) text: String,
}

impl File {
    /// A file for a test of a check.
    pub(crate) fn new(path: &str, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    /// Whether it is Rust.
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether it holds only tests.
    pub(crate) fn is_test(&self) -> bool {
        self.path.starts_with("tests/")
            || self.path.contains("/tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }
}

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every file of the repository.
pub(crate) fn files() -> &'static [File] {
    static FILES: LazyLock<Vec<File>> = LazyLock::new(|| {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root())
            .output()
            .expect("git is needed to list the repository's files");
        assert!(
            listed.status.success(),
            "git ls-files: {}",
            String::from_utf8_lossy(&listed.stderr)
        );
        let names = String::from_utf8(listed.stdout).expect("names of files are UTF-8");
        let files: Vec<File> = names
            .split_terminator('\0')
            // One that is deleted but not yet committed is still listed.
            .filter(|path| root().join(path).is_file())
            .map(|path| File {
                path: path.to_owned(),
                text: String::from_utf8(std::fs::read(root().join(path)).expect("a listed file is read"))
                    .unwrap_or_default(),
            })
            .collect();
        assert!(
            files.iter().any(|file| file.path == "Cargo.toml"),
            "not the repository"
        );
        files
    });
    &FILES
}

/// The file at this path.
pub(crate) fn file(path: &str) -> &'static File {
    files()
        .iter()
        .find(|file| file.path == path)
        .unwrap_or_else(|| panic!("{path} is missing"))
}
