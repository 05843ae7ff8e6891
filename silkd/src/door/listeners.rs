//! Where a guest's programs find their doors, and how they are told.
//!
//! May call: nothing.
//! Never inside: a connection.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
};

use sandbox_protocol::{
    card::{HOST_ADDRESS, HTTP_PORT, SOCKS5_PORT},
    v1::EnvVar,
};

/// The doors' listeners.
#[derive(Debug)]
pub struct Listeners {
    pub(super) http: (TcpListener, SocketAddr),
    pub(super) socks5: (TcpListener, SocketAddr),
    /// Where the doors are that the guest's card reaches; none: they are reached by the link.
    pub(super) by_card: Option<[SocketAddr; 2]>,
}

impl Listeners {
    /// Those of a guest; `card`: it has one, by which it reaches its doors.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_a_guest(card: bool) -> io::Result<Self> {
        let at = |address: Ipv4Addr| [HTTP_PORT, SOCKS5_PORT].map(|port| SocketAddr::from((address, port)));
        let [http, socks5] = at(Ipv4Addr::LOCALHOST);
        Ok(Self {
            by_card: card.then(|| at(HOST_ADDRESS)),
            ..Self::bind(http, socks5)?
        })
    }

    /// At these addresses; port 0 takes one that is free.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind(http: SocketAddr, socks5: SocketAddr) -> io::Result<Self> {
        let bind = |address| {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok::<_, io::Error>((listener, address))
        };
        Ok(Self {
            http: bind(http)?,
            socks5: bind(socks5)?,
            by_card: None,
        })
    }

    /// What programs are told, so that common clients work unasked.
    #[must_use]
    pub fn env(&self) -> Vec<EnvVar> {
        let (http, socks5) = (format!("http://{}", self.http.1), self.socks5.1.to_string());
        let own = "localhost,127.0.0.1,::1".to_owned();
        let lower = [
            ("http_proxy", http.clone()),
            ("https_proxy", http.clone()),
            // A socks5h: value makes common Python clients fail on construction.
            ("all_proxy", http),
            ("no_proxy", own),
        ];
        let upper = lower.clone().map(|(key, value)| (key.to_uppercase(), value));
        let others = [
            ("NODE_USE_ENV_PROXY".to_owned(), "1".to_owned()),
            ("SANDBOX_SOCKS5".to_owned(), socks5),
        ];
        lower
            .map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .chain(upper)
            .chain(others)
            .map(|(key, value)| EnvVar {
                key: key.into(),
                value: value.into(),
            })
            .collect()
    }
}
