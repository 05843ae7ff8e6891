//! Tokens as text, and their hashes, which are all that is ever kept.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, Mac as _};
use sandbox_protocol::id::ClaimId;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use super::HostKey;

/// SHA-256 of a token's text. Two are compared in the same time whatever they hold.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of no token: nobody can find a text for it.
    pub const NONE: Self = Self([0; 32]);

    /// The hash of this text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// A hash that was kept.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// To be kept.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A hash in 64 hexadecimal digits, as the configuration has it.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if text.len() != 64 {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).ok()?;
            // `from_str_radix` also takes a sign.
            let digits = pair.bytes().all(|b| b.is_ascii_hexdigit());
            *byte = u8::from_str_radix(pair, 16).ok().filter(|_| digits)?;
        }
        Some(Self(bytes))
    }

    /// As the configuration has it.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            for nibble in [byte >> 4, byte & 15] {
                text.extend(char::from_digit(u32::from(nibble), 16));
            }
            text
        })
    }
}

impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for TokenHash {}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

macro_rules! secret_text {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $name(Zeroizing<String>);

        impl $name {
            /// What its text begins with.
            pub const PREFIX: &'static str = $prefix;

            fn encode(bytes: &[u8; 32]) -> Self {
                // Sized for the whole text, so that no shorter copy is left behind by growing.
                let mut text = Zeroizing::new(String::with_capacity(Self::PREFIX.len() + 43));
                text.push_str(Self::PREFIX);
                URL_SAFE_NO_PAD.encode_string(bytes, &mut text);
                Self(text)
            }

            /// The text, for the one who is owed it.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// What is kept of it.
            #[must_use]
            pub fn hash(&self) -> TokenHash {
                TokenHash::of(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }
    )*};
}

secret_text! {
    /// Opens the sandbox of one claim: `sbt_` and 43 characters. Zeroed when dropped.
    ClaimToken = "sbt_";
    /// Opens the daemon in a role: `sba_` and 43 characters. Zeroed when dropped.
    AccessToken = "sba_";
}

impl ClaimToken {
    /// The token of a claim: the same whenever it is asked for, and nobody without the key can make it.
    #[must_use]
    pub fn new(key: &HostKey, claim: ClaimId) -> Self {
        let mut mac = <Hmac<Sha256> as hmac::Mac>::new_from_slice(key.as_bytes())
            .expect("HMAC takes keys of any length");
        mac.update(claim.to_string().as_bytes());
        let code: Zeroizing<[u8; 32]> = Zeroizing::new(mac.finalize().into_bytes().into());
        Self::encode(&code)
    }
}

impl AccessToken {
    /// A token of 32 random bytes; randomness is the caller's.
    #[must_use]
    pub fn from_random(bytes: &[u8; 32]) -> Self {
        Self::encode(bytes)
    }
}
