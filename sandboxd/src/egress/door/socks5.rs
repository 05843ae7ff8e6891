//! The SOCKS5 door: no authentication, CONNECT only; otherwise a second way to ask for the same tunnel.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};

use super::{HEAD_TIME, Visit, farewell, intercept, last_word, say, tunnel};
use crate::policy::{Authority, Host, Seen};

/// No method that we have.
pub(super) const NO_METHOD: [u8; 2] = [5, 0xff];
const NO_AUTHENTICATION: [u8; 2] = [5, 0];
/// Longest of both messages: a request with a name of 255 bytes.
const MESSAGE: usize = 4 + 1 + 255 + 2;

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// A tunnel.
    Tunnel(Authority),
    /// Something else, which gets this answer; the target as far as it could be read.
    Not(DoorReason, String),
}

/// Bytes that are not SOCKS5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotSocks;

/// Reads a greeting: whether the client takes no authentication, and its length. `None`: more is needed.
///
/// # Errors
/// [`NotSocks`].
pub fn greeting(bytes: &[u8]) -> Result<Option<(bool, usize)>, NotSocks> {
    match bytes {
        [] | [5] => Ok(None),
        [5, count, rest @ ..] => {
            let count = usize::from(*count);
            let methods = rest.get(..count);
            Ok(methods.map(|methods| (methods.contains(&0), 2 + count)))
        }
        [_, ..] => Err(NotSocks),
    }
}

/// Reads a request and its length. `None`: more is needed.
///
/// # Errors
/// [`NotSocks`].
pub fn request(bytes: &[u8]) -> Result<Option<(Wish, usize)>, NotSocks> {
    let (command, kind, rest) = match bytes {
        [] | [5] | [5, _] | [5, _, 0] => return Ok(None),
        [5, command, 0, kind, rest @ ..] => (*command, *kind, rest),
        [_, ..] => return Err(NotSocks),
    };
    let (length, skip) = match (kind, rest) {
        (1, _) => (4, 0),
        (4, _) => (16, 0),
        (3, []) => return Ok(None),
        (3, [length, ..]) => (usize::from(*length), 1),
        (_, _) => {
            let wish = Wish::Not(DoorReason::AddressTypeNotSupported, String::new());
            return Ok(Some((wish, bytes.len())));
        }
    };
    let Some(address) = rest.get(skip..skip + length) else {
        return Ok(None);
    };
    let Some([high, low]) = rest.get(skip + length..skip + length + 2) else {
        return Ok(None);
    };
    let port = u16::from_be_bytes([*high, *low]);
    let host = match (kind, <[u8; 4]>::try_from(address), <[u8; 16]>::try_from(address)) {
        (1, Ok(v4), _) => Ok(Host::address(Ipv4Addr::from(v4).into())),
        (4, _, Ok(v6)) => Ok(Host::address(Ipv6Addr::from(v6).into())),
        (_, _, _) => Host::parse_unicode(address),
    };
    let target = || match &host {
        Ok(host) => format!("{host}:{port}"),
        Err(_) => format!("{}:{port}", address.escape_ascii()),
    };
    let wish = match (command, host.clone().and_then(|host| Authority::new(host, port))) {
        (1, Ok(authority)) => Wish::Tunnel(authority),
        (1, Err(error)) => Wish::Not(error.reason(), target()),
        (_, _) => Wish::Not(DoorReason::CommandNotSupported, target()),
    };
    Ok(Some((wish, 4 + skip + length + 2)))
}

/// A reply without a bound address, which no client uses.
pub(super) const fn reply(code: u8) -> [u8; 10] {
    [5, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

/// Serves one connection.
pub(super) async fn serve<T>(visit: Visit, mut io: T)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let visit = Arc::new(visit);
    let (asked, early) = match timeout(HEAD_TIME, ask(&mut io)).await {
        Ok(Some(asked)) => asked,
        Ok(None) => return farewell(io).await,
        Err(_elapsed) => {
            visit.refuse(DoorReason::HeadTimeout, "");
            return farewell(io).await;
        }
    };
    let refused = match asked {
        Wish::Not(reason, target) => visit.refuse(reason, &target).reason,
        Wish::Tunnel(target) if let Some(target) = visit.looks_inside(&target) => {
            if let Some(means) = visit.interception() {
                if say(&mut io, &reply(0)).await {
                    Box::pin(intercept::run(&visit, &means, io, early.into(), target)).await;
                }
                return;
            }
            visit
                .refuse(DoorReason::CaUnavailable, &target.to_string())
                .reason
        }
        Wish::Tunnel(target) => match Box::pin(visit.reach(&target, Seen::Tunnel)).await {
            Ok(reached) => {
                if say(&mut io, &reply(0)).await {
                    Box::pin(tunnel::run(&visit, io, &early, reached, Seen::Tunnel)).await;
                }
                return;
            }
            Err(denial) => denial.reason,
        },
    };
    last_word(io, &reply(refused.socks())).await;
}

/// Greets, and reads what is wanted and what was sent behind it; none: the client is no SOCKS5 client, or left.
async fn ask<T>(io: &mut T) -> Option<(Wish, Vec<u8>)>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut bytes = Vec::with_capacity(MESSAGE);
    let (plain, length) = loop {
        if let Some(greeted) = greeting(&bytes).ok()? {
            break greeted;
        }
        more(io, &mut bytes).await?;
    };
    if !plain {
        io.write_all(&NO_METHOD).await.ok()?;
        return None;
    }
    io.write_all(&NO_AUTHENTICATION).await.ok()?;
    bytes.drain(..length);
    loop {
        if let Some((wish, length)) = request(&bytes).ok()? {
            return Some((wish, bytes.split_off(length)));
        }
        more(io, &mut bytes).await?;
    }
}

/// Reads a little more; none at the end, and past what both messages can have.
async fn more<T: AsyncRead + Unpin>(io: &mut T, bytes: &mut Vec<u8>) -> Option<()> {
    let mut chunk = [0; MESSAGE];
    let n = io.read(&mut chunk).await.ok().filter(|n| *n > 0)?;
    bytes.extend_from_slice(chunk.get(..n)?);
    (bytes.len() <= 2 * MESSAGE).then_some(())
}
