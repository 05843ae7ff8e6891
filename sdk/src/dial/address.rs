//! Where a daemon listens, as text and back.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

use rustls_pki_types::ServerName;

use crate::error::Error;

/// Where a daemon listens: `unix:PATH`, `http://127.0.0.1:PORT` (loopback only) or `https://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address(Place);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Unix(PathBuf),
    Loopback {
        host: String,
        port: u16,
    },
    Tls {
        host: String,
        name: ServerName<'static>,
        port: u16,
    },
}

impl Address {
    pub(super) const fn place(&self) -> &Place {
        &self.0
    }

    /// Scheme and authority of the requests that go there.
    pub(crate) fn origin(&self) -> http::Uri {
        let text = match &self.0 {
            Place::Unix(_) => return http::Uri::from_static("http://localhost"),
            Place::Loopback { host, port } => format!("http://{host}:{port}"),
            Place::Tls { host, port, .. } => format!("https://{host}:{port}"),
        };
        text.parse()
            .unwrap_or_else(|_checked_by_from_str| http::Uri::from_static("http://localhost"))
    }
}

fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let text = text.strip_suffix('/').unwrap_or(text);
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    (!host.is_empty() && http::Uri::from_str(&format!("http://{text}")).is_ok()).then_some((host, port))
}

fn bare(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |why: &str| Error::address(format!("{text:?} is not an address: {why}"));
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(bad("the path is empty"));
            }
            return Ok(Self(Place::Unix(path.into())));
        }
        if let Some(rest) = text.strip_prefix("http://") {
            let (host, port) = host_and_port(rest).ok_or_else(|| bad("expected HOST:PORT"))?;
            let loopback = match bare(host).parse::<IpAddr>() {
                Ok(ip) => ip.is_loopback(),
                Err(_name) => host == "localhost",
            };
            if !loopback {
                return Err(bad("plain HTTP is for loopback only"));
            }
            return Ok(Self(Place::Loopback {
                host: host.to_owned(),
                port,
            }));
        }
        if let Some(rest) = text.strip_prefix("https://") {
            let (host, port) = host_and_port(rest).ok_or_else(|| bad("expected HOST:PORT"))?;
            let name = ServerName::try_from(bare(host).to_owned())
                .map_err(|_invalid_name| bad("the host is neither a name nor an IP address"))?;
            return Ok(Self(Place::Tls {
                host: host.to_owned(),
                name,
                port,
            }));
        }
        Err(bad("it begins with none of `unix:`, `http://`, `https://`"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Unix(path) => write!(f, "unix:{}", path.display()),
            Place::Loopback { host, port } => write!(f, "http://{host}:{port}"),
            Place::Tls { host, port, .. } => write!(f, "https://{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use sandbox_protocol::reason::Reason;

    use super::*;

    #[test]
    fn good_addresses_print_back() {
        for text in [
            "unix:/run/sandboxd/api.sock",
            "unix:relative.sock",
            "http://127.0.0.1:80",
            "http://localhost:7000",
            "http://[::1]:7000",
            "https://host.example:443",
            "https://10.0.0.1:443",
            "https://[fe80::1]:443",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert!(address.origin().authority().is_some());
        }
    }

    #[test]
    fn bad_addresses_are_refused_by_reason() {
        for text in [
            "",
            "unix:",
            "/run/sandboxd/api.sock",
            "http://10.0.0.1:80",
            "http://example.org:80",
            "http://127.0.0.1",
            "http://127.0.0.1:0",
            "http://127.0.0.1:70000",
            "https://:443",
            "https://a b:443",
            "https://host",
            "ftp://127.0.0.1:1",
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.is(Reason::AddressInvalid), "{text}");
        }
    }
}
