//! `sandboxd audit verify`. It reads, and changes nothing.

use std::{path::Path, process::ExitCode};

use serde_json::{Value, json};

use super::{
    FAILED,
    args::Audit,
    print::{Printer, Refusal, StartReason},
};
use crate::{
    egress::audit::{self, Chain, Finding},
    journal::{self, Heads, OpenError},
};

pub(super) fn run(command: &Audit, printer: Printer) -> ExitCode {
    let Audit::Verify { dir } = command;
    // Before the files: a living daemon writes its lines before the journal hears of them.
    let (heads, unknown) = heads(dir);
    let chains = match audit::verify(dir, &heads) {
        Ok(chains) => chains,
        Err(error) => {
            printer.refusal(&Refusal::new(StartReason::HostFault, Some(dir.clone()), &error));
            return ExitCode::from(FAILED);
        }
    };
    if chains.is_empty() {
        printer.refusal(&Refusal {
            reason: StartReason::HostFault,
            place: Some(dir.clone()),
            message: "there is no file of a chain here".to_owned(),
        });
        return ExitCode::from(FAILED);
    }
    let is_sound = chains.iter().all(|chain| chain.faults == 0);
    let value = json!({
        "ok": is_sound, "dir": dir, "journal": unknown,
        "chains": chains.iter().map(chain_value).collect::<Vec<_>>(),
    });
    match printer.result(&value, &text(&chains, unknown, is_sound)) {
        Ok(()) if is_sound => ExitCode::SUCCESS,
        Ok(()) | Err(_) => ExitCode::from(FAILED),
    }
}

/// How far the journal knows the chains, and why it does not, if so.
fn heads(dir: &Path) -> (Heads, Option<&'static str>) {
    if !dir.join("journal").is_dir() {
        return (Heads::default(), Some("there is no journal here"));
    }
    match journal::heads(dir) {
        Ok(heads) => (heads, None),
        Err(OpenError::Locked { .. }) => (
            Heads::default(),
            Some("a daemon has the journal open, and its segments do not say yet"),
        ),
        Err(OpenError::Newer { .. } | OpenError::Damaged { .. } | OpenError::Io { .. }) => {
            (Heads::default(), Some("the journal cannot be read"))
        }
    }
}

fn chain_value(chain: &Chain) -> Value {
    let (first, last) = chain.numbers;
    json!({
        "chain": chain.name, "files": chain.files, "lines": chain.lines, "first": first, "last": last,
        "deleted": chain.deleted, "lost": chain.lost, "unclean": chain.unclean, "torn": chain.torn, "journal": chain.known,
        "faults": chain.faults, "findings": chain.findings.iter().map(finding_value).collect::<Vec<_>>(),
    })
}

fn finding_value(finding: &Finding) -> Value {
    json!({
        "file": finding.file, "line": finding.line, "seq": finding.seq,
        "fault": finding.fault.as_str(), "what": finding.fault.to_string(),
    })
}

fn text(chains: &[Chain], unknown: Option<&'static str>, is_sound: bool) -> String {
    let mut lines: Vec<String> = chains.iter().flat_map(chain_text).collect();
    lines.extend(unknown.map(|why| format!("tails are not compared: {why}")));
    lines.push(if is_sound { "sound" } else { "not sound" }.to_owned());
    lines.join("\n")
}

fn chain_text(chain: &Chain) -> Vec<String> {
    let Chain {
        name,
        files,
        lines,
        numbers: (first, last),
        lost,
        deleted,
        unclean,
        torn,
        known,
        findings,
        faults,
    } = chain;
    let notes = [
        Some(format!(
            "{name}: {files} files, {lines} lines, numbers {first} to {last}"
        )),
        (*deleted > 0).then(|| format!("up to {deleted} deleted after their time")),
        (*first > deleted + 1).then(|| format!("no line says where those before {first} are")),
        (*lost > 0).then(|| format!("{lost} lost")),
        (*unclean > 0).then(|| format!("{unclean} ends without a stop")),
        (*torn > 0).then(|| format!("{torn} bytes of an unfinished line")),
        known.map(|known| format!("known to the journal up to {known}")),
    ];
    let notes: Vec<String> = notes.into_iter().flatten().collect();
    let mut text = vec![notes.join(", ")];
    text.extend(findings.iter().map(|finding| {
        let number = finding.seq.map(|seq| format!(" number {seq}:"));
        format!(
            "{}:{}:{} {}",
            finding.file.display(),
            finding.line,
            number.unwrap_or_default(),
            finding.fault
        )
    }));
    let told = u64::try_from(findings.len()).unwrap_or(u64::MAX);
    if *faults > told {
        text.push(format!("and {} more", faults - told));
    }
    text
}
