//! The client's side of the handshake: its ClientHello first, and the rest once it is known what to offer.

use std::{io, pin::pin, sync::Arc};

use rustls::{AlertDescription, server::Acceptor};
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, server::TlsStream};

use super::{Interception, farewell, last_word, leaves};
use crate::{
    egress::{Visit, door::HEAD_TIME},
    policy::{Authority, Host},
};

/// HTTP/2, as it is named in a handshake.
pub(super) const H2: &[u8] = b"h2";
/// HTTP/1.1, as it is named in a handshake.
pub(super) const HTTP_1: &[u8] = b"http/1.1";
/// A fatal alert before any key is agreed on: unrecognized_name (RFC 6066, 3).
const UNRECOGNIZED_NAME: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 0x70];

/// A ClientHello that names the right host, and is to be answered.
pub(super) struct Hello<T> {
    start: StartHandshake<T>,
    alpn: Vec<Vec<u8>>,
}

impl<T> Hello<T> {
    /// What the client offers, cut to what can be looked into, in its order.
    pub(super) fn alpn(&self) -> Vec<Vec<u8>> {
        self.alpn.clone()
    }

    /// What an answer that tells of a failure is given in.
    pub(super) fn plainest(&self) -> Option<&'static [u8]> {
        let offers = |wanted: &'static [u8]| {
            self.alpn
                .iter()
                .any(|offered| offered == wanted)
                .then_some(wanted)
        };
        offers(HTTP_1).or_else(|| offers(H2))
    }
}

/// Reads a ClientHello. None: it was refused, or the client left.
pub(super) async fn read<T>(visit: &Visit, io: T, target: &Authority) -> Option<Hello<T>>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut acceptor = pin!(LazyConfigAcceptor::new(Acceptor::default(), io));
    let start = match timeout(HEAD_TIME, acceptor.as_mut()).await {
        Ok(Ok(start)) => start,
        outcome => {
            match outcome {
                Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    visit.refuse(DoorReason::BadFraming, &target.to_string());
                }
                Err(_elapsed) => drop(visit.refuse(DoorReason::HeadTimeout, &target.to_string())),
                Ok(Ok(_) | Err(_)) => {}
            }
            if let Some(io) = acceptor.take_io() {
                farewell(io).await;
            }
            return None;
        }
    };
    let hello = start.client_hello();
    if !agrees(target.host(), hello.server_name()) {
        visit.refuse(DoorReason::SniMismatch, &target.to_string());
        last_word(start.io, &UNRECOGNIZED_NAME).await;
        return None;
    }
    let offered = hello.alpn().into_iter().flatten();
    let alpn = offered
        .filter(|name| [H2, HTTP_1].contains(name))
        .map(<[u8]>::to_vec)
        .collect();
    Some(Hello { start, alpn })
}

/// Whether a client names the host that was asked for. Who asked for a name names it here too; an address has no name.
fn agrees(host: &Host, named: Option<&str>) -> bool {
    match (host, named) {
        (Host::Name(_), Some(named)) => Host::parse(named).is_ok_and(|named| named == *host),
        (Host::Address(_), None) => true,
        (Host::Name(_), None) | (Host::Address(_), Some(_)) => false,
    }
}

/// Ends the handshake; the client may speak `alpn` alone. None: it did not come about.
pub(super) async fn finish<T>(
    visit: &Visit,
    means: &Interception,
    hello: Hello<T>,
    target: &Authority,
    alpn: Option<&'static [u8]>,
) -> Option<TlsStream<T>>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let Some(leaf) = means.leaves.of(target.host()) else {
        visit.refuse(DoorReason::CaUnavailable, &target.to_string());
        return None;
    };
    let mut config = means.server.clone();
    config.cert_resolver = Arc::new(leaves::One(leaf));
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    match timeout(HEAD_TIME, hello.start.into_stream(Arc::new(config))).await {
        Ok(Ok(tls)) => Some(tls),
        Ok(Err(error)) => {
            tracing::debug!(%error, %target, "a handshake with a guest's client failed");
            if is_rejection(&error) {
                visit.refuse(DoorReason::TlsClientRejected, &target.to_string());
            }
            None
        }
        Err(_elapsed) => {
            visit.refuse(DoorReason::HeadTimeout, &target.to_string());
            None
        }
    }
}

/// Whether the client says that it does not trust what it was shown.
fn is_rejection(error: &io::Error) -> bool {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::AlertReceived(alert)) = inner else {
        return false;
    };
    [
        AlertDescription::BadCertificate,
        AlertDescription::UnsupportedCertificate,
        AlertDescription::CertificateRevoked,
        AlertDescription::CertificateExpired,
        AlertDescription::CertificateUnknown,
        AlertDescription::UnknownCA,
    ]
    .contains(alert)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_and_no_other_agrees() {
        let name = Host::parse("a.test").unwrap();
        let address = Host::parse("192.0.2.1").unwrap();
        assert!(agrees(&name, Some("a.test")) && agrees(&name, Some("A.Test")) && agrees(&address, None));
        for (host, named) in [
            (&name, None),
            (&name, Some("b.test")),
            (&name, Some("a.test.b.test")),
            (&address, Some("a.test")),
            (&address, Some("192.0.2.1")),
        ] {
            assert!(!agrees(host, named), "{host:?} {named:?}");
        }
    }
}
