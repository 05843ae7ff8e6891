//! The cross-certificate of a rotation: the new root's name and key, signed by the old root, so that guests which know the
//! old root alone trust what the new one signs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rcgen::{Issuer, KeyPair};

use super::{
    Bundle, CaError, Cert, Dir,
    cert::Depth,
    dir::{read_key, secret, text, write},
    make,
};
use crate::{clock::WallTime, disk};

const CROSS: &str = "cross.pem";

impl Dir {
    /// The cross-certificate's file.
    #[must_use]
    pub fn cross_file(&self) -> PathBuf {
        self.path().join(CROSS)
    }

    /// The cross-certificate of a rotation that is under way; none: there is no rotation, or no such certificate. One of
    /// other roots, or whose time is over, is left aside: nothing that works hangs on it.
    pub(super) fn cross(&self, bundle: &Bundle, now: WallTime) -> Result<Option<Cert>, CaError> {
        let [newest, others @ ..] = bundle.roots() else {
            return Ok(None);
        };
        if others.is_empty() {
            return Ok(None);
        }
        let path = self.cross_file();
        let text = match text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CaError::Unread { path, source }),
        };
        let certs = Cert::all(&text).map_err(|why| CaError::Damaged { path, why })?;
        let leads_back = |cert: &Cert| {
            cert.is_same_ca(newest) && cert.holds(now) && others.iter().any(|other| cert.is_signed_by(other))
        };
        Ok(certs.into_iter().find(leads_back))
    }

    /// The key by which an old root can sign for a new one: that of `path`, or the one beside the bundle; none: there is no
    /// such key, or the root allows no chain of that length.
    pub(super) fn old_key(&self, old: &Cert, path: Option<&Path>) -> Result<Option<KeyPair>, CaError> {
        let beside = self.key_file(old.fingerprint());
        let is_deep = match old.depth() {
            Some(Depth::Any) => true,
            Some(Depth::Most(below)) => below >= u32::from(make::ROOT_DEPTH),
            None => false,
        };
        let path = match path {
            Some(_) if !is_deep => {
                return Err(CaError::Shallow {
                    root: old.fingerprint(),
                });
            }
            Some(path) => path,
            None if is_deep && beside.exists() => &beside,
            None => return Ok(None),
        };
        let key = read_key(path, &secret(path)?)?;
        if !old.is_of_key(key.public_key_raw()) {
            return Err(CaError::OtherKey {
                path: path.to_owned(),
                root: old.fingerprint(),
            });
        }
        Ok(Some(key))
    }

    /// Has the old root sign for the new one.
    pub(super) fn write_cross(
        &self,
        new: &Cert,
        old: &Cert,
        old_key: KeyPair,
        serial: [u8; 16],
        now: WallTime,
    ) -> Result<(), CaError> {
        let issuer = Issuer::from_ca_cert_der(old.der(), old_key).map_err(CaError::Make)?;
        let until = old.not_after().min(new.not_after());
        let cross = make::cross(new, &issuer, until, serial, now)?;
        write(&self.cross_file(), cross.pem().as_bytes(), 0o644)
    }

    /// Removes it, if there is one.
    pub(super) fn drop_cross(&self) -> Result<(), CaError> {
        let path = self.cross_file();
        let removed = match fs::remove_file(&path) {
            Ok(()) => disk::sync_dir(self.path()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        removed.map_err(|source| CaError::Unwritten { path, source })
    }
}
