//! Where images are found: by name under `state_dir/images`, or by absolute path.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{Digest, Image, ImageError, manifest};
use crate::words::Name;

/// The images of a node. An image is hashed once; it is opened and hashed anew only when its manifest has changed.
#[derive(Debug, Clone)]
pub struct Catalog {
    images: PathBuf,
    opened: Arc<Mutex<HashMap<PathBuf, (Digest, Image)>>>,
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

    /// Finds, opens and checks an image. Blocks while it hashes one that is new or changed.
    ///
    /// # Errors
    /// [`ImageError::NotFound`] where there is no manifest, or the text is neither a name nor an absolute path.
    pub fn find(&self, name_or_path: &str) -> Result<Image, ImageError> {
        let dir = self.dir_of(name_or_path)?;
        let bytes = manifest::read(&dir, name_or_path)?;
        let digest = Digest::of(&bytes);
        let known = {
            let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.get(&dir).filter(|(of, _)| *of == digest).cloned()
        };
        if let Some((_, image)) = known {
            return Ok(image);
        }
        let image = Image::from_manifest(&dir, &bytes)?;
        self.opened
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(dir, (digest, image.clone()));
        Ok(image)
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
