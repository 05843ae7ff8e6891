//! `lsp`: a guest's language server on stdin and stdout, as an editor starts one.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt as _, pin::pin, time::Duration};

use bytes::Bytes;
use clap::Args;
use futures_util::{SinkExt as _, StreamExt as _};
use sandbox_sdk::{ErrorKind, LspStream};
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};

use crate::{
    Reach,
    args::duration,
    claim::variable,
    fault::Fault,
    guest::{self, As},
    print,
};

/// Bytes of the header lines of one message.
const HEADER: u64 = 4096;
/// Bytes of one message, as the guest allows.
const MESSAGE: usize = 8 * 1024 * 1024;

/// From the editor's end to ours, if the server does not end.
const LAST_WORDS: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Args)]
pub(crate) struct LspArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// Name of a file below /etc/silkd/lsp.d of the image.
    #[arg(required_unless_present = "server", conflicts_with = "server")]
    language: Option<String>,
    /// A server that was started before, by the number that was told on stderr.
    #[arg(long, value_name = "N")]
    server: Option<u64>,
    /// Its working directory, absolute.
    #[arg(long, value_name = "DIR")]
    root: Option<OsString>,
    /// Environment variable; may be repeated.
    #[arg(long = "env", value_name = "K=V")]
    env: Vec<OsString>,
    /// How long it stays when this ends, 1h at most [default: 5m].
    #[arg(long, value_name = "D", value_parser = duration)]
    linger: Option<Duration>,
    #[command(flatten)]
    user: As,
}

pub(crate) async fn lsp(reach: &Reach, args: LspArgs) -> Result<(), Fault> {
    let sandbox = guest::sandbox(reach, args.sandbox).await?;
    let mut lsp = match (args.server, args.language) {
        (Some(server), _) => sandbox.lsp_server(server),
        (None, language) => sandbox.lsp(language.unwrap_or_default()),
    };
    if let Some(root) = args.root {
        lsp = lsp.root(root);
    }
    if let Some(user) = args.user.user {
        lsp = lsp.user(user.into_vec());
    }
    for text in args.env {
        let (key, value) = variable(text)?;
        lsp = lsp.env(key, value);
    }
    if let Some(linger) = args.linger {
        lsp = lsp.linger(linger);
    }
    let stream = lsp.open().await?;
    print::stderr(&format!("sandboxctl: language server {}", stream.server()));
    Box::pin(relay(stream)).await
}

/// When the editor has gone, what the server says yet is passed on, but not for longer than [`LAST_WORDS`].
async fn relay(stream: LspStream) -> Result<(), Fault> {
    let (mut to_server, mut from_server) = stream.split();
    let input = async {
        let mut stdin = BufReader::new(tokio::io::stdin());
        while let Some(message) = read(&mut stdin)
            .await
            .map_err(|error| Fault::Io("stdin", error))?
        {
            to_server.send(message).await?;
        }
        to_server.close().await?;
        Ok::<(), Fault>(())
    };
    let output = async {
        let mut stdout = tokio::io::stdout();
        while let Some(message) = from_server.next().await {
            let written = write(&mut stdout, &message?).await;
            written.map_err(|error| Fault::io("stdout", error))?;
        }
        Ok(())
    };
    let (input, mut output) = (pin!(input), pin!(output));
    tokio::select! {
        ended = &mut output => return ended,
        ended = input => ended?,
    }
    match tokio::time::timeout(LAST_WORDS, output).await {
        // The server lives on for another editor, so its end was not to come.
        Ok(Err(Fault::Sdk(error))) if error.kind() == ErrorKind::Unfinished => Ok(()),
        Ok(ended) => ended,
        Err(_elapsed) => Ok(()),
    }
}

async fn write(to: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    let header = format!("Content-Length: {}\r\n\r\n", message.len());
    to.write_all(header.as_bytes()).await?;
    to.write_all(message).await?;
    to.flush().await
}

/// The next message, without its header; nothing at the end.
async fn read(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Bytes>> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut length = None;
    let mut header = from.take(HEADER);
    let mut begun = false;
    loop {
        let mut line = Vec::new();
        header.read_until(b'\n', &mut line).await?;
        if line.is_empty() && !begun {
            return Ok(None);
        }
        begun = true;
        let Some(line) = line.strip_suffix(b"\n") else {
            return Err(wrong("a header that has no end within 4 KiB"));
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            break;
        }
        let text = std::str::from_utf8(line).map_err(|error| wrong(&error.to_string()))?;
        if let Some((key, value)) = text.split_once(':')
            && key.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse::<usize>().ok();
        }
    }
    match length {
        Some(length) if length <= MESSAGE => {
            let mut message = vec![0; length];
            from.read_exact(&mut message).await?;
            Ok(Some(message.into()))
        }
        Some(_) => Err(wrong("a message of more than 8 MiB")),
        None => Err(wrong("a header without a Content-Length")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &[u8]) -> io::Result<Vec<Bytes>> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut from = text;
            let mut all = Vec::new();
            while let Some(message) = read(&mut from).await? {
                all.push(message);
            }
            Ok(all)
        })
    }

    #[test]
    fn messages_are_told_apart_by_their_headers() {
        let text = b"Content-Length: 2\r\n\r\n{}content-LENGTH:3\r\nContent-Type: x\r\n\r\n\r\n\nContent-Length: 0\n\n";
        let all = messages(text).unwrap();
        assert_eq!(all, [&b"{}"[..], b"\r\n\n", b""]);
        assert!(messages(b"").unwrap().is_empty());
        let long = [&b"A: "[..], &[b'x'; 5000], b"\r\nContent-Length: 0\r\n\r\n"].concat();
        for wrong in [
            &b"Content-Length: 9\r\n\r\n{}"[..],
            b"Content-Length: 2\r\n",
            b"Content-Length: x\r\n\r\n{}",
            b"Content-Length: -2\r\n\r\n{}",
            b"Content-Length: 8388609\r\n\r\n",
            b"A: b\r\n\r\n{}",
            b"\xff: 2\r\n\r\n{}",
            b"\r\n{}",
            &long,
        ] {
            assert!(messages(wrong).is_err(), "{}", wrong.escape_ascii());
        }
    }
}
