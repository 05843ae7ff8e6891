//! BREAK out, HELLO in, at the same time: a guest that is still pushing an old connection's output must be read before
//! it takes anything.

use bytes::Bytes;
use sandbox_protocol::{
    link::{HelloReader, Nonce, encode_break},
    v1::LinkHello,
};
use tokio::io::{self, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{LinkError, port::Prefixed};

/// Bytes read at once before HTTP/2 begins.
const READ: usize = 8 * 1024;

/// Writes BREAK once and waits for the HELLO that answers it; gives it, and the port as it is to be read from there on.
/// The nonce must be fresh. Cancel safe: the port is dropped.
///
/// # Errors
/// [`LinkError::Port`], [`LinkError::Hello`].
pub async fn greet<T>(io: T, nonce: Nonce) -> Result<(LinkHello, Prefixed<T>), LinkError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from, mut to) = io::split(io);
    let write = async {
        to.write_all(&encode_break(nonce))
            .await
            .map_err(LinkError::Port)?;
        to.flush().await.map_err(LinkError::Port)
    };
    let ((), (hello, behind)) = tokio::try_join!(write, hello(&mut from, nonce))?;
    Ok((hello, Prefixed::new(behind, from.unsplit(to))))
}

async fn hello<R: AsyncRead + Unpin>(from: &mut R, nonce: Nonce) -> Result<(LinkHello, Bytes), LinkError> {
    let mut reader = HelloReader::new(nonce);
    let mut chunk = vec![0; READ];
    loop {
        let n = from.read(&mut chunk).await.map_err(LinkError::Port)?;
        if n == 0 {
            return Err(LinkError::Port(io::ErrorKind::UnexpectedEof.into()));
        }
        let read = chunk.get(..n).unwrap_or_default();
        if let Some((hello, behind)) = reader.feed(read).map_err(LinkError::Hello)? {
            return Ok((hello, behind.into()));
        }
    }
}
