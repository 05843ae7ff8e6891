//! `exec`, with the manners of a good remote shell: stdin only when asked for, bytes as they come, signals passed on,
//! the command's own exit code.

use std::{os::unix::ffi::OsStringExt, process::ExitCode};

use sandbox_sdk::{Event, ExecStdin, ExecStream, Exit, How as End, SandboxHandle, Signaller};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::{
    Reach,
    args::{ExecArgs, How},
    claim::variable,
    fault::Fault,
    human, json,
    print::{self, Out},
    signals::Signals,
};

/// Bytes that one read of stdin takes at most.
const PIECE: usize = 64 * 1024;
/// Bytes of each output that `--json` keeps.
const KEPT: usize = 8 * 1024 * 1024;
/// The command's time was over.
const TIMED_OUT: u8 = 124;

pub(crate) fn builder(
    sandbox: &SandboxHandle,
    how: How,
    command: Vec<std::ffi::OsString>,
) -> Result<sandbox_sdk::Exec, Fault> {
    let mut exec = sandbox.exec(command.into_iter().map(OsStringExt::into_vec));
    for text in how.env {
        let (key, value) = variable(text)?;
        exec = exec.env(key, value);
    }
    if let Some(cwd) = how.cwd {
        exec = exec.cwd(cwd.into_vec());
    }
    if let Some(user) = how.user {
        exec = exec.user(user.into_vec());
    }
    if let Some(timeout) = how.timeout {
        exec = exec.timeout(timeout);
    }
    if how.trace {
        exec = exec.trace();
    }
    if how.stdin {
        exec = exec.piped_stdin();
    }
    Ok(exec)
}

pub(crate) async fn exec(reach: &Reach, args: ExecArgs, out: Out) -> Result<ExitCode, Fault> {
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let stream = builder(&sandbox, args.how, args.command)?.stream().await?;
    let mut signals = Signals::catch()?;
    let done = Box::pin(relay(stream, &mut signals, out)).await?;
    done.print(out, Map::new())?;
    Ok(done.code())
}

/// A command that has ended, and what it said if that was kept.
#[derive(Debug)]
pub(crate) struct Done {
    exit: Exit,
    stdout: Kept,
    stderr: Kept,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    cut: bool,
}

impl Kept {
    fn push(&mut self, data: &[u8]) {
        let room = KEPT.saturating_sub(self.bytes.len());
        let fits = data.get(..room).unwrap_or(data);
        self.cut |= fits.len() < data.len();
        self.bytes.extend_from_slice(fits);
    }
}

impl Done {
    pub(crate) fn code(&self) -> ExitCode {
        let code = match self.exit.how {
            _ if self.exit.timed_out => TIMED_OUT,
            // A wait status has 8 bits.
            End::Code(code) => u8::try_from(code & 0xff).unwrap_or(u8::MAX),
            End::Signal(number) => u8::try_from(number.saturating_add(128)).unwrap_or(u8::MAX),
        };
        code.into()
    }

    /// The JSON of it, with what else the verb has to say; or, for people, only what was counted.
    pub(crate) fn print(&self, out: Out, mut object: Map<String, Value>) -> Result<(), Fault> {
        let traced = traced(&self.exit);
        if !out.json {
            if let Some((_json, text)) = traced {
                print::stderr(&text);
            }
            return Ok(());
        }
        let (code, signal) = match self.exit.how {
            End::Code(code) => (Some(code), None),
            End::Signal(signal) => (None, Some(signal)),
        };
        object.insert("code".to_owned(), json!(code));
        object.insert("signal".to_owned(), json!(signal));
        object.insert("timed_out".to_owned(), json!(self.exit.timed_out));
        object.insert("truncated".to_owned(), json!(self.stdout.cut || self.stderr.cut));
        json::output(&mut object, "stdout", self.stdout.bytes.clone());
        json::output(&mut object, "stderr", self.stderr.bytes.clone());
        if let Some((Value::Object(json), _text)) = traced {
            object.extend(json);
        }
        print::line(&Value::Object(object).to_string())
    }
}

/// What was counted, as JSON and for people.
pub(crate) fn traced(exit: &Exit) -> Option<(Value, String)> {
    if exit.work.is_none() && exit.host_work.is_none() {
        return None;
    }
    let host = exit.host_work.clone().unwrap_or_default();
    let mut text = human::work(&host);
    if let Some(work) = &exit.work {
        text = format!("{text}\n{}", human::agent_work(work));
    }
    let json = json!({
        "work": exit.host_work.as_ref().map(json::work),
        "steps_us": host.steps_us,
        "agent_work": exit.work.as_ref().map(json::agent_work),
    });
    Some((json, text))
}

/// Passes everything on until the command has ended.
pub(crate) async fn relay(mut stream: ExecStream, signals: &mut Signals, out: Out) -> Result<Done, Fault> {
    let stdin = stream.take_stdin();
    let signaller = stream.signaller();
    let output = output(stream, out);
    tokio::select! {
        done = output => done,
        never = input(stdin) => match never {},
        never = forward(signals, signaller) => match never {},
    }
}

enum Never {}

/// Ends only by being dropped, as does [`forward`]: it is the command's end that ends a call.
async fn input(stdin: Option<ExecStdin>) -> Never {
    if let Some(mut stdin) = stdin {
        let mut local = tokio::io::stdin();
        let mut piece = vec![0; PIECE];
        // A stdin that cannot be read has ended, as for any program.
        while let Ok(length @ 1..) = local.read(&mut piece).await {
            let data = piece.get(..length).unwrap_or_default().to_vec();
            if stdin.write(data).await.is_err() {
                break;
            }
        }
    }
    std::future::pending().await
}

async fn forward(signals: &mut Signals, signaller: Signaller) -> Never {
    loop {
        let number = signals.next().await;
        signaller.signal(number.into()).await;
    }
}

async fn output(mut stream: ExecStream, out: Out) -> Result<Done, Fault> {
    let (mut stdout, mut stderr) = (Kept::default(), Kept::default());
    let (mut to_stdout, mut to_stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(event) = stream.next().await {
        match event? {
            Event::Started { .. } => {}
            Event::Stdout(data) if out.json => stdout.push(&data),
            Event::Stderr(data) if out.json => stderr.push(&data),
            Event::Stdout(data) => write(&mut to_stdout, &data)
                .await
                .map_err(|error| Fault::io("stdout", error))?,
            // A command goes on when nobody reads its complaints.
            Event::Stderr(data) => drop(write(&mut to_stderr, &data).await),
            Event::Exit(exit) => {
                return Ok(Done {
                    exit: *exit,
                    stdout,
                    stderr,
                });
            }
        }
    }
    Err(Fault::Io(
        "exec",
        std::io::Error::other("the call ended without the command's exit"),
    ))
}

async fn write(to: &mut (impl AsyncWrite + Unpin), data: &[u8]) -> std::io::Result<()> {
    to.write_all(data).await?;
    to.flush().await
}
