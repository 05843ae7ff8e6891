//! Why there is no template.

use std::{path::PathBuf, sync::Arc};

use sandbox_protocol::reason::Reason;

use super::BuildStep;
use crate::{
    admission::Full,
    engine::EngineError,
    image::ImageError,
    net::NetError,
    words::{Name, PoolKey},
};

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// No template of that name.
    #[error("there is no template {0}")]
    NotFound(Name),
    /// No size of that name.
    #[error("there is no size {0}")]
    SizeNotFound(Name),
    /// The variant exists, and was not to be replaced.
    #[error("template {} exists for lane {} and size {}", .0.template, .0.lane, .0.size)]
    Exists(PoolKey),
    /// A build of it from another image or with another warm-up is under way, or it is being built or deleted.
    #[error("template {0} is being built or deleted")]
    Building(Name),
    /// The configuration file names it.
    #[error("template {0} is used by the configuration file")]
    FromFile(Name),
    /// Its image cannot be used.
    #[error("its image cannot be used")]
    Image(#[source] ImageError),
    /// There is no room for the VM that builds it.
    #[error("the node has no room for the build: {0}")]
    Capacity(Full),
    /// Its lane cannot be had, or has no slot for the VM that builds it.
    #[error("{0}")]
    Net(#[source] NetError),
    /// A step of the build failed.
    #[error("the build failed at step {step}: {why}")]
    Failed {
        /// The step.
        step: BuildStep,
        /// The error and its causes, and the end of the console or of the warm-up's output.
        why: String,
    },
    /// Its agent and this daemon have no protocol in common.
    #[error("its agent speaks another protocol: {0}")]
    TooOld(String),
    /// Its guests would not trust what doors show them that look into TLS.
    #[error("template {template} lacks root {root} of this node: build it anew")]
    CaNotInTemplate {
        /// The template.
        template: Name,
        /// The first digits of the root's fingerprint.
        root: String,
    },
    /// There is none yet, so that nothing can be said of its guests.
    #[error("template {0} has to be built before a rule can look into its tunnels")]
    NotBuilt(Name),
    /// This node has no CA.
    #[error("this node has no certificates to look into TLS with")]
    NoCa,
    /// The machine could not be driven.
    #[error("the machine failed at step {step}")]
    Engine {
        /// The step.
        step: BuildStep,
        /// The engine's error.
        #[source]
        source: EngineError,
    },
    /// The disk did not take it.
    #[error("cannot keep the template in {}", path.display())]
    Disk {
        /// Where.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: std::io::Error,
    },
    /// A build that others waited for failed.
    #[error("{0}")]
    Shared(Arc<TemplateError>),
    /// Its work ended without an outcome: a panic, which the log holds.
    #[error("the work on template {0} broke off; see the log")]
    BrokeOff(Name),
    /// Nobody wanted it any more, or the daemon stops.
    #[error("the build was cancelled")]
    Cancelled,
}

impl TemplateError {
    /// Its reason at the border.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::NotFound(_) => Reason::TemplateNotFound,
            Self::SizeNotFound(_) => Reason::SizeNotFound,
            Self::Exists(_) => Reason::TemplateExists,
            Self::Image(ImageError::NotFound { .. }) => Reason::ImageNotFound,
            Self::Image(ImageError::Damaged { .. } | ImageError::Read { .. }) => Reason::ImageDamaged,
            Self::Capacity(_) => Reason::Capacity,
            Self::Net(error) => error.reason(),
            Self::Building(_) => Reason::TemplateBuilding,
            Self::FromFile(_) => Reason::TemplateInUse,
            Self::Failed { .. }
            | Self::Engine { .. }
            | Self::Disk { .. }
            | Self::BrokeOff(_)
            | Self::Cancelled => Reason::TemplateFailed,
            Self::CaNotInTemplate { .. } | Self::NotBuilt(_) | Self::NoCa => Reason::CaNotInTemplate,
            Self::TooOld(_) => Reason::TemplateTooOld,
            Self::Shared(error) => error.reason(),
        }
    }

    /// The error and its causes in one line.
    #[must_use]
    pub fn chain(&self) -> String {
        crate::telemetry::chain(self)
    }
}
