//! `exec`, with the manners of a good remote shell: stdin only when asked for, bytes as they come, signals passed on,
//! the command's own exit code.

use std::{os::unix::ffi::OsStringExt, process::ExitCode, time::Duration};

use sandbox_sdk::{Exit, How as End, SandboxHandle, v1::signal::Scope};
use serde_json::{Map, Value, json};

use crate::{
    Reach,
    args::{ExecArgs, How},
    claim::variable,
    fault::Fault,
    human, json,
    print::{self, Out},
    relay::{Done, Left, Remote},
    signals::Signals,
    terminal::{self, Keys},
    text::harmless,
};

/// SIGHUP.
const HANGUP: i32 = 1;
/// Time for a last word to a program whose terminal is gone.
const PARTING: Duration = Duration::from_secs(2);
/// The command's time was over.
pub(crate) const TIMED_OUT: u8 = 124;

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
    if how.tty {
        let (cols, rows) = terminal::size();
        exec = exec.tty(cols, rows);
        if let Some(term) = how.term {
            exec = exec.term(term.into_vec());
        }
    }
    Ok(exec)
}

pub(crate) async fn exec(reach: &Reach, args: ExecArgs, out: Out) -> Result<ExitCode, Fault> {
    let (input, tty) = (args.how.stdin, args.how.tty);
    if tty {
        terminal::check("-t", input, out)?;
    }
    let client = reach.client(None).await?;
    let sandbox = client.sandbox(args.sandbox, None);
    let command = builder(&sandbox, args.how, args.command)?;
    if input && tty {
        return interact(&sandbox, command, args.detach_keys, out).await;
    }
    let remote = Remote::exec(command.stream().await?);
    let mut signals = Signals::catch()?;
    let done = if tty {
        Box::pin(remote.show(&mut signals, out)).await?
    } else {
        Box::pin(remote.relay(&mut signals, out)).await?
    };
    done.print(out, Map::new())?;
    Ok(done.code())
}

/// Puts the local terminal before a command. `keys` leave it running, if there are any.
pub(crate) async fn interact(
    sandbox: &SandboxHandle,
    mut command: sandbox_sdk::Exec,
    keys: Option<Keys>,
    out: Out,
) -> Result<ExitCode, Fault> {
    let detaches = keys.is_some();
    // Whoever can leave it alone leaves it running.
    if detaches {
        command = command.detach_on_disconnect();
    }
    let mut signals = Signals::catch()?;
    let mut remote = Remote::exec(command.stream().await?);
    let id = remote.started().await?;
    let left = Box::pin(remote.interact(keys.unwrap_or_default(), &mut signals, out)).await;
    if !matches!(left, Ok(Left::Ended(_))) {
        terminal::clean();
    }
    match left {
        Ok(Left::Ended(done)) => {
            done.print(out, Map::new())?;
            Ok(done.code())
        }
        Ok(Left::Detached) => {
            on_its_own(sandbox, id);
            Ok(ExitCode::SUCCESS)
        }
        Ok(Left::Signal(number)) => {
            if detaches {
                hang_up(sandbox, id).await;
            }
            Err(Fault::Signal(number))
        }
        Err(fault) => {
            if detaches {
                on_its_own(sandbox, id);
            }
            Err(fault)
        }
    }
}

fn on_its_own(sandbox: &SandboxHandle, id: u64) {
    let sandbox = harmless(sandbox.id());
    print::stderr(&format!(
        "sandboxctl: it goes on as process {id}; `sandboxctl attach {sandbox} {id}` goes back to it"
    ));
}

/// Does to a program that would go on what the end of its terminal does: nobody has asked for it to stay.
async fn hang_up(sandbox: &SandboxHandle, id: u64) {
    let process = sandbox.process(id);
    let hung_up = tokio::time::timeout(PARTING, process.signal(HANGUP, Scope::Tree)).await;
    if !matches!(hung_up, Ok(Ok(_))) {
        on_its_own(sandbox, id);
    }
}

impl Done {
    pub(crate) fn code(&self) -> ExitCode {
        code(&self.exit).into()
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
        json::exit(&mut object, self.exit.how, self.exit.timed_out);
        object.insert("truncated".to_owned(), json!(self.stdout.cut || self.stderr.cut));
        json::output(&mut object, "stdout", self.stdout.bytes.clone());
        json::output(&mut object, "stderr", self.stderr.bytes.clone());
        if let Some((Value::Object(json), _text)) = traced {
            object.extend(json);
        }
        print::line(&Value::Object(object).to_string())
    }
}

/// The exit code that a shell would show.
pub(crate) fn code(exit: &Exit) -> u8 {
    if exit.timed_out { TIMED_OUT } else { how(exit.how) }
}

/// As [`code`], of a program that was in time.
pub(crate) fn how(how: End) -> u8 {
    match how {
        // A wait status has 8 bits.
        End::Code(code) => u8::try_from(code & 0xff).unwrap_or(u8::MAX),
        End::Signal(number) => u8::try_from(number.saturating_add(128)).unwrap_or(u8::MAX),
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
