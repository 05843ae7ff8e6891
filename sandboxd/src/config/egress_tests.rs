use std::{path::Path, time::Duration};

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
audit = { required = true, keep = \"30days\" }
usage.keep_size = \"1GiB\"
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
    assert!(config.egress.audit.required && !parse("").unwrap().egress.audit.required);
    let other = parse(&text.replace("required = true", "required = false")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.audit.required"]);
    let (kept, default) = (config.egress.audit.retention, types::Audit::default().retention);
    let days = |days: u64| Duration::from_secs(days * 24 * 3600);
    assert_eq!((default.audit.time, default.usage.time), (days(90), days(400)));
    assert_eq!((kept.audit.time, kept.audit.size), (days(30), default.audit.size));
    assert_eq!((kept.usage.time, kept.usage.size), (default.usage.time, 1 << 30));
    let other = parse(&text.replace("1GiB", "2GiB")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.audit.retention"]);
    let other = parse(&text.replace("/srv/ca", "/srv/cb")).unwrap();
    assert_eq!(diff(&config, &other).changed, ["egress.tls"]);
}

#[test]
fn policy_invisible_fields_fail_load() {
    let text = "\
pool.web.egress = \"nowhere\"
[egress]
audit = { required = \"yes\", dir = \"/x\", keep = \"0s\", keep_size = \"1KiB\" }
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
        "3 egress.audit.required",
        "3 egress.audit.dir",
        "3 egress.audit.keep",
        "3 egress.audit.keep_size",
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
        "14 egress.policy.p.rules.ports",
        "14 egress.policy.p.rules.secret",
    ] {
        assert!(told.iter().any(|told| told == expected), "{expected}: {told:#?}");
    }
    // Of line 14 twice: it goes out in clear, and there is no such secret.
    assert_eq!(told.len(), 19, "{told:#?}");
    assert!(mistakes.to_string().contains("give ports, without 443"));
}

#[test]
fn ways_out_are_configured() {
    let text = "\
pool.web.upstream = \"corp\"

[egress]
default_upstream = \"socks\"
infra.rules = [{ id = \"cache\", host = [\"cache.example\"], ports = [443] }]
source = { node = [\"192.0.2.7\", \"2001:db8::7\"], tenants = [{ name = \"acme\", addresses = [\"192.0.2.8\"] }] }

[egress.secret.pypi]
header = \"Authorization\"
prefix = \"Bearer \"
value = { file = \"/etc/sandboxd/pypi\" }
hosts = [\"*.pypi.example\", \"192.0.2.1\"]
tenants = [\"acme\"]

[egress.secret.login]
value = { credential = \"login\" }

[egress.upstream.corp]
url = \"http://proxy.example:3128/\"
secret = \"login\"
resolve = \"upstream\"

[egress.upstream.socks]
url = \"socks5://[2001:db8::1]:1080\"

[egress.policy.build]
rules = [{ id = \"up\", host = [\"up.pypi.example\"], ports = [80], secret = \"pypi\", cleartext_secret = true }]
";
    let config = parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let name = |text: &str| text.parse::<crate::words::Name>().unwrap();
    assert_eq!(config.pools[&name("web")].upstream, Some(name("corp")));
    let egress = &config.egress;
    assert_eq!(egress.default_upstream, Some(name("socks")));
    assert_eq!(egress.infra.as_ref().unwrap().rules()[0].id(), "cache");
    assert_eq!(egress.sources.of("acme").v4.unwrap().to_string(), "192.0.2.8");
    assert_eq!(egress.sources.of("other").v6.unwrap().to_string(), "2001:db8::7");
    let pypi = &egress.secrets[&name("pypi")];
    assert_eq!(pypi.header.as_ref().unwrap(), "authorization");
    assert_eq!(egress.secrets[&name("login")].header, None);
    let corp = &egress.upstreams[&name("corp")];
    assert_eq!(
        (corp.port, corp.resolves, &corp.secret),
        (3128, true, &Some(name("login")))
    );
    let rules = egress.policies[&name("build")].rules();
    assert_eq!(rules[0].fields().secret.as_deref(), Some("pypi"));
    // A reload takes each of them up, by its own key.
    for (from, to, key) in [
        ("Bearer ", "Basic ", "egress.secret.pypi"),
        (":3128", ":3129", "egress.upstream.corp"),
        ("\"socks\"\n", "\"corp\"\n", "egress.default_upstream"),
        ("cache.example", "other.example", "egress.infra"),
        ("192.0.2.8", "192.0.2.9", "egress.sources"),
        ("upstream = \"corp\"", "upstream = \"socks\"", "pool.web"),
    ] {
        let other = parse(&text.replacen(from, to, 1)).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        assert_eq!(diff(&config, &other).changed, [key], "{from}");
    }
}

#[expect(clippy::too_many_lines, reason = "a table of cases is read whole")]
#[test]
fn ways_out_are_read_strictly() {
    let text = "\
pool.web.upstream = \"nowhere\"
[egress]
default_upstream = \"nowhere\"
source = { node = [\"192.0.2.7\", \"192.0.2.8\", ], tenants = [{ name = \"acme\" }] }
infra.rules = [{ id = \"a\", host = [\"a.b\"], methods = [\"GET\"] }]
[egress.secret.literal]
header = \"a\"
value = \"hush\"
hosts = [\"a.b\"]
[egress.secret.two]
header = \"a\"
value = { env = \"A\", file = \"/hush\" }
hosts = [\"a.b\"]
[egress.secret.host]
header = \"Host\"
value = { env = \"A\" }
hosts = [\"a.b\"]
[egress.secret.all]
header = \"a\"
value = { env = \"A\" }
hosts = [\"*\"]
[egress.secret.bare]
header = \"a\"
value = { env = \"A\" }
[egress.secret.out]
header = \"a\"
value = { credential = \"../hush\" }
hosts = [\"a.b\"]
[egress.secret.good]
header = \"a\"
value = { env = \"A\" }
hosts = [\"a.b\", \"*.c.d\"]
[egress.secret.login]
value = { env = \"A\" }
[egress.upstream.loud]
url = \"http://me:hush@proxy:1\"
[egress.upstream.tls]
url = \"https://proxy:1\"
[egress.upstream.none]
[egress.upstream.field]
url = \"http://proxy:1\"
secret = \"good\"
[egress.policy.p]
rules = [
  { id = \"a\", host = [\"a.b\", \"x.c.d\", \"*.x.c.d\"], ports = [80], secret = \"good\", cleartext_secret = true },
  { id = \"b\", host = [\"c.d\"], ports = [80], secret = \"good\", cleartext_secret = true },
  { id = \"c\", host = [\"*\"], ports = [80], secret = \"good\", cleartext_secret = true },
  { id = \"d\", host = [\"*.d\"], ports = [80], secret = \"good\", cleartext_secret = true },
  { id = \"e\", host = [\"a.b\"], ports = [80], secret = \"login\", cleartext_secret = true },
  { id = \"f\", host = [\"a.b\"], ports = [80], secret = \"literal\", cleartext_secret = true },
  { id = \"g\", host = [\"a.b\"], ports = [80], secret = \"good\" },
]
";
    let mistakes = parse(text).expect_err("it must be refused");
    let told: Vec<String> = mistakes
        .all()
        .iter()
        .map(|mistake| format!("{} {}", mistakes.place(mistake).0, mistake.key))
        .collect();
    let text = mistakes.to_string();
    assert!(
        text.contains("\"login\" is for upstream proxies: it has no header"),
        "{text}"
    );
    let expected = [
        "1 pool.web.upstream",
        "3 egress.default_upstream",
        "4 egress.source.node",
        "4 egress.source.tenants.addresses",
        "5 egress.infra.rules.methods",
        "8 egress.secret.literal.value",
        "12 egress.secret.two.value",
        "15 egress.secret.host.header",
        "21 egress.secret.all.hosts",
        "22 egress.secret.bare.hosts",
        "27 egress.secret.out.value.credential",
        "36 egress.upstream.loud.url",
        "38 egress.upstream.tls.url",
        "39 egress.upstream.none.url",
        "42 egress.upstream.field.secret",
        "46 egress.policy.p.rules.secret",
        "47 egress.policy.p.rules.secret",
        "48 egress.policy.p.rules.secret",
        "49 egress.policy.p.rules.secret",
        "51 egress.policy.p.rules.secret",
    ];
    for expected in expected {
        assert!(told.iter().any(|told| told == expected), "{expected}: {told:#?}");
    }
    for told in &told {
        assert!(expected.contains(&told.as_str()), "{told} is told too");
    }
    // What may be a value is nowhere told.
    let whole = format!("{mistakes} {}", mistakes.to_json());
    assert!(whole.contains("not shown") && !whole.contains("hush"), "{whole}");
}
