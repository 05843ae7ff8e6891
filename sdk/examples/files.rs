//! Writes and reads files of a sandbox, and copies a tree out of it and back.
//!
//! `cargo run --example files -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use sandbox_sdk::{Client, Reason};
use tokio::io::AsyncReadExt as _;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;
    let files = sandbox.files();
    // Engine stub isolates nothing: a directory of our own.
    let work = format!("/tmp/{}", sandbox.id());

    let notes = format!("{work}/src/notes.txt");
    let written = files
        .write(&notes)
        .parents()
        .mode(0o600)
        .bytes("one\ntwo\nthree\n")
        .await?;
    println!("{} bytes written, modes {:o}", written.bytes, written.stat.mode);

    // Whoever has changed it meanwhile is not written over.
    let stale = files
        .write(&notes)
        .if_unchanged_since(written.stat.mtime_ns - 1)
        .bytes("")
        .await;
    assert!(stale.is_err_and(|error| error.is(Reason::MtimeChanged)));

    // As a stream, of any length: memory does not grow with it.
    let mut reader = files.read(&notes).offset(4).stream().await?;
    let mut text = String::new();
    reader.read_to_string(&mut text).await?;
    println!("of {} bytes, from the fifth: {text:?}", reader.stat().size);

    // A tree goes to this machine and back.
    let here = std::env::temp_dir().join(format!("{}-here", sandbox.id()));
    let pulled = files.pull_dir(format!("{work}/src"), &here).await?;
    println!(
        "pulled {} entries, {} bytes",
        pulled.unpacked.entries, pulled.unpacked.bytes
    );
    let pushed = files.push_dir(&here, format!("{work}/copy")).await?;
    println!("pushed {} entries", pushed.entries);
    std::fs::remove_dir_all(&here)?;

    let mut entries = files.list(&work).depth(3).stream().await?;
    while let Some(entry) = entries.next().await {
        println!("{}", entry?.name.escape_ascii());
    }

    files.remove(&work).recursive().await?;
    sandbox.release().await?;
    Ok(())
}
