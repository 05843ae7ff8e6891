//! TCP and TLS, against the smallest server there is: it answers every call with an empty message.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use rustls::{ServerConfig, crypto::ring};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;

use crate::{Client, ErrorKind};

/// Answers calls on one connection until it ends.
async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin) {
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((_request, mut respond))) = connection.accept().await {
        let head = Response::builder()
            .header("content-type", "application/grpc")
            .body(())
            .unwrap();
        let mut body = respond.send_response(head, false).unwrap();
        body.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
        let trailers =
            HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
        body.send_trailers(trailers).unwrap();
    }
}

#[tokio::test]
async fn plain_http_on_loopback() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = async {
        loop {
            answer(listener.accept().await.unwrap().0).await;
        }
    };
    let calls = async {
        let client = Client::connect(&format!("http://127.0.0.1:{port}"))
            .await
            .unwrap();
        client.node().ping().await.unwrap();
    };
    tokio::select! { () = calls => (), () = server => () }
}

#[tokio::test]
async fn tls_with_a_ca_of_ones_own_and_no_other() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let server = async {
        loop {
            if let Ok(stream) = acceptor.accept(listener.accept().await.unwrap().0).await {
                Box::pin(answer(stream)).await;
            }
        }
    };
    let calls = async {
        let client = Client::options()
            .ca(made.cert.pem())
            .connect(&address)
            .await
            .unwrap();
        client.node().ping().await.unwrap();
        drop(client);
        let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let error = Client::options()
            .ca(other.cert.pem())
            .connect(&address)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        for rubbish in [
            "no pem",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ] {
            let error = Client::options().ca(rubbish).connect(&address).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    };
    tokio::select! { () = calls => (), () = server => () }
}
