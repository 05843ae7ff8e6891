//! The node's templates, as they are known.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use super::{Inner, Known, Means, Progress, Spec, TemplateError, Templates, Variant, catalog};
use crate::{
    engine::Capture,
    feed::{Feed, Reader},
    tasks::Group,
    words::{Name, PoolKey, Size},
};

impl Templates {
    /// Reads what lies on the disk, and sweeps what a killed daemon left half made. Blocks.
    ///
    /// # Errors
    /// [`TemplateError::Disk`] if the directory cannot be read; a variant that cannot is told in the log and passed over.
    pub fn open(
        means: Means,
        sizes: BTreeMap<Name, Size>,
        specs: BTreeMap<Name, Spec>,
    ) -> Result<Self, TemplateError> {
        let found = catalog::scan(&means.dir)?;
        let templates = Self(Arc::new(Inner {
            means,
            known: RwLock::default(),
            variants: RwLock::default(),
            under_way: Mutex::default(),
            judging: Mutex::default(),
            progress: Feed::default(),
            tasks: Group::new(),
        }));
        for (key, capture) in found {
            templates.keep(key, capture);
        }
        templates.known_mut().made = templates.built();
        templates.set(specs, sizes);
        Ok(templates)
    }

    pub(super) fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.0.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn known_mut(&self) -> RwLockWriteGuard<'_, Known> {
        self.0.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// News of all builds, from now on.
    #[must_use]
    pub fn progress(&self) -> Reader<Progress> {
        self.0.progress.read()
    }

    /// What a size stands for.
    #[must_use]
    pub fn size(&self, name: &Name) -> Option<Size> {
        self.known().sizes.get(name).copied()
    }

    /// Whether there is a template of this name, built or not.
    #[must_use]
    pub fn knows(&self, name: &Name) -> bool {
        self.known().spec(name).is_some()
    }

    /// Whether the configuration file names it.
    #[must_use]
    pub fn is_of_file(&self, name: &Name) -> bool {
        self.known().file.contains_key(name)
    }

    /// What a template is made from.
    #[must_use]
    pub fn spec(&self, name: &Name) -> Option<Spec> {
        self.known().spec(name).cloned()
    }

    /// All templates, by name, with their variants.
    #[must_use]
    pub fn list(&self) -> Vec<(Spec, Vec<(PoolKey, Variant)>)> {
        let specs: BTreeMap<Name, Spec> = {
            let known = self.known();
            let both = known.made.iter().chain(&known.file);
            both.map(|(name, spec)| (name.clone(), spec.clone())).collect()
        };
        let variants = self
            .0
            .variants
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let of = |name: &Name| {
            let mut own: Vec<_> = variants
                .iter()
                .filter(|(key, _)| key.template == *name)
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            own.sort_by(|a, b| a.0.cmp(&b.0));
            own
        };
        specs
            .into_values()
            .map(|spec| (of(&spec.name), spec))
            .map(|(own, spec)| (spec, own))
            .collect()
    }

    /// The capture to clone from, if there is one that can be used.
    #[must_use]
    pub fn current(&self, key: &PoolKey) -> Option<Capture> {
        let variants = self.0.variants.read().unwrap_or_else(PoisonError::into_inner);
        variants
            .get(key)
            .filter(|variant| variant.stale().is_none())
            .map(|variant| variant.capture.clone())
    }
}
