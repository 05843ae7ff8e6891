//! What systemd is told (`sd_notify`): a datagram to the socket that it names.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

/// News for systemd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News<'a> {
    /// Claims are taken.
    Ready,
    /// The configuration is read anew. [`Ready`](Self::Ready) follows.
    Reloading {
        /// Time since boot, without suspend (`CLOCK_MONOTONIC`); by it systemd tells old news from new.
        monotonic: Duration,
    },
    /// The daemon stops.
    Stopping,
    /// The daemon lives.
    Watchdog,
    /// One line for `systemctl status`.
    Status(&'a str),
}

/// Why there is nobody to tell.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// The name is none.
    #[error("NOTIFY_SOCKET {name:?} is not an address")]
    Address {
        /// What the environment said.
        name: OsString,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No socket.
    #[error("cannot make a socket for systemd")]
    Socket(#[source] io::Error),
    /// It was not taken.
    #[error("cannot tell systemd")]
    Send(#[source] io::Error),
}

/// The way to systemd, or to nobody.
#[derive(Debug)]
pub struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    /// The way that `NOTIFY_SOCKET` names: a path, or `@` and an abstract name. Without it, to nobody.
    ///
    /// # Errors
    /// The name is none, or no socket can be had.
    pub fn new(name: Option<&OsStr>) -> Result<Self, NotifyError> {
        let Some(name) = name else {
            return Ok(Self(None));
        };
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(hidden) => SocketAddr::from_abstract_name(hidden),
            None => SocketAddr::from_pathname(name),
        };
        let address = address.map_err(|source| NotifyError::Address {
            name: name.to_owned(),
            source,
        })?;
        let socket = UnixDatagram::unbound().map_err(NotifyError::Socket)?;
        // systemd may be busy or gone; a daemon does not stand still for its news.
        socket.set_nonblocking(true).map_err(NotifyError::Socket)?;
        Ok(Self(Some((socket, address))))
    }

    /// Tells; to nobody, that is nothing. Never waits.
    ///
    /// # Errors
    /// The datagram was not taken.
    pub fn tell(&self, news: News<'_>) -> Result<(), NotifyError> {
        let Some((socket, address)) = &self.0 else {
            return Ok(());
        };
        let message = message(news);
        socket
            .send_to_addr(message.as_bytes(), address)
            .map(drop)
            .map_err(NotifyError::Send)
    }

    /// Tells, and logs a failure: the daemon goes on all the same.
    pub(super) fn say(&self, news: News<'_>) {
        if let Err(error) = self.tell(news) {
            tracing::warn!(error = %crate::telemetry::chain(&error), "systemd was not told");
        }
    }
}

fn message(news: News<'_>) -> String {
    match news {
        News::Ready => "READY=1".to_owned(),
        News::Reloading { monotonic } => {
            format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic.as_micros())
        }
        News::Stopping => "STOPPING=1".to_owned(),
        News::Watchdog => "WATCHDOG=1".to_owned(),
        // A line end would begin another assignment.
        News::Status(text) => format!("STATUS={}", text.replace(['\n', '\r'], " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(receiver: &UnixDatagram, notify: &Notify, news: News<'_>) -> String {
        notify.tell(news).unwrap();
        let mut buffer = [0; 256];
        let length = receiver.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn news_reach_a_path_and_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let notify = Notify::new(Some(path.as_os_str())).unwrap();
        assert_eq!(heard(&receiver, &notify, News::Ready), "READY=1");
        assert_eq!(heard(&receiver, &notify, News::Watchdog), "WATCHDOG=1");
        let monotonic = Duration::from_micros(1_234);
        assert_eq!(
            heard(&receiver, &notify, News::Reloading { monotonic }),
            "RELOADING=1\nMONOTONIC_USEC=1234"
        );
        assert_eq!(
            heard(&receiver, &notify, News::Status("a\nREADY=1")),
            "STATUS=a READY=1"
        );

        let name = format!("sandboxd-test-{}", dir.path().display());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        let notify = Notify::new(Some(OsStr::new(&format!("@{name}")))).unwrap();
        assert_eq!(heard(&receiver, &notify, News::Stopping), "STOPPING=1");
    }

    #[test]
    fn nobody_and_nowhere_are_told_apart() {
        Notify::new(None).unwrap().tell(News::Ready).unwrap();
        let long = OsString::from(format!("/{}", "x".repeat(200)));
        assert!(matches!(
            Notify::new(Some(&long)),
            Err(NotifyError::Address { .. })
        ));
        let nowhere = Notify::new(Some(OsStr::new("/nowhere/notify"))).unwrap();
        assert!(matches!(nowhere.tell(News::Ready), Err(NotifyError::Send(_))));
    }
}
