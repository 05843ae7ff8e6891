//! The ports to the host, found by the names that the host gave them.
//!
//! May call: boot/*.
//! Never inside: a byte that goes through them.
//!
//! The driver learns of ports and then of their names by messages, some time after it was loaded; each is an uevent.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::{Mode, OFlags};

use super::uevent::Uevents;

/// Names of ports that were found, and their devices.
type Found = Vec<(&'static str, PathBuf)>;

/// Opens the ports with these names, of which the first has to be there.
///
/// # Errors
/// The kernel's; not found, when the first did not come in time.
pub(super) fn open(names: &[&'static str], limit: Duration) -> io::Result<Vec<(&'static str, OwnedFd)>> {
    let class = Path::new("/sys/class/virtio-ports");
    let first = names.first().copied().unwrap_or_default();
    let mut latest = Found::new();
    let all = Uevents::new()?.wait_for(limit, || {
        let (found, complete) = look(class, names)?;
        latest.clone_from(&found);
        Ok((complete && found.iter().any(|(name, _)| *name == first)).then_some(found))
    })?;
    // A port that never gets a name is not one of ours.
    let found = all.unwrap_or(latest);
    if !found.iter().any(|(name, _)| *name == first) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no {first}"),
        ));
    }
    found
        .into_iter()
        .map(|(name, device)| Ok((name, open_one(&device)?)))
        .collect()
}

fn open_one(device: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(device, flags, Mode::empty())?)
}

/// Which of the names are there, and whether every port that is there has a name already.
fn look(class: &Path, names: &[&'static str]) -> io::Result<(Found, bool)> {
    let ports = match fs::read_dir(class) {
        Ok(ports) => ports,
        // The driver is not there yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Found::new(), false)),
        Err(error) => return Err(error),
    };
    let (mut found, mut complete) = (Found::new(), true);
    for port in ports {
        let port = port?;
        match fs::read_to_string(port.path().join("name")) {
            Ok(name) => {
                if let Some(name) = names.iter().find(|wanted| **wanted == name.trim_end()) {
                    found.push((*name, Path::new("/dev").join(port.file_name())));
                }
            }
            Err(_not_yet) => complete = false,
        }
    }
    Ok((found, complete))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_found_by_name_once_all_have_one() {
        let class = tempfile::tempdir().unwrap();
        assert!(!look(&class.path().join("absent"), &["a"]).unwrap().1);
        for (port, name) in [
            ("vport0p1", Some("a\n")),
            ("vport0p2", Some("other\n")),
            ("vport0p3", None),
        ] {
            let dir = class.path().join(port);
            fs::create_dir(&dir).unwrap();
            if let Some(name) = name {
                let mut file = fs::File::create(dir.join("name")).unwrap();
                io::Write::write_all(&mut file, name.as_bytes()).unwrap();
            }
        }
        let expected = vec![("a", PathBuf::from("/dev/vport0p1"))];
        assert_eq!(
            look(class.path(), &["a", "b"]).unwrap(),
            (expected.clone(), false)
        );
        fs::remove_dir(class.path().join("vport0p3")).unwrap();
        assert_eq!(look(class.path(), &["a", "b"]).unwrap(), (expected, true));
    }
}
