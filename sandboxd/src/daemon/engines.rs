//! The engine that the configuration names, and what it takes to find one.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::print::{Refusal, StartReason};
use crate::{
    config::{self, AccelWish, Config, StubAgent},
    doctor::Given,
    engine::{self, Engine, EngineError, qemu, stub},
    image::{Catalog, Image},
    words::EngineKind,
};

/// Where `make install` puts the image of dev mode.
const INSTALLED_IMAGE: &str = "/usr/lib/sandboxd/image/busybox";

/// Builds the engine.
///
/// # Errors
/// It is not there, or cannot do what is insisted on.
pub(super) async fn build(config: &Config) -> Result<Arc<dyn Engine>, Refusal> {
    let missing = |error: EngineError| Refusal::new(StartReason::EngineMissing, None, &error);
    match config.engine.kind {
        EngineKind::Qemu => {
            let proof = proof(config);
            let options = qemu::QemuOptions {
                program: config.engine.qemu.clone(),
                run_root: config.node.run_dir.clone(),
                state_dir: config.node.state_dir.clone(),
                accel: match config.engine.accel {
                    AccelWish::Auto => qemu::AccelWish::Auto,
                    AccelWish::Kvm => qemu::AccelWish::Kvm,
                    AccelWish::Tcg => qemu::AccelWish::Tcg,
                },
                vm_user: config.engine.vm_user.clone().unwrap_or_default(),
                blanks: usize::from(config.engine.blanks),
            };
            let engine = qemu::QemuEngine::open(options, proof.as_ref())
                .await
                .map_err(missing)?;
            Ok(Arc::new(engine))
        }
        EngineKind::Stub => {
            let agent = match config.engine.stub.agent {
                StubAgent::InProcess => stub::StubAgent::InProcess,
                StubAgent::Process => stub::StubAgent::Process(silkd(config)?),
            };
            let options = stub::StubOptions {
                run_root: config.node.run_dir.clone(),
                agent,
                faults: stub::StubFault::parse_all(&config.engine.stub.faults)
                    .map_err(|error| Refusal::new(StartReason::ConfigInvalid, None, &error))?,
            };
            Ok(Arc::new(stub::StubEngine::new(options)))
        }
    }
}

/// An image with which KVM can be proved: the first that a template names and that is there.
fn proof(config: &Config) -> Option<Image> {
    let images = Catalog::new(&config.node.state_dir);
    config
        .templates
        .values()
        .find_map(|template| images.find(&template.image.to_string()).ok())
}

/// The agent's program: as configured, else the `silkd` that lies beside us, else the one that `make install` brings for
/// images.
fn silkd(config: &Config) -> Result<PathBuf, Refusal> {
    if let Some(silkd) = &config.engine.stub.silkd {
        return Ok(silkd.clone());
    }
    let here = std::env::current_exe().map_err(|error| Refusal::new(StartReason::HostFault, None, &error))?;
    let beside = here.with_file_name("silkd");
    let installed = here
        .parent()
        .and_then(Path::parent)
        .map(|prefix| prefix.join("lib/sandboxd/image/silkd"));
    let found = [Some(beside.clone()), installed]
        .into_iter()
        .flatten()
        .find(|path| path.is_file());
    found.ok_or_else(|| {
        let error =
            EngineError::Unsupported("the stub engine needs the program silkd beside sandboxd: build it");
        Refusal::new(StartReason::EngineMissing, Some(beside), &error)
    })
}

/// The image of dev mode: the first that is there of those in docs/configuration.md, dev mode.
///
/// # Errors
/// None is there.
pub(super) fn dev_image(given: Option<PathBuf>, state_dir: &Path) -> Result<PathBuf, Refusal> {
    let built = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.parent()?.join("image/busybox")));
    let places: Vec<PathBuf> = match given {
        Some(given) => vec![given],
        None => [
            Some(state_dir.join("images/busybox")),
            Some(INSTALLED_IMAGE.into()),
            built,
        ]
        .into_iter()
        .flatten()
        .collect(),
    };
    match places.iter().find(|place| place.join("manifest.json").is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(Refusal {
            reason: StartReason::ImageNotFound,
            place: places.last().cloned(),
            message: format!(
                "no image in {}",
                places
                    .iter()
                    .map(|place| place.display().to_string())
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }),
    }
}

/// What the doctor wants to know of engine and images.
#[must_use]
pub(super) fn given(config: &Config) -> Given {
    let images = Catalog::new(&config.node.state_dir);
    let look = |template: &config::Template| {
        let name = template.image.to_string();
        let found = images.find(&name).map(|image| image.digest().to_string());
        (name, found.map_err(|error| crate::telemetry::chain(&error)))
    };
    match config.engine.kind {
        EngineKind::Qemu => Given {
            qemu: Some(engine::version_of(&config.engine.qemu)),
            accel: None,
            images: config.templates.values().map(look).collect(),
        },
        EngineKind::Stub => Given::default(),
    }
}
