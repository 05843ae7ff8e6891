//! Rooms for tests: everything up to the claim, over the fake engine, in a folder of their own.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    access::HostKey,
    admission::{Admission, Limits},
    claim::{Claims, Keys},
    clock::Clock,
    egress::Egress,
    engine::{Engine, tests::fake::Fake},
    image::{self, Image},
    journal::{self, Journal, SyncMode},
    link,
    pool::Pools,
    sandbox::{Deadlines, MakeSpec, Means, Paces, Reaper, Sandboxes, Source},
    telemetry::metrics::Metrics,
    template::{self, Templates},
    words::{Lane, MemBytes, PoolKey, Size, Tier, Vcpus},
};

/// The rooms, and what a test reaches into.
pub(crate) struct Rooms {
    pub(crate) claims: Claims,
    pub(crate) engine: Fake,
    pub(crate) journal: Journal,
    pub(crate) dir: tempfile::TempDir,
}

/// What every sandbox of these tests is.
pub(crate) fn key() -> PoolKey {
    PoolKey {
        template: "default".parse().unwrap(),
        lane: Lane::None,
        size: "small".parse().unwrap(),
    }
}

pub(crate) fn size() -> Size {
    Size {
        vcpus: Vcpus(1),
        memory: MemBytes::from_mib(256),
    }
}

/// A boot for nobody's pool: needs no template.
pub(crate) fn boot() -> MakeSpec {
    MakeSpec {
        key: key(),
        pool: None,
        size: size(),
        tier: Tier::Cold,
        source: Source::Boot(Image::absent()),
    }
}

impl Rooms {
    /// With room for four sandboxes.
    pub(crate) fn new() -> Self {
        Self::with(4, SyncMode::Auto)
    }

    pub(crate) fn with(sandboxes: u16, sync: SyncMode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::host();
        let options = journal::Options {
            dir: dir.path().join("state"),
            sync,
            segment_bytes: 256 * 1024,
            clock: clock.clone(),
        };
        let (journal, _opened) = Journal::open(options).unwrap();
        let engine = Fake::default();
        let admission = Admission::new(Limits {
            memory: MemBytes::from_mib(1 << 20),
            sandboxes,
            counts_memory: false,
        });
        let metrics = Arc::new(Metrics::new());
        let spec = template::Spec {
            name: key().template,
            image: "none".into(),
            warmup: vec![],
            warmup_timeout: Duration::from_secs(1),
        };
        let templates = Templates::open(
            template::Means {
                clock: clock.clone(),
                engine: Arc::new(engine.clone()) as Arc<dyn Engine>,
                admission: admission.clone(),
                net: None,
                images: image::Catalog::new(dir.path()),
                dir: dir.path().join("templates"),
            },
            BTreeMap::from([(key().size, size())]),
            BTreeMap::from([(key().template, spec)]),
        )
        .unwrap();
        let sandboxes = Sandboxes::new(Means {
            clock,
            journal: journal.clone(),
            engine: Arc::new(engine.clone()),
            admission,
            reaper: Reaper::new(),
            paces: Paces {
                warm: link::PACE_WARM,
                claimed: link::PACE_CLAIMED,
            },
            deadlines: Deadlines::default(),
            egress: Egress::new(Default::default(), metrics.door.clone(), Clock::host()),
            metrics: Arc::clone(&metrics),
            net: None,
        });
        let pools = Pools::new(sandboxes.clone(), templates.clone(), Arc::clone(&metrics), 2);
        let claims = Claims {
            sandboxes,
            pools,
            templates,
            keys: Keys::default(),
            host_key: Arc::new(HostKey::open(dir.path(), [7; 32]).unwrap()),
            metrics: Arc::new(metrics.claim.series(None)),
        };
        Self {
            claims,
            engine,
            journal,
            dir,
        }
    }

    pub(crate) fn sandboxes(&self) -> &Sandboxes {
        &self.claims.sandboxes
    }

    /// Slots that are held.
    pub(crate) fn held(&self) -> u32 {
        self.sandboxes().means().admission.used().sandboxes
    }
}
