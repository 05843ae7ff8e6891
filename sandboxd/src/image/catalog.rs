//! Where images are found: by name under `state_dir/images`, or by absolute path.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{Digest, Image, ImageError, manifest};
use crate::words::Name;

/// An image by the digest of its manifest; empty until the first of those who wait for the lock has opened it.
type Opened = Arc<Mutex<Option<(Digest, Image)>>>;

/// The images of a node. An image is hashed once, however many ask for it at a time; it is opened and hashed anew only
/// when its manifest has changed.
#[derive(Debug, Clone)]
pub struct Catalog {
    images: PathBuf,
    opened: Arc<Mutex<HashMap<PathBuf, Opened>>>,
}

impl Catalog {
    /// Images by name are those under `state_dir/images`.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self {
            images: state_dir.join("images"),
            opened: Arc::default(),
        }
    }

    /// Finds, opens and checks an image. Blocks while it, or another caller, hashes one that is new
    /// or changed.
    ///
    /// # Errors
    /// [`ImageError::NotFound`] where there is no manifest, or the text is neither a name nor an absolute path.
    pub fn find(&self, name_or_path: &str) -> Result<Image, ImageError> {
        let dir = self.dir_of(name_or_path)?;
        let bytes = manifest::read(&dir, name_or_path)?;
        let digest = Digest::of(&bytes);
        let opened = {
            let mut all = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(dir.clone()).or_default())
        };
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, image)) = &*opened
            && *of == digest
        {
            return Ok(image.clone());
        }
        let image = Image::from_manifest(&dir, &bytes)?;
        *opened = Some((digest, image.clone()));
        Ok(image)
    }

    /// Closes all images but these, named as for [`find`](Self::find). Whoever uses one keeps it open.
    pub fn keep_only<'a>(&self, names: impl Iterator<Item = &'a str>) {
        // What is no name of an image was never opened.
        let dirs: HashSet<PathBuf> = names.filter_map(|name| self.dir_of(name).ok()).collect();
        let mut all = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|dir, _| dirs.contains(dir));
    }

    fn dir_of(&self, name_or_path: &str) -> Result<PathBuf, ImageError> {
        if Path::new(name_or_path).is_absolute() {
            return Ok(PathBuf::from(name_or_path));
        }
        match name_or_path.parse::<Name>() {
            Ok(name) => Ok(self.images.join(name.as_str())),
            Err(_not_a_name) => Err(ImageError::NotFound {
                name: name_or_path.to_owned(),
                dir: self.images.clone(),
            }),
        }
    }
}
