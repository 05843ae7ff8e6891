//! Follows changes of files in a sandbox.
//!
//! `cargo run --example watch_files -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use sandbox_sdk::{Client, FileChange};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;
    let files = sandbox.files();
    let work = format!("/tmp/{}", sandbox.id());
    files.mkdir(&work).await?;

    let mut changes = files.watch(&work).recursive().exclude("*.swp").stream().await?;
    while let Some(change) = changes.next().await {
        match change? {
            // Only now: what happened before is not told.
            FileChange::Ready { directories } => {
                println!("watching {directories} directories");
                files.write(format!("{work}/made.txt")).bytes("hello").await?;
            }
            FileChange::Changed { kind, path, .. } => {
                println!("{} {}", kind.as_str_name(), path.escape_ascii());
                if path == "made.txt" {
                    break;
                }
            }
            FileChange::Renamed { from, to, .. } => {
                println!("{} -> {}", from.escape_ascii(), to.escape_ascii());
            }
            FileChange::Overflow { reason } => println!("changes were lost ({reason}): look at everything"),
            other => println!("{other:?}"),
        }
    }
    // Dropping the stream ends the watch.
    drop(changes);

    files.remove(&work).recursive().await?;
    sandbox.release().await?;
    Ok(())
}
