use std::sync::Arc;

use proptest::prelude::*;
use sandbox_protocol::door::DoorReason;

use super::*;

pub(super) fn target(text: &str) -> Authority {
    Authority::parse(text, Some(80)).unwrap()
}

fn rule(id: &str, effect: Effect, hosts: &[&str]) -> RuleFields {
    RuleFields {
        id: id.into(),
        effect,
        host: hosts.iter().map(|host| (*host).to_owned()).collect(),
        ..RuleFields::default()
    }
}

fn allow(id: &str, hosts: &[&str]) -> RuleFields {
    rule(id, Effect::Allow, hosts)
}

fn layer(rules: Vec<RuleFields>) -> Arc<Layer> {
    Arc::new(Layer::new(Mode::Enforce, rules, 256).unwrap())
}

fn named(layer: Arc<Layer>) -> Named {
    Named {
        name: "build".parse().unwrap(),
        layer,
    }
}

fn sides(pool: Arc<Layer>) -> Sides {
    Sides {
        infra: None,
        pool: PoolSide::Layer(named(pool)),
        tenant: TenantSide::All,
        claim: ClaimSide::Open,
    }
}

const GET: Seen<'static> = Seen::Request {
    method: "GET",
    path: "/",
};

fn reason(sides: &Sides, text: &str, seen: Seen<'_>) -> Option<DoorReason> {
    let target = target(text);
    let decision = decide(sides, &target, seen);
    decision.denial().map(|verdict| match verdict.ruling {
        Ruling::Denied { reason, .. } => reason,
        Ruling::Allowed(_) => unreachable!("it denies"),
    })
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[test]
fn policy_normalisation_table() {
    for (text, form) in [
        ("Example.ORG:443", "example.org:443"),
        ("example.org.:443", "example.org:443"),
        ("example.org", "example.org:80"),
        ("xn--bcher-kva.example:1", "xn--bcher-kva.example:1"),
        ("a_b.example", "a_b.example:80"),
        ("1.2.3.4", "1.2.3.4:80"),
        ("1.2.3.4.", "1.2.3.4:80"),
        ("[2600::1]:443", "[2600::1]:443"),
        ("[2600:0:0::1]", "[2600::1]:80"),
        ("[::ffff:1.2.3.4]:80", "1.2.3.4:80"),
        ("1a.example", "1a.example:80"),
        ("example.0xg", "example.0xg:80"),
    ] {
        assert_eq!(target(text).to_string(), form, "{text}");
    }
    let long = format!("{}.a", "x".repeat(64));
    let longer = ["abcdefg"; 32].join(".");
    for bad in [
        "",
        ".",
        "..",
        ":80",
        "a..b",
        ".a",
        "a.b..",
        "a:",
        "a:0",
        "a:65536",
        "a:080",
        "a:x",
        "a:80:80",
        "a:+80",
        "u@a",
        "u:p@a",
        "a%2eb",
        "%61",
        "[::1",
        "::1",
        "[::1]x",
        "[fe80::1%25eth0]",
        "[fe80::1%eth0]",
        "[1.2.3.4]",
        "[a]",
        "a b",
        "a\tb",
        "a/b",
        "a,b",
        "a*",
        "*",
        "\u{e4}.example",
        "a\0",
        "[]",
        &long,
        &longer,
    ] {
        let error = Authority::parse(bad, Some(80)).unwrap_err();
        assert_eq!(error.reason(), DoorReason::BadTarget, "{bad:?}");
    }
    for odd in [
        "127.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.3.256",
        "01.2.3.4",
        "0x7f000001",
        "a.1",
        "a.0x1",
        "1.2.3.0x",
        "0",
    ] {
        let error = Authority::parse(odd, Some(80)).unwrap_err();
        assert_eq!(error.reason(), DoorReason::OddAddress, "{odd:?}");
    }
    assert!(Authority::parse("a", None).is_err(), "a tunnel names its port");

    for (name, form) in [
        ("B\u{fc}cher.example", "xn--bcher-kva.example"),
        ("\u{ff45}xample\u{3002}org", "example.org"),
        ("example.org", "example.org"),
        ("1.2.3.4", "1.2.3.4"),
    ] {
        assert_eq!(Host::parse_unicode(name.as_bytes()).unwrap().to_string(), form);
    }
    for (name, reason) in [
        ("\u{ff11}27.0.0.1", DoorReason::OddAddress),
        ("\u{ff11}27.1", DoorReason::OddAddress),
        ("127\u{3002}0\u{3002}0\u{3002}1", DoorReason::OddAddress),
        ("a\u{200b}\u{e4}\u{0}.b", DoorReason::BadTarget),
        ("[::1]", DoorReason::BadTarget),
        ("", DoorReason::BadTarget),
    ] {
        let error = Host::parse_unicode(name.as_bytes()).unwrap_err();
        assert_eq!(error.reason(), reason, "{name:?}");
    }
    assert!(Host::parse_unicode(b"\xff").is_err());
}

#[test]
fn policy_first_match_matrix() {
    let rules = vec![
        rule("no-gists", Effect::Deny, &["gist.example.org"]),
        allow("site", &["example.org", "*.example.org"]),
        rule("no-rest", Effect::Deny, &["*.org"]),
        allow("any", &["*"]),
        rule("no-net", Effect::Deny, &["8.8.8.8"]),
        allow("net", &["8.8.8.8", "8.8.4.4"]),
    ];
    let sides = sides(layer(rules));
    for (text, expected) in [
        ("gist.example.org:443", Some(DoorReason::DeniedByRule)),
        ("example.org:443", None),
        ("a.example.org:80", None),
        ("a.b.example.org:80", None),
        ("other.org:80", Some(DoorReason::DeniedByRule)),
        ("example.net:80", None),
        ("8.8.8.8:80", Some(DoorReason::DeniedByRule)),
        ("8.8.4.4:80", None),
        ("8.8.4.5:80", Some(DoorReason::AddressLiteral)),
        ("example.net:22", Some(DoorReason::PortNotAllowed)),
    ] {
        assert_eq!(reason(&sides, text, Seen::Tunnel), expected, "{text}");
        assert_eq!(reason(&sides, text, GET), expected, "{text}");
    }
    // The first rule that matches is told, with the nearest where none does.
    let asked = target("gist.example.org:443");
    let decision = decide(&sides, &asked, Seen::Tunnel);
    let Ruling::Denied { rule: Some(rule), .. } = decision.denial().unwrap().ruling else {
        panic!("a rule decides");
    };
    assert_eq!(rule.id(), "no-gists");
    let asked = target("example.net:22");
    let Ruling::Denied { nearest, .. } = decide(&sides, &asked, GET).denial().unwrap().ruling else {
        panic!("no rule decides");
    };
    assert_eq!(nearest.unwrap().id(), "any");
}

#[test]
fn policy_missing_side_denies() {
    let all = || named(layer(vec![allow("any", &["*"])]));
    let whole = Sides {
        infra: None,
        pool: PoolSide::Layer(all()),
        tenant: TenantSide::Layer(all()),
        claim: ClaimSide::Open,
    };
    assert_eq!(reason(&whole, "a.example:80", GET), None);
    for (sides, side) in [
        (
            Sides {
                pool: PoolSide::Missing,
                ..whole.clone()
            },
            Side::Pool,
        ),
        (
            Sides {
                tenant: TenantSide::Missing,
                ..whole.clone()
            },
            Side::Tenant,
        ),
        (
            Sides {
                claim: ClaimSide::Missing,
                ..whole.clone()
            },
            Side::Claim,
        ),
        (Sides::default(), Side::Pool),
    ] {
        let asked = target("a.example:80");
        let decision = decide(&sides, &asked, GET);
        let denial = decision.denial().unwrap();
        assert_eq!(denial.side, side);
        assert_eq!(reason(&sides, "a.example:80", GET), Some(DoorReason::NoPolicy));
    }
}

#[test]
fn policy_wildcard_and_path_edges() {
    let wild = sides(layer(vec![allow("w", &["*.b"])]));
    for (text, is_allowed) in [
        ("a.b", true),
        ("c.a.b", true),
        ("b", false),
        ("xa.c", false),
        ("xb", false),
    ] {
        assert_eq!(reason(&wild, text, GET).is_none(), is_allowed, "{text}");
    }
    let any = sides(layer(vec![allow("any", &["*"])]));
    assert_eq!(reason(&any, "8.8.8.8", GET), Some(DoorReason::AddressLiteral));
    assert_eq!(reason(&any, "[2600::1]", GET), Some(DoorReason::AddressLiteral));

    let mut fields = allow("p", &["a.b"]);
    fields.ports = vec![80];
    fields.paths = vec!["/v1".into(), "/legacy/".into()];
    let paths = sides(layer(vec![fields]));
    let at = |path| {
        let seen = Seen::Request { method: "GET", path };
        reason(&paths, "a.b", seen)
    };
    for good in ["/v1", "/v1/", "/v1/x", "/v1?x=/../", "/legacy/", "/legacy/x"] {
        assert_eq!(at(good), None, "{good}");
    }
    for other in ["/v10", "/V1", "/", "/legacy", "/x/v1"] {
        assert_eq!(at(other), Some(DoorReason::PathNotAllowed), "{other}");
    }
    for odd in [
        "/v1/../x",
        "/v1/./x",
        "/v1/%2e%2E/x",
        "/v1%2fx",
        "/v1//x",
        "/v1\\x",
        "/v1/%5cx",
        "/v1/%00",
        "//v1",
        "*",
    ] {
        assert_eq!(at(odd), Some(DoorReason::PathNotCanonical), "{odd}");
    }
    assert_eq!(
        reason(&paths, "a.b", Seen::Tunnel),
        Some(DoorReason::NeedsVisibleRequest)
    );
    // A rule that denies a path is not walked round by another spelling of it.
    let mut no = rule("no", Effect::Deny, &["a.b"]);
    no.ports = vec![80];
    no.paths = vec!["/admin".into()];
    let sides = sides(layer(vec![no, allow("yes", &["a.b"])]));
    let at = |path| reason(&sides, "a.b", Seen::Request { method: "GET", path });
    assert_eq!(at("/x"), None);
    assert_eq!(at("/admin/x"), Some(DoorReason::DeniedByRule));
    assert_eq!(at("/x/../admin"), Some(DoorReason::PathNotCanonical));
}

#[test]
fn methods_are_seen_in_plain_requests_alone() {
    let mut fields = allow("m", &["a.b"]);
    fields.ports = vec![80];
    fields.methods = vec!["GET".into(), "HEAD".into()];
    let sides = sides(layer(vec![fields]));
    let with = |method| reason(&sides, "a.b", Seen::Request { method, path: "/" });
    assert_eq!((with("GET"), with("HEAD")), (None, None));
    assert_eq!(with("POST"), Some(DoorReason::MethodNotAllowed));
    assert_eq!(with("get"), Some(DoorReason::MethodNotAllowed));
    assert_eq!(
        reason(&sides, "a.b:80", Seen::Tunnel),
        Some(DoorReason::NeedsVisibleRequest)
    );
    assert_eq!(
        reason(&sides, "a.b:443", Seen::Tunnel),
        Some(DoorReason::PortNotAllowed)
    );
}

const INSIDE: Seen<'static> = Seen::Inside {
    method: "GET",
    path: "/",
};

