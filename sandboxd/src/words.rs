//! Values that many rooms speak of: names, sizes, lanes, engines. Parsed at the border, meaningful inside.
//!
//! May call: nothing.
//! Never inside: I/O, a default of the configuration.

use std::{fmt, str::FromStr};

use sandbox_protocol::{limits, v1};
use serde::{Deserialize, Serialize};

/// Text that is not a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a name begins with a-z or 0-9, goes on with those and `-`, and has at most 32 characters")]
pub struct NameError;

/// Name of a pool, template, size or tenant: `[a-z0-9][a-z0-9-]{0,31}`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(std::sync::Arc<str>);

impl Name {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let first = text.bytes().next().ok_or(NameError)?;
        let good = plain(first) && text.len() <= limits::NAME && text.bytes().all(|b| plain(b) || b == b'-');
        if good {
            Ok(Self(text.into()))
        } else {
            Err(NameError)
        }
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The owner of what operators claim; no tenant may have this name.
pub const OPERATOR: &str = "operator";

/// Bytes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemBytes(pub u64);

impl MemBytes {
    /// Whole mebibytes, rounded down.
    #[must_use]
    pub const fn mib(self) -> u64 {
        self.0 >> 20
    }

    /// That many mebibytes.
    #[must_use]
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib << 20)
    }
}

/// Virtual processors, 1 ..= 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Vcpus(pub u16);

/// What a guest has of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    /// Processors.
    pub vcpus: Vcpus,
    /// Memory.
    pub memory: MemBytes,
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident : $proto:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Lower-case text, as in configuration, journal, metrics and `--json`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// As the API has it.
            #[must_use]
            pub const fn to_proto(self) -> v1::$proto {
                match self { $(Self::$variant => v1::$proto::$variant,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

word! {
    /// How a guest reaches out.
    Lane: Lane {
        /// No NIC: doors only.
        None = "none",
        /// A NIC that reaches only the doors.
        Guarded = "guarded",
    }
}
word! {
    /// What runs the guests.
    EngineKind: Engine {
        /// Virtual machines by QEMU.
        Qemu = "qemu",
        /// No isolation; for tests and load.
        Stub = "stub",
    }
}
word! {
    /// What the guests run on.
    Accel: Accel {
        /// No virtual machine.
        None = "none",
        /// Hardware virtualisation.
        Kvm = "kvm",
        /// Software emulation.
        Tcg = "tcg",
    }
}
word! {
    /// How a claim was served.
    Tier: Tier {
        /// From warm stock.
        Warm = "warm",
        /// A clone made on demand.
        Clone = "clone",
        /// Booted from the image.
        Cold = "cold",
    }
}

/// What a pool's sandboxes have in common; also names one variant of a template.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolKey {
    /// Template.
    pub template: Name,
    /// Lane.
    pub lane: Lane,
    /// Name of the size.
    pub size: Name,
}

impl PoolKey {
    /// As the API has it.
    #[must_use]
    pub fn to_proto(&self) -> v1::PoolKey {
        v1::PoolKey {
            template: self.template.to_string(),
            lane: self.lane.to_proto().into(),
            size: self.size.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_form() {
        for good in ["a", "0", "default", "a-b-", &"x".repeat(32)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            "-a",
            "A",
            "a_b",
            "a/b",
            "..",
            "a\n",
            &"x".repeat(33),
            "\u{e4}",
        ] {
            assert_eq!(bad.parse::<Name>(), Err(NameError), "{bad:?}");
        }
        assert!(serde_json::from_str::<Name>("\"../x\"").is_err());
    }
}
