//! What `sandboxd ca check` says of a folder.

use std::{fs, io, os::unix::fs::MetadataExt as _, time::Duration};

use super::{Bundle, CaError, Cert, Dir, Fingerprint};
use crate::{clock::WallTime, verdict::Verdict};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// An intermediate that ends before that is to be renewed, and a root to be rotated.
const INTERMEDIATE_SOON: Duration = DAY.saturating_mul(15);
const ROOT_SOON: Duration = DAY.saturating_mul(180);

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub what: String,
    /// How it stands.
    pub verdict: Verdict,
    /// Why, or what to do.
    pub said: String,
}

impl Finding {
    fn new(what: impl Into<String>, verdict: Verdict, said: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            verdict,
            said: said.into(),
        }
    }
}

impl Dir {
    /// Looks at chain, dates, modes, and at the templates: each with its name and the roots that its manifest lists.
    #[must_use]
    pub fn check(&self, templates: &[(String, Vec<Fingerprint>)], now: WallTime) -> Vec<Finding> {
        let mut found = vec![self.folder()];
        let bundle = match self.bundle() {
            Ok(bundle) => bundle,
            Err(error) => {
                found.push(Finding::new("bundle.pem", Verdict::Fail, chain(&error)));
                return found;
            }
        };
        for root in bundle.roots() {
            let what = format!("root {}", root.fingerprint().short());
            found.push(dated(
                &what,
                root,
                ROOT_SOON,
                "rotate it: `sandboxd ca rotate`",
                now,
            ));
            if self.key_file(root.fingerprint()).exists() {
                let said = format!(
                    "{} lies here: keep it offline, and bring it for `ca issue-node` alone",
                    self.key_file(root.fingerprint()).display()
                );
                found.push(Finding::new(format!("{what} key"), Verdict::Warn, said));
            }
        }
        if bundle.roots().len() > 1 {
            found.push(self.vouched(&bundle, now));
        }
        match self.open(now) {
            Ok(None) => {
                let said = "there is none, so this node looks into nothing: `sandboxd ca issue-node`";
                found.push(Finding::new("node.pem", Verdict::Warn, said));
            }
            Err(error) => found.push(Finding::new("node.pem", Verdict::Fail, chain(&error))),
            Ok(Some(node)) => {
                let mut judged = dated(
                    "node.pem",
                    node.intermediate(),
                    INTERMEDIATE_SOON,
                    "renew it: `sandboxd ca issue-node`, then reload",
                    now,
                );
                judged.said = format!("of root {}, {}", node.root().short(), judged.said);
                found.push(judged);
                for (template, roots) in templates {
                    let (verdict, said) = if roots.contains(&node.root()) {
                        (Verdict::Ok, "trusts the root of node.pem".to_owned())
                    } else {
                        let said =
                            "lacks the root of node.pem: build it anew before a pool that intercepts uses it";
                        (Verdict::Warn, said.to_owned())
                    };
                    found.push(Finding::new(format!("template {template}"), verdict, said));
                }
            }
        }
        found
    }

    /// Whether the old root of a rotation vouches for the new one.
    fn vouched(&self, bundle: &Bundle, now: WallTime) -> Finding {
        match self.cross(bundle, now) {
            Ok(Some(cross)) => dated(
                "cross.pem",
                &cross,
                INTERMEDIATE_SOON,
                "end the rotation: `sandboxd ca rotate --finish`",
                now,
            ),
            Ok(None) => {
                let said = "there is none of these roots: guests that know the old root alone will not trust what the \
                            new one signs: `sandboxd ca rotate --old-root-key FILE`";
                Finding::new("cross.pem", Verdict::Warn, said)
            }
            Err(error) => Finding::new("cross.pem", Verdict::Fail, chain(&error)),
        }
    }

    /// Whoever can write in the folder can put keys of his own there.
    fn folder(&self) -> Finding {
        let what = self.path().display().to_string();
        match fs::metadata(self.path()) {
            Ok(about) if about.mode() & 0o022 != 0 => Finding::new(
                what,
                Verdict::Fail,
                format!(
                    "others can write in it (mode {:04o}): chmod 0755",
                    about.mode() & 0o7777
                ),
            ),
            Ok(_) => Finding::new(what, Verdict::Ok, "only its owner can write in it"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Finding::new(what, Verdict::Fail, "it is not there: `sandboxd ca init`")
            }
            Err(error) => Finding::new(what, Verdict::Fail, error.to_string()),
        }
    }
}

fn dated(what: &str, cert: &Cert, soon: Duration, remedy: &str, now: WallTime) -> Finding {
    let until = format!("valid until {}", cert.not_after());
    if !cert.holds(now) {
        let said = format!(
            "valid from {} to {} only: {remedy}",
            cert.not_before(),
            cert.not_after()
        );
        return Finding::new(what, Verdict::Fail, said);
    }
    if cert.not_after() < now.plus(soon) {
        return Finding::new(what, Verdict::Warn, format!("{until}: {remedy}"));
    }
    Finding::new(what, Verdict::Ok, until)
}

fn chain(error: &CaError) -> String {
    crate::telemetry::chain(error)
}