#[test]
fn a_tunnel_is_looked_into_where_the_deciding_rule_of_any_side_asks_for_it() {
    let mut inside = allow("in", &["a.b"]);
    inside.intercept = true;
    inside.methods = vec!["GET".into()];
    let opaque = layer(vec![allow("all", &["a.b", "c.d"])]);
    let mut both = sides(opaque.clone());
    both.claim = ClaimSide::Layer(layer(vec![inside.clone(), allow("else", &["c.d"])]));
    let looks = |sides: &Sides, text: &str| {
        let target = target(text);
        let decision = decide(sides, &target, Seen::Tunnel);
        assert!(decision.denial().is_none(), "{text}");
        decision.looks_inside()
    };
    assert!(looks(&both, "a.b:443"));
    assert!(!looks(&both, "c.d:443"));
    assert!(!looks(&sides(opaque), "a.b:443"));
    // What is inside is judged by all sides again, and the rule is about nothing else.
    assert_eq!(reason(&both, "a.b:443", INSIDE), None);
    let post = Seen::Inside {
        method: "POST",
        path: "/",
    };
    assert_eq!(reason(&both, "a.b:443", post), Some(DoorReason::MethodNotAllowed));
    let plain = reason(&both, "a.b:443", GET);
    assert_eq!(plain, Some(DoorReason::NeedsVisibleRequest));
    assert_eq!(
        reason(&both, "a.b:80", Seen::Tunnel),
        Some(DoorReason::PortNotAllowed)
    );
    // A rule about plain requests says nothing of those inside a tunnel.
    let mut cleartext = allow("m", &["a.b"]);
    cleartext.ports = vec![8443];
    cleartext.methods = vec!["GET".into()];
    let sides = sides(layer(vec![cleartext]));
    assert_eq!(
        reason(&sides, "a.b:8443", INSIDE),
        Some(DoorReason::NeedsVisibleRequest)
    );
}

