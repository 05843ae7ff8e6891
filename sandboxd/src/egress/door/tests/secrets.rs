//! Which requests are given a secret.

use std::{collections::BTreeSet, convert::Infallible, sync::Arc};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncWriteExt as _, DuplexStream};

use crate::{
    egress::{
        DoorKind, Visit,
        door::{
            body::Body,
            onward::{self, Asked},
        },
        tests::{Bench, read_all, rule, secret_terms, secrets, tunnel},
    },
    policy::{Authority, Layer, Mode, Opening, RuleFields, Seen},
    tasks,
};

const FIELD: &str = "authorization: Bearer hush\r\n";

/// A request as a program of the guest makes it that has read what the field is called.
fn forged(url: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nhost: x\r\nauthorization: mine\r\nAuthorization: mine too\r\n\r\n")
}

/// Requests to `allowed.test` are given the secret `s` by this rule.
fn giving(change: impl FnOnce(&mut RuleFields), port: u16) -> RuleFields {
    let mut given = rule("s", "allowed.test", &[port]);
    given.secret = Some("s".into());
    change(&mut given);
    given
}

/// What a request inside a tunnel is answered, as one whose origin's certificate was verified.
async fn inside(bench: &Bench, text: &str) -> String {
    let (mut ours, theirs) = tokio::io::duplex(64 * 1024);
    let door = bench.door.clone();
    let (armed, seat) = (door.armed().unwrap(), door.seat(DoorKind::Http).unwrap());
    let visit = Arc::new(Visit::new(door, DoorKind::Http, armed, seat));
    let target = Authority::parse(&format!("allowed.test:{}", bench.origin.port()), None).unwrap();
    let serving = service_fn(move |request| {
        let (visit, target) = (Arc::clone(&visit), target.clone());
        async move { Ok::<_, Infallible>(one_inside(&visit, &target, request).await) }
    });
    let served = http1::Builder::new()
        .half_close(true)
        .serve_connection(TokioIo::new(theirs), serving);
    drop(tasks::spawn("inside", served));
    said(&mut ours, text).await
}

async fn one_inside(visit: &Visit, target: &Authority, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let (method, path) = (parts.method.clone(), parts.uri.path().to_owned());
    let seen = Seen::Inside {
        method: method.as_str(),
        path: &path,
    };
    let sent = async {
        let reached = visit.reach(target, seen).await?;
        let asked = Asked {
            target,
            seen,
            keeps: None,
        };
        Box::pin(onward::send(visit, reached, asked, parts, body)).await
    };
    match sent.await {
        Ok(response) => response,
        Err(denial) => denial.response().map(|bytes| {
            use http_body_util::BodyExt as _;
            http_body_util::Full::new(bytes)
                .map_err(|never| match never {})
                .boxed()
        }),
    }
}

async fn said(io: &mut DuplexStream, text: &str) -> String {
    io.write_all(text.as_bytes()).await.unwrap();
    io.shutdown().await.unwrap();
    read_all(io).await
}

