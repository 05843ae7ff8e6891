//! The node's templates: found, judged, built once however many want them, deleted.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use super::{
    Build, Inner, Means, Progress, Spec, TemplateError, Templates, Variant, build, build::Building, catalog,
};
use crate::{
    engine::Capture,
    feed::{Feed, Reader},
    image::Image,
    tasks::{self, Group},
    words::{EngineKind, Name, PoolKey, Size},
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
            sizes: RwLock::new(sizes),
            specs: RwLock::new(BTreeMap::new()),
            variants: RwLock::default(),
            building: Mutex::default(),
            progress: Feed::default(),
            tasks: Group::new(),
        }));
        for (key, capture) in &found {
            let spec = catalog::spec_of(&key.template, capture);
            templates
                .0
                .specs
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(key.template.clone(), spec);
        }
        templates
            .0
            .specs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(specs);
        for (key, capture) in found {
            templates.keep(key, capture);
        }
        Ok(templates)
    }

    /// Takes the templates of the configuration file, over those that the API made.
    pub fn set_specs(&self, specs: BTreeMap<Name, Spec>) {
        self.0
            .specs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(specs);
        self.judge();
    }

    /// Takes the sizes of the configuration file.
    pub fn set_sizes(&self, sizes: BTreeMap<Name, Size>) {
        *self.0.sizes.write().unwrap_or_else(PoisonError::into_inner) = sizes;
        self.judge();
    }

    /// News of all builds, from now on.
    #[must_use]
    pub fn progress(&self) -> Reader<Progress> {
        self.0.progress.read()
    }

    /// What a size stands for.
    #[must_use]
    pub fn size(&self, name: &Name) -> Option<Size> {
        self.0
            .sizes
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .copied()
    }

    /// Whether there is a template of this name, built or not.
    #[must_use]
    pub fn knows(&self, name: &Name) -> bool {
        self.0
            .specs
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(name)
    }

    /// What a template is made from.
    #[must_use]
    pub fn spec(&self, name: &Name) -> Option<Spec> {
        self.0
            .specs
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// All templates, by name, with their variants.
    #[must_use]
    pub fn list(&self) -> Vec<(Spec, Vec<(PoolKey, Variant)>)> {
        let specs = self
            .0
            .specs
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
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

    /// Whether a build of this variant is under way.
    #[must_use]
    pub fn is_building(&self, key: &PoolKey) -> bool {
        self.0
            .building
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(key)
    }

    /// The image that a template is made from, opened and checked: as long as its digests take, on a thread for such
    /// work. Cancel safe.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Image`].
    pub async fn image(&self, name: &Name) -> Result<Image, TemplateError> {
        let spec = self
            .spec(name)
            .ok_or_else(|| TemplateError::NotFound(name.clone()))?;
        let templates = self.clone();
        let opening = tasks::blocking("open-image", move || templates.open_image(&spec));
        // A thread that panicked has logged why; nothing was opened.
        opening.await.unwrap_or(Err(TemplateError::Cancelled))
    }

    pub(super) fn open_image(&self, spec: &Spec) -> Result<Image, TemplateError> {
        match self.0.means.engine.kind() {
            EngineKind::Qemu => self
                .0
                .means
                .images
                .find(&spec.image)
                .map_err(TemplateError::Image),
            EngineKind::Stub => Ok(Image::absent()),
        }
    }

    /// The capture to clone from, built first if it is missing or stale. Cancel safe.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub async fn ensure(&self, key: &PoolKey) -> Result<Capture, TemplateError> {
        if let Some(capture) = self.current(key) {
            return Ok(capture);
        }
        let spec = self
            .spec(&key.template)
            .ok_or_else(|| TemplateError::NotFound(key.template.clone()))?;
        self.build(spec, key.clone(), true)?.done().await
    }

    /// Begins a build, or joins the one under way. A spec that is new by its name is known from then on.
    ///
    /// # Errors
    /// [`TemplateError::Exists`] where a usable variant is there and not to be replaced,
    /// [`TemplateError::SizeNotFound`].
    pub fn build(&self, spec: Spec, key: PoolKey, rebuild: bool) -> Result<Build, TemplateError> {
        let size = self
            .size(&key.size)
            .ok_or_else(|| TemplateError::SizeNotFound(key.size.clone()))?;
        if !rebuild && self.current(&key).is_some() {
            return Err(TemplateError::Exists(key));
        }
        let mut building = self.0.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(under_way) = building.get(&key) {
            return Ok(under_way.join());
        }
        let (handle, build) = Building::begin();
        building.insert(key.clone(), Arc::clone(&handle));
        drop(building);
        let templates = self.clone();
        self.0.tasks.spawn("template", async move {
            let outcome = Box::pin(build::run(&templates, &spec, &key, size, &handle)).await;
            if let Ok(capture) = &outcome {
                templates
                    .0
                    .specs
                    .write()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(spec.name.clone(), spec);
                templates.keep(key.clone(), capture.clone());
            }
            templates
                .0
                .building
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&key);
            handle.finish(outcome);
        });
        Ok(build)
    }

    /// Deletes a template with all its variants. Whether it is in use is the caller's to know.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Disk`].
    pub fn delete(&self, name: &Name) -> Result<(), TemplateError> {
        let removed = self
            .0
            .specs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        if removed.is_none() {
            return Err(TemplateError::NotFound(name.clone()));
        }
        let gone: Vec<Variant> = {
            let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
            let keys: Vec<PoolKey> = variants
                .keys()
                .filter(|key| key.template == *name)
                .cloned()
                .collect();
            keys.iter().filter_map(|key| variants.remove(key)).collect()
        };
        for variant in gone {
            self.0.means.engine.cool(&variant.capture);
        }
        catalog::remove(&self.0.means.dir, name)
    }

    /// Stops builds under way, and waits until nothing of them is left.
    pub async fn stop(&self) {
        self.0.tasks.ask();
        let under_way: Vec<Arc<Building>> = self
            .0
            .building
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect();
        under_way.iter().for_each(|building| building.cancel());
        self.0.tasks.stop().await;
    }

    pub(super) fn keep(&self, key: PoolKey, capture: Capture) {
        let stale = self.stale(&key, &capture);
        if stale.is_none() {
            self.0.means.engine.warm_up(&capture);
        }
        let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
        let old = variants.insert(key, Variant { capture, stale });
        drop(variants);
        if let Some(old) = old {
            self.0.means.engine.cool(&old.capture);
        }
    }

    /// Looks again whether each variant can be used: specs or sizes have changed.
    pub(super) fn judge(&self) {
        let all: Vec<(PoolKey, Capture)> = {
            let variants = self.0.variants.read().unwrap_or_else(PoisonError::into_inner);
            variants
                .iter()
                .map(|(key, variant)| (key.clone(), variant.capture.clone()))
                .collect()
        };
        for (key, capture) in all {
            let stale = self.stale(&key, &capture);
            let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(variant) = variants.get_mut(&key) {
                variant.stale = stale;
            }
        }
    }

    /// Why a capture cannot be used as it is.
    pub(super) fn stale(&self, key: &PoolKey, capture: &Capture) -> Option<String> {
        let (engine, manifest) = (&self.0.means.engine, capture.manifest());
        if let Err(stale) = capture.fits(&engine.facts()) {
            return Some(stale.to_string());
        }
        if self.size(&key.size) != Some(manifest.size) {
            return Some(format!("size {} stands for something else now", key.size));
        }
        let spec = self.spec(&key.template)?;
        if spec.warmup != manifest.warmup {
            return Some("its warm-up has changed".into());
        }
        // An image that is gone since does not make the capture any worse.
        let image = self.open_image(&spec).ok()?;
        (image.digest() != manifest.image.digest).then(|| "its image has changed".to_owned())
    }
}
