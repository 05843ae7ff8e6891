//! What the verbs on a guest's files, tools and ports have in common.

use std::{ffi::OsString, os::unix::ffi::OsStringExt as _};

use clap::Args;
use sandbox_sdk::{Files, SandboxHandle};
use serde_json::{Map, Value};

use crate::{
    Reach,
    fault::Fault,
    json,
    text::{harmless, lossy},
};

/// As whom.
#[derive(Debug, Clone, Args)]
pub(crate) struct As {
    /// User: name or number, with `:group` if wanted [default: the claim's, else root].
    #[arg(long, value_name = "U")]
    pub(crate) user: Option<OsString>,
}

pub(crate) async fn sandbox(reach: &Reach, id: String) -> Result<SandboxHandle, Fault> {
    Ok(reach.client(None).await?.sandbox(id, None))
}

pub(crate) async fn files(reach: &Reach, id: String, user: As) -> Result<Files, Fault> {
    let files = sandbox(reach, id).await?.files();
    Ok(match user.user {
        Some(user) => files.user(user.into_vec()),
        None => files,
    })
}

/// A guest's bytes for a terminal: names and lines may hold anything.
pub(crate) fn shown(bytes: &[u8]) -> String {
    harmless(&lossy(bytes))
}

/// An object with these bytes under their name, or with `_base64` where they are no text.
pub(crate) fn object<const N: usize>(texts: [(&str, &[u8]); N]) -> Map<String, Value> {
    let mut object = Map::new();
    for (name, bytes) in texts {
        json::output(&mut object, name, bytes.to_vec());
    }
    object
}
