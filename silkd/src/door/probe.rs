//! The doors as a program of the guest finds them.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::{Doors, Listeners};

/// For both doors to answer. A healthy one needs milliseconds; the host gives a whole renewal 15 s.
const ANSWER: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read; a refusal has some hundreds.
const MOST: u64 = 4 * 1024;
/// Bytes of an answer that are told.
const WORDS: usize = 64;

/// A way to ask the doors what they say; a handle.
#[derive(Debug, Clone)]
pub struct Probe {
    doors: Doors,
    ends: [SocketAddr; 2],
    by_link: bool,
}

/// The first words of each door, at most 64 bytes; empty: it did not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// HTTP.
    pub http: Vec<u8>,
    /// SOCKS5.
    pub socks5: Vec<u8>,
}

impl Listeners {
    /// Asks what listens here, over the connections of `doors` where they are reached by those.
    #[must_use]
    pub fn probe(&self, doors: Doors) -> Probe {
        Probe {
            doors,
            ends: [self.http.1, self.socks5.1],
            by_link: self.by_card.is_none(),
        }
    }
}

impl Probe {
    /// Connects to both at once, sends nothing and ends its side, so that whatever waits for a request closes. Takes 5 s at
    /// most. Cancel safe.
    pub async fn ask(&self) -> Said {
        let [http, socks5] = self.ends;
        let (http, socks5) = tokio::join!(self.words_of(http), self.words_of(socks5));
        Said { http, socks5 }
    }

    async fn words_of(&self, end: SocketAddr) -> Vec<u8> {
        let asked = async {
            if self.by_link {
                self.doors.linked().await;
            }
            first_words(end).await
        };
        // What kept it from answering its own side tells.
        timeout(ANSWER, asked)
            .await
            .ok()
            .and_then(Result::ok)
            .unwrap_or_default()
    }
}

async fn first_words(end: SocketAddr) -> io::Result<Vec<u8>> {
    let mut door = TcpStream::connect(end).await?;
    door.shutdown().await?;
    let mut said = Vec::new();
    // To its end, so that it closes without a reset.
    door.take(MOST).read_to_end(&mut said).await?;
    said.truncate(WORDS);
    Ok(said)
}
