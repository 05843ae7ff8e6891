//! Builds, begun once however many want them, and deletions.

use std::sync::{Arc, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::{Build, Spec, TemplateError, Templates, UnderWay, Variant, build, building::Building, catalog};
use crate::{
    engine::Capture,
    tasks,
    telemetry::chain,
    words::{Name, PoolKey, Size},
};

/// What becomes of the wish for a build.
enum Begun {
    /// It is under way.
    Build(Build),
    /// One from another image or with another warm-up is.
    Other(Arc<Building>),
    /// The template is being deleted.
    Deleting,
}

/// One build's task. Dropped, it takes the build off the list and tells its outcome, whatever became of it.
struct Running {
    templates: Templates,
    key: PoolKey,
    building: Arc<Building>,
    outcome: Option<Result<Capture, TemplateError>>,
}

impl Templates {
    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a build of this variant is under way.
    #[must_use]
    pub fn is_building(&self, key: &PoolKey) -> bool {
        self.under_way().building.contains_key(key)
    }

    /// The capture to clone from, built first if it is missing or stale. Cancel safe.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub async fn ensure(&self, key: &PoolKey) -> Result<Capture, TemplateError> {
        loop {
            if let Some(capture) = self.current(key) {
                return Ok(capture);
            }
            match self.begin(None, key.clone(), self.size_of(key)?)? {
                Begun::Build(build) => return build.done().await,
                // If it succeeds, the template is what that one says.
                Begun::Other(building) => building.over().await,
                Begun::Deleting => return Err(TemplateError::Building(key.template.clone())),
            }
        }
    }

    /// Begins a build, or joins the one under way. A spec that is new by its name is known once it is built.
    ///
    /// # Errors
    /// [`TemplateError::Exists`] where a usable variant is there and not to be replaced,
    /// [`TemplateError::SizeNotFound`], [`TemplateError::Building`] while one from another image or with another warm-up
    /// is under way, or the template is being deleted.
    pub fn build(&self, spec: Spec, key: PoolKey, rebuild: bool) -> Result<Build, TemplateError> {
        let size = self.size_of(&key)?;
        if !rebuild && self.current(&key).is_some() {
            return Err(TemplateError::Exists(key));
        }
        let name = key.template.clone();
        match self.begin(Some(spec), key, size)? {
            Begun::Build(build) => Ok(build),
            Begun::Other(_) | Begun::Deleting => Err(TemplateError::Building(name)),
        }
    }

    fn size_of(&self, key: &PoolKey) -> Result<Size, TemplateError> {
        self.size(&key.size)
            .ok_or_else(|| TemplateError::SizeNotFound(key.size.clone()))
    }

    /// Begins or joins a build from this spec, or from the one that is known.
    fn begin(&self, spec: Option<Spec>, key: PoolKey, size: Size) -> Result<Begun, TemplateError> {
        let mut under_way = self.under_way();
        if self.0.tasks.is_stopping() {
            return Err(TemplateError::Cancelled);
        }
        if under_way.deleting.contains(&key.template) {
            return Ok(Begun::Deleting);
        }
        let spec = spec
            .or_else(|| self.spec(&key.template))
            .ok_or_else(|| TemplateError::NotFound(key.template.clone()))?;
        let before = under_way.building.get(&key).cloned();
        if let Some(building) = &before {
            if building.spec().makes_the_same(&spec) {
                if let Some(build) = building.join() {
                    return Ok(Begun::Build(build));
                }
            } else if !building.is_cancelled() {
                return Ok(Begun::Other(Arc::clone(building)));
            }
        }
        let (building, build) = Building::begin(spec);
        under_way.building.insert(key.clone(), Arc::clone(&building));
        let running = Running {
            templates: self.clone(),
            key,
            building,
            outcome: None,
        };
        // Within the lock, so that a stop finds it either here or among the tasks.
        self.0.tasks.spawn("template", running.run(before, size));
        drop(under_way);
        Ok(Begun::Build(build))
    }

    /// Deletes a template with all its variants: it is unknown from now on, and the outcome tells when its files are
    /// gone, which goes on without a waiter. Whether it is in use is the caller's to know.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::FromFile`], [`TemplateError::Building`] while it is built; later
    /// [`TemplateError::Disk`], and it is known again.
    pub fn delete(
        &self,
        name: &Name,
    ) -> Result<impl Future<Output = Result<(), TemplateError>> + Send + use<>, TemplateError> {
        let spec = {
            let mut under_way = self.under_way();
            let is_built = under_way.building.keys().any(|key| key.template == *name);
            if is_built || under_way.deleting.contains(name) {
                return Err(TemplateError::Building(name.clone()));
            }
            let mut known = self.known_mut();
            if known.file.contains_key(name) {
                return Err(TemplateError::FromFile(name.clone()));
            }
            let removed = known.made.remove(name);
            let spec = removed.ok_or_else(|| TemplateError::NotFound(name.clone()))?;
            under_way.deleting.insert(name.clone());
            spec
        };
        let gone = self.take_out(name);
        let (templates, name) = (self.clone(), name.clone());
        let whose = name.clone();
        let removing = tasks::blocking("delete template", move || {
            let removed = catalog::remove(&templates.0.means.dir, &name);
            if removed.is_err() {
                for (key, variant) in gone {
                    templates.take(spec.clone(), key, variant.capture);
                }
            }
            templates.forget_images();
            removed
        });
        let (tell, told) = oneshot::channel();
        let (templates, name) = (self.clone(), whose.clone());
        // A task of the group: a stop waits for it, whether or not the caller does.
        self.0.tasks.spawn("delete template", async move {
            let removed = removing.await.unwrap_or_else(|panicked| {
                tracing::error!(template = %name, error = %chain(&panicked), "a deletion broke off");
                Err(TemplateError::BrokeOff(name.clone()))
            });
            templates.under_way().deleting.remove(&name);
            // The caller may have left.
            drop(tell.send(removed));
        });
        Ok(async move { told.await.unwrap_or(Err(TemplateError::BrokeOff(whose))) })
    }

    fn take_out(&self, name: &Name) -> Vec<(PoolKey, Variant)> {
        let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> = variants.extract_if(|key, _| key.template == *name).collect();
        for (_, variant) in &gone {
            self.0.means.engine.cool(&variant.capture);
        }
        gone
    }

    /// Stops builds under way, and waits until nothing of them is left.
    pub async fn stop(&self) {
        self.0.tasks.ask();
        for building in self.under_way().building.values() {
            building.cancel();
        }
        self.0.tasks.stop().await;
    }
}

