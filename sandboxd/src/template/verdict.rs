//! Which variants can be used: judged when they come, when the configuration changes, and when one proves spoiled.

use std::{
    collections::{BTreeMap, HashMap},
    sync::PoisonError,
};

use super::{Spec, TemplateError, Templates, Variant, catalog};
use crate::{
    engine::Capture,
    image::{Digest, Image},
    tasks,
    telemetry::chain,
    words::{EngineKind, Name, PoolKey, Size},
};

/// What a variant is until it is judged.
const UNJUDGED: &str = "it is being looked at";

impl Templates {
    /// Takes the templates and sizes of the configuration file. A template that the file no longer names is what its
    /// newest variant says; without one it is gone. Blocks while it hashes images that are new.
    pub fn set(&self, specs: BTreeMap<Name, Spec>, sizes: BTreeMap<Name, Size>) {
        let judging = self.0.judging.lock().unwrap_or_else(PoisonError::into_inner);
        let mut built = self.built();
        {
            let mut known = self.known_mut();
            known.made.retain(|name, _| !specs.contains_key(name));
            let before = std::mem::replace(&mut known.file, specs);
            known.sizes = sizes;
            for name in before.into_keys() {
                if !known.file.contains_key(&name)
                    && let Some(spec) = built.remove(&name)
                {
                    known.made.insert(name, spec);
                }
            }
        }
        self.judge();
        drop(judging);
        self.forget_images();
    }

    /// What the newest variant of each template was made from.
    pub(super) fn built(&self) -> BTreeMap<Name, Spec> {
        let variants = self.0.variants.read().unwrap_or_else(PoisonError::into_inner);
        let mut newest: BTreeMap<&Name, &Capture> = BTreeMap::new();
        for (key, variant) in &*variants {
            let kept = newest.entry(&key.template).or_insert(&variant.capture);
            if kept.manifest().created_at < variant.capture.manifest().created_at {
                *kept = &variant.capture;
            }
        }
        let specs = newest.into_iter();
        specs
            .map(|(name, capture)| (name.clone(), catalog::spec_of(name, capture)))
            .collect()
    }

    /// No clone can be made of this capture: it is built anew. Nothing changes where it was replaced meanwhile.
    pub fn spoil(&self, key: &PoolKey, digest: Digest, why: String) {
        let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
        let Some(variant) = variants
            .get_mut(key)
            .filter(|variant| variant.capture.digest() == digest)
        else {
            return;
        };
        tracing::warn!(template = %key.template, lane = %key.lane, size = %key.size, %why, "a template's capture is spoiled");
        variant.spoiled = Some(why);
        self.0.means.engine.cool(&variant.capture);
    }

    /// Takes a variant that was just built, and what it was built from. Blocks as [`set`](Self::set) does.
    pub(super) fn take(&self, spec: Spec, key: PoolKey, capture: Capture) {
        let judging = self.0.judging.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut known = self.known_mut();
            if !known.file.contains_key(&spec.name) {
                known.made.insert(spec.name.clone(), spec);
            }
        }
        self.keep(key, capture);
        self.judge();
        drop(judging);
    }

    /// Puts a variant in its place; it is used once it is judged.
    pub(super) fn keep(&self, key: PoolKey, capture: Capture) {
        let variant = Variant {
            capture,
            stale: Some(UNJUDGED.into()),
            spoiled: None,
        };
        let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = variants.insert(key, variant) {
            self.0.means.engine.cool(&old.capture);
        }
    }

    /// Looks again whether each variant can be used; whoever calls holds `judging`.
    pub(super) fn judge(&self) {
        let all: HashMap<PoolKey, Capture> = {
            let variants = self.0.variants.read().unwrap_or_else(PoisonError::into_inner);
            let captures = variants.iter();
            captures
                .map(|(key, variant)| (key.clone(), variant.capture.clone()))
                .collect()
        };
        let engine = &self.0.means.engine;
        for (key, capture) in all {
            let stale = self.stale(&key, &capture);
            let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
            let Some(variant) = variants
                .get_mut(&key)
                .filter(|variant| variant.capture.digest() == capture.digest())
            else {
                continue;
            };
            let was_used = variant.stale().is_none();
            variant.stale = stale;
            match (was_used, variant.stale().is_none()) {
                (false, true) => engine.warm_up(&variant.capture),
                (true, false) => engine.cool(&variant.capture),
                (false, false) | (true, true) => {}
            }
        }
    }

    /// Why a capture cannot be used as it is.
    fn stale(&self, key: &PoolKey, capture: &Capture) -> Option<String> {
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

    /// The image that a template is made from, opened and checked. Cancel safe: what was begun goes on.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Image`].
    pub async fn image(&self, name: &Name) -> Result<Image, TemplateError> {
        let spec = self
            .spec(name)
            .ok_or_else(|| TemplateError::NotFound(name.clone()))?;
        self.opened(spec).await
    }

    pub(super) async fn opened(&self, spec: Spec) -> Result<Image, TemplateError> {
        let (templates, name) = (self.clone(), spec.name.clone());
        match tasks::blocking("image", move || templates.open_image(&spec)).await {
            Ok(opened) => opened,
            Err(panicked) => {
                tracing::error!(template = %name, error = %chain(&panicked), "opening an image broke off");
                Err(TemplateError::BrokeOff(name))
            }
        }
    }

    /// Blocks for as long as the digests take.
    fn open_image(&self, spec: &Spec) -> Result<Image, TemplateError> {
        let means = &self.0.means;
        match means.engine.kind() {
            EngineKind::Qemu => means.images.find(&spec.image).map_err(TemplateError::Image),
            EngineKind::Stub => Ok(Image::absent()),
        }
    }

    /// Closes images that no template is made from any more.
    pub(super) fn forget_images(&self) {
        let known = self.known();
        let specs = known.file.values().chain(known.made.values());
        self.0
            .means
            .images
            .keep_only(specs.map(|spec| spec.image.as_str()));
    }
}