#[test]
fn no_secret_is_a_field_that_frames_or_leads_a_request() {
    for (name, may_be) in [
        ("authorization", true),
        ("x-api-key", true),
        ("host", false),
        ("content-length", false),
        ("connection", false),
        ("te", false),
        ("keep-alive", false),
        ("proxy-connection", false),
    ] {
        assert_eq!(may_be_secret(&name.parse().unwrap()), may_be, "{name}");
    }
}

#[test]
fn a_denial_of_some_requests_is_not_walked_round_by_a_tunnel() {
    let mut no = rule("no", Effect::Deny, &["a.b"]);
    no.intercept = true;
    no.paths = vec!["/admin".into()];
    assert!(!layer(vec![allow("yes", &["a.b"])]).looks_inside());
    let looking = layer(vec![no, allow("yes", &["a.b"])]);
    assert!(looking.looks_inside());
    let sides = sides(looking);
    let asked = target("a.b:443");
    let decision = decide(&sides, &asked, Seen::Tunnel);
    assert!(decision.denial().is_none() && decision.looks_inside());
    let at = |path| reason(&sides, "a.b:443", Seen::Inside { method: "GET", path });
    assert_eq!(at("/x"), None);
    assert_eq!(at("/admin/x"), Some(DoorReason::DeniedByRule));
    assert_eq!(at("/x/../admin"), Some(DoorReason::PathNotCanonical));
}

