//! What every program is told before the claim and the caller say more.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use sandbox_protocol::{ca, v1::EnvVar};

/// Where OpenSSL, curl, git, cargo and Python look for the roots that they trust.
const STORE: [&str; 6] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
];
/// Where node looks for roots beside its own.
const MORE: &str = "NODE_EXTRA_CA_CERTS";

/// The environment that programs begin with.
#[derive(Debug, Clone, Default)]
pub struct BaseEnv {
    plain: Arc<Vec<EnvVar>>,
    with_ca: Arc<Vec<EnvVar>>,
    /// The roots that the host put here; none unless the template has them.
    roots: PathBuf,
}

impl BaseEnv {
    /// `doors`: where those are. What the image says goes over everything; the host's roots, once they lie in the image's
    /// folder, are named where it does not.
    #[must_use]
    pub fn new(doors: Vec<EnvVar>, image: Vec<EnvVar>, etc_silkd: &Path) -> Self {
        let at = |name: &str| etc_silkd.join(name);
        let (roots, store) = (at(ca::ROOTS), at(ca::STORE));
        let var = |key: &'static str, path: &Path| EnvVar {
            key: Bytes::from_static(key.as_bytes()),
            value: Bytes::copy_from_slice(path.as_os_str().as_encoded_bytes()),
        };
        let trust = STORE.map(|key| var(key, &store)).into_iter();
        let with_ca = doors.iter().cloned().chain(trust).chain([var(MORE, &roots)]);
        Self {
            with_ca: Arc::new(with_ca.chain(image.iter().cloned()).collect()),
            plain: Arc::new(doors.into_iter().chain(image).collect()),
            roots,
        }
    }

    /// What holds now: a template's build brings the roots while silkd runs.
    #[must_use]
    pub fn now(&self) -> Arc<Vec<EnvVar>> {
        let env = if self.roots.exists() {
            &self.with_ca
        } else {
            &self.plain
        };
        Arc::clone(env)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn var(key: &str, value: &str) -> EnvVar {
        EnvVar {
            key: Bytes::copy_from_slice(key.as_bytes()),
            value: Bytes::copy_from_slice(value.as_bytes()),
        }
    }

    #[test]
    fn programs_are_told_of_roots_once_they_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let env = BaseEnv::new(vec![var("d", "1")], vec![var("PIP_CERT", "/own")], dir.path());
        let keys = |env: &BaseEnv| -> Vec<String> {
            let env = env.now();
            env.iter()
                .map(|var| String::from_utf8_lossy(&var.key).into_owned())
                .collect()
        };
        assert_eq!(keys(&env), ["d", "PIP_CERT"]);
        drop(std::fs::File::create(dir.path().join(ca::ROOTS)).unwrap());
        let told = keys(&env);
        for key in STORE.iter().chain([&MORE]) {
            assert!(told.iter().any(|told| told == key), "{key}: {told:?}");
        }
        // The last one of a name counts: the image's.
        assert_eq!(env.now().last(), Some(&var("PIP_CERT", "/own")));
        let store = env.now().iter().find(|var| var.key == "SSL_CERT_FILE").cloned();
        let path = dir.path().join(ca::STORE);
        assert_eq!(store, Some(var("SSL_CERT_FILE", path.to_str().unwrap())));
    }
}
