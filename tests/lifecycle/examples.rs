//! The examples of the SDK run as they are.

use std::{fs, path::Path, process::Stdio};

use harness::{HANG, Setup, example, within};
use tokio::{io::AsyncWriteExt as _, net::TcpListener, process::Command};

#[tokio::test(flavor = "multi_thread")]
async fn every_example_of_the_sdk_runs() {
    let daemon = Setup::stub().warm(1).start().await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    // What a guest's server may be.
    let serving = tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let (mut from, mut to) = socket.split();
            tokio::io::copy(&mut from, &mut to).await.unwrap();
            to.shutdown().await.unwrap();
        }
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sdk/examples");
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            entry
                .unwrap()
                .path()
                .file_stem()
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    names.sort();
    assert!(names.len() >= 3, "{names:?}");
    for name in names {
        let mut command = Command::new(example(&name));
        command
            .arg(daemon.address())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let expected = match name.as_str() {
            "forward" => {
                command.arg(&port);
                "the server says 5 bytes"
            }
            "files" => "2 lines in",
            "git" => "on topic: 1 entries",
            "watch_files" => "WATCH_KIND_CREATED made.txt",
            _ => "",
        };
        let output = within(HANG, command.output()).await.unwrap();
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success(), "{name}: {out}{err}");
        assert!(out.contains(expected), "{name}: {out}");
    }
    serving.abort();
}
