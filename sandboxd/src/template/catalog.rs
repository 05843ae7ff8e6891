//! Templates on the disk: `templates/<name>/<lane>-<size>/`, whole or not there.

use std::{fs, io, path::Path, str::FromStr as _, time::Duration};

use super::{Spec, TemplateError};
use crate::{
    ca::Fingerprint,
    disk,
    engine::Capture,
    telemetry::chain,
    words::{Lane, Name, PoolKey},
};

/// What the names of half-made variants begin with; no template's name can.
pub(super) const STAGING: &str = ".build-";
/// Where the API's own warm-ups take their time from after a restart; the manifest does not hold it.
const WARMUP_TIMEOUT: Duration = Duration::from_secs(30);

/// Finds every complete variant, and removes what a killed daemon left half made.
pub(super) fn scan(dir: &Path) -> Result<Vec<(PoolKey, Capture)>, TemplateError> {
    let disk = |source| TemplateError::Disk {
        path: dir.to_owned(),
        source,
    };
    disk::make_dir(dir, 0o700).map_err(disk)?;
    let mut found = vec![];
    for entry in fs::read_dir(dir).map_err(disk)? {
        let entry = entry.map_err(disk)?;
        let file_name = entry.file_name();
        let text = file_name.to_string_lossy();
        if text.starts_with(STAGING) {
            tracing::info!(path = %entry.path().display(), "a template that was never finished: removed");
            clear_dir(&entry.path()).map_err(disk)?;
        } else if let Ok(template) = Name::from_str(&text) {
            variants(&entry.path(), &template, &mut found).map_err(disk)?;
        }
    }
    Ok(found)
}

fn variants(dir: &Path, template: &Name, found: &mut Vec<(PoolKey, Capture)>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Some(key) = key_of(template, &entry.file_name().to_string_lossy()) else {
            continue;
        };
        match Capture::open(&entry.path()) {
            Ok(capture) => found.push((key, capture)),
            // Its bytes are kept for whoever wants to look; a build replaces it.
            Err(error) => {
                tracing::warn!(path = %entry.path().display(), error = %chain(&error), "not a usable template, will be built anew");
            }
        }
    }
    Ok(())
}

/// The roots that each usable variant below this folder says it trusts, by `template-lane-size`. Changes nothing.
///
/// # Errors
/// The kernel's; a folder that is not there holds nothing.
pub fn coverage(dir: &Path) -> io::Result<Vec<(String, Vec<Fingerprint>)>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Ok(template) = Name::from_str(&entry.file_name().to_string_lossy()) {
            variants(&entry.path(), &template, &mut found)?;
        }
    }
    let mut named: Vec<_> = found
        .into_iter()
        .map(|(key, capture)| {
            let name = format!("{}-{}", key.template, folder(&key));
            (name, capture.manifest().ca.clone())
        })
        .collect();
    named.sort();
    Ok(named)
}

fn key_of(template: &Name, folder: &str) -> Option<PoolKey> {
    let (lane, size) = folder.split_once('-')?;
    let lane = [Lane::None, Lane::Guarded]
        .into_iter()
        .find(|known| known.as_str() == lane)?;
    Some(PoolKey {
        template: template.clone(),
        lane,
        size: size.parse().ok()?,
    })
}

/// The folder of a variant, below its template's.
pub(super) fn folder(key: &PoolKey) -> String {
    format!("{}-{}", key.lane, key.size)
}

/// What a capture was made from, as it says itself.
pub(super) fn spec_of(template: &Name, capture: &Capture) -> Spec {
    let manifest = capture.manifest();
    Spec {
        name: template.clone(),
        image: manifest.image.dir.to_string_lossy().into_owned(),
        warmup: manifest.warmup.clone(),
        warmup_timeout: WARMUP_TIMEOUT,
    }
}

/// Puts a sealed variant in place, and removes the one that it replaces. An error means that it is not in place.
pub(super) fn put(staging: &Path, target: &Path) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        disk::make_dir(parent, 0o700)?;
        parent.parent().map_or(Ok(()), disk::sync_dir)?;
    }
    if target.exists() {
        disk::exchange_synced(staging, target)?;
        // The new one is there whether or not the old one goes; what remains of that is removed at the next start.
        drop(clear_dir(staging));
        Ok(())
    } else {
        disk::rename_synced(staging, target)
    }
}

/// Removes a template. It is out of the way before the first of its files goes; an error means that it is still there.
pub(super) fn remove(dir: &Path, name: &Name) -> Result<(), TemplateError> {
    let path = dir.join(name.as_str());
    let aside = dir.join(format!("{STAGING}gone-{name}"));
    let disk = |source| TemplateError::Disk {
        path: path.clone(),
        source,
    };
    clear_dir(&aside).map_err(disk)?;
    match disk::rename_synced(&path, &aside) {
        Ok(()) => {
            if let Err(error) = clear_dir(&aside) {
                tracing::warn!(path = %aside.display(), %error, "a deleted template's files remain; the next start removes them");
            }
            Ok(())
        }
        // It was never built.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(disk(error)),
    }
}

/// Removes a folder with all that is in it; one that is not there is fine.
pub(super) fn clear_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_name_variants_and_nothing_else_does() {
        let template: Name = "default".parse().unwrap();
        let key = key_of(&template, "none-small").unwrap();
        assert_eq!(folder(&key), "none-small");
        assert_eq!(
            key_of(&template, "none-my-size").unwrap().size.as_str(),
            "my-size"
        );
        for bad in ["none", "other-small", "none-", "none-A", "none-../x"] {
            assert_eq!(key_of(&template, bad), None, "{bad}");
        }
    }

    #[test]
    fn inv_09_power_cut_model() {
        // The rename is the record: before it there is no variant, after it a whole one, and a cut between leaves only
        // what the next start removes.
        let dir = tempfile::tempdir().unwrap();
        let staging = dir.path().join(format!("{STAGING}0001"));
        fs::create_dir(&staging).unwrap();
        disk::write_atomic(&staging.join("half"), b"x", 0o600).unwrap();
        assert!(scan(dir.path()).unwrap().is_empty());
        assert!(!staging.exists(), "what was never finished is removed");

        let target = dir.path().join("default").join("none-small");
        for content in ["one", "two"] {
            fs::create_dir(&staging).unwrap();
            disk::write_atomic(&staging.join("ram"), content.as_bytes(), 0o600).unwrap();
            put(&staging, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("ram")).unwrap(), content);
            assert!(!staging.exists());
        }
        remove(dir.path(), &"default".parse().unwrap()).unwrap();
        remove(dir.path(), &"default".parse().unwrap()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
