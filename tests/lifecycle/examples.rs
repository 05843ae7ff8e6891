//! The examples of the SDK do what they say.

use harness::{Daemon, HANG, Setup, program, within};
use tokio::{io::AsyncWriteExt as _, net::TcpListener, process::Command};

async fn run(daemon: &Daemon, name: &str) -> String {
    run_with(daemon, name, &[]).await
}

async fn run_with(daemon: &Daemon, name: &str, args: &[&str]) -> String {
    let output = Command::new(program(&format!("example-{name}")))
        .arg(daemon.address())
        .args(args)
        .kill_on_drop(true)
        .output();
    let output = within(HANG, output).await.unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}\n{complaints}");
    said
}

#[tokio::test]
async fn examples_of_claims_and_programs_run() {
    let daemon = Setup::stub().warm(2).start().await;
    daemon.until_warm(2).await;
    let said = run(&daemon, "claim-exec").await;
    assert!(
        said.contains("12\nended with Code(0)\nreleased, recorded: true\n"),
        "{said}"
    );
    let said = run(&daemon, "stream").await;
    assert!(said.contains("one\ntwo\nended with Signal(15)"), "{said}");
    let said = run(&daemon, "pools").await;
    assert!(said.ends_with("all full\n"), "{said}");
}

#[tokio::test]
async fn examples_of_processes_terminals_and_sessions_run() {
    let daemon = Setup::stub().warm(1).start().await;
    let said = run(&daemon, "processes").await;
    assert!(said.starts_with("on Linux\nstarted "), "{said}");
    let rest = "\nended with Code(3)\nready\nheard one\nheard two\nover\n";
    assert!(said.contains(rest) && said.ends_with("is Exited\n"), "{said}");
    let said = run(&daemon, "terminal").await;
    let expected = "24 80\nasks\n43 132\nheard hello\nit is Running\nended with Code(4)\n";
    assert_eq!(said, expected);
    let said = run(&daemon, "session").await;
    let expected = "hello from /tmp\nended with Code(1) in b\"/tmp\"\nin time: false\ncommand 4\nhello from you\n\
                    the shell has ended: true\n";
    assert_eq!(said, expected);
}

#[tokio::test]
async fn examples_of_files_ports_and_tools_run() {
    let daemon = Setup::stub().warm(1).start().await;
    let said = run(&daemon, "files").await;
    let expected = "14 bytes written, modes 600\nof 14 bytes, from the fifth: \"two\\nthree\\n\"\n\
                    pulled 2 entries, 14 bytes\npushed 2 entries\n";
    assert!(
        said.starts_with(expected) && said.contains("copy/notes.txt\n"),
        "{said}"
    );
    // What a guest's server may be.
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let echo = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut socket, _) = listener.accept().await.unwrap();
            let (mut from, mut to) = socket.split();
            tokio::io::copy(&mut from, &mut to).await.unwrap();
            to.shutdown().await.unwrap();
        }
    });
    let said = run_with(&daemon, "forward", &[&port]).await;
    assert_eq!(said.matches("the server says 5 bytes").count(), 2, "{said}");
    within(HANG, echo).await.unwrap();
    let said = run(&daemon, "forward").await;
    assert!(
        said.contains("nothing listens on port 1") && said.contains("PORT_REFUSED"),
        "{said}"
    );
    let said = run(&daemon, "git").await;
    assert!(
        said.contains("on topic: 1 entries\n") && said.contains("branch main\n"),
        "{said}"
    );
    let said = run(&daemon, "lsp").await;
    assert_eq!(said, "the image has no server for rust\n");
}
