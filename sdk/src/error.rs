//! One error for every call: a stable reason, whether to ask again, what it is about, and what to do.
//!
//! May call: dial (its error).
//! Never inside: a decision to repeat; that is `retry`'s.

use std::{borrow::Cow, error::Error as StdError, fmt, io, time::Duration};

use sandbox_protocol::{
    metadata,
    reason::{DOMAIN, Reason},
};
use tonic::{Code, Status};
use tonic_types::{FieldViolation, StatusExt as _};

use crate::dial::DialError;

/// Why a call was refused, or why there is no answer. Messages may hold text of a guest: escape them before a
/// terminal or a log sees them.
#[expect(
    clippy::error_impl_error,
    reason = "the one error of the library, read as `sandbox_sdk::Error`"
)]
pub struct Error(Box<Detail>);

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The daemon or the guest answered, with a refusal or a failure.
    Refused,
    /// No connection could be made: nothing was sent.
    Unreachable,
    /// The connection broke before the answer; whether the call took effect is not known.
    Broken,
    /// The time that the caller allowed is over.
    TimedOut,
    /// A stream ended in order, but without what must stand at its end. Never taken for success.
    Unfinished,
    /// The SDK refused the arguments: nothing was sent.
    Invalid,
    /// Reading or writing on this side failed (a local file, a stream of the caller's).
    Local,
}

/// Who spoke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The daemon.
    Host,
    /// The guest; it can say what it likes.
    Guest,
    /// The SDK itself, or nobody who said who he is.
    Unknown,
}

/// A stable reason, of this SDK's table or of a newer daemon's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorReason {
    /// One of the table.
    Known(Reason),
    /// One that this version does not know.
    Unknown(String),
}

impl ErrorReason {
    /// The upper-case text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Known(reason) => reason.as_str(),
            Self::Unknown(text) => text,
        }
    }
}

/// A field of the request that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Its name.
    pub field: String,
    /// What is allowed.
    pub description: String,
}

