//! Runs a program on a terminal of its own: its size, another size, what is typed, and leaving it for a while.
//!
//! `cargo run --example terminal -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use anyhow::Context as _;
use sandbox_sdk::{Client, Event, ExecStream, TextDecoder, process::LogFrom};

/// Reads until the program has said this.
async fn until(stream: &mut ExecStream, text: &mut TextDecoder, word: &str) -> anyhow::Result<u64> {
    let (mut said, mut process) = (String::new(), 0);
    while !said.contains(word) {
        match stream.next().await.context("it ended too early")?? {
            Event::Started { id, .. } => process = id,
            Event::Stdout(bytes) => said.push_str(&text.push(&bytes)),
            Event::Stderr(_) | Event::Exit(_) => {}
        }
    }
    println!("{}", said.replace("\r\n", "\n").trim_end());
    Ok(process)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    // The program can be left: then it goes on, and its output goes to its log.
    let script = "stty -echo; stty size; echo asks; while read -r line; do stty size; echo \"heard $line\"; done; exit 4";
    let mut stream = sandbox
        .exec(["sh", "-c", script])
        .tty(80, 24)
        .detach_on_disconnect()
        .piped_stdin()
        .stream()
        .await?;
    let mut stdin = stream.take_stdin().context("the input was asked for")?;
    let resizer = stream.resizer();
    let mut text = TextDecoder::new();
    let process = until(&mut stream, &mut text, "asks\r\n").await?;
    resizer.resize(132, 43).await;
    stdin.write("hello\n").await?;
    until(&mut stream, &mut text, "heard hello\r\n").await?;

    // Leaving drops the call before the input, so that the input stays open.
    drop(stream);
    drop(stdin);
    let process = sandbox.process(process);
    let mut visit = process.attach().from(LogFrom::Live).input().open().await?;
    println!("it is {:?}", visit.attached().state);
    let stdin = visit.take_stdin().context("the input was asked for")?;
    // On a terminal the end of the input is Ctrl-D.
    drop(stdin);
    println!("ended with {:?}", visit.wait().await?.how);

    sandbox.release().await?;
    Ok(())
}