#[tokio::test]
async fn secret_only_to_verified_origin() {
    let bench = Bench::new().await;
    let (port, url) = (bench.origin.port(), bench.url("/"));
    bench.set(|settings| settings.secrets = secrets(&[("s", secret_terms(Some("authorization")))], "hush"));

    // A plain request, where a rule says that it may be seen: in place of all that the guest sent by that name.
    bench.policy(vec![
        giving(|rule| rule.cleartext_secret = true, port),
        rule("o", "other.test", &[port]),
    ]);
    bench.arm();
    let answer = bench.ask(forged(&url).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let seen = bench.origin.text();
    assert_eq!(seen.matches(FIELD).count(), 1, "{seen}");
    assert!(!seen.contains("mine"), "{seen}");

    // A request inside, whose rule is about no other.
    let looking = |change: fn(&mut RuleFields)| {
        giving(
            |rule| {
                rule.intercept = true;
                change(rule);
            },
            port,
        )
    };
    bench.policy(vec![looking(|_| {})]);
    bench.arm();
    bench.origin.seen.lock().unwrap().clear();
    let answer = inside(&bench, &forged("/")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let seen = bench.origin.text();
    assert_eq!(seen.matches(FIELD).count(), 1, "{seen}");
    assert!(!seen.contains("mine"), "{seen}");

    // And nothing else is given it. Each of these reaches the origin, or is refused; all without.
    bench.origin.seen.lock().unwrap().clear();
    let answer = bench.ask(forged(&url).as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 403 needs_visible_request\r\n"),
        "{answer}"
    );
    bench.policy(vec![
        looking(|rule| rule.methods = vec!["PUT".into()]),
        rule("t", "allowed.test", &[port]),
        rule("o", "other.test", &[port]),
    ]);
    bench.arm();
    assert!(
        inside(&bench, &forged("/"))
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    let other = format!("http://other.test:{port}/");
    assert!(
        bench
            .ask(forged(&other).as_bytes())
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    bench.policy(vec![
        giving(|rule| rule.cleartext_secret = true, port),
        rule("t", "allowed.test", &[port]),
    ]);
    bench.arm();
    let mut io = bench.connect(DoorKind::Http);
    let line = tunnel(&mut io, &format!("allowed.test:{port}")).await;
    assert_eq!(line, "HTTP/1.1 200 Connection established");
    assert!(said(&mut io, "to and fro").await.ends_with("to and fro"));
    assert!(!bench.origin.text().contains("hush"), "{}", bench.origin.text());
    drop(io);
    refused_rather_than_without(&bench, &url).await;
}

/// Where the rule names a secret that is not for this request, it is refused.
async fn refused_rather_than_without(bench: &Bench, url: &str) {
    let port = bench.origin.port();
    bench.origin.seen.lock().unwrap().clear();
    let unavailable = "HTTP/1.1 503 secret_unavailable\r\n";
    bench.policy(vec![giving(|rule| rule.cleartext_secret = true, port)]);
    let mut terms = secret_terms(Some("authorization"));
    terms.tenants = Opening::Named(BTreeSet::from(["acme".parse().unwrap()]));
    bench.set(|settings| settings.secrets = secrets(&[("s", terms.clone())], "hush"));
    bench.arm_for("other");
    let answer = bench.ask(forged(url).as_bytes()).await;
    assert!(answer.starts_with(unavailable), "{answer}");
    assert!(!answer.contains("hush"), "{answer}");
    // It is there under another host alone; it has no field; it is not there.
    let mut elsewhere = terms.clone();
    elsewhere.hosts = vec![crate::policy::HostPattern::parse("other.test").unwrap()];
    for of in [("s", elsewhere), ("s", secret_terms(None)), ("t", terms.clone())] {
        bench.set(|settings| settings.secrets = secrets(&[of], "hush"));
        bench.arm_for("acme");
        let answer = bench.ask(forged(url).as_bytes()).await;
        assert!(answer.starts_with(unavailable), "{answer}");
    }
    assert_eq!(bench.origin.text(), "", "nothing was dialled");
    let (decided, _, _) = bench.egress.decisions().read(Some(1));
    let last = decided.last().unwrap();
    assert_eq!(
        (last.secret.as_deref(), last.rule.as_deref()),
        (Some("s"), Some("s"))
    );
    assert!(!format!("{decided:?}").contains("hush"));
    bench.set(|settings| settings.secrets = secrets(&[("s", terms)], "hush"));
    assert!(
        bench
            .ask(forged(url).as_bytes())
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    assert!(bench.origin.text().contains(FIELD));

    // What passes by report mode alone is given none.
    bench.origin.seen.lock().unwrap().clear();
    let mut never = giving(|rule| rule.cleartext_secret = true, port);
    never.methods = vec!["PUT".into()];
    let layer = Layer::new(Mode::Report, vec![never], 256).unwrap();
    let policies = std::collections::BTreeMap::from([("build".parse().unwrap(), Arc::new(layer))]);
    bench
        .egress
        .book()
        .set(policies, std::collections::BTreeMap::new());
    bench.arm_for("acme");
    assert!(
        bench
            .ask(forged(url).as_bytes())
            .await
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    assert!(!bench.origin.text().contains("hush"));
}