#[derive(Debug)]
struct Detail {
    kind: ErrorKind,
    code: Code,
    reason: Option<ErrorReason>,
    message: Cow<'static, str>,
    remedy: Option<Cow<'static, str>>,
    why: Option<String>,
    retry_after: Option<Duration>,
    request_id: Option<String>,
    origin: Origin,
    fields: Vec<FieldError>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    fn own(kind: ErrorKind, reason: Option<Reason>, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Detail {
            kind,
            code: reason.map_or(Code::Unavailable, Reason::code),
            reason: reason.map(ErrorReason::Known),
            message: message.into(),
            remedy: reason.map(|reason| reason.remedy().into()),
            why: None,
            retry_after: None,
            request_id: None,
            origin: Origin::Unknown,
            fields: Vec::new(),
            source: None,
        }))
    }

    pub(crate) fn address(message: String) -> Self {
        Self::own(ErrorKind::Invalid, Some(Reason::AddressInvalid), message)
    }

    /// The SDK refuses an argument by the name of its field.
    pub(crate) fn invalid(field: &'static str, description: String) -> Self {
        let mut error = Self::own(
            ErrorKind::Invalid,
            Some(Reason::FieldInvalid),
            format!("{field}: {description}"),
        );
        error.0.fields.push(FieldError {
            field: field.to_owned(),
            description,
        });
        error
    }

    pub(crate) fn timed_out() -> Self {
        Self::own(
            ErrorKind::TimedOut,
            Some(Reason::Deadline),
            "no answer within the time allowed",
        )
    }

    pub(crate) fn unfinished(message: impl Into<Cow<'static, str>>) -> Self {
        Self::own(ErrorKind::Unfinished, Some(Reason::AgentLost), message)
    }

    /// Reading or writing on this side failed. What only carried an error of ours is that error.
    pub(crate) fn local(what: impl fmt::Display, source: io::Error) -> Self {
        match source.downcast::<Self>() {
            Ok(ours) => ours,
            Err(source) => {
                let mut error = Self::own(ErrorKind::Local, None, format!("{what}: {source}"));
                error.0.code = Code::Unknown;
                error.0.source = Some(Box::new(source));
                error
            }
        }
    }

    /// A directory was asked for, and the guest has something else there.
    pub(crate) fn not_a_directory() -> Self {
        let reason = Reason::NotADirectory;
        Self::own(ErrorKind::Local, Some(reason), "the path is one file: read it")
    }

    /// What came is no archive that may be unpacked here.
    pub(crate) fn archive(message: String) -> Self {
        Self::own(ErrorKind::Local, Some(Reason::ArchiveRefused), message)
    }

    /// No connection at the first attempt.
    pub(crate) fn dial(source: DialError) -> Self {
        let mut error = Self::lost(&source);
        error.0.source = Some(Box::new(source));
        error
    }

    fn lost(source: &DialError) -> Self {
        let (kind, remedy) = match source {
            DialError::Unreachable { .. } => (
                ErrorKind::Unreachable,
                "start sandboxd, or check the address and the rights on its socket",
            ),
            DialError::Broken { .. } => (
                ErrorKind::Broken,
                "ask again; whether the call took effect is not known",
            ),
        };
        let mut error = Self::own(kind, None, source.to_string());
        error.0.remedy = Some(remedy.into());
        error
    }

    /// Reads what a failed call says.
    pub(crate) fn from_status(status: Status) -> Self {
        if let Some(dial) = status
            .source()
            .and_then(|source| source.downcast_ref::<DialError>())
        {
            let mut error = Self::lost(dial);
            error.0.source = Some(Box::new(status));
            return error;
        }
        let text = |key: &str| {
            let value = status.metadata().get(key)?;
            value.to_str().ok().map(str::to_owned)
        };
        let origin = match text(metadata::SANDBOX_ORIGIN).as_deref() {
            Some(metadata::ORIGIN_HOST) => Origin::Host,
            Some(metadata::ORIGIN_GUEST) => Origin::Guest,
            Some(_) | None => Origin::Unknown,
        };
        let details = status.get_error_details();
        let info = details.error_info().filter(|info| info.domain == DOMAIN);
        let field = |key| info.and_then(|info| info.metadata.get(key).cloned());
        let reason = info.map(|info| {
            let unknown = || ErrorReason::Unknown(info.reason.clone());
            Reason::parse(&info.reason).map_or_else(unknown, ErrorReason::Known)
        });
        let remedy = match (field(metadata::REMEDY_FIELD), &reason) {
            (Some(remedy), _) => Some(remedy.into()),
            (None, Some(ErrorReason::Known(known))) => Some(known.remedy().into()),
            (None, Some(ErrorReason::Unknown(_)) | None) => None,
        };
        let late = status.code() == Code::DeadlineExceeded;
        Self(Box::new(Detail {
            kind: if late {
                ErrorKind::TimedOut
            } else {
                ErrorKind::Refused
            },
            code: status.code(),
            reason,
            message: status.message().to_owned().into(),
            remedy,
            why: field(metadata::WHY_FIELD),
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
            request_id: text(metadata::SANDBOX_REQUEST_ID).or_else(|| field(metadata::REQUEST_ID_FIELD)),
            origin,
            fields: details.bad_request().map_or_else(Vec::new, |bad| {
                let name = |field: &FieldViolation| FieldError {
                    field: field.field.clone(),
                    description: field.description.clone(),
                };
                bad.field_violations.iter().map(name).collect()
            }),
            source: None,
        }))
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// gRPC status; of the SDK's own failures the one that fits best.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The stable reason, where there is one.
    #[must_use]
    pub fn reason(&self) -> Option<&ErrorReason> {
        self.0.reason.as_ref()
    }

    /// Whether it is this reason.
    #[must_use]
    pub fn is(&self, reason: Reason) -> bool {
        self.0.reason == Some(ErrorReason::Known(reason))
    }

    /// What happened, for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What can be done about it.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// Of a sandbox that failed: why it did.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        self.0.why.as_deref()
    }

    /// Present: nothing happened, and asking again after this time may help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// `rq_..`, as in the daemon's log.
    #[must_use]
    pub fn request_id(&self) -> Option<&str> {
        self.0.request_id.as_deref()
    }

    /// Who spoke.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.0.origin
    }

    /// The fields that were refused.
    #[must_use]
    pub fn fields(&self) -> &[FieldError] {
        &self.0.fields
    }
}

