//! Talks to a running program: its output as it comes, input while it runs, a signal at the end.
//!
//! `cargo run --example stream -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use anyhow::Context as _;
use sandbox_sdk::{Client, Event, TextDecoder};

/// SIGTERM.
const TERM: i32 = 15;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    let mut stream = sandbox.exec(["cat"]).piped_stdin().stream().await?;
    let mut stdin = stream.take_stdin().context("the input was asked for")?;
    let signaller = stream.signaller();
    stdin.write("one\n").await?;

    // Characters that are cut by a piece's end are put together again.
    let mut text = TextDecoder::new();
    let mut lines = 0;
    while let Some(event) = stream.next().await {
        match event? {
            Event::Started { pid, .. } => println!("runs as {pid}"),
            Event::Stdout(bytes) => {
                print!("{}", text.push(&bytes));
                lines += 1;
                match lines {
                    1 => stdin.write("two\n").await?,
                    _ => signaller.signal(TERM).await,
                }
            }
            Event::Stderr(_) => {}
            Event::Exit(exit) => println!("ended with {:?} after {:?}", exit.how, exit.wall),
        }
    }
    sandbox.release().await?;
    Ok(())
}
