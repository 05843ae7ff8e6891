use std::path::Path;

use super::{tests::host, *};

fn parse(text: &str) -> Result<Config, Mistakes> {
    Config::parse(text, Path::new("test.toml"), &host())
}

#[test]
fn doors_are_configured() {
    let text = "\
[pool.web]
egress = \"build\"
require_claim_policy = true

[pool.none]

[tenant.acme]
egress = \"build\"

[egress]
own_addresses = [\"198.51.100.7\"]
nat64_prefixes = [\"2600:64::/96\"]
internal_allow = [{ cidr = \"10.1.0.0/16\", ports = [443], pools = [\"web\"] }]
resolver.servers = [\"192.0.2.1\", \"127.0.0.1:5353\"]
tls = { extra_roots = [\"/etc/ssl/inner.pem\"], ca_dir = \"/srv/ca\" }

[egress.policy.build]
mode = \"report\"
rules = [
  { id = \"no\", effect = \"deny\", host = [\"a.example\"], message = \"ask\" },
  { id = \"git\", host = [\"*.example\"], ports = [22, 443] },
  { id = \"get\", host = [\"m.example\"], ports = [80], methods = [\"GET\"], paths = [\"/debian\"] },
  { id = \"up\", host = [\"u.example\"], intercept = true, methods = [\"POST\"] },
]
";
    let config = parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let name = |text: &str| text.parse::<crate::words::Name>().unwrap();
    let pool = &config.pools[&name("web")];
    assert_eq!(
        (pool.egress.clone(), pool.require_claim_policy),
        (Some(name("build")), true)
    );
    let pool = &config.pools[&name("none")];
    assert_eq!((pool.egress.clone(), pool.require_claim_policy), (None, false));
    assert_eq!(config.tenants[&name("acme")].egress, Some(name("build")));
    let policy = &config.egress.policies[&name("build")];
    assert_eq!(policy.rules().len(), 4);
    assert!(policy.rules().last().unwrap().fields().intercept);
    assert_eq!(config.egress.tls.ca_dir, Path::new("/srv/ca"));
    assert_eq!(config.egress.tls.extra_roots, [Path::new("/etc/ssl/inner.pem")]);
    assert_eq!(parse("").unwrap().egress.tls, EgressTls::default());
    assert_eq!(policy.mode(), crate::policy::Mode::Report);
    let servers: Vec<String> = config.egress.servers.iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["192.0.2.1:53", "127.0.0.1:5353"]);
    assert_eq!(config.egress.vetting.internal.len(), 1);
    assert_eq!(config.egress.vetting.own.len(), 1);

    // A reload takes it up.
    let other = parse(&text.replace("a.example", "b.example")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.policy.build"]);
    let other = parse(&text.replace("192.0.2.1", "192.0.2.2")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.servers"]);
    let other = parse(&text.replace("/srv/ca", "/srv/cb")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.tls"]);
}

#[test]
fn policy_invisible_fields_fail_load() {
    let text = "\
pool.web.egress = \"nowhere\"
[egress]
audit = { required = true }
own_addresses = [\"10.0.0.1/8\"]
nat64_prefixes = [\"64:ff9b::/64\"]
internal_allow = [{ cidr = \"10.1.0.0/16\" }]
resolver.servers = [\"dns.example\"]
tls = { ca_dir = \"relative\", extra_root = [] }
[egress.policy.p]
rules = [
  { id = \"a\", host = [\"a.b\"], methods = [\"GET\"] },
  { id = \"a\", host = [\"a b\"], ports = [80, 443], paths = [\"/\"] },
  { id = \"c\", host = [\"c.d\"], ports = [80], intercept = 1 },
  { id = \"d\", host = [\"c.d\"], secret = \"x\" },
]
";
    let mistakes = parse(text).expect_err("it must be refused");
    let told: Vec<String> = mistakes
        .all()
        .iter()
        .map(|mistake| format!("{} {}", mistakes.place(mistake).0, mistake.key))
        .collect();
    for expected in [
        "1 pool.web.egress",
        "3 egress.audit",
        "4 egress.own_addresses",
        "5 egress.nat64_prefixes",
        "6 egress.internal_allow.ports",
        "7 egress.resolver.servers",
        "8 egress.tls.ca_dir",
        "8 egress.tls.extra_root",
        "11 egress.policy.p.rules.ports",
        "12 egress.policy.p.rules.id",
        "12 egress.policy.p.rules.host",
        "12 egress.policy.p.rules.ports",
        "13 egress.policy.p.rules.intercept",
        "14 egress.policy.p.rules.secret",
    ] {
        assert!(told.iter().any(|told| told == expected), "{expected}: {told:#?}");
    }
    assert_eq!(told.len(), 14, "{told:#?}");
    assert!(mistakes.to_string().contains("give ports, without 443"));
}
