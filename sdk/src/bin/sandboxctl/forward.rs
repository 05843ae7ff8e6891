//! `forward`: local ports that lead to ports of a guest, as `kubectl port-forward` has them.

use std::{net::IpAddr, str::FromStr};

use clap::Args;
use futures_util::{StreamExt as _, stream};
use sandbox_sdk::{Error, PortListener, Reason};
use serde_json::json;

use crate::{
    Reach,
    args::Limit,
    fault::Fault,
    guest,
    print::{self, Out},
    text::harmless,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct ForwardArgs {
    /// Id of the sandbox.
    sandbox: String,
    /// `LOCAL:GUEST`; `PORT` for both; `:GUEST` or `0:GUEST` for a local port that is free.
    #[arg(required = true, value_name = "LOCAL:GUEST")]
    ports: Vec<Pair>,
    /// Local address to listen on.
    #[arg(long, value_name = "A", default_value = "127.0.0.1")]
    address: IpAddr,
    /// To ::1 of the guest instead of 127.0.0.1.
    #[arg(short = '6', long)]
    v6: bool,
    #[command(flatten)]
    limit: Limit,
}

/// A local port and the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    local: u16,
    guest: u16,
}

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| text.parse::<u16>().map_err(|error| format!("{text}: {error}"));
        let (local, guest) = match text.split_once(':') {
            Some(("", guest)) => (0, port(guest)?),
            Some((local, guest)) => (port(local)?, port(guest)?),
            None => (port(text)?, port(text)?),
        };
        if guest == 0 {
            return Err("ports of a guest are 1 to 65535".to_owned());
        }
        Ok(Self { local, guest })
    }
}

pub(crate) async fn forward(reach: &Reach, args: ForwardArgs, out: Out) -> Result<(), Fault> {
    let limit = args.limit.timeout;
    crate::within(limit, serve(reach, args, out)).await
}

async fn serve(reach: &Reach, args: ForwardArgs, out: Out) -> Result<(), Fault> {
    let sandbox = guest::sandbox(reach, args.sandbox).await?;
    // A sandbox that is not there is told now, and not to the first who connects.
    sandbox.agent().await?;
    let mut listeners = Vec::new();
    for pair in args.ports {
        let mut forward = sandbox.forward(pair.guest);
        if args.v6 {
            forward = forward.v6();
        }
        let listener = forward.listen((args.address, pair.local)).await?;
        let local = listener.local_addr();
        out.result(
            || json!({ "local": local.to_string(), "guest": pair.guest }),
            || format!("Forwarding from {local} -> {}", pair.guest),
        )?;
        listeners.push((pair.guest, listener));
    }
    let failures = listeners.into_iter().map(|(guest, listener)| {
        Box::pin(stream::unfold(
            listener,
            move |mut listener: PortListener| async move {
                let error = listener.next_failure().await;
                Some(((guest, error), listener))
            },
        ))
    });
    let mut failures = stream::select_all(failures);
    while let Some((guest, error)) = failures.next().await {
        tell(guest, &error);
    }
    Ok(())
}

/// A connection that failed is its own matter; a sandbox that is gone will take none any more, which its user sees here.
fn tell(guest: u16, error: &Error) {
    let gone = [Reason::SandboxEnded, Reason::LeaseExpired, Reason::SandboxFailed];
    let gone = gone.into_iter().any(|reason| error.is(reason));
    let end = if gone {
        " (no connection will be taken any more)"
    } else {
        ""
    };
    print::stderr(&format!(
        "sandboxctl: port {guest}: {}{end}",
        harmless(&error.to_string())
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ports() {
        let pair = |local, guest| Ok(Pair { local, guest });
        assert_eq!("8080:80".parse(), pair(8080, 80));
        assert_eq!("80".parse(), pair(80, 80));
        assert_eq!(":80".parse(), pair(0, 80));
        assert_eq!("0:80".parse(), pair(0, 80));
        for wrong in ["", "80:", "80:0", "0", "a:1", "1:65536", "-1:2"] {
            assert!(wrong.parse::<Pair>().is_err(), "{wrong}");
        }
    }
}
