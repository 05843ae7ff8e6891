//! Commands that work beside a dead daemon. But for `net` (and `ca`, which has a file of its own), they read what lies on the disk, and change nothing but what
//! they print.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::json;

use super::{
    FAILED,
    args::{Journal, JournalArgs, Net, RoleArg, Token},
    engines,
    print::{Printer, Refusal, StartReason},
};
use crate::{
    access::AccessToken,
    config::{self, Config},
    doctor::{self, Verdict},
    journal::{self, OpenError, Report, RowState, Torn},
    net, random,
    words::Name,
};

/// Done, unless whoever read the output is gone.
pub(super) fn printed(outcome: std::io::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(_gone) => ExitCode::from(FAILED),
    }
}

pub(super) fn check_config(file: &Path, printer: Printer) -> ExitCode {
    match Config::read(file, &config::Host::look()) {
        Ok(_) => printed(printer.result(
            &json!({ "file": file, "ok": true }),
            &format!("{}: ok", file.display()),
        )),
        Err(error) => {
            printer.config_error(&error);
            ExitCode::from(FAILED)
        }
    }
}

/// The configuration that a command goes by: the file that was named, else the default one if it is there, else the
/// defaults. Its mistakes are told.
pub(super) fn config(
    file: Option<PathBuf>,
    host: &config::Host,
    printer: Printer,
) -> Result<Config, ExitCode> {
    let default = Path::new(config::DEFAULT_FILE);
    let config = match file {
        Some(file) => Config::read(&file, host),
        None if default.exists() => Config::read(default, host),
        None => Ok(Config::defaults(host)),
    };
    config.map_err(|error| {
        printer.config_error(&error);
        ExitCode::from(FAILED)
    })
}

pub(super) fn doctor(file: Option<PathBuf>, printer: Printer) -> ExitCode {
    let host = config::Host::look();
    let config = match config(file, &host, printer) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let checks = doctor::judge(&doctor::look(&config, &host, engines::given(&config)));
    let fails = checks.iter().any(|check| check.verdict == Verdict::Fail);
    match printer.checks(&checks) {
        Ok(()) if !fails => ExitCode::SUCCESS,
        Ok(()) | Err(_) => ExitCode::from(FAILED),
    }
}

pub(super) fn journal(command: Journal, printer: Printer) -> ExitCode {
    match command {
        Journal::Cat(args) => cat(&args, printer),
        Journal::Check(args) => match journal::check(&args.state_dir) {
            Ok(report) => {
                let sound = report.damage.is_empty();
                let outcome = printed(printer.result(&report_value(&report), &report_text(&report)));
                if sound { outcome } else { ExitCode::from(FAILED) }
            }
            Err(error) => refused(&args.state_dir, &error, printer),
        },
    }
}

fn report_value(report: &Report) -> serde_json::Value {
    let states = report
        .sandboxes
        .iter()
        .map(|(state, count)| (state_text(*state), json!(count)));
    let damage = report.damage.iter().map(|damage| {
        json!({
            "file": damage.file, "offset": damage.offset, "what": damage.what.to_string(),
            "sandbox": damage.sandbox.map(|id| id.to_string()),
        })
    });
    json!({
        "segments": report.segments, "unfolded": report.unfolded, "last_seq": report.last_seq,
        "sandboxes": states.collect::<serde_json::Map<_, _>>(), "pools": report.pools,
        "damage": damage.collect::<Vec<_>>(), "torn": report.torn.as_ref().map(torn_text),
        "ok": report.damage.is_empty(),
    })
}

/// A state as the records spell it.
fn state_text(state: RowState) -> String {
    serde_json::to_value(state)
        .ok()
        .and_then(|text| text.as_str().map(str::to_owned))
        .unwrap_or_default()
}

fn torn_text(torn: &Torn) -> String {
    format!(
        "torn end, of which nobody was answered: {} at byte {}, {} bytes",
        torn.file.display(),
        torn.offset,
        torn.bytes
    )
}

