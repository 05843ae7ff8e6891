//! The border where a refusal becomes a gRPC status: the one place that makes them for the host.

use std::{collections::HashMap, time::Duration};

use sandbox_protocol::{
    id::RequestId,
    metadata::{REMEDY_FIELD, REQUEST_ID_FIELD, WHY_FIELD},
    reason::{DOMAIN, Reason},
};
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

/// Bytes of a message that are sent. Metadata has room for 16 KiB in all, and this is percent-encoded and sent twice.
const MESSAGE: usize = 2 * 1024;

/// Why a call is not done, as its caller is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    reason: Reason,
    message: String,
    field: Option<(String, String)>,
    metadata: Vec<(&'static str, String)>,
    retry_after: Option<Duration>,
}

impl Refusal {
    /// A refusal. The message says what is the matter in this case; what to do about it comes with the reason. Messages
    /// over 2 KiB are cut.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(MESSAGE));
        Self {
            reason,
            message,
            field: None,
            metadata: Vec::new(),
            retry_after: reason.retry_after(),
        }
    }

    /// A field whose value is not allowed: FIELD_INVALID with a BadRequest that names it.
    #[must_use]
    pub fn field(name: impl Into<String>, allowed: impl Into<String>) -> Self {
        let (name, allowed) = (name.into(), allowed.into());
        let mut refusal = Self::new(Reason::FieldInvalid, format!("{name}: {allowed}"));
        refusal.field = Some((name, allowed));
        refusal
    }

    /// The one answer for a sandbox that is not there and for a credential that does not open it.
    #[must_use]
    pub fn not_found() -> Self {
        Self::new(Reason::SandboxNotFound, "no such sandbox for this token")
    }

    /// Names the cause of a sandbox's end.
    #[must_use]
    pub fn why(self, why: impl Into<String>) -> Self {
        self.with(WHY_FIELD, why)
    }

    /// Adds a word to the ErrorInfo's metadata.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.metadata.push((key, value.into()));
        self
    }

    /// Replaces the advised wait; only reasons that can be retried have one.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        self.retry_after = self.retry_after.map(|_| wait);
        self
    }

    /// The reason.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        self.reason
    }

    /// The status that the caller gets: ErrorInfo always, RetryInfo if nothing happened and it can be asked again,
    /// BadRequest if a field is to blame.
    #[must_use]
    pub fn status(self, id: RequestId) -> Status {
        let mut metadata: HashMap<String, String> = self
            .metadata
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        metadata.insert(REMEDY_FIELD.to_owned(), self.reason.remedy().to_owned());
        metadata.insert(REQUEST_ID_FIELD.to_owned(), id.to_string());
        let mut details = ErrorDetails::with_error_info(self.reason.as_str(), DOMAIN, metadata);
        if let Some(wait) = self.retry_after {
            details.set_retry_info(Some(wait));
        }
        if let Some((field, allowed)) = self.field {
            details.add_bad_request_violation(field, allowed);
        }
        Status::with_error_details(self.reason.code(), self.message, details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_makes_a_whole_status() {
        let id = RequestId::from_random([3; 16]);
        for reason in Reason::ALL {
            let status = Refusal::new(*reason, "m").why("w").status(id);
            assert_eq!((status.code(), status.message()), (reason.code(), "m"));
            let details = status.get_error_details();
            let info = details.error_info().unwrap();
            assert_eq!(
                (info.reason.as_str(), info.domain.as_str()),
                (reason.as_str(), DOMAIN)
            );
            assert_eq!(info.metadata["remedy"], reason.remedy());
            assert_eq!(info.metadata["request_id"], id.to_string());
            assert_eq!(info.metadata["why"], "w");
            assert_eq!(
                details.retry_info().and_then(|info| info.retry_delay),
                reason.retry_after(),
                "{reason:?}"
            );
        }
    }

    #[test]
    fn a_field_is_named() {
        let id = RequestId::from_random([3; 16]);
        let status = Refusal::field("wait_ms", "at most 600000").status(id);
        let details = status.get_error_details();
        let violation = &details.bad_request().unwrap().field_violations[0];
        assert_eq!(
            (violation.field.as_str(), violation.description.as_str()),
            ("wait_ms", "at most 600000")
        );
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
    }

    #[test]
    fn only_what_can_be_retried_gets_a_wait() {
        let wait = Duration::from_secs(9);
        assert_eq!(Refusal::new(Reason::Busy, "").after(wait).retry_after, Some(wait));
        assert_eq!(Refusal::new(Reason::Bug, "").after(wait).retry_after, None);
        let long = Refusal::new(Reason::Bug, "\u{e4}".repeat(5000));
        assert_eq!(long.message.len(), MESSAGE);
    }
}
