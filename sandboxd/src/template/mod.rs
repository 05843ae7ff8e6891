//! Templates: an image booted once, warmed up, quiesced and captured; one capture, a *variant*, per lane and size.
//!
//! A variant lies whole in `templates/<name>/<lane>-<size>/`, or not at all: it is made beside its name, synced, and
//! renamed. That directory is its own record; the journal holds none. What is stale (another QEMU, another image, another
//! warm-up) is not used but built anew.
//!
//! May call: agent, link, engine, image, admission.
//! Never inside: a change of what is complete; a guess.
//! Invariant 09: what outlives power is synced, data before record (the rename is the record).
//! Cancel safety: a build goes on while somebody waits for it, and leaves nothing when the last one is gone.

mod build;
mod catalog;
mod error;
mod templates;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use self::build::Building;
pub use self::{
    build::{Build, BuildEvent, BuildStep, Progress},
    error::TemplateError,
};
use crate::{
    admission::Admission,
    clock::Clock,
    engine::{Capture, Engine},
    feed::Feed,
    image::{self, Digest},
    tasks::Group,
    words::{Name, PoolKey, Size},
};

/// What a template is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Its name.
    pub name: Name,
    /// Name of an image below the state directory's `images/`, or an absolute path.
    pub image: String,
    /// argv, run once before the capture; empty for none.
    pub warmup: Vec<String>,
    /// How long that may take.
    pub warmup_timeout: Duration,
}

/// What templates work with.
#[derive(Debug)]
pub struct Means {
    /// Time.
    pub clock: Clock,
    /// Machines.
    pub engine: Arc<dyn Engine>,
    /// Room on the node.
    pub admission: Admission,
    /// Images.
    pub images: image::Catalog,
    /// `state_dir/templates`.
    pub dir: PathBuf,
}

/// All templates of this node; cheap to clone.
#[derive(Debug, Clone)]
pub struct Templates(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    means: Means,
    sizes: RwLock<BTreeMap<Name, Size>>,
    specs: RwLock<BTreeMap<Name, Spec>>,
    variants: RwLock<HashMap<PoolKey, Variant>>,
    building: Mutex<HashMap<PoolKey, Arc<Building>>>,
    progress: Feed<Progress>,
    tasks: Group,
}

/// A complete variant, and why it cannot be used as it is.
#[derive(Debug, Clone)]
pub struct Variant {
    /// What lies on the disk.
    pub capture: Capture,
    /// Why it is not used, as far as its manifest tells.
    stale: Option<String>,
}

impl Variant {
    /// Why it is not used; none: it is.
    #[must_use]
    pub fn stale(&self) -> Option<&str> {
        self.stale.as_deref().or_else(|| self.capture.unusable())
    }
}

impl Templates {
    /// A load found that the capture of this digest cannot be used: it is not used any more, and built anew by whoever
    /// wants the variant next. One that was replaced meanwhile stays as it is.
    pub fn spoil(&self, key: &PoolKey, digest: Digest, why: String) {
        let mut variants = self.0.variants.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(variant) = variants.get_mut(key)
            && variant.capture.digest() == digest
        {
            variant.stale = Some(why);
        }
    }
}