fn report_text(report: &Report) -> String {
    let mut lines = vec![format!(
        "{} segments, {} records not folded yet, last number {}, {} pools",
        report.segments, report.unfolded, report.last_seq, report.pools
    )];
    lines.extend(
        report
            .sandboxes
            .iter()
            .map(|(state, count)| format!("{count} {}", state_text(*state))),
    );
    lines.extend(report.torn.iter().map(torn_text));
    lines.extend(report.damage.iter().map(|damage| {
        format!(
            "damaged: {} at byte {}: {}",
            damage.file.display(),
            damage.offset,
            damage.what
        )
    }));
    lines.push(if report.damage.is_empty() {
        "sound".into()
    } else {
        "damaged".into()
    });
    lines.join("\n")
}

fn refused(dir: &Path, error: &OpenError, printer: Printer) -> ExitCode {
    printer.refusal(&Refusal::new(
        super::start::open_reason(error),
        Some(dir.to_owned()),
        error,
    ));
    ExitCode::from(FAILED)
}

fn cat(args: &JournalArgs, printer: Printer) -> ExitCode {
    let sandbox = match args.sandbox.as_deref().map(str::parse).transpose() {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let error: sandbox_protocol::id::IdError = error;
            printer.refusal(&Refusal::new(StartReason::ConfigInvalid, None, &error));
            return ExitCode::from(FAILED);
        }
    };
    let lines = match journal::cat(&args.state_dir, journal::Filter { sandbox }) {
        Ok(lines) => lines,
        Err(error) => return refused(&args.state_dir, &error, printer),
    };
    for line in lines {
        match line {
            Ok(line) if printer.line(&line).is_ok() => {}
            Ok(_) => return ExitCode::from(FAILED),
            Err(error) => return refused(&args.state_dir, &error, printer),
        }
    }
    ExitCode::SUCCESS
}

pub(super) fn net(command: &Net, printer: Printer) -> ExitCode {
    let (Net::Prepare(args) | Net::Purge(args)) = command;
    let (namespace, wanted) = match &args.namespace {
        Some(namespace) => (namespace.clone(), true),
        None => match config(args.config.clone(), &config::Host::look(), printer) {
            Ok(config) => (config.net.namespace, config.net.slots > 0),
            Err(code) => return code,
        },
    };
    let outcome = match command {
        Net::Prepare(_) if !wanted => Ok((
            json!({ "namespace": namespace, "off": true }),
            "lane guarded is off (net.slots = 0): nothing to prepare".to_owned(),
        )),
        Net::Prepare(_) => net::prepare(&namespace).map(|done| prepared(&namespace, done)),
        Net::Purge(_) => net::purge(&namespace).map(|there| {
            let text = if there { "dropped" } else { "not there" };
            (
                json!({ "namespace": namespace, "dropped": there }),
                format!("{namespace}: {text}"),
            )
        }),
    };
    match outcome {
        Ok((value, text)) => printed(printer.result(&value, &text)),
        Err(error) => {
            printer.refusal(&super::lane::refusal(&namespace, &error));
            ExitCode::from(FAILED)
        }
    }
}

fn prepared(namespace: &Name, done: net::Prepared) -> (serde_json::Value, String) {
    let net::Prepared { made, held, taps } = done;
    let value = json!({ "namespace": namespace, "off": false, "made": made, "held": held, "taps": taps });
    let text = match (made, held) {
        (_, true) => "a running daemon keeps it in order",
        (true, false) => "made, packet filter in force",
        (false, false) => "there, packet filter in force",
    };
    (value, format!("{namespace}: {text}, {taps} network cards"))
}

pub(super) fn token(command: Token, printer: Printer) -> ExitCode {
    let Token::New { name, role, tenant } = command;
    let token = AccessToken::from_random(&random::bytes());
    let sha256 = token.hash().to_hex();
    let role = match role {
        RoleArg::Operator => "operator",
        RoleArg::Tenant => "tenant",
    };
    let tenant_line = tenant
        .as_ref()
        .map(|tenant| format!("\ntenant = \"{tenant}\""))
        .unwrap_or_default();
    let text = format!(
        "{}\n\nIt is shown this once. For the configuration file:\n\n[[access.token]]\nname = \"{name}\"\nsha256 = \"{sha256}\"\nrole = \"{role}\"{tenant_line}",
        token.as_str()
    );
    let value = json!({
        "token": token.as_str(), "name": name.as_str(), "sha256": sha256, "role": role,
        "tenant": tenant.as_ref().map(Name::as_str),
    });
    printed(printer.result(&value, &text))
}
