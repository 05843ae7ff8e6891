//! The configuration of `serve --dev`: everything below one folder, one pool, no TCP.

use std::{
    collections::BTreeMap,
    path::{Component, PathBuf},
};

use super::{
    Host,
    check::{
        default_name, engine_default, log_default, net_default, node_default, sizes_default, template_default,
    },
    pool::PoolFields,
    types::{
        Access, Config, Egress, EgressTls, Engine, ImageName, Journal, Listen, Node, PoolConfig, Stub, Sync,
        Template,
    },
    values,
};
use crate::words::{EngineKind, Lane, PoolKey};

/// What `serve --dev` may say.
#[derive(Debug, Clone)]
pub struct DevOptions {
    /// Absolute; holds state, run directories and socket.
    pub state_dir: PathBuf,
    /// What runs the guests.
    pub engine: EngineKind,
    /// Floor and ceiling of the pool. `None`: 2 with QEMU, 32 with the stub engine.
    pub warm: Option<u32>,
    /// The image. `None`: `busybox` below the state directory.
    pub image: Option<PathBuf>,
    /// The stub engine.
    pub stub: Stub,
}

/// Why there is no dev mode here. Reason: `CONFIG_INVALID`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DevError {
    /// The folder cannot hold a daemon's sockets.
    #[error("{} cannot be the state directory: {why}", dir.display())]
    StateDir {
        /// The folder.
        dir: PathBuf,
        /// Why.
        why: String,
    },
    /// Too much stock.
    #[error("--warm {warm} is out of range: 0 to 4096")]
    Warm {
        /// What was asked for.
        warm: u32,
    },
    /// The image's path is not absolute.
    #[error("{} is not an absolute path", image.display())]
    Image {
        /// What was asked for.
        image: PathBuf,
    },
}

impl Config {
    /// The dev configuration.
    ///
    /// # Errors
    /// A folder that cannot hold sockets, a relative image, too much stock.
    pub fn dev(options: DevOptions, host: &Host) -> Result<Self, DevError> {
        let DevOptions {
            state_dir,
            engine,
            warm,
            image,
            stub,
        } = options;
        check_dir(&state_dir)?;
        let ca_dir = state_dir.join("ca");
        let warm = warm.unwrap_or(match engine {
            EngineKind::Qemu => 2,
            EngineKind::Stub => 32,
        });
        let key = PoolKey {
            template: default_name(),
            lane: Lane::None,
            size: "small".parse().expect("it is a name"),
        };
        let pool = PoolConfig::new(PoolFields {
            key,
            warm,
            warm_max: Some(warm),
            lease_secs: None,
            lease_max_secs: None,
            egress: None,
            require_claim_policy: false,
        })
        .map_err(|_out_of_range| DevError::Warm { warm })?;
        let image = match image {
            None => template_default().image,
            Some(image) if image.is_absolute() => ImageName::At(image),
            Some(image) => return Err(DevError::Image { image }),
        };
        let template = Template {
            image,
            ..template_default()
        };
        Ok(Self {
            listen: Listen {
                unix: state_dir.join("api.sock"),
                unix_mode: 0o600,
                tcp: None,
                metrics: None,
            },
            node: Node {
                run_dir: state_dir.clone(),
                state_dir,
                ..node_default(host)
            },
            engine: Engine {
                kind: engine,
                vm_user: None,
                stub,
                ..engine_default()
            },
            net: net_default(),
            journal: Journal { sync: Sync::Auto },
            log: log_default(),
            access: Access {
                operator_group: None,
                tokens: Vec::new(),
            },
            tenants: BTreeMap::new(),
            templates: BTreeMap::from([(default_name(), template)]),
            sizes: sizes_default(),
            pools: BTreeMap::from([(default_name(), pool)]),
            egress: doors(ca_dir),
        })
    }
}

/// Nothing allowed, and certificates of its own, so that it tries out nobody else's.
fn doors(ca_dir: PathBuf) -> Egress {
    let tls = EgressTls {
        ca_dir,
        ..EgressTls::default()
    };
    Egress {
        tls,
        ..Egress::default()
    }
}

fn check_dir(dir: &std::path::Path) -> Result<(), DevError> {
    let plain = dir
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let fits = if dir.is_absolute() && plain {
        values::fits_sockets(dir)
    } else {
        Err("it is not an absolute path without `..`".to_owned())
    };
    fits.map_err(|why| DevError::StateDir {
        dir: dir.to_owned(),
        why,
    })
}
