//! Commits in a sandbox, with its own git.
//!
//! `cargo run --example git -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use sandbox_sdk::{Client, git::GitEvent};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;
    let work = format!("/tmp/{}", sandbox.id());

    let init = sandbox.exec(["git", "init", "-q", "-b", "main", &format!("{work}/origin")]);
    anyhow::ensure!(init.output().await?.status.success(), "git init failed");
    // Who commits is git's configuration, or this.
    let origin = sandbox
        .git(format!("{work}/origin"))
        .env("GIT_COMMITTER_NAME", "Ann")
        .env("GIT_COMMITTER_EMAIL", "ann@example.com");
    let readme = format!("{work}/origin/README");
    sandbox.files().write(readme).bytes("hello\n").await?;
    origin.add(["README"]).await?;
    let commit = origin.commit("say hello").author("Ann", "ann@example.com");
    let head = commit.run().await?;
    println!("committed {head}");

    // There are no credentials in a sandbox: its door adds them on the host.
    let clone = sandbox.git(format!("{work}/clone"));
    let mut cloning = clone.clone_from(format!("{work}/origin")).stream().await?;
    while let Some(event) = cloning.next().await {
        match event? {
            GitEvent::Progress(text) => print!("{}", text.escape_ascii()),
            GitEvent::Done { head } => println!("cloned at {head}"),
        }
    }
    clone.checkout("topic").create().run().await?;
    sandbox
        .files()
        .write(format!("{work}/clone/new"))
        .bytes("")
        .await?;
    let status = clone.status().await?;
    println!(
        "on {}: {} entries",
        status.branch.escape_ascii(),
        status.entries.len()
    );
    for branch in clone.branches(true).await?.branches {
        println!("branch {}", branch.name.escape_ascii());
    }

    sandbox.files().remove(&work).recursive().await?;
    sandbox.release().await?;
    Ok(())
}
