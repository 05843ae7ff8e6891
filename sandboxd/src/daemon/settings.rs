//! The settings that a daemon starts with: of a file, or of `serve --dev`.

use std::path::{Path, PathBuf};

use super::{
    args::{self, Environment, Serve},
    engines,
    print::{Printer, Refusal, StartReason},
};
use crate::{
    config::{self, Config, DevOptions, Stub},
    words::EngineKind,
};

/// A refusal was printed.
pub(super) struct Printed;

pub(super) type Configured = Result<(Config, Option<PathBuf>), Printed>;

/// The configuration of a file.
pub(super) fn file_config(file: &Path, printer: Printer) -> Configured {
    match Config::read(file, &config::Host::look()) {
        Ok(config) => Ok((config, Some(file.to_owned()))),
        Err(error) => {
            printer.config_error(&error);
            Err(Printed)
        }
    }
}

/// The configuration of `serve --dev`.
pub(super) fn dev_config(serve: Serve, environment: &Environment, printer: Printer) -> Configured {
    let refuse = |reason, place, error: &dyn std::error::Error| {
        printer.refusal(&Refusal::new(reason, place, error));
        Printed
    };
    let options = serve.options;
    let here = std::env::current_dir().map_err(|error| refuse(StartReason::HostFault, None, &error))?;
    let state_dir = options
        .state_dir
        .or_else(|| environment.dev_state_dir())
        .unwrap_or_else(|| "sandboxd".into());
    let state_dir = args::absolute(&here, &state_dir);
    let engine: EngineKind = options.engine.into();
    let given = options.image.map(|image| args::absolute(&here, &image));
    let image = match engine {
        EngineKind::Stub => given,
        EngineKind::Qemu => Some(engines::dev_image(given, &state_dir).map_err(|refusal| {
            printer.refusal(&refusal);
            Printed
        })?),
    };
    let stub = Stub {
        agent: options.stub_agent.into(),
        silkd: options.stub_silkd.map(|silkd| args::absolute(&here, &silkd)),
        faults: options.stub_faults,
    };
    let dev = DevOptions {
        state_dir,
        engine,
        warm: options.warm,
        image,
        stub,
    };
    let config = Config::dev(dev, &config::Host::look());
    Ok((
        config.map_err(|error| refuse(StartReason::ConfigInvalid, None, &error))?,
        None,
    ))
}
