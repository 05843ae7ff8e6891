//! Names that clients and guests say: ids, names of pools, hosts as HTTP and as SOCKS5 has them. There is one spelling of
//! each, and what was taken is taken again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandboxd::{policy::Host, words::Name};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(host) = Host::parse_unicode(bytes) {
        let text = host.to_string();
        assert!(text.is_ascii() && text.len() <= 253);
        assert_eq!(Host::parse(&text), Ok(host));
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(id) = text.parse::<SandboxId>() {
        assert_eq!(id.to_string(), text);
        assert!(text.parse::<ClaimId>().is_err());
    }
    if let Ok(name) = text.parse::<Name>() {
        assert_eq!(name.to_string(), text);
        assert!(!text.is_empty() && text.len() <= 32 && !text.contains(['/', '.', '\0']));
    }
    if let Ok(host) = Host::parse(text) {
        assert_eq!(Host::parse(&host.to_string()), Ok(host));
    }
});
