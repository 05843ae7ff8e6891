//! Templates: an image booted once, warmed up, quiesced and captured; one capture, a *variant*, per lane and size.
//!
//! A variant lies whole in `templates/<name>/<lane>-<size>/`, or not at all: it is made beside its name, synced, and
//! renamed. That directory is its own record; the journal holds none. What is stale (another QEMU, another image, another
//! warm-up) is not used but built anew.
//!
//! May call: agent, ca, link, engine, image, net, admission.
//! Never inside: a change of what is complete; a guess.
//! Invariant 09: what outlives power is synced, data before record (the rename is the record).
//! Cancel safety: a build goes on while somebody waits for it, and leaves nothing when the last one is gone.

mod build;
mod building;
mod catalog;
mod error;
mod roots;
mod templates;
#[cfg(test)]
mod tests;
mod verdict;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use self::building::Building;
pub use self::{
    building::{Build, BuildEvent, BuildStep, Progress},
    catalog::coverage,
    error::TemplateError,
};
use crate::{
    admission::Admission,
    ca::Trust,
    clock::Clock,
    engine::{Capture, Engine},
    feed::Feed,
    image, net,
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

impl Spec {
    /// Whether the other one makes the same template. How long a warm-up may take is no part of what it makes.
    fn makes_the_same(&self, other: &Self) -> bool {
        let Self {
            name,
            image,
            warmup,
            warmup_timeout: _,
        } = self;
        (name, image, warmup) == (&other.name, &other.image, &other.warmup)
    }
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
    /// Lane guarded, where the host has it.
    pub net: Option<Arc<net::Lane>>,
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
    known: RwLock<Known>,
    variants: RwLock<HashMap<PoolKey, Variant>>,
    /// Locked before `known`, never within it.
    under_way: Mutex<UnderWay>,
    /// Held over each judgement, so that an old one never overwrites a new one. It is waited for on blocking threads only.
    judging: Mutex<()>,
    progress: Feed<Progress>,
    tasks: Group,
}

/// What templates are made from, and what sizes stand for.
#[derive(Debug, Default)]
struct Known {
    sizes: BTreeMap<Name, Size>,
    /// Of the configuration file: these go first.
    file: BTreeMap<Name, Spec>,
    /// Of the API; none that the file names.
    made: BTreeMap<Name, Spec>,
    /// What guests of builds from now on are to trust; none: this node looks into nothing.
    trust: Option<Arc<Trust>>,
}

impl Known {
    fn spec(&self, name: &Name) -> Option<&Spec> {
        self.file.get(name).or_else(|| self.made.get(name))
    }
}

/// Work that is under way.
#[derive(Debug, Default)]
struct UnderWay {
    building: HashMap<PoolKey, Arc<Building>>,
    deleting: BTreeSet<Name>,
}

/// A complete variant, and why it cannot be used as it is.
#[derive(Debug, Clone)]
pub struct Variant {
    /// What lies on the disk.
    pub capture: Capture,
    /// Why it is not used, as far as its manifest tells.
    stale: Option<String>,
    /// Why no clone can be made of it, as one who tried has found.
    spoiled: Option<String>,
}

impl Variant {
    /// Why it is not used; none: it is.
    #[must_use]
    pub fn stale(&self) -> Option<&str> {
        self.spoiled.as_deref().or(self.stale.as_deref())
    }
}
