//! Which sockets the API is served on, and who may call.

use std::{fs, path::Path, sync::Arc};

use super::{
    args::Environment,
    print::{Refusal, StartReason},
};
use crate::{
    access::{self, Access, Grant, Role, TokenHash},
    api::{Certificates, ListenError, Listener, tcp, unix},
    config::{self, Config},
    sys,
};

/// What the API is served on.
pub(super) struct Opened {
    /// The sockets.
    pub(super) listeners: Vec<Listener>,
    /// The address to tell.
    pub(super) address: String,
    /// Of the TLS listener, if there is one.
    pub(super) certificates: Option<Arc<Certificates>>,
}

/// Opens every listener. A socket that systemd passed wins over the configured one.
///
/// # Errors
/// The first that cannot be had.
pub(super) fn open(config: &Config, environment: &Environment) -> Result<Opened, Refusal> {
    let refused = |error: &ListenError| Refusal::new(StartReason::HostFault, None, error);
    let mut listeners = vec![];
    if environment.listen_fds == 0 {
        let gid = config.access.operator_group.as_deref().and_then(group);
        let listener =
            unix(&config.listen.unix, config.listen.unix_mode, gid).map_err(|error| refused(&error))?;
        listeners.push(listener);
    } else {
        let passed = sys::passed_sockets(environment.listen_fds);
        for fd in passed.map_err(|error| refused(&ListenError::Passed(error)))? {
            listeners.push(Listener::passed(fd, None).map_err(|error| refused(&error))?);
        }
    }
    let address = listeners.first().map(Listener::address).unwrap_or_default();
    let mut certificates = None;
    if let Some(wanted) = &config.listen.tcp {
        if let Some(files) = wanted.tls() {
            let opened = Certificates::open(files.cert.clone(), files.key.clone());
            certificates = Some(Arc::new(opened.map_err(|error| refused(&error))?));
        }
        listeners.push(tcp(wanted.addr(), certificates.clone()).map_err(|error| refused(&error))?);
    }
    Ok(Opened {
        listeners,
        address,
        certificates,
    })
}

/// Who may call, by the configuration.
#[must_use]
pub(super) fn access(config: &config::Access) -> Access {
    let grants = config.tokens.iter().map(|token| Grant {
        name: token.name.clone(),
        hash: TokenHash::from_bytes(token.sha256),
        role: match &token.role {
            config::Role::Operator => Role::Operator,
            config::Role::Tenant(tenant) => Role::Tenant(tenant.clone()),
        },
    });
    Access {
        grants: grants.collect(),
        operator_gid: config.operator_group.as_deref().and_then(group),
        daemon_uid: rustix::process::geteuid().as_raw(),
    }
}

/// The number of a group of this host.
fn group(name: &str) -> Option<u32> {
    let text = fs::read_to_string(Path::new("/etc/group")).unwrap_or_default();
    access::group_id(&text, name)
}
