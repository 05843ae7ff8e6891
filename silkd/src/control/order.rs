//! Renewals as the host orders them, checked. Pure.
//!
//! May call: refusal, run.
//! Never inside: doing any of it.

use rustix::time::Timespec;
use sandbox_protocol::{
    limits::CLAIM_ENV,
    reason::Reason,
    v1::{
        ControlRenewRequest, ControlSetClaimRequest, control_quiesce_request::Mode as WireRest,
        control_renew_request::Mode as WireMode,
    },
};

use super::machine::SEED;
use crate::{refusal::Refusal, run::ClaimDefaults};

/// Longest `renew_id`, sandbox id and user, in bytes.
const NAME: usize = 128;
/// Longest host name that the kernel takes.
const HOSTNAME: usize = 64;

/// What a rest is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// A template: nothing of a user may be open; what has ended is forgotten.
    Template,
    /// A sleep: open streams end.
    Hibernate,
    /// A checkpoint: open streams are left alone.
    Checkpoint,
}

/// Checks what a rest is for.
///
/// # Errors
/// `FIELD_INVALID`.
pub fn rest(mode: i32) -> Result<Rest, Refusal> {
    match WireRest::try_from(mode) {
        Ok(WireRest::Template) => Ok(Rest::Template),
        Ok(WireRest::Hibernate) => Ok(Rest::Hibernate),
        Ok(WireRest::Checkpoint) => Ok(Rest::Checkpoint),
        Ok(WireRest::Unspecified) | Err(_) => {
            Err(invalid("mode: expected TEMPLATE, HIBERNATE or CHECKPOINT"))
        }
    }
}

/// Which kind of renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// After a boot: a first identity.
    Boot,
    /// In a clone: an identity of its own.
    Clone,
    /// After a sleep: the same identity.
    Wake,
}

impl Mode {
    /// As hooks are told.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Clone => "clone",
            Self::Wake => "wake",
        }
    }

    /// Whether the guest becomes somebody else.
    #[must_use]
    pub const fn changes_identity(self) -> bool {
        match self {
            Self::Boot | Self::Clone => true,
            Self::Wake => false,
        }
    }
}

/// A renewal.
#[derive(Clone, PartialEq, Eq)]
pub struct Renewal {
    /// Which kind.
    pub mode: Mode,
    /// What makes a repeated order the same order.
    pub id: String,
    /// The host's entropy.
    pub seed: [u8; SEED],
    /// The host's wall time.
    pub host_time: Timespec,
    /// Whose guest this is; empty for a template.
    pub sandbox: String,
    /// The new host name; none: as it is.
    pub hostname: Option<String>,
    /// The doors are asked what they say.
    pub ask_doors: bool,
}

impl std::fmt::Debug for Renewal {
    /// Without the seed: it is a secret of this guest.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewal")
            .field("mode", &self.mode)
            .field("id", &self.id)
            .field("sandbox", &self.sandbox)
            .finish_non_exhaustive()
    }
}

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(Reason::FieldInvalid, message)
}

/// Checks an order.
///
/// # Errors
/// `FIELD_INVALID`, naming the field.
pub fn renewal(request: ControlRenewRequest) -> Result<Renewal, Refusal> {
    let mode = match WireMode::try_from(request.mode) {
        Ok(WireMode::Boot) => Mode::Boot,
        Ok(WireMode::Clone) => Mode::Clone,
        Ok(WireMode::Wake) => Mode::Wake,
        Ok(WireMode::Unspecified) | Err(_) => return Err(invalid("mode: expected BOOT, CLONE or WAKE")),
    };
    if request.renew_id.is_empty() || request.renew_id.len() > NAME {
        return Err(invalid(format!("renew_id: expected 1 to {NAME} bytes")));
    }
    let seed = request
        .seed
        .as_ref()
        .try_into()
        .map_err(|_length| invalid(format!("seed: expected {SEED} bytes")))?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if request.sandbox_id.len() > NAME || !request.sandbox_id.bytes().all(plain) {
        return Err(invalid("sandbox_id: expected letters, digits, _ and -"));
    }
    Ok(Renewal {
        mode,
        id: request.renew_id,
        seed,
        host_time: time(request.host_time)?,
        sandbox: request.sandbox_id,
        hostname: hostname(request.hostname)?,
        ask_doors: request.ask_doors,
    })
}

