//! Ways out: the operator's own destinations, upstream proxies, local addresses.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
};

use crate::{
    egress::{
        Decided, DoorKind, Routes, explain,
        tests::{Bench, pool, read_all, rule, secret_terms, secrets, socks5, tunnel, within},
    },
    policy::{
        Authority, Host, Internal, Layer, Mode, Opening, ProxyKind, Seen, Side, Sides, Source, Sources,
        UpstreamTerms, Who,
    },
    tasks,
};

fn last(bench: &Bench) -> Arc<Decided> {
    bench.egress.decisions().read(Some(1)).0.last().unwrap().clone()
}

#[tokio::test]
async fn policy_infra_is_separate() {
    let bench = Bench::new().await;
    let port = bench.origin.port();
    let infra = Layer::new(Mode::Enforce, vec![rule("cache", "other.test", &[port])], 256).unwrap();
    bench.egress.book().set_infra(Some(Arc::new(infra)));
    let secret = secret_terms(Some("authorization"));
    bench.set(|settings| settings.secrets = secrets(&[("s", secret)], "hush"));
    // A pool that denies everything; one that looks into all TLS and gives a secret there; none at all.
    let mut looks = rule("all", "*", &[port]);
    (looks.intercept, looks.secret) = (true, Some("s".into()));
    for rules in [Some(vec![]), Some(vec![looks]), None] {
        match rules {
            Some(rules) => bench.policy(rules),
            None => bench.egress.book().forget_pool(&pool()),
        }
        bench.arm();
        for kind in [DoorKind::Http, DoorKind::Socks5] {
            let mut io = bench.connect(kind);
            match kind {
                DoorKind::Http => {
                    let line = tunnel(&mut io, &format!("other.test:{port}")).await;
                    assert_eq!(line, "HTTP/1.1 200 Connection established");
                }
                DoorKind::Socks5 | DoorKind::Dns => assert_eq!(socks5(&mut io, "other.test", port).await, 0),
            }
            io.write_all(b"to and fro").await.unwrap();
            io.shutdown().await.unwrap();
            assert_eq!(read_all(&mut io).await, "to and fro");
            let last = last(&bench);
            assert_eq!(
                (last.side, last.rule.as_deref(), &last.secret),
                (Some(Side::Infra), Some("cache"), &None)
            );
        }
        let armed = bench.door.armed().unwrap();
        let target = Authority::parse(&format!("other.test:{port}"), None).unwrap();
        let decision = crate::policy::decide(&armed.sides, &target, Seen::Tunnel);
        assert!(!decision.looks_inside() && decision.secret().is_none());
        // A plain request, another port, and another host are the layers' to judge.
        let answer = bench.get(&format!("http://other.test:{port}/")).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        for other in [format!("other.test:{}", port - 1), format!("8.8.8.8:{port}")] {
            let mut io = bench.connect(DoorKind::Http);
            assert!(
                tunnel(&mut io, &other).await.starts_with("HTTP/1.1 403 "),
                "{other}"
            );
        }
    }
    assert!(!bench.origin.text().contains("hush"));
    // It is vetted like everything, and unarmed doors have none of it.
    bench.dns.set("other.test", &["10.0.0.1"]);
    let mut io = bench.connect(DoorKind::Http);
    let line = tunnel(&mut io, &format!("other.test:{port}")).await;
    assert_eq!(line, "HTTP/1.1 403 special_address");
    assert_eq!(Sides::default().infra, None);
    bench.door.disarm();
    let mut io = bench.connect(DoorKind::Http);
    let line = tunnel(&mut io, &format!("other.test:{port}")).await;
    assert_eq!(line, "HTTP/1.1 403 not_armed");
}

/// A proxy of either kind, which leads every target to one address and records what it was asked.
#[derive(Clone)]
struct Proxy {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    async fn serve(kind: ProxyKind, to: SocketAddr, status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.6:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            asked: Arc::default(),
        };
        let asked = Arc::clone(&proxy.asked);
        drop(tasks::spawn("proxy", async move {
            while let Ok((stream, _)) = listener.accept().await {
                let asked = Arc::clone(&asked);
                drop(tasks::spawn("proxy", async move {
                    match kind {
                        ProxyKind::Http => by_connect(stream, to, status, &asked).await,
                        ProxyKind::Socks5 => by_socks5(stream, to, &asked).await,
                    }
                }));
            }
        }));
        proxy
    }

    fn asked(&self) -> String {
        self.asked.lock().unwrap().concat()
    }

    fn terms(&self, kind: ProxyKind) -> UpstreamTerms {
        UpstreamTerms {
            kind,
            host: Host::address(self.address.ip()),
            port: self.address.port(),
            secret: None,
            resolves: false,
        }
    }
}

