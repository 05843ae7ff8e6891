//! `manifest.json` of an image: strict, bounded, format 1.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::{Digest, ImageError};

/// Name of the manifest inside an image's directory.
pub(super) const FILE: &str = "manifest.json";
/// Largest manifest that is read; real ones have less than 2 KiB.
const MOST: u64 = 64 * 1024;
/// The kernel's own limit for a command line on x86.
const CMDLINE: usize = 2048;

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Name inside the image's directory.
    pub file: String,
    /// Digest of its content.
    pub sha256: Digest,
    /// Version of what it holds, for people.
    #[serde(default)]
    pub version: Option<String>,
}

/// The root disk of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    /// Name inside the image's directory.
    pub file: String,
    /// Digest of its content.
    pub sha256: Digest,
    /// Serial number by which silkd finds the disk, at most 20 of `[A-Za-z0-9_-]`.
    pub serial: String,
}

/// What an image's manifest says. Unknown keys are passed over, so that a newer builder can say more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always 1.
    pub format: u32,
    /// Name of the image.
    pub name: String,
    /// The kernel.
    pub kernel: Part,
    /// The initrd, whose `/init` is silkd.
    pub initrd: Part,
    /// The root disk; `None` keeps the initrd as root.
    #[serde(default)]
    pub rootfs: Option<Rootfs>,
    /// The kernel's command line.
    pub cmdline: String,
    /// Lowest agent proto of its silkd.
    pub proto_min: u32,
    /// Highest agent proto of its silkd.
    pub proto_max: u32,
    /// Version of its silkd.
    #[serde(default)]
    pub silkd_version: String,
    /// When it was built, for people.
    #[serde(default)]
    pub built_at: String,
}

impl Manifest {
    /// Parses and judges; the error is a sentence for the operator.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if manifest.format != 1 {
            return Err(format!(
                "format {} is not one that this version reads (1)",
                manifest.format
            ));
        }
        let root = manifest.rootfs.as_ref().map(|root| root.file.as_str());
        for file in [&*manifest.kernel.file, &*manifest.initrd.file]
            .into_iter()
            .chain(root)
        {
            if file.is_empty() || file.contains('/') || file.contains('\0') || file.starts_with('.') {
                return Err(format!("{file:?} is not the name of a file beside the manifest"));
            }
        }
        if let Some(root) = &manifest.rootfs {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
            if root.serial.is_empty() || root.serial.len() > 20 || !root.serial.bytes().all(plain) {
                return Err("rootfs.serial is not 1 to 20 of [A-Za-z0-9_-]".to_owned());
            }
        }
        if manifest.cmdline.len() >= CMDLINE || manifest.cmdline.contains(['\0', '\n']) {
            return Err(format!("cmdline is not one line of less than {CMDLINE} bytes"));
        }
        if manifest.proto_min == 0 || manifest.proto_min > manifest.proto_max {
            return Err("proto_min .. proto_max is not a range above 0".to_owned());
        }
        Ok(manifest)
    }

    pub(super) fn absent() -> Self {
        let part = || Part {
            file: String::new(),
            sha256: Digest::of(b""),
            version: None,
        };
        Self {
            format: 1,
            name: "none".to_owned(),
            kernel: part(),
            initrd: part(),
            rootfs: None,
            cmdline: String::new(),
            proto_min: sandbox_protocol::limits::PROTO_MIN,
            proto_max: sandbox_protocol::limits::PROTO_MAX,
            silkd_version: String::new(),
            built_at: String::new(),
        }
    }
}

/// The bytes of the manifest in `dir`, bounded.
pub(super) fn read(dir: &Path, asked: &str) -> Result<Vec<u8>, ImageError> {
    let path = dir.join(FILE);
    let failed = |source| ImageError::Read {
        path: path.clone(),
        source,
    };
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Err(ImageError::NotFound {
                name: asked.to_owned(),
                dir: dir.to_owned(),
            });
        }
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MOST {
        return Err(ImageError::Damaged {
            dir: dir.to_owned(),
            file: FILE.to_owned(),
            why: format!("longer than {MOST} bytes"),
        });
    }
    Ok(bytes)
}