#[test]
fn a_secret_is_the_pools_before_the_tenants_and_report_mode_gives_none() {
    let with = |mode, secret: Option<&str>| {
        let mut fields = allow("s", &["a.b"]);
        fields.intercept = true;
        fields.secret = secret.map(str::to_owned);
        Arc::new(Layer::new(mode, vec![fields], 256).unwrap())
    };
    let given = |pool, tenant, claim, seen| {
        let sides = Sides {
            infra: None,
            pool: PoolSide::Layer(named(pool)),
            tenant: TenantSide::Layer(named(tenant)),
            claim: ClaimSide::Layer(claim),
        };
        let asked = target("a.b:443");
        decide(&sides, &asked, seen).secret().map(str::to_owned)
    };
    let (one, two, none) = (
        with(Mode::Enforce, Some("one")),
        with(Mode::Enforce, Some("two")),
        with(Mode::Enforce, None),
    );
    let given_inside = |pool: &Arc<Layer>, tenant: &Arc<Layer>, claim: &Arc<Layer>| {
        given(pool.clone(), tenant.clone(), claim.clone(), INSIDE)
    };
    assert_eq!(given_inside(&one, &two, &none).as_deref(), Some("one"));
    assert_eq!(given_inside(&none, &two, &none).as_deref(), Some("two"));
    // A claim names none.
    assert_eq!(given_inside(&none, &none, &one), None);
    // A layer in report mode gives none, and nothing gets one that passes by report mode alone.
    assert_eq!(
        given_inside(&with(Mode::Report, Some("one")), &two, &none).as_deref(),
        Some("two")
    );
    let elsewhere = Layer::new(Mode::Report, vec![allow("x", &["c.d"])], 256).unwrap();
    assert_eq!(given_inside(&one, &two, &Arc::new(elsewhere)), None);
    let denies = layer(vec![allow("x", &["c.d"])]);
    assert_eq!(given_inside(&one, &two, &denies), None);
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[test]
fn policy_invisible_fields_fail_load() {
    let fault = |change: fn(&mut RuleFields)| {
        let mut fields = allow("r", &["a.b"]);
        change(&mut fields);
        let faults = Layer::new(Mode::Enforce, vec![fields], 256).unwrap_err();
        (faults[0].at, faults[0].fault.field)
    };
    assert_eq!(fault(|rule| rule.methods = vec!["GET".into()]), (0, "ports"));
    assert_eq!(fault(|rule| rule.paths = vec!["/".into()]), (0, "ports"));
    assert_eq!(
        fault(|rule| {
            rule.paths = vec!["/".into()];
            rule.ports = vec![80, 443];
        }),
        (0, "ports")
    );
    for (change, field) in [
        (
            (|rule: &mut RuleFields| rule.id = String::new()) as fn(&mut RuleFields),
            "id",
        ),
        (|rule| rule.id = "A b".into(), "id"),
        (|rule| rule.host = vec![], "host"),
        (|rule| rule.host = vec!["a b".into()], "host"),
        (|rule| rule.host = vec!["a.b:80".into()], "host"),
        (|rule| rule.host = vec!["*.1.2.3.4".into()], "host"),
        (|rule| rule.host = vec!["127.1".into()], "host"),
        (|rule| rule.host = vec!["a.*".into()], "host"),
        (|rule| rule.ports = vec![0], "ports"),
        (|rule| rule.ports = vec![65_536], "ports"),
        (
            |rule| {
                rule.ports = vec![80];
                rule.methods = vec!["get".into()];
            },
            "methods",
        ),
        (
            |rule| {
                rule.ports = vec![80];
                rule.methods = vec!["CONNECT".into()];
            },
            "methods",
        ),
        (
            |rule| {
                rule.ports = vec![80];
                rule.paths = vec!["/a/../b".into()];
            },
            "paths",
        ),
        (
            |rule| {
                rule.ports = vec![80];
                rule.paths = vec!["a".into()];
            },
            "paths",
        ),
        (|rule| rule.secret = Some("s".into()), "ports"),
        (
            |rule| {
                rule.ports = vec![80];
                rule.secret = Some("s".into());
            },
            "secret",
        ),
        (
            |rule| {
                rule.intercept = true;
                rule.effect = Effect::Deny;
                rule.secret = Some("s".into());
            },
            "secret",
        ),
        (|rule| rule.cleartext_secret = true, "cleartext_secret"),
        (|rule| rule.message = "a\nb".into(), "message"),
        (|rule| rule.message = "x".repeat(257), "message"),
    ] {
        assert_eq!(fault(change).1, field);
    }
    let twice = vec![allow("a", &["x"]), allow("a", &["y"])];
    assert_eq!(Layer::new(Mode::Enforce, twice, 256).unwrap_err()[0].at, 1);
    let many = (0..3).map(|n| allow(&format!("r{n}"), &["x"])).collect();
    assert!(Layer::new(Mode::Enforce, many, 2).is_err());
    let wrong = vec![allow("a", &["a b"]), allow("b", &["c d"])];
    let all = Layer::new(Mode::Enforce, wrong, 256).unwrap_err();
    assert_eq!(all.iter().map(|fault| fault.at).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn policy_report_mode_limits() {
    let report = |rules| Arc::new(Layer::new(Mode::Report, rules, 256).unwrap());
    let mut sides = sides(report(vec![allow("a", &["a.b"])]));
    let asked = target("c.d:80");
    let decision = decide(&sides, &asked, GET);
    assert!(decision.denial().is_none());
    assert_eq!(decision.would_deny().unwrap().side, Side::Pool);
    assert!(decide(&sides, &target("a.b:80"), GET).would_deny().is_none());
    // It lifts no other layer, and no missing side.
    sides.claim = ClaimSide::Layer(layer(vec![allow("a", &["a.b"])]));
    assert_eq!(reason(&sides, "c.d:80", GET), Some(DoorReason::HostNotAllowed));
    sides.claim = ClaimSide::Layer(report(vec![]));
    sides.tenant = TenantSide::Missing;
    assert_eq!(reason(&sides, "a.b:80", GET), Some(DoorReason::NoPolicy));
}

#[test]
fn digests_tell_layers_apart() {
    let one = layer(vec![allow("a", &["a.b"])]);
    let same = layer(vec![allow("a", &["a.b"])]);
    let other = layer(vec![allow("a", &["a.c"])]);
    let report = Layer::new(Mode::Report, vec![allow("a", &["a.b"])], 256).unwrap();
    assert_eq!(one.digest(), same.digest());
    assert_eq!(one.digest().len(), 64);
    for different in [&*other, &report, &Layer::nothing()] {
        assert_ne!(one.digest(), different.digest());
    }
}

fn some_rule() -> impl Strategy<Value = RuleFields> {
    let hosts = proptest::sample::select(vec!["a.b", "*.b", "c.b", "*", "8.8.8.8", "c.a.b"]);
    let ports = proptest::sample::select(vec![vec![], vec![80], vec![22, 80]]);
    let methods = proptest::sample::select(vec![vec![], vec!["GET".to_owned()]]);
    let paths = proptest::sample::select(vec![vec![], vec!["/v1".to_owned()]]);
    let flags = (any::<bool>(), any::<bool>());
    (hosts, flags, ports, methods, paths).prop_map(|(host, (is_deny, is_inside), ports, methods, paths)| {
        let sees = !methods.is_empty() || !paths.is_empty();
        RuleFields {
            id: "r".into(),
            effect: if is_deny { Effect::Deny } else { Effect::Allow },
            host: vec![host.into()],
            ports: if sees && ports.is_empty() { vec![80] } else { ports },
            intercept: is_inside && sees,
            methods,
            paths,
            ..RuleFields::default()
        }
    })
}

fn some_layer() -> impl Strategy<Value = Arc<Layer>> {
    proptest::collection::vec(some_rule(), 0..5).prop_map(|mut rules| {
        for (at, rule) in rules.iter_mut().enumerate() {
            rule.id = format!("r{at}");
        }
        layer(rules)
    })
}

fn some_target() -> impl Strategy<Value = Authority> {
    let texts = vec![
        "a.b:80",
        "b:80",
        "c.a.b:22",
        "x.b:443",
        "8.8.8.8:80",
        "8.8.4.4:80",
        "z:81",
    ];
    proptest::sample::select(texts).prop_map(target)
}

fn some_seen() -> impl Strategy<Value = Seen<'static>> {
    let paths = proptest::sample::select(vec!["/", "/v1/x", "/v10", "/v1/../x"]);
    let methods = proptest::sample::select(vec!["GET", "POST"]);
    prop_oneof![
        Just(Seen::Tunnel),
        (methods.clone(), paths.clone()).prop_map(|(method, path)| Seen::Request { method, path }),
        (methods, paths).prop_map(|(method, path)| Seen::Inside { method, path })
    ]
}

proptest! {
    #[test]
    fn policy_claim_only_narrows(pool in some_layer(), tenant in some_layer(), claim in some_layer(), target in some_target(), seen in some_seen()) {
        let without = Sides {
            infra: None,
            pool: PoolSide::Layer(named(pool.clone())),
            tenant: TenantSide::Layer(named(tenant.clone())),
            claim: ClaimSide::Open,
        };
        let with = Sides { claim: ClaimSide::Layer(claim), ..without.clone() };
        let allows = |sides: &Sides| decide(sides, &target, seen).denial().is_none();
        prop_assert!(!allows(&with) || allows(&without));
        let alone = |layer| allows(&sides(layer));
        prop_assert_eq!(allows(&without), alone(pool) && alone(tenant));
    }

    #[test]
    fn a_target_reads_back_as_itself(text in "[a-z0-9.:\\[\\]@%x-]{0,24}") {
        if let Ok(target) = Authority::parse(&text, Some(80)) {
            prop_assert_eq!(Authority::parse(&target.to_string(), None).unwrap(), target);
        }
    }
}