async fn by_connect(mut stream: TcpStream, to: SocketAddr, status: &str, asked: &Mutex<Vec<String>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            // SOCKS5 is not its tongue.
            Ok(5) if head.is_empty() => return drop(stream.write_all(b"HTTP/1.1 400 What?\r\n\r\n").await),
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    asked.lock().unwrap().push(String::from_utf8(head).unwrap());
    // Its head, and what the target says first, come in one piece.
    let answer = format!("HTTP/1.1 {status}\r\nvia: stub\r\n\r\nfirst ");
    stream.write_all(answer.as_bytes()).await.unwrap();
    if let Ok(mut target) = TcpStream::connect(to).await {
        drop(copy_bidirectional(&mut stream, &mut target).await);
    }
}

async fn by_socks5(mut stream: TcpStream, to: SocketAddr, asked: &Mutex<Vec<String>>) {
    let mut greeting = [0; 3];
    stream.read_exact(&mut greeting).await.unwrap();
    stream.write_all(&[5, greeting[2]]).await.unwrap();
    if greeting[2] == 2 {
        let mut words = Vec::new();
        assert_eq!(stream.read_u8().await.unwrap(), 1);
        for _ in 0..2 {
            let mut word = vec![0; usize::from(stream.read_u8().await.unwrap())];
            stream.read_exact(&mut word).await.unwrap();
            words.push(String::from_utf8(word).unwrap());
        }
        asked.lock().unwrap().push(format!("{} ", words.join(" and ")));
        stream.write_all(&[1, 0]).await.unwrap();
    }
    let mut request = [0; 4];
    stream.read_exact(&mut request).await.unwrap();
    let host = match request[3] {
        1 => {
            let mut v4 = [0; 4];
            stream.read_exact(&mut v4).await.unwrap();
            Ipv4Addr::from(v4).to_string()
        }
        _ => {
            let mut name = vec![0; usize::from(stream.read_u8().await.unwrap())];
            stream.read_exact(&mut name).await.unwrap();
            String::from_utf8(name).unwrap()
        }
    };
    let port = stream.read_u16().await.unwrap();
    asked.lock().unwrap().push(format!("{host}:{port}"));
    stream.write_all(&[5, 0, 0, 3, 1, b'x', 0, 0]).await.unwrap();
    stream.write_all(b"first ").await.unwrap();
    if let Ok(mut target) = TcpStream::connect(to).await {
        drop(copy_bidirectional(&mut stream, &mut target).await);
    }
}

/// Pool `p` goes through this proxy.
fn through(bench: &Bench, terms: UpstreamTerms) {
    let corp = || "corp".parse().unwrap();
    let credentials = secrets(&[("login", secret_terms(None))], "me:hush");
    bench.set(|settings| {
        settings.secrets = credentials;
        settings.routes = Routes::new(
            BTreeMap::from([(corp(), terms)]),
            BTreeMap::from([(pool(), corp())]),
            None,
            Sources::default(),
        );
    });
}

/// What a tunnel to `allowed.test` gives, or the line that refuses it.
async fn through_tunnel(bench: &Bench) -> String {
    let mut io = bench.connect(DoorKind::Http);
    let line = tunnel(&mut io, &format!("allowed.test:{}", bench.origin.port())).await;
    if line != "HTTP/1.1 200 Connection established" {
        return line;
    }
    io.write_all(b"to and fro").await.unwrap();
    io.shutdown().await.unwrap();
    read_all(&mut io).await
}

