//! Refusals as gRPC statuses: status + `ErrorInfo` (domain `sandbox.v1`) + `RetryInfo`, the one border of silkd.
//!
//! `Reason` itself says, in matches that hold every variant, which status, remedy and retry advice it has; here they
//! only meet what the call knew.

use std::collections::HashMap;

use sandbox_protocol::{
    limits::GUEST_STATUS_MESSAGE,
    metadata::REMEDY_FIELD,
    reason::{DOMAIN, Reason},
};
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::refusal::{Escaped, Refusal};

/// Longest path in an error, in bytes before escaping.
const PATH_SHOWN: usize = 256;

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let mut fields = HashMap::from([(REMEDY_FIELD.to_owned(), refusal.reason.remedy().to_owned())]);
        if let Some(errno) = refusal.errno {
            fields.insert("errno".to_owned(), errno.to_string());
        }
        if let Some(path) = &refusal.path {
            fields.insert("path".to_owned(), Escaped(path, PATH_SHOWN).to_string());
        }
        let mut details = ErrorDetails::with_error_info(refusal.reason.as_str(), DOMAIN, fields);
        if let Some(after) = refusal.reason.retry_after() {
            details.set_retry_info(Some(after));
        }
        let message = cut(refusal.message);
        Self::with_error_details(refusal.reason.code(), message, details)
    }
}

/// The status of a fault of silkd itself.
#[must_use]
pub fn bug(message: &str) -> Status {
    Refusal::new(Reason::AgentBug, message).into()
}

/// At most what a forwarder passes on, ending on a character.
fn cut(mut message: String) -> String {
    if message.len() > GUEST_STATUS_MESSAGE {
        let mut end = GUEST_STATUS_MESSAGE;
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
    }
    message
}

#[cfg(test)]
mod tests {
    use sandbox_protocol::limits::GUEST_STATUS_DETAILS;

    use super::*;

    #[test]
    fn every_reason_travels_whole_and_within_what_is_forwarded() {
        for reason in Reason::ALL {
            let refusal = Refusal::new(*reason, "\u{e9}".repeat(5000))
                .with_errno(2)
                .with_path(&[0xff; 5000]);
            let status = Status::from(refusal);
            assert_eq!(status.code(), reason.code());
            assert!(status.message().len() <= GUEST_STATUS_MESSAGE);
            // Base64 makes four bytes of three.
            assert!(
                status.details().len() * 4 / 3 < GUEST_STATUS_DETAILS,
                "{reason:?}"
            );
            let details = status.get_error_details();
            let info = details.error_info().unwrap();
            assert_eq!(
                (info.reason.as_str(), info.domain.as_str()),
                (reason.as_str(), DOMAIN)
            );
            assert_eq!(info.metadata["errno"], "2");
            assert_eq!(info.metadata[REMEDY_FIELD], reason.remedy());
            assert!(info.metadata["path"].starts_with("\\xff"));
            assert_eq!(
                details.retry_info().and_then(|r| r.retry_delay),
                reason.retry_after()
            );
        }
    }
}
