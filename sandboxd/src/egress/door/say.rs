//! The last that a client is told, and the ways it is said in time.

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};

use super::{BODY, FAREWELL};

/// Says something to a client; false: it is gone, or takes nothing for as long as a body may rest.
pub(super) async fn say<T: AsyncWrite + Unpin>(io: &mut T, bytes: &[u8]) -> bool {
    let saying = async {
        io.write_all(bytes).await?;
        // It may be long until something follows.
        io.flush().await
    };
    matches!(timeout(BODY, saying).await, Ok(Ok(())))
}

/// Says something and ends.
pub(super) async fn last_word<T>(mut io: T, bytes: &[u8])
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    if say(&mut io, bytes).await {
        farewell(io).await;
    }
}

/// A graceful end: ours is said, and what the client still sends is read until it ends too, for a while. What closes a
/// socket with unread bytes resets it, and the client would lose the answer.
pub(super) async fn farewell<T>(mut io: T)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let ending = async {
        if io.shutdown().await.is_err() {
            return;
        }
        let mut chunk = [0; 1024];
        while matches!(io.read(&mut chunk).await, Ok(n) if n > 0) {}
    };
    // Whoever does not end in time is cut.
    timeout(FAREWELL, ending).await.unwrap_or(());
}