#[tokio::test]
async fn addr_upstream_proxy() {
    let bench = Bench::new().await;
    let port = bench.origin.port();
    bench.arm();
    for kind in [ProxyKind::Http, ProxyKind::Socks5] {
        let proxy = Proxy::serve(kind, bench.origin.address, "200 OK").await;
        let mut terms = proxy.terms(kind);
        terms.secret = Some("login".parse().unwrap());
        through(&bench, terms.clone());
        // The target is judged here, and handed on as an address; credentials are shown, and nothing that the target
        // says at once is lost.
        assert_eq!(through_tunnel(&bench).await, "first to and fro");
        let asked = proxy.asked();
        let shown = match kind {
            ProxyKind::Http => format!(
                "\r\nProxy-Authorization: Basic {}\r\n\r\n",
                STANDARD.encode("me:hush")
            ),
            ProxyKind::Socks5 => "me and hush ".to_owned(),
        };
        assert!(
            asked.contains(&format!("127.0.0.2:{port}")) && asked.contains(&shown),
            "{asked}"
        );
        assert!(!asked.contains("allowed.test"), "{asked}");
        let decided = last(&bench);
        assert_eq!(
            decided.way.upstream.as_ref().map(|name| name.as_str()),
            Some("corp")
        );
        assert!(decided.way.vetted && !format!("{decided:?}").contains("hush"));
        bench.dns.set("allowed.test", &["10.0.0.1"]);
        assert_eq!(through_tunnel(&bench).await, "HTTP/1.1 403 special_address");

        // As a name, where it says so: nothing of the name is asked for or judged here, and that is told.
        terms.resolves = true;
        through(&bench, terms.clone());
        let before = bench.dns.asked().len();
        assert_eq!(through_tunnel(&bench).await, "first to and fro");
        assert!(
            proxy.asked().contains(&format!("allowed.test:{port}")),
            "{}",
            proxy.asked()
        );
        assert_eq!(bench.dns.asked().len(), before);
        assert!(!last(&bench).way.vetted);
        let target = Authority::parse(&format!("allowed.test:{port}"), None).unwrap();
        let (armed, who) = (
            bench.door.armed().unwrap(),
            Who {
                pool: "p",
                tenant: "operator",
            },
        );
        let asked = explain(&bench.egress, &armed.sides, &target, Seen::Tunnel, who, true);
        let told = Box::pin(asked).await;
        assert_eq!((told.refused, &told.way), (None, &last(&bench).way));
        assert!(told.addresses.is_empty());
        bench.dns.set("allowed.test", &["127.0.0.2"]);
    }
    bench.origin.seen.lock().unwrap().clear();
    nothing_goes_around_it(&bench).await;
}

/// Down, or unwilling: no other way is taken.
async fn nothing_goes_around_it(bench: &Bench) {
    let listener = TcpListener::bind("127.0.0.6:0").await.unwrap();
    let gone = Proxy {
        address: listener.local_addr().unwrap(),
        asked: Arc::default(),
    };
    drop(listener);
    let rude = Proxy::serve(ProxyKind::Http, bench.origin.address, "407 No").await;
    for terms in [
        gone.terms(ProxyKind::Http),
        gone.terms(ProxyKind::Socks5),
        rude.terms(ProxyKind::Http),
        rude.terms(ProxyKind::Socks5),
        // Its name leads nowhere.
        UpstreamTerms {
            host: Host::parse("nowhere.test").unwrap(),
            ..rude.terms(ProxyKind::Http)
        },
    ] {
        through(bench, terms);
        assert_eq!(within(through_tunnel(bench)).await, "HTTP/1.1 502 upstream_proxy");
        let answer = bench.get(&bench.url("/")).await;
        assert!(answer.starts_with("HTTP/1.1 502 upstream_proxy\r\n"), "{answer}");
    }
    through(
        bench,
        UpstreamTerms {
            secret: Some("lost".parse().unwrap()),
            ..rude.terms(ProxyKind::Http)
        },
    );
    assert_eq!(through_tunnel(bench).await, "HTTP/1.1 503 secret_unavailable");
    assert_eq!(bench.origin.text(), "", "nothing was dialled around it");
}

