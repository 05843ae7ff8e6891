//! Speaks to a language server of a sandbox.
//!
//! `cargo run --example lsp -- unix:/run/sandboxd/api.sock rust`
#![expect(clippy::print_stdout, reason = "examples print")]

use anyhow::Context as _;
use sandbox_sdk::{Client, Reason};

/// The first message of every client.
const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"processId":null,"rootUri":null,"capabilities":{}}}"#;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    // A file below /etc/silkd/lsp.d of the image.
    let language = std::env::args().nth(2).unwrap_or_else(|| "rust".to_owned());
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    match sandbox.lsp(&language).root("/").open().await {
        Ok(mut server) => {
            // Whole messages: their length headers are the guest's matter.
            server.send(INITIALIZE).await?;
            let answer = server.next().await.context("it has ended")??;
            println!("server {} says {}", server.server(), answer.escape_ascii());
            let id = server.server();
            // It stays for another client, for a while; or is ended.
            drop(server);
            let exit = sandbox.lsp_stop(id).await?;
            println!("ended with {:?}", exit.map(|exit| exit.how));
        }
        Err(error) if error.is(Reason::LspUnknown) => println!("the image has no server for {language}"),
        Err(error) => return Err(error.into()),
    }
    sandbox.release().await?;
    Ok(())
}
