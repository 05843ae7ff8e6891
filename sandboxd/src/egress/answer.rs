//! A denial as a guest reads it: a status line that names the reason, headers, and JSON that says what to do.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use sandbox_protocol::{
    door::DoorReason,
    metadata::door::{DENY_REASON, DENY_RULE},
};

use super::{Decided, Outcome};

/// Seconds to wait before a request that may succeed later is repeated.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// A denial. Its text is escaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// Why.
    pub reason: DoorReason,
    /// What was asked for.
    pub target: String,
    /// Whose layer denied, where one did.
    pub layer: Option<&'static str>,
    /// By which rule.
    pub rule: Option<String>,
    /// What the rule says about it.
    pub message: Option<String>,
    /// Number of its line in the audit; 0: it has none.
    pub seq: u64,
}

impl Denial {
    /// A denial that no record tells of.
    #[must_use]
    pub const fn bare(reason: DoorReason) -> Self {
        Self {
            reason,
            target: String::new(),
            layer: None,
            rule: None,
            message: None,
            seq: 0,
        }
    }

    /// Of a decision; none if it allowed.
    #[must_use]
    pub fn of(decided: &Decided) -> Option<Self> {
        match decided.outcome {
            Outcome::Allowed(_) => None,
            Outcome::Denied(reason) => Some(Self {
                reason,
                target: decided.target.clone(),
                layer: decided.side.map(crate::policy::Side::as_str),
                rule: decided.rule.clone(),
                message: decided.message.clone(),
                seq: decided.audit_seq,
            }),
        }
    }

    /// The first line of an answer.
    #[must_use]
    pub fn status_line(&self) -> String {
        format!("HTTP/1.1 {} {}", self.reason.http(), self.reason.as_str())
    }

    /// The value that stands for it in lists and answers.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let message = self.message.clone().unwrap_or_else(|| match self.layer {
            Some(layer) => format!("the {layer}'s policy does not allow it"),
            None => self.reason.as_str().replace('_', " "),
        });
        serde_json::json!({
            "reason": self.reason.as_str(),
            "target": self.target,
            "layer": self.layer,
            "rule": self.rule,
            "message": message,
            "remedy": self.reason.remedy(),
            "retry": self.reason.retry(),
            "audit_seq": self.seq,
        })
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> Bytes {
        let mut text = serde_json::json!({ "error": self.to_json() }).to_string();
        text.push('\n');
        text.into()
    }

    /// As hyper sends it.
    #[must_use]
    pub fn response(&self) -> Response<Bytes> {
        let body = self.body();
        let mut response = Response::new(body);
        *response.status_mut() =
            http::StatusCode::from_u16(self.reason.http()).unwrap_or(http::StatusCode::FORBIDDEN);
        let reason = hyper::ext::ReasonPhrase::from_static(self.reason.as_str().as_bytes());
        response.extensions_mut().insert(reason);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(DENY_REASON, HeaderValue::from_static(self.reason.as_str()));
        if let Some(rule) = self.rule.as_deref().and_then(|rule| rule.parse().ok()) {
            headers.insert(DENY_RULE, rule);
        }
        let status = format!(
            "sandboxd; error=http_request_denied; details=\"{}\"",
            self.reason.as_str()
        );
        if let Ok(status) = HeaderValue::from_str(&status) {
            headers.insert("proxy-status", status);
        }
        if self.reason.retry() {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }

    /// As it is written where no HTTP server stands between: the last thing on a connection.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let response = self.response();
        let mut bytes = self.status_line().into_bytes();
        bytes.extend_from_slice(b"\r\n");
        for (name, value) in response.headers() {
            bytes.extend_from_slice(name.as_str().as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value.as_bytes());
            bytes.extend_from_slice(b"\r\n");
        }
        let body = response.into_body();
        bytes.extend_from_slice(
            format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len()).as_bytes(),
        );
        bytes.extend_from_slice(&body);
        bytes
    }
}