#[tokio::test]
async fn an_upstream_proxy_is_no_target() {
    let bench = Bench::new().await;
    let proxy = Proxy::serve(ProxyKind::Http, bench.origin.address, "200 OK").await;
    let (address, port) = (proxy.address.ip().to_string(), proxy.address.port());
    // Even where the operator opened its address.
    let opened = Internal {
        net: format!("{address}/32").parse().unwrap(),
        ports: [port, bench.origin.port()].into(),
        pools: Opening::All,
        tenants: Opening::All,
    };
    bench.policy(vec![
        rule("any", "*", &[port, bench.origin.port()]),
        rule("a", &address, &[port]),
    ]);
    bench.dns.set("proxy.test", &[&address]);
    bench.dns.set("alias.test", &[&address, "127.0.0.2"]);
    bench.arm();
    let by_name = UpstreamTerms {
        host: Host::parse("proxy.test").unwrap(),
        ..proxy.terms(ProxyKind::Http)
    };
    for terms in [proxy.terms(ProxyKind::Http), by_name] {
        // For who goes through it, and who does not.
        for pool in ["p", "other"] {
            let corp = || "corp".parse().unwrap();
            bench.set(|settings| {
                settings.vetting.internal.push(opened.clone());
                settings.routes = Routes::new(
                    BTreeMap::from([(corp(), terms.clone())]),
                    BTreeMap::from([(pool.parse().unwrap(), corp())]),
                    None,
                    Sources::default(),
                );
            });
            for host in [&*address, "proxy.test", "alias.test"] {
                let mut io = bench.connect(DoorKind::Http);
                let line = tunnel(&mut io, &format!("{host}:{port}")).await;
                assert_eq!(line, "HTTP/1.1 403 own_address", "{host} of {pool}");
                let mut io = bench.connect(DoorKind::Socks5);
                assert_eq!(socks5(&mut io, host, port).await, 2);
                let target = Authority::parse(&format!("{host}:{port}"), None).unwrap();
                let (armed, who) = (
                    bench.door.armed().unwrap(),
                    Who {
                        pool: "p",
                        tenant: "operator",
                    },
                );
                let asked = explain(&bench.egress, &armed.sides, &target, Seen::Tunnel, who, true);
                let told = Box::pin(asked).await.refused;
                assert_eq!(told, Some(sandbox_protocol::door::DoorReason::OwnAddress));
            }
        }
    }
    assert_eq!(proxy.asked(), "");
}

#[tokio::test]
async fn dials_leave_from_the_address_that_is_named() {
    let bench = Bench::new().await;
    let listener = TcpListener::bind("127.0.0.7:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let opened = Internal {
        net: "127.0.0.7/32".parse().unwrap(),
        ports: [port].into(),
        pools: Opening::All,
        tenants: Opening::All,
    };
    bench.dns.set("allowed.test", &["127.0.0.7"]);
    bench.policy(vec![rule("t", "allowed.test", &[port])]);
    let v4 = |last| Source {
        v4: Some(Ipv4Addr::new(127, 0, 0, last)),
        v6: None,
    };
    let own = BTreeMap::from([("acme".to_owned(), v4(9))]);
    bench.set(|settings| {
        settings.vetting.internal.push(opened.clone());
        settings.routes = Routes::new(
            BTreeMap::new(),
            BTreeMap::new(),
            None,
            Sources {
                node: v4(8),
                tenants: own,
            },
        );
    });
    let target = format!("allowed.test:{port}");
    for (tenant, from) in [("acme", "127.0.0.9"), ("other", "127.0.0.8")] {
        bench.arm_for(tenant);
        let mut io = bench.connect(DoorKind::Http);
        let opening = tunnel(&mut io, &target);
        let (line, accepted) = tokio::join!(opening, listener.accept());
        assert_eq!(line, "HTTP/1.1 200 Connection established");
        assert_eq!(accepted.unwrap().1.ip().to_string(), from);
    }
    // Where none of that family is named, nothing leaves from another.
    let v6 = Source {
        v4: None,
        v6: Some("2001:db8::1".parse().unwrap()),
    };
    bench.set(|settings| {
        settings.vetting.internal.push(opened);
        settings.routes = Routes::new(
            BTreeMap::new(),
            BTreeMap::new(),
            None,
            Sources {
                node: v6,
                ..Sources::default()
            },
        );
    });
    let mut io = bench.connect(DoorKind::Http);
    assert_eq!(tunnel(&mut io, &target).await, "HTTP/1.1 502 dial_unreachable");
}
