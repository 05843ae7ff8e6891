//! The examples of the SDK do what they say.

use harness::{Daemon, HANG, Setup, program, within};
use tokio::process::Command;

async fn run(daemon: &Daemon, name: &str) -> String {
    let output = Command::new(program(&format!("example-{name}")))
        .arg(daemon.address())
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
