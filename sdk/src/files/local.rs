//! A local file that is written whole or not at all.

use std::{
    ffi::OsString,
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use sandbox_protocol::limits;
use tokio::{
    fs::{self, File},
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
};

use crate::error::Error;

/// Removes a file that was not finished.
struct Unfinished(Option<PathBuf>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // It may not even have been made.
            std::fs::remove_file(path).ok();
        }
    }
}

/// Writes what a reader gives to a local file, with these permission bits, and gives the number of bytes. The old file
/// stays until the new one is complete; links are followed. What is no regular file (a pipe, a device) is written to.
///
/// # Errors
/// Kind `Local`, or the reader's own error; then, and when the future is dropped, the old file is as it was.
pub async fn save(
    mut content: impl AsyncRead + Unpin,
    local: impl AsRef<Path>,
    mode: u32,
) -> Result<u64, Error> {
    let local = local.as_ref();
    let wrong = |error: io::Error| Error::local(local.display(), error);
    let target = match fs::canonicalize(local).await {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => local.to_owned(),
        Err(error) => return Err(wrong(error)),
    };
    match fs::metadata(&target).await {
        Ok(stat) if stat.is_dir() => return Err(wrong(io::ErrorKind::IsADirectory.into())),
        Ok(stat) if !stat.is_file() => {
            let mut file = File::options().write(true).open(&target).await.map_err(wrong)?;
            return copy(&mut content, &mut file, local).await;
        }
        Ok(_) | Err(_) => {}
    }
    let beside = beside(&target)?;
    let mut unfinished = Unfinished(Some(beside.clone()));
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&beside).await.map_err(wrong)?;
    let count = copy(&mut content, &mut file, local).await?;
    let permissions = Permissions::from_mode(mode & 0o7777);
    file.set_permissions(permissions).await.map_err(wrong)?;
    fs::rename(&beside, &target).await.map_err(wrong)?;
    unfinished.0 = None;
    Ok(count)
}

/// A name in the same directory, hidden and nobody's.
fn beside(target: &Path) -> Result<PathBuf, Error> {
    let mut bits = [0; 8];
    getrandom::fill(&mut bits)
        .map_err(|error| Error::local("no randomness for a name", io::Error::other(error.to_string())))?;
    let name = OsString::from(format!(".sandbox-{:016x}.part", u64::from_ne_bytes(bits)));
    Ok(target.with_file_name(name))
}

async fn copy(content: &mut (impl AsyncRead + Unpin), file: &mut File, local: &Path) -> Result<u64, Error> {
    let mut piece = vec![0; limits::CHUNK_IN];
    let mut count = 0_u64;
    loop {
        let read = content.read(&mut piece).await;
        let length = read.map_err(|error| Error::local("the content cannot be read", error))?;
        let Some(data @ [_, ..]) = piece.get(..length) else {
            break;
        };
        let written = file.write_all(data).await;
        written.map_err(|error| Error::local(local.display(), error))?;
        count = count.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }
    let flushed = file.flush().await;
    flushed.map_err(|error| Error::local(local.display(), error))?;
    Ok(count)
}