/// A time of the host.
///
/// # Errors
/// `FIELD_INVALID` for one that is absent, before 1970 or malformed.
pub fn time(at: Option<prost_types::Timestamp>) -> Result<Timespec, Refusal> {
    at.filter(|at| at.seconds >= 0 && (0..1_000_000_000).contains(&at.nanos))
        .map(|at| Timespec {
            tv_sec: at.seconds,
            tv_nsec: at.nanos.into(),
        })
        .ok_or_else(|| invalid("host_time: expected a time since 1970"))
}

fn hostname(name: String) -> Result<Option<String>, Refusal> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.len() > HOSTNAME || name.starts_with(['-', '.']) || !name.bytes().all(plain) {
        let message = format!("hostname: expected at most {HOSTNAME} letters, digits, - and .");
        return Err(invalid(message));
    }
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// Checks a claim's environment and user.
///
/// # Errors
/// `INVALID_ENV` and `FIELD_INVALID`.
pub fn claim(request: ControlSetClaimRequest) -> Result<ClaimDefaults, Refusal> {
    let mut total = request.default_user.len();
    for var in &request.env {
        if var.key.is_empty() || var.key.contains(&b'=') || var.key.contains(&0) || var.value.contains(&0) {
            return Err(Refusal::new(
                Reason::InvalidEnv,
                "a key or value of the claim's environment",
            ));
        }
        total = total
            .saturating_add(var.key.len())
            .saturating_add(var.value.len());
    }
    if total > CLAIM_ENV {
        return Err(invalid(format!(
            "environment and user: at most {CLAIM_ENV} bytes"
        )));
    }
    if request.default_user.len() > NAME || request.default_user.contains(&0) {
        return Err(invalid(format!(
            "default_user: at most {NAME} bytes, without NUL"
        )));
    }
    Ok(ClaimDefaults {
        env: request.env,
        user: request.default_user,
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use sandbox_protocol::v1::EnvVar;

    use super::*;

    fn good() -> ControlRenewRequest {
        ControlRenewRequest {
            mode: WireMode::Clone.into(),
            renew_id: "r".into(),
            seed: vec![1; SEED].into(),
            host_time: Some(prost_types::Timestamp { seconds: 5, nanos: 6 }),
            sandbox_id: "sb_1".into(),
            hostname: "sb-1".into(),
            ask_doors: true,
        }
    }

    #[test]
    fn a_good_order_is_taken_as_it_is() {
        let renewal = renewal(good()).unwrap();
        assert_eq!(renewal.mode, Mode::Clone);
        assert_eq!((renewal.host_time.tv_sec, renewal.host_time.tv_nsec), (5, 6));
        assert_eq!(renewal.hostname.as_deref(), Some("sb-1"));
        assert!(renewal.ask_doors);
        assert!(!format!("{renewal:?}").contains("seed"));
    }

    #[test]
    fn each_field_is_refused_by_name() {
        type Spoil = fn(&mut ControlRenewRequest);
        let spoils: [(&str, Spoil); 8] = [
            ("mode", |r| r.mode = 0),
            ("mode", |r| r.mode = 77),
            ("renew_id", |r| r.renew_id.clear()),
            ("seed", |r| r.seed = vec![1; 31].into()),
            ("host_time", |r| r.host_time = None),
            ("host_time", |r| {
                r.host_time = Some(prost_types::Timestamp {
                    seconds: 1,
                    nanos: -1,
                })
            }),
            ("sandbox_id", |r| r.sandbox_id = "a\nb".into()),
            ("hostname", |r| r.hostname = "-x".into()),
        ];
        for (field, spoil) in spoils {
            let mut request = good();
            spoil(&mut request);
            let refusal = renewal(request).unwrap_err();
            assert_eq!(refusal.reason, Reason::FieldInvalid);
            assert!(refusal.message.starts_with(field), "{refusal}");
        }
    }

    #[test]
    fn claims_are_bounded_and_have_keys() {
        let var = |key: &'static [u8], value: Vec<u8>| EnvVar {
            key: Bytes::from_static(key),
            value: value.into(),
        };
        let with = |env| ControlSetClaimRequest {
            env,
            default_user: Bytes::new(),
        };
        for (env, reason) in [
            (vec![var(b"", vec![])], Reason::InvalidEnv),
            (vec![var(b"A=B", vec![])], Reason::InvalidEnv),
            (vec![var(b"A", vec![0])], Reason::InvalidEnv),
            (vec![var(b"A", vec![1; CLAIM_ENV])], Reason::FieldInvalid),
        ] {
            assert_eq!(claim(with(env)).unwrap_err().reason, reason);
        }
        let order = claim(with(vec![var(b"A", vec![1])])).unwrap();
        assert_eq!((order.env.len(), order.user.len()), (1, 0));
    }
}
