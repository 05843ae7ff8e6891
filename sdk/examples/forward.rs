//! Speaks to a port of a sandbox, directly and through a local port that everybody can use.
//!
//! `cargo run --example forward -- unix:/run/sandboxd/api.sock`
#![expect(clippy::print_stdout, reason = "examples print")]

use sandbox_sdk::{Client, Reason};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| Client::DEFAULT_ADDRESS.to_owned());
    // The port of a server in the sandbox; without one, nothing listens on port 1.
    let port: u16 = std::env::args().nth(2).map_or(Ok(1), |port| port.parse())?;
    let client = Client::connect(&address).await?;
    let sandbox = client.claim("default").await?;

    match sandbox.forward(port).connect().await {
        Ok(mut connection) => {
            connection.write_all(b"hello").await?;
            // That direction ends; the other goes on until the server ends it.
            connection.shutdown().await?;
            let mut answer = Vec::new();
            connection.read_to_end(&mut answer).await?;
            println!("the server says {} bytes", answer.len());
        }
        Err(error) if error.is(Reason::PortRefused) => println!("nothing listens on port {port}"),
        Err(error) => return Err(error.into()),
    }

    // A local port, for programs that know nothing of sandboxes.
    let mut listener = sandbox.forward(port).listen(("127.0.0.1", 0)).await?;
    println!("{} leads to port {port}", listener.local_addr());
    let mut socket = TcpStream::connect(listener.local_addr()).await?;
    socket.write_all(b"hello").await?;
    socket.shutdown().await?;
    let mut answer = Vec::new();
    match socket.read_to_end(&mut answer).await {
        Ok(bytes) => println!("the server says {bytes} bytes"),
        // What breaks there is reset here, and told.
        Err(reset) => println!("{reset}: {}", listener.next_failure().await),
    }
    // Dropping the listener closes it and all its connections.
    drop(listener);
    sandbox.release().await?;
    Ok(())
}
