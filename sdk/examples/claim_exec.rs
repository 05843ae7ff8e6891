//! Claims a sandbox, runs a command in it, gives it back.
//!
//! `cargo run --example claim_exec -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use std::time::Duration;

use sandbox_sdk::Client;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    let client = Client::connect(&address).await?;

    let sandbox = client
        .claim("default")
        .lease(Duration::from_secs(60))
        .label("example", "claim_exec")
        .await?;
    println!(
        "{} from {:?}, on engine {:?}",
        sandbox.id(),
        sandbox.tier(),
        sandbox.engine()
    );

    let output = sandbox
        .exec(["sh", "-c", "echo \"hello from $(uname -n)\"; wc -c"])
        .stdin("twelve bytes")
        .timeout(Duration::from_secs(10))
        .output()
        .await?;
    print!("{}", output.stdout_text());
    println!("ended with {:?}", output.status.how);

    let released = sandbox.release().await?;
    println!("released, recorded: {}", released.recorded);
    Ok(())
}
