//! `sandboxctl` on a real terminal: what a program draws, what is typed, and that the terminal is as it was afterwards.

use harness::{Ctl, Daemon, Setup, Terminal, process::Process};
use rustix::process::Signal;
use sandbox_sdk::SandboxHandle;

/// Says how the command went and whether the terminal's modes are those of before; the line that was typed does not
/// hold what it prints.
const VERDICT: &str =
    "; c=$?; b=$(stty -g); [ \"$a\" = \"$b\" ] && m=same || m=changed; echo c''ode=$c modes=$m";

async fn claimed(daemon: &Daemon) -> (SandboxHandle, Ctl) {
    let sandbox = daemon.client().await.claim("default").await.unwrap().keep();
    let ctl = daemon.ctl().token(sandbox.token().unwrap().expose());
    (sandbox, ctl)
}

/// Types a command whose end is told as `code=C modes=same`, and waits for the guest's prompt.
async fn open(terminal: &mut Terminal, command: &str) {
    terminal.line("clear; echo rea''dy").await;
    terminal
        .until("an empty screen", |screen| screen.trim() == "ready\nout>")
        .await;
    terminal.line(&format!("a=$(stty -g); {command}{VERDICT}")).await;
    terminal
        .until("the guest's prompt", |screen| screen.contains("\nin>"))
        .await;
}

async fn ended(terminal: &mut Terminal, code: i32) {
    let screen = terminal.until("the end", |screen| screen.contains("code=")).await;
    assert!(screen.contains(&format!("code={code} modes=same\n")), "{screen}");
}

/// The process that a line on the screen names as `word=PID`.
async fn process(terminal: &mut Terminal, word: &str) -> Process {
    let pid = |screen: &str| {
        let (_, rest) = screen.split_once(&format!("{word}="))?;
        rest.lines().next()?.parse().ok()
    };
    let screen = terminal.until(word, |screen| pid(screen).is_some()).await;
    Process::look(pid(&screen).unwrap()).unwrap()
}

#[tokio::test]
async fn a_shell_is_a_shell() {
    let daemon = Setup::stub().warm(1).start().await;
    let (sandbox, ctl) = claimed(&daemon).await;
    let mut terminal = Terminal::open(&ctl).await;
    let shell = format!(
        "\"$ctl\" shell --detach-keys '' --env 'PS1=in> ' {} -- bash --norc --noprofile",
        sandbox.id()
    );
    open(&mut terminal, &shell).await;

    // A terminal of this size from the start, and of another at once.
    terminal.line("stty size; tty; echo T''ERM=$TERM").await;
    terminal
        .until("its size", |screen| screen.contains("\n24 80\n/dev/pts/"))
        .await;
    terminal
        .until("TERM", |screen| screen.contains("\nTERM=screen"))
        .await;
    terminal
        .line("sh -c 'trap \"stty size; exit\" WINCH; sleep 1000 & echo wa\"\"its; wait'")
        .await;
    terminal
        .until("it waits", |screen| screen.contains("\nwaits\n"))
        .await;
    terminal.resize(100, 30).await;
    terminal
        .until("the new size", |screen| screen.contains("30 100\n"))
        .await;

    // A program that draws, before and after it gets another size.
    let numbers = sandbox.exec(["sh", "-c", "seq 1000 >/tmp/$0", sandbox.id()]);
    assert!(numbers.output().await.unwrap().status.success());
    terminal
        .line(&format!("less -X /tmp/{}; rm /tmp/{0}", sandbox.id()))
        .await;
    terminal
        .until("the first page", |screen| {
            screen.ends_with("\n27\n28\n29\n:\n") || screen.contains("\n29\n/tmp/")
        })
        .await;
    terminal.keys("G").await;
    terminal
        .until("the last page", |screen| screen.contains("\n1000\n(END)"))
        .await;
    terminal.resize(60, 10).await;
    terminal
        .until("the last page, smaller", |screen| {
            screen.contains("\n1000\n(END)") && screen.lines().count() <= 10
        })
        .await;
    terminal.keys("q").await;
    terminal
        .until("the shell again", |screen| screen.trim_end().ends_with("\nin>"))
        .await;

    // What is typed is the program's: Ctrl-C interrupts it and not us.
    terminal
        .line("clear; sh -c 'echo be\"\"gun; exec sleep 1000'; echo went on with $?")
        .await;
    terminal
        .until("it sleeps", |screen| screen.contains("begun\n"))
        .await;
    terminal.keys("\x03").await;
    terminal
        .until("the shell again", |screen| screen.trim_end().ends_with("\nin>"))
        .await;
    terminal.line("clear; exit 7").await;
    ended(&mut terminal, 7).await;
}

#[tokio::test]
async fn a_terminal_without_input_shows_and_does_not_read() {
    let daemon = Setup::stub().warm(1).start().await;
    let (sandbox, ctl) = claimed(&daemon).await;
    let mut terminal = Terminal::open(&ctl).await;
    let exec = format!(
        "\"$ctl\" exec -t {} -- sh -c 'stty size; exit 3'; echo c''ode=$?",
        sandbox.id()
    );
    terminal.line(&exec).await;
    terminal
        .until("size and code", |screen| screen.contains("\n24 80\ncode=3\n"))
        .await;
}

