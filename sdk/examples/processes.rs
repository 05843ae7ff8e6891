//! Starts a process that outlives the call, reads its log, talks to it, ends it.
//!
//! `cargo run --example processes -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use anyhow::Context as _;
use sandbox_sdk::{
    Client, TextDecoder,
    process::{LogEvent, LogFrom},
};
use tokio::io::AsyncWriteExt as _;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    // Run is for what is short: one exchange, one answer.
    let kernel = sandbox.run(["uname", "-s"]).await?;
    print!("on {}", kernel.stdout_text());

    let script = "echo ready; while read -r line; do echo \"heard $line\"; done; echo over; exit 3";
    let process = sandbox
        .spawn(["sh", "-c", script])
        .name("listener")
        .keep_stdin()
        .await?;
    println!("started {} as {}", process.id(), process.pid());

    // Whoever has its name finds it, in this program or in another. One visitor at a time gives it input.
    let mut visit = sandbox.process("listener").attach().input().open().await?;
    let mut stdin = visit.take_stdin().context("the input was asked for")?;
    stdin.write_all(b"one\ntwo\n").await?;
    // Dropped, the input is at its end.
    drop(stdin);
    let exit = visit.wait().await?;
    println!("ended with {:?}", exit.how);

    // The log is still there, and can be read from any offset. What it no longer holds is told.
    let mut log = process.logs().from(LogFrom::Oldest).follow().open().await?;
    let mut text = TextDecoder::new();
    while let Some(event) = log.next().await {
        match event? {
            LogEvent::Stdout { data, .. } | LogEvent::Stderr { data, .. } => {
                print!("{}", text.push(&data));
            }
            LogEvent::Gap { from, to } => println!("({} bytes are gone)", to - from),
            LogEvent::Exit(_) => {}
        }
    }

    let mut processes = sandbox.processes(false).await?;
    while let Some(row) = processes.next().await {
        let row = row?;
        println!("{} is {:?}", row.id, row.state());
    }
    process.forget().await?;
    sandbox.release().await?;
    Ok(())
}
