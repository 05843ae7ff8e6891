//! The TCP listener with TLS.

use std::{fs, path::Path};

use harness::{Daemon, Setup, refused};
use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use sandbox_sdk::{Client, ErrorKind, Reason};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Writes a certificate for `localhost` and its key.
fn write(authority: &Authority, dir: &Path, name: &str) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let cert = params.signed_by(&key, authority).unwrap();
    // The key first, each in one step: what a reader finds between the two does not fit together, and is not used.
    put(&dir.join(format!("{name}.key")), &key.serialize_pem());
    put(&dir.join(format!("{name}.pem")), &cert.pem());
}

fn put(path: &Path, text: &str) {
    let aside = path.with_extension("new");
    fs::write(&aside, text).unwrap();
    fs::rename(&aside, path).unwrap();
}

fn config(dir: &Path, name: &str) -> String {
    let (cert, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
    format!("listen.tcp = \"127.0.0.1:0\"\nlisten.tls = {{ cert = {cert:?}, key = {key:?} }}\n")
}

async fn connect(daemon: &Daemon, authority: &Authority) -> Result<Client, sandbox_sdk::Error> {
    let port = daemon.process().listening_ports()[0];
    let options = Client::options().ca(authority.pem());
    options.connect(&format!("https://localhost:{port}")).await
}

#[tokio::test]
async fn tls_is_served_and_its_files_are_read_anew_when_they_change() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (authority("old"), authority("new"));
    write(&old, dir.path(), "a");
    let mut daemon = Setup::stub()
        .in_process()
        .warm(1)
        .config(&config(dir.path(), "a"))
        .start()
        .await;
    let client = connect(&daemon, &old).await.unwrap();
    // A client by TCP is nobody without a token.
    refused(client.node().info().await, Reason::TokenRequired);
    let distrust = connect(&daemon, &new).await.unwrap_err();
    assert_eq!(distrust.kind(), ErrorKind::Unreachable, "{distrust:?}");

    // Other content of the same files: the next connection meets it.
    write(&new, dir.path(), "a");
    connect(&daemon, &new).await.unwrap();
    connect(&daemon, &old).await.unwrap_err();
    refused(client.node().info().await, Reason::TokenRequired);
    // Content that does not work: the old stays.
    put(&dir.path().join("a.pem"), "nonsense");
    connect(&daemon, &new).await.unwrap();

    // Other files, by a reload; and files that do not work are refused whole.
    write(&old, dir.path(), "b");
    let operator = daemon.client().await;
    daemon.configure(&config(dir.path(), "b"));
    assert_eq!(operator.node().reload().await.unwrap().changed, ["listen.tls"]);
    connect(&daemon, &old).await.unwrap();
    daemon.configure(&format!("{}pool.web.warm = 0\n", config(dir.path(), "absent")));
    let error = refused(operator.node().reload().await, Reason::ReloadRefused);
    assert!(error.message().contains("absent.pem"), "{error:?}");
    assert_eq!(
        operator.pools().list().await.unwrap().len(),
        1,
        "nothing of it was put in force"
    );
    connect(&daemon, &old).await.unwrap();
}

#[tokio::test]
async fn tcp_beyond_loopback_wants_tls_and_tls_wants_files_that_work() {
    let plain = Setup::stub().config("listen.tcp = \"0.0.0.0:0\"").refused().await;
    assert!(plain.stderr.contains("listen.tcp"), "{}", plain.stderr);
    let dir = tempfile::tempdir().unwrap();
    let absent = Setup::stub()
        .config(&config(dir.path(), "absent"))
        .refused()
        .await;
    assert_eq!(absent.status.code(), Some(1));
    assert!(absent.stderr.contains("absent.pem"), "{}", absent.stderr);
}
