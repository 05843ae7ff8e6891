//! Our door in a process of its own: armed, with a policy that allows the origin by its last rule.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, TcpListener},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::net::sockopt::set_socket_linger;
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandboxd::{
    clock::Clock,
    egress::{Audit, Egress, PoolTerms, Settings, audit},
    journal::Heads,
    policy::{Internal, Layer, Mode, Opening, RuleFields, Vetting},
    telemetry::metrics::Metrics,
    words::{Name, OPERATOR},
};

use super::{
    tls::{Certificates, INSIDE, OPAQUE},
    world::{BLAST, DNS, HTTP, ORIGIN, SILENT, TLS},
};

/// Rules before those that match.
const OTHERS: usize = 47;
const RULES: usize = OTHERS + 3;

fn listener() -> Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    // As those on a TAP.
    set_socket_linger(&listener, Some(Duration::ZERO))?;
    Ok(listener)
}

fn policy() -> Result<Layer> {
    let others = (0..OTHERS).map(|n| RuleFields {
        id: format!("r{n}"),
        host: vec![format!("h{n}.example.org")],
        ..RuleFields::default()
    });
    let origin = RuleFields {
        id: "origin".to_owned(),
        host: vec![ORIGIN.to_string()],
        ports: [HTTP, SILENT, BLAST].map(u32::from).to_vec(),
        ..RuleFields::default()
    };
    let tls = |id: &str, host: &str| RuleFields {
        id: id.to_owned(),
        host: vec![host.to_owned()],
        ports: vec![TLS.into()],
        ..RuleFields::default()
    };
    let inside = RuleFields {
        intercept: true,
        ..tls("inside", INSIDE)
    };
    let ours = [tls("opaque", OPAQUE), inside, origin];
    Layer::new(Mode::Enforce, others.chain(ours).collect(), RULES)
        .map_err(|faults| anyhow::anyhow!("{faults:?}"))
}

/// Serves until it is killed, and looks into TLS by these certificates; with an audit in this folder, if one is named.
/// Says its ports: HTTP, SOCKS5.
#[expect(
    clippy::print_stdout,
    reason = "the printer of a program that its parent reads"
)]
pub(crate) async fn serve(certificates: Certificates<'_>, audited: Option<&Path>) -> Result<()> {
    let vetting = Vetting {
        internal: vec![Internal {
            net: format!("{ORIGIN}/32").parse()?,
            ports: BTreeSet::from([HTTP, SILENT, BLAST, TLS]),
            pools: Opening::All,
            tenants: Opening::All,
        }],
        ..Vetting::default()
    };
    let settings = Settings {
        servers: vec![(ORIGIN, DNS).into()],
        vetting,
        ..Settings::default()
    };
    let metrics = Metrics::new();
    let audit = match audited {
        None => Audit::off(),
        Some(dir) => Audit::open(audit::Options {
            state_dir: dir.to_owned(),
            queue: audit::QUEUE,
            spare: audit::SPARE,
            heads: Heads::default(),
            journal: None,
            metrics: metrics.audit.clone(),
            clock: Clock::host(),
        })
        .context("open the audit")?,
    };
    let egress = Egress::audited(settings, metrics.door.clone(), Clock::host(), audit);
    egress.set_interception(Some(certificates.interception()?));
    let name: Name = "bench".parse()?;
    let policies = BTreeMap::from([(name.clone(), Arc::new(policy()?))]);
    egress.book().set(policies, BTreeMap::new());
    let terms = PoolTerms {
        policy: Some(name.clone()),
        requires_claim_layer: false,
    };
    egress.book().set_pool(&name, terms);
    let door = egress.door(SandboxId::from_random([1; 16]));
    let (http, socks5) = (listener()?, listener()?);
    let ports = (http.local_addr()?.port(), socks5.local_addr()?.port());
    door.listen(http, socks5).context("listen")?;
    let sides = egress.book().sides(Some(&name), OPERATOR, None);
    door.arm(ClaimId::from_random([2; 16]), OPERATOR.into(), Some(name), sides);
    println!("{} {}", ports.0, ports.1);
    std::future::pending::<()>().await;
    Ok(())
}
