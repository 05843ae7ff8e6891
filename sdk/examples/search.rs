//! Replaces what matches in files of a sandbox, and looks for lines.
//!
//! `cargo run --example search -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use sandbox_sdk::{Client, files::FindEvent};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;
    let files = sandbox.files();
    let work = format!("/tmp/{}", sandbox.id());
    let notes = format!("{work}/notes.txt");
    files.write(&notes).parents().bytes("one\ntwo\nthree\n").await?;

    // In all the files, or in none.
    let replaced = files
        .replace("t(wo|hree)", "T$1")
        .path(&work)
        .glob("*.txt")
        .run()
        .await?;
    println!(
        "{} replaced in {} files",
        replaced.done.replacements, replaced.done.files
    );
    let mut finding = files.find(&work, "^T").stream().await?;
    while let Some(event) = finding.next().await {
        match event? {
            FindEvent::Line(line) => {
                println!(
                    "{}:{}: {}",
                    line.path.escape_ascii(),
                    line.line,
                    line.text.escape_ascii()
                );
            }
            FindEvent::Done(done) => println!("{} lines in {} files", done.matches, done.searched),
        }
    }

    files.remove(&work).recursive().await?;
    sandbox.release().await?;
    Ok(())
}
