//! `sandboxd ca`: the certificates by which doors look into TLS.

use std::{path::PathBuf, process::ExitCode};

use serde_json::{Value, json};

use super::{
    FAILED,
    args::{Ca, CaArgs},
    commands,
    print::{Printer, Refusal, StartReason},
};
use crate::{
    ca::{CaError, Cert, Dir, Done, Finding, Fingerprint, Issued},
    clock::Clock,
    config, random, template,
    verdict::Verdict,
};

/// Where a command works, and which templates belong to it.
struct Place {
    dir: Dir,
    templates: PathBuf,
    node: String,
}

pub(super) fn ca(command: Ca, printer: Printer) -> ExitCode {
    let (Ca::Init { at, .. }
    | Ca::IssueNode { at, .. }
    | Ca::Show { at }
    | Ca::Check { at }
    | Ca::Rotate { at, .. }) = &command;
    let place = match place(at, printer) {
        Ok(place) => place,
        Err(code) => return code,
    };
    let now = Clock::host().wall();
    let Place { dir, templates, node } = place;
    let done = match command {
        Ca::Init { root_key, .. } => dir
            .init(root_key, random::bytes(), now)
            .map(|done| initialised(&dir, &done)),
        Ca::IssueNode {
            root_key,
            name,
            renew,
            ..
        } => {
            let name = name.unwrap_or(node);
            dir.issue_node(root_key, &name, renew, random::bytes(), now)
                .map(|issued| issued_text(&dir, &issued))
        }
        Ca::Show { .. } => show(&dir),
        Ca::Rotate {
            root_key,
            old_root_key,
            finish: false,
            ..
        } => dir
            .rotate(root_key, old_root_key.as_deref(), random::bytes(), now)
            .map(|done| rotated(&dir, &done)),
        Ca::Rotate { finish: true, .. } => dir.finish().map(|done| finished(&done)),
        Ca::Check { .. } => return check(&dir, &templates, now, printer),
    };
    match done {
        Ok((value, text)) => commands::printed(printer.result(&value, &text)),
        Err(error) => {
            printer.refusal(&Refusal::new(
                StartReason::CaFault,
                Some(dir.path().to_owned()),
                &error,
            ));
            ExitCode::from(FAILED)
        }
    }
}

fn place(at: &CaArgs, printer: Printer) -> Result<Place, ExitCode> {
    let host = config::Host::look();
    let config = commands::config(at.config.clone(), &host, printer)?;
    Ok(Place {
        dir: Dir::new(at.dir.clone().unwrap_or(config.egress.tls.ca_dir)),
        templates: config.node.state_dir.join("templates"),
        node: config.node.name,
    })
}

fn initialised(dir: &Dir, done: &Done) -> (Value, String) {
    let bundle = dir.bundle_file();
    let value = json!({
        "changed": done.changed, "root": done.root, "bundle": bundle, "root_key": done.key,
    });
    let text = match &done.key {
        None => format!("{}: there already, root {}", bundle.display(), done.root),
        Some(key) => format!(
            "root {}\n  {}  what guests trust: copy it to every node\n  {}  its key: keep it offline, bring it for `sandboxd ca issue-node` alone",
            done.root,
            bundle.display(),
            key.display()
        ),
    };
    (value, text)
}

fn issued_text(dir: &Dir, issued: &Issued) -> (Value, String) {
    let file = dir.node_file();
    let value = json!({
        "changed": issued.changed, "file": file, "root": issued.root,
        "fingerprint": issued.cert.fingerprint(), "not_after": issued.cert.not_after().to_string(),
    });
    let (root, until) = (issued.root.short(), issued.cert.not_after());
    let text = if issued.changed {
        format!(
            "{}: issued by root {root}, valid until {until}; reload the daemon to take it up",
            file.display()
        )
    } else {
        format!(
            "{}: there already, by root {root}, valid until {until} (--renew replaces it)",
            file.display()
        )
    };
    (value, text)
}

fn rotated(dir: &Dir, done: &Done) -> (Value, String) {
    let value = json!({
        "changed": done.changed, "root": done.root, "bundle": done.bundle, "root_key": done.key, "cross": done.cross,
    });
    let (vouched, files) = match &done.cross {
        Some(cross) => (
            format!("{}: the old root vouches for the new one", cross.display()),
            "bundle.pem and cross.pem",
        ),
        None => (
            "the old root does not vouch for the new one: sandboxes that know it alone have to end before the \
             intermediate changes (`--old-root-key FILE` spares that)"
                .to_owned(),
            "bundle.pem",
        ),
    };
    let text = match &done.key {
        None => {
            format!("a rotation is under way: the bundle holds the new root and the old one\n  {vouched}")
        }
        Some(key) => format!(
            "new root {}, before the old one in {}\n  its key: {}, to be kept offline\n  {vouched}\nNow: copy {files} to every node, reload, build templates anew; then `sandboxd ca issue-node` and reload; \
             after the last old sandbox `sandboxd ca rotate --finish` and reload",
            done.root,
            dir.bundle_file().display(),
            key.display()
        ),
    };
    (value, text)
}

fn finished(done: &Done) -> (Value, String) {
    let value = json!({ "changed": done.changed, "root": done.root, "bundle": done.bundle });
    let text = if done.changed {
        format!("root {} stands alone; reload the daemon", done.root)
    } else {
        "there is one root: nothing to drop".to_owned()
    };
    (value, text)
}

fn show(dir: &Dir) -> Result<(Value, String), CaError> {
    let bundle = dir.bundle()?;
    let node = dir.intermediate()?;
    let one = |cert: &Cert| {
        json!({
            "name": cert.name(), "fingerprint": cert.fingerprint(),
            "not_before": cert.not_before().to_string(), "not_after": cert.not_after().to_string(),
        })
    };
    let line = |what: &str, cert: &Cert| {
        let print: Fingerprint = cert.fingerprint();
        format!("{what}  {print}  {}  until {}", cert.name(), cert.not_after())
    };
    let roots = bundle.roots();
    let mut lines: Vec<_> = roots.iter().map(|root| line("root", root)).collect();
    lines.push(
        node.as_ref()
            .map_or_else(|| "node  none".to_owned(), |node| line("node", node)),
    );
    let value = json!({
        "roots": roots.iter().map(one).collect::<Vec<_>>(), "node": node.as_ref().map(one),
    });
    Ok((value, lines.join("\n")))
}

fn check(dir: &Dir, templates: &std::path::Path, now: crate::clock::WallTime, printer: Printer) -> ExitCode {
    let found = match template::coverage(templates) {
        Ok(coverage) => dir.check(&coverage, now),
        Err(error) => {
            let mut found = dir.check(&[], now);
            found.push(Finding {
                what: templates.display().to_string(),
                verdict: Verdict::Fail,
                said: error.to_string(),
            });
            found
        }
    };
    let fails = found.iter().any(|found| found.verdict == Verdict::Fail);
    let checks = found
        .iter()
        .map(|found| json!({ "what": found.what, "verdict": found.verdict.as_str(), "said": found.said }));
    let value = json!({ "ok": !fails, "checks": checks.collect::<Vec<_>>() });
    let lines = found
        .iter()
        .map(|found| format!("{:<4}  {}: {}", found.verdict.as_str(), found.what, found.said));
    let text = lines.collect::<Vec<_>>().join("\n");
    let code = commands::printed(printer.result(&value, &text));
    if fails { ExitCode::from(FAILED) } else { code }
}