/// For those who read and write: `std::io::Error::downcast` gives the error back.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match (&error.0.reason, error.kind()) {
            (Some(ErrorReason::Known(Reason::PortReset)), _) => io::ErrorKind::ConnectionReset,
            (Some(ErrorReason::Known(Reason::PortRefused)), _) => io::ErrorKind::ConnectionRefused,
            (_, ErrorKind::Unreachable | ErrorKind::Broken) => io::ErrorKind::ConnectionAborted,
            (_, ErrorKind::TimedOut) => io::ErrorKind::TimedOut,
            (_, ErrorKind::Unfinished) => io::ErrorKind::UnexpectedEof,
            (_, ErrorKind::Invalid) => io::ErrorKind::InvalidInput,
            (_, ErrorKind::Refused | ErrorKind::Local) => {
                let kinds = [
                    (Code::NotFound, io::ErrorKind::NotFound),
                    (Code::AlreadyExists, io::ErrorKind::AlreadyExists),
                    (Code::PermissionDenied, io::ErrorKind::PermissionDenied),
                ];
                let fits = kinds.into_iter().find(|(code, _kind)| *code == error.code());
                fits.map_or(io::ErrorKind::Other, |(_code, kind)| kind)
            }
        };
        Self::new(kind, error)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = &self.0.reason {
            write!(f, "{}: ", reason.as_str())?;
        }
        f.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .source
            .as_deref()
            .map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic::metadata::MetadataMap;
    use tonic_types::ErrorDetails;

    use super::*;

    fn refusal(domain: &str, reason: &str, origin: &'static str) -> Status {
        let mut details = ErrorDetails::new();
        details.set_error_info(
            reason,
            domain,
            HashMap::from([
                ("remedy".to_owned(), "do that".to_owned()),
                ("why".to_owned(), "vm exited".to_owned()),
                ("request_id".to_owned(), "rq_1".to_owned()),
            ]),
        );
        details.set_retry_info(Some(Duration::from_millis(500)));
        details.set_bad_request(vec![FieldViolation::new("lease_secs", "at least 1")]);
        let mut metadata = MetadataMap::new();
        metadata.insert(metadata::SANDBOX_ORIGIN, origin.parse().unwrap());
        Status::with_error_details_and_metadata(Code::ResourceExhausted, "empty", details, metadata)
    }

    #[test]
    fn all_that_a_refusal_says_is_read() {
        let error = Error::from_status(refusal(DOMAIN, "POOL_EMPTY", "host"));
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.is(Reason::PoolEmpty));
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert_eq!(error.remedy(), Some("do that"));
        assert_eq!(error.why(), Some("vm exited"));
        assert_eq!(error.request_id(), Some("rq_1"));
        assert_eq!(error.retry_after(), Some(Duration::from_millis(500)));
        assert_eq!(error.origin(), Origin::Host);
        assert_eq!(error.fields().len(), 1);
        assert_eq!(error.to_string(), "POOL_EMPTY: empty");
    }

    #[test]
    fn unknown_reasons_are_kept_and_strange_domains_are_not_believed() {
        let error = Error::from_status(refusal(DOMAIN, "NEWER_THAN_WE", "guest"));
        assert_eq!(
            error.reason(),
            Some(&ErrorReason::Unknown("NEWER_THAN_WE".into()))
        );
        assert_eq!(error.origin(), Origin::Guest);
        let error = Error::from_status(refusal("elsewhere", "POOL_EMPTY", "host"));
        assert_eq!(error.reason(), None);
    }

    #[test]
    fn rubbish_from_a_guest_is_an_error_and_no_panic() {
        for details in [&b"\xff\xff\xff"[..], b"", &[8, 1, 18, 200, 1]] {
            let status = Status::with_details(Code::Unknown, "\u{1b}[31m", details.to_vec().into());
            let error = Error::from_status(status);
            assert_eq!(error.reason(), None);
            assert_eq!(error.origin(), Origin::Unknown);
        }
    }
}
