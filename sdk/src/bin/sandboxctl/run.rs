//! `run`: claim, exec, release, whatever happens in between.

use std::{pin::pin, process::ExitCode, time::Duration};

use sandbox_sdk::{Sandbox, Token};
use serde_json::{Map, json};

use crate::{
    Reach,
    args::RunArgs,
    claim, exec,
    fault::Fault,
    print::{self, Out, Progress},
    relay::{Done, Left, Remote},
    signals::Signals,
    terminal::{self, Keys},
};

/// After a signal, how long a claim that is under way may still take, so that it can be given back.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn run(reach: &Reach, args: RunArgs, out: Out) -> Result<ExitCode, Fault> {
    let (input, tty) = (args.how.stdin, args.how.tty);
    if tty {
        terminal::check("-t", input, out)?;
    }
    let mut signals = Signals::catch()?;
    let client = tokio::select! {
        client = reach.client(None) => client?,
        number = signals.next() => return Err(Fault::Signal(number)),
    };
    let progress = Progress::start(out, "claiming a sandbox");
    let claiming = async { claim::builder(&client, args.wanted).await };
    let mut claiming = pin!(claiming);
    let (sandbox, interrupted) = tokio::select! {
        sandbox = &mut claiming => (sandbox?, None),
        number = signals.next() => match tokio::time::timeout(PATIENCE, &mut claiming).await {
            Ok(Ok(sandbox)) => (sandbox, Some(number)),
            Ok(Err(_)) | Err(_) => return Err(Fault::Signal(number)),
        },
    };
    drop(progress);
    let done = match interrupted {
        Some(number) => Err(Fault::Signal(number)),
        None => match exec::builder(&sandbox, args.how, args.command) {
            Ok(command) => relay(command, (input, tty), &mut signals, out).await,
            Err(fault) => Err(fault),
        },
    };
    let object = finish(sandbox, args.keep && done.is_ok(), out).await;
    let done = done?;
    done.print(out, object)?;
    Ok(done.code())
}

async fn relay(
    command: sandbox_sdk::Exec,
    (input, tty): (bool, bool),
    signals: &mut Signals,
    out: Out,
) -> Result<Done, Fault> {
    let stream = tokio::select! {
        stream = command.stream() => stream?,
        number = signals.next() => return Err(Fault::Signal(number)),
    };
    let mut remote = Remote::exec(stream);
    match (input, tty) {
        (_, false) => Box::pin(remote.relay(signals, out)).await,
        (false, true) => Box::pin(remote.show(signals, out)).await,
        (true, true) => {
            remote.started().await?;
            // Nobody can leave it alone: its sandbox ends with this verb.
            let left = Box::pin(remote.interact(Keys::default(), signals, out)).await;
            if !matches!(left, Ok(Left::Ended(_))) {
                terminal::clean();
            }
            match left? {
                Left::Ended(done) => Ok(*done),
                Left::Detached => Err(Fault::Told),
                Left::Signal(number) => Err(Fault::Signal(number)),
            }
        }
    }
}

/// Gives the sandbox back, or says what was kept. A release that fails does not change what the command said.
async fn finish(sandbox: Sandbox, keep: bool, out: Out) -> Map<String, serde_json::Value> {
    let mut object = Map::new();
    object.insert("sandbox".to_owned(), json!(sandbox.id()));
    if !keep {
        let id = sandbox.id().to_owned();
        if let Err(error) = sandbox.release().await {
            print::stderr(&format!(
                "sandboxctl: {id} was not released, its lease will end it: {error}"
            ));
        }
        return object;
    }
    let kept = sandbox.keep();
    let token = kept.token().map(Token::expose);
    object.insert("token".to_owned(), json!(token));
    if !out.json {
        let token = token.unwrap_or_default();
        print::stderr(&format!("sandboxctl: kept {}, token {token}", kept.id()));
    }
    object
}
