//! Where the programs under test lie.

use std::path::PathBuf;

/// The folder of the test's own build: `<target>/<profile>`.
fn folder() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let folder = here.parent().unwrap();
    // Test executables lie in `deps`, programs and examples of the harness do not.
    let deps = folder.ends_with("deps") || folder.ends_with("examples");
    if deps {
        folder.parent().unwrap().to_owned()
    } else {
        folder.to_owned()
    }
}

/// A program of this package: `sandboxd-faults`, `silkd-under-test`, `sandboxctl-under-test`.
///
/// # Panics
/// It was not built.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = folder().join(name);
    assert!(
        path.is_file(),
        "{} is missing: `cargo build -p sandbox-tests --bins`",
        path.display()
    );
    path
}

/// The folder of a virtual machine's image, as `make image` leaves it.
///
/// # Panics
/// It was not built.
#[must_use]
pub fn image(name: &str) -> PathBuf {
    let path = folder().parent().unwrap().join("image").join(name);
    assert!(
        path.join("manifest.json").is_file(),
        "{} holds no image: `make image IMAGE={name}`",
        path.display()
    );
    path
}
