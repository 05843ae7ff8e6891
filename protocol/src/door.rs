//! Why a door refused: the closed set of reasons with their HTTP status, SOCKS5 reply, remedy and retry advice. Apart
//! from the gRPC reasons, since a program in a guest reads them. `docs/door-reasons.md` is compared with it by a test.

macro_rules! door_reasons {
    ($($name:ident = $text:literal, $http:literal, $socks:literal, $retry:literal, $remedy:literal;)*) => {
        /// Why a door refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DoorReason {
            $(#[doc = $remedy] $name,)*
        }

        impl DoorReason {
            /// Every reason, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Stable lower-case text.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Status of an HTTP answer.
            #[must_use]
            pub const fn http(self) -> u16 {
                match self { $(Self::$name => $http,)* }
            }

            /// Reply code of a SOCKS5 answer.
            #[must_use]
            pub const fn socks(self) -> u8 {
                match self { $(Self::$name => $socks,)* }
            }

            /// Whether the same request may succeed a moment later.
            #[must_use]
            pub const fn retry(self) -> bool {
                match self { $(Self::$name => $retry,)* }
            }

            /// What the reader can do about it.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }

            /// The reason of this text.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| reason.as_str() == text)
            }
        }
    };
}

door_reasons! {
    NotArmed = "not_armed", 403, 2, false, "the sandbox is nobody's yet, or no longer: claim it first";
    NoPolicy = "no_policy", 403, 2, false, "pool, tenant or claim has no egress policy, and missing means no: ask the operator for one";
    HostNotAllowed = "host_not_allowed", 403, 2, false, "no rule allows this host; going round the door will not help: ask for a rule";
    PortNotAllowed = "port_not_allowed", 403, 2, false, "the host is allowed on other ports: use one of them, or ask for this one";
    MethodNotAllowed = "method_not_allowed", 403, 2, false, "the host is allowed with other methods: use one of them, or ask for this one";
    PathNotAllowed = "path_not_allowed", 403, 2, false, "the host is allowed with other paths: use one of them, or ask for this one";
    DeniedByRule = "denied_by_rule", 403, 2, false, "a rule forbids this; the message may say what to use instead";
    NeedsVisibleRequest = "needs_visible_request", 403, 2, false, "the rule judges methods or paths, which a tunnel hides: send plain http:// requests through the HTTP door";
    AddressLiteral = "address_literal", 403, 2, false, "no rule allows this address: ask by the host's name, or ask for a rule";
    SpecialAddress = "special_address", 403, 2, false, "the host leads to an address that is not public; only the operator can open it (egress.internal_allow)";
    OwnAddress = "own_address", 403, 2, false, "the host leads back to the machine that runs the sandboxes: nothing opens that";
    PolicyChanged = "policy_changed", 403, 2, false, "the policy was narrowed while the connection was open";
    BadTarget = "bad_target", 400, 1, false, "use CONNECT host:port, or an absolute http:// target; a name has letters, digits, - and _";
    OddAddress = "odd_address", 400, 1, false, "write IPv4 addresses as four plain decimals";
    BadFraming = "bad_framing", 400, 1, false, "the request can be read in two ways: send exactly one length, one Host and CRLF line ends";
    SniMismatch = "sni_mismatch", 421, 1, false, "name in TLS (SNI) the host that you asked the door for";
    AuthorityMismatch = "authority_mismatch", 421, 1, false, "inside one tunnel ask for the one host that the tunnel was opened for";
    TlsClientRejected = "tls_client_rejected", 400, 1, false, "the client does not trust this sandbox's CA: let it read the bundle that SSL_CERT_FILE names";
    PathNotCanonical = "path_not_canonical", 400, 1, false, "the rule judges paths: send one without dot segments, //, backslash, or encoded slash, dot or NUL";
    HeadTimeout = "head_timeout", 408, 1, true, "send the whole request head or greeting within 10 seconds";
    HeadTooLarge = "head_too_large", 431, 1, false, "a request head has at most 64 KiB and 128 fields";
    NameNotFound = "name_not_found", 502, 4, false, "the name has no address: check its spelling";
    DialUnreachable = "dial_unreachable", 502, 4, true, "the host cannot be reached: try later";
    DialRefused = "dial_refused", 502, 5, true, "nothing listens on that port of the host";
    UpstreamProtocol = "upstream_protocol", 502, 1, true, "the host answered with something that is not HTTP/1, or broke off";
    UpstreamTls = "upstream_tls", 502, 1, false, "the host's certificate does not hold, or it speaks no TLS 1.2 or later: nothing was sent to it";
    ResolveTimeout = "resolve_timeout", 504, 4, true, "the name servers did not answer: try later";
    DialTimeout = "dial_timeout", 504, 4, true, "the host did not answer: try later";
    TooManyConnections = "too_many_connections", 503, 1, true, "close connections first: at most 256 are open through each door";
    CaUnavailable = "ca_unavailable", 503, 1, false, "a rule wants to look into this tunnel and the host has no certificates for that: tell the operator (sandboxd ca check)";
    DoorUnreachable = "door_unreachable", 503, 1, true, "the host is not connected just now: try again";
    CommandNotSupported = "command_not_supported", 405, 7, false, "the SOCKS5 door serves CONNECT only";
    AddressTypeNotSupported = "address_type_not_supported", 400, 8, false, "use an IPv4 address, an IPv6 address or a name";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_distinct_lower_case_and_parse_back() {
        let mut seen = std::collections::HashSet::new();
        for reason in DoorReason::ALL {
            assert!(seen.insert(reason.as_str()), "{reason:?} stands twice");
            let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
            assert!(reason.as_str().bytes().all(plain));
            assert_eq!(DoorReason::parse(reason.as_str()), Some(*reason));
            assert!(!reason.remedy().is_empty());
            assert!((1..=8).contains(&reason.socks()) && (400..600).contains(&reason.http()));
        }
        assert_eq!(DoorReason::parse("NOT_ARMED"), None);
    }
}
