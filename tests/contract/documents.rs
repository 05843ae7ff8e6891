//! Documents that are tables of code.

use std::fmt::Write as _;

use sandbox_protocol::{door::DoorReason, reason::Reason};

use crate::tree;

const REASONS: &str = "docs/reasons.md";
const DOOR_REASONS: &str = "docs/door-reasons.md";

/// Whether files that are made from code are written now.
pub(crate) fn blessing() -> bool {
    std::env::var_os("BLESS").is_some()
}

fn reasons() -> String {
    let mut text = String::from(
        "# Reasons\n\n\
         Every error of the API carries a `google.rpc.ErrorInfo` with domain `sandbox.v1` and one of these reasons. They are\n\
         stable: programs may match them, and none changes its meaning. Where a time to try again is given, the error has a\n\
         `google.rpc.RetryInfo` too: nothing happened, and asking again is safe. The metadata of the ErrorInfo holds `remedy`\n\
         and `request_id`.\n\n\
         This page is made from `protocol/src/reason.rs` (`BLESS=1 cargo test -p sandbox-tests --test contract`).\n\n\
         | reason | status | try again after | what to do |\n|---|---|---|---|\n",
    );
    for reason in Reason::ALL {
        let retry = reason
            .retry_after()
            .map_or_else(String::new, |after| format!("{} ms", after.as_millis()));
        let remedy = reason.remedy().replace('|', "\\|");
        writeln!(
            text,
            "| `{}` | {:?} | {retry} | {remedy} |",
            reason.as_str(),
            reason.code()
        )
        .expect("a string takes everything");
    }
    text
}

fn door_reasons() -> String {
    let mut text = String::from(
        "# Reasons of the doors\n\n\
         What a program in a guest is told when a door refuses it: in the status line, in the header `sandbox-deny-reason`, in\n\
         the JSON of the body, and as a SOCKS5 reply code. They are stable, and none changes its meaning. docs/egress.md says\n\
         how doors work.\n\n\
         This page is made from `protocol/src/door.rs` (`BLESS=1 cargo test -p sandbox-tests --test contract`).\n\n\
         | reason | HTTP | SOCKS5 | again later | what to do |\n|---|---|---|---|---|\n",
    );
    for reason in DoorReason::ALL {
        let retry = if reason.retry() { "yes" } else { "" };
        let remedy = reason.remedy().replace('|', "\\|");
        writeln!(
            text,
            "| `{}` | {} | {:02} | {retry} | {remedy} |",
            reason.as_str(),
            reason.http(),
            reason.socks()
        )
        .expect("a string takes everything");
    }
    text
}

fn is_as_made(page: &str, text: &str) {
    if blessing() {
        std::fs::write(tree::root().join(page), text).expect("the page is written");
    }
    let found = std::fs::read_to_string(tree::root().join(page)).expect("the page is there");
    assert!(
        found == text,
        "{page} is not what the code says: make it anew with BLESS=1"
    );
}

#[test]
fn reasons_page_is_the_enum() {
    is_as_made(REASONS, &reasons());
}

#[test]
fn door_reasons_page_is_the_enum() {
    is_as_made(DOOR_REASONS, &door_reasons());
}

#[test]
fn reasons_page_holds_every_reason_once() {
    let text = reasons();
    for reason in Reason::ALL {
        assert_eq!(
            text.matches(&format!("| `{}` |", reason.as_str())).count(),
            1,
            "{reason:?}"
        );
    }
}