#[tokio::test]
async fn e19_the_terminal_is_given_back_whatever_ends_the_verb() {
    let mut daemon = Setup::stub().warm(1).start().await;
    let (sandbox, ctl) = claimed(&daemon).await;
    let mut terminal = Terminal::open(&ctl).await;
    let id = sandbox.id();
    let inside = |script: &str| {
        format!("sh -c 'echo o\"\"wn=$$; exec \"$ctl\" exec -i -t --env \"PS1=in> \" {id} -- {script}'")
    };

    // A signal, while a program has the whole screen.
    let script = inside("sh -c \"echo g\"\"uest=\\$\\$; sleep 1000 & exec bash --norc --noprofile\"");
    open(&mut terminal, &script).await;
    let own = process(&mut terminal, "own").await;
    let guest = process(&mut terminal, "guest").await;
    terminal.line("less /etc/passwd").await;
    terminal
        .until("the program's screen", |screen| !screen.contains("own="))
        .await;
    own.signal(Signal::TERM);
    ended(&mut terminal, 143).await;
    let screen = terminal
        .until("the shell's screen", |screen| screen.contains("in> less"))
        .await;
    assert!(screen.contains("\ncode=143"), "{screen}");
    guest.gone().await;

    // A stop, after which a shell had the terminal.
    open(&mut terminal, &inside("bash --norc --noprofile")).await;
    let own = process(&mut terminal, "own").await;
    own.signal(Signal::STOP);
    terminal
        .until("the shell", |screen| screen.trim_end().ends_with("out>"))
        .await;
    terminal.keys("stty \"$a\"; fg\n").await;
    // `fg` says whom it puts in front, as the shell did when that was stopped.
    terminal
        .until("it is in front again", |screen| {
            let rest = screen.split_once("Stopped").map_or("", |(_, rest)| rest);
            rest.matches("sh -c \"echo").count() == 2
        })
        .await;
    terminal.line("").await;
    terminal
        .until("the guest's prompt", |screen| {
            screen.trim_end().ends_with("\nin>")
        })
        .await;
    terminal
        .line("clear; sh -c 'echo be\"\"gun; exec sleep 1000'")
        .await;
    terminal
        .until("it sleeps", |screen| screen.contains("begun\n"))
        .await;
    terminal.keys("\x03").await;
    terminal
        .until("the guest's shell", |screen| screen.trim_end().ends_with("\nin>"))
        .await;
    terminal.line("clear; exit 3").await;
    terminal
        .until("the shell", |screen| screen.trim_end().ends_with("out>"))
        .await;
    // The rest of the line that was stopped is gone.
    terminal.line(VERDICT.trim_start_matches("; ")).await;
    ended(&mut terminal, 3).await;

    // A connection that is lost.
    open(&mut terminal, &inside("bash --norc --noprofile")).await;
    daemon.kill9().await;
    ended(&mut terminal, 125).await;
}

#[tokio::test]
async fn a_shell_is_left_and_found_again() {
    let daemon = Setup::stub().warm(1).start().await;
    let (sandbox, ctl) = claimed(&daemon).await;
    let mut terminal = Terminal::open(&ctl).await;
    let id = sandbox.id();
    let shell = format!("\"$ctl\" shell --env 'PS1=in> ' {id} -- bash --norc --noprofile");
    open(&mut terminal, &shell).await;
    terminal.line("clear; x=kept").await;
    // What is typed at once with the keys may be dropped with the call.
    terminal
        .until("that is done", |screen| screen.trim() == "in>")
        .await;
    terminal.keys("\x10\x11").await;
    ended(&mut terminal, 0).await;
    let screen = terminal
        .until("how to go back", |screen| screen.contains("goes back to it"))
        .await;
    let process = screen.split_once("it goes on as process ").unwrap().1;
    let process: u64 = process.split_once(';').unwrap().0.parse().unwrap();

    // Back again, in a window of another size. A first Ctrl-P alone is the program's.
    terminal.resize(100, 30).await;
    terminal.line("clear; echo rea''dy").await;
    terminal
        .until("an empty screen", |screen| screen.trim() == "ready\nout>")
        .await;
    let attach = format!("a=$(stty -g); \"$ctl\" attach {id} {process}{VERDICT}");
    terminal.line(&attach).await;
    terminal.line("echo $x; stty size").await;
    terminal
        .until("its variable and size", |screen| {
            screen.contains("kept\n30 100\n")
        })
        .await;
    // Another may look on, and not type.
    let busy = ctl.run(["attach", "-i", id, &process.to_string()]).await;
    assert!(busy.code == 125 && busy.stderr.contains("INPUT_BUSY"), "{busy:?}");
    terminal.line("clear; exit 9").await;
    ended(&mut terminal, 9).await;
    let gone = ctl
        .run([
            "attach",
            "--no-stdin",
            "--from",
            "oldest",
            id,
            &process.to_string(),
        ])
        .await;
    assert_eq!(gone.code, 9, "{gone:?}");
}

#[tokio::test]
async fn a_shell_whose_window_is_closed_is_hung_up() {
    let daemon = Setup::stub().warm(1).start().await;
    let (sandbox, ctl) = claimed(&daemon).await;
    let mut terminal = Terminal::open(&ctl).await;
    let guest = "sh -c 'echo g\"\"uest=$$; exec bash --norc --noprofile'";
    let shell = format!(
        "sh -c 'echo o\"\"wn=$$; exec \"$0\" shell --env \"PS1=in> \" {} -- \"$@\"' \"$ctl\" {guest}",
        sandbox.id()
    );
    open(&mut terminal, &shell).await;
    let own = process(&mut terminal, "own").await;
    let guest = process(&mut terminal, "guest").await;
    own.signal(Signal::HUP);
    ended(&mut terminal, 129).await;
    guest.gone().await;
}
