//! A shell that keeps its directory and variables between commands.
//!
//! `cargo run --example session -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use std::time::Duration;

use sandbox_sdk::{Client, session::SessionEvent};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    let session = sandbox.session().cwd("/").await?;
    session.run("cd /tmp; greeting='hello from'").output().await?;
    let output = session.run("echo $greeting $PWD; false").output().await?;
    print!("{}", output.stdout_text());
    println!("ended with {:?} in {:?}", output.status.how, output.status.cwd);

    // The command is over after its time; the shell stays.
    let late = session
        .run("sleep 1000")
        .timeout(Duration::from_millis(100))
        .output()
        .await?;
    println!("in time: {}", !late.status.timed_out);

    let mut stream = session.run("echo $greeting you; exit 5").stream().await?;
    while let Some(event) = stream.next().await {
        match event? {
            SessionEvent::Started { number } => println!("command {number}"),
            SessionEvent::Stdout(bytes) => print!("{}", String::from_utf8_lossy(&bytes)),
            SessionEvent::Exit(exit) => println!("the shell has ended: {}", exit.session_ended),
            SessionEvent::Stderr(_) | SessionEvent::LateStdout(_) | SessionEvent::LateStderr(_) => {}
        }
    }

    sandbox.release().await?;
    Ok(())
}