impl Running {
    async fn run(mut self, before: Option<Arc<Building>>, size: Size) {
        if let Some(before) = before {
            // Cancelled, and still giving back what it holds: two builds of one variant never meet.
            before.over().await;
        }
        self.outcome = Some(self.outcome(size).await);
    }

    async fn outcome(&self, size: Size) -> Result<Capture, TemplateError> {
        let (templates, key, spec) = (&self.templates, &self.key, self.building.spec());
        if self.building.is_cancelled() {
            return Err(TemplateError::Cancelled);
        }
        let built = Box::pin(build::run(templates, spec, key, size, &self.building)).await;
        let kept = built.as_ref().ok().cloned();
        let (to, spec, key) = (templates.clone(), spec.clone(), key.clone());
        let keeping = tasks::blocking("keep template", move || {
            if let Some(capture) = kept {
                to.take(spec, key, capture);
            }
            to.forget_images();
        });
        match keeping.await {
            Ok(()) => built,
            Err(panicked) => {
                tracing::error!(template = %self.key.template, error = %chain(&panicked), "keeping a template broke off");
                Err(TemplateError::BrokeOff(self.key.template.clone()))
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let building = &mut self.templates.under_way().building;
        // One that was cancelled may have been followed by another.
        if building
            .get(&self.key)
            .is_some_and(|listed| Arc::ptr_eq(listed, &self.building))
        {
            building.remove(&self.key);
        }
        let broke_off = || Err(TemplateError::BrokeOff(self.key.template.clone()));
        let outcome = self.outcome.take().unwrap_or_else(broke_off);
        self.building.finish(outcome);
    }
}
