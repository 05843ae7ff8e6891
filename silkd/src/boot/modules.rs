//! Kernel modules: those that the initrd lists, in its order.
//!
//! May call: boot.
//! Never inside: the name of a module.

use std::{
    ffi::CStr,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    system::finit_module,
};

use super::BootError;

/// Longest list, in bytes.
const LIST: usize = 64 * 1024;
const NO_PARAMETERS: &CStr = c"";

/// Loads what `modules` in this folder lists: a path a line, `#` begins a comment. No list: nothing to load.
///
/// # Errors
/// A module that cannot be loaded, by name; one that is there already is none.
pub(super) fn load(etc: &Path) -> Result<(), BootError> {
    let list = etc.join("modules");
    let text = match fs::read_to_string(&list) {
        Ok(text) if text.len() <= LIST => text,
        Ok(_) => {
            return Err(BootError::new(
                "modules",
                format!("{} is too long", list.display()),
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(BootError::new(format!("modules: {}", list.display()), error)),
    };
    for path in listed(&text) {
        load_one(&path).map_err(|errno| BootError::new(format!("modules: {}", path.display()), errno))?;
    }
    Ok(())
}

fn load_one(path: &Path) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    match finit_module(&file, NO_PARAMETERS, 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The paths of a list; a relative one is of `/lib/modules`. Pure.
fn listed(text: &str) -> Vec<PathBuf> {
    text.lines()
        .map(|line| {
            line.split_once('#')
                .map_or(line, |(before, _comment)| before)
                .trim()
        })
        .filter(|line| !line.is_empty())
        .map(|line| Path::new("/lib/modules").join(line))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_line_by_line() {
        let text = "# order matters\nvirtio.ko\n\n  /lib/modules/6.1/erofs.ko # root\n";
        let paths = ["/lib/modules/virtio.ko", "/lib/modules/6.1/erofs.ko"];
        assert_eq!(listed(text), paths.map(PathBuf::from));
    }

    #[test]
    fn missing_module_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(load(dir.path()).is_ok());
        let mut file = fs::File::create(dir.path().join("modules")).unwrap();
        io::Write::write_all(&mut file, b"/nowhere/absent.ko\n").unwrap();
        let error = load(dir.path()).unwrap_err();
        assert_eq!(error.to_string(), "modules: /nowhere/absent.ko");
    }
}
