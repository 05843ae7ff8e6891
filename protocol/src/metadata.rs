//! Keys of gRPC metadata that the API gives a meaning; their only home.

/// `Bearer <token>`. A token that is present decides alone.
pub const AUTHORIZATION: &str = "authorization";
/// What comes before the token in [`AUTHORIZATION`].
pub const BEARER: &str = "Bearer ";
/// Which guest a call on `/sandbox.v1.Agent/` is for; stripped before the guest.
pub const SANDBOX_ID: &str = "sandbox-id";
/// Highest agent proto that an Agent call uses; absent means 1.
pub const AGENT_PROTO_MIN: &str = "agent-proto-min";
/// `1`: exact counts come back in the trailer [`SANDBOX_WORK`].
pub const SANDBOX_TRACE: &str = "sandbox-trace";
/// Trailer with an encoded `sandbox.v1.Work`, the host's part of a forwarded call.
pub const SANDBOX_WORK: &str = "sandbox-work-bin";
/// Who spoke: [`ORIGIN_HOST`] or [`ORIGIN_GUEST`]. Stamped by the host on every reply, in headers and trailers;
/// only what the host said may be retried unasked.
pub const SANDBOX_ORIGIN: &str = "sandbox-origin";
/// The daemon spoke.
pub const ORIGIN_HOST: &str = "host";
/// The guest spoke; it can say what it likes.
pub const ORIGIN_GUEST: &str = "guest";
/// `rq_..` of this call, also in logs and in ErrorInfo metadata as [`REQUEST_ID_FIELD`].
pub const SANDBOX_REQUEST_ID: &str = "sandbox-request-id";
/// Key of the request id in ErrorInfo metadata.
pub const REQUEST_ID_FIELD: &str = "request_id";
/// Key of the remedy in ErrorInfo metadata.
pub const REMEDY_FIELD: &str = "remedy";
/// Key of the cause of a sandbox's end in ErrorInfo metadata.
pub const WHY_FIELD: &str = "why";

/// The path prefix that is forwarded to guests; nothing else is.
pub const AGENT_PREFIX: &str = "/sandbox.v1.Agent/";

/// Names of the guest's virtio-serial ports.
pub mod port {
    /// The host is the HTTP/2 client.
    pub const AGENT: &str = "silkd.agent";
    /// The guest is the HTTP/2 client.
    pub const EGRESS: &str = "silkd.egress";
}

/// The doors: authorities of the streams on [`port::EGRESS`], and the variables that tell programs of them.
pub mod door {
    /// `:authority` of a connection to the HTTP door.
    pub const HTTP: &str = "http.door:3128";
    /// `:authority` of a connection to the SOCKS5 door.
    pub const SOCKS5: &str = "socks5.door:1080";
    /// Header of a denial: its reason.
    pub const DENY_REASON: &str = "sandbox-deny-reason";
    /// Header of a denial: the rule, where one decided.
    pub const DENY_RULE: &str = "sandbox-deny-rule";
    /// The name that the HTTP door itself answers.
    pub const OWN_NAME: &str = "door.internal";
}
