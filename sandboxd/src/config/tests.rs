use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::words::{EngineKind, Lane, Name};

pub(super) fn host() -> Host {
    Host {
        name: "testhost".to_owned(),
        memory: MemBytes::from_mib(10_000),
        cores: 3,
    }
}

fn parse(text: &str) -> Result<Config, Mistakes> {
    Config::parse(text, Path::new("test.toml"), &host())
}

fn good(text: &str) -> Config {
    parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

/// `line:column key`, in order.
fn bad(text: &str) -> Vec<String> {
    let mistakes = parse(text).expect_err("it must be refused");
    let tell = |mistake: &Mistake| {
        let (line, column) = mistakes.place(mistake);
        format!("{line}:{column} {}", mistake.key)
    };
    mistakes.all().iter().map(tell).collect()
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

#[test]
fn an_empty_file_has_every_default() {
    let config = good("");
    assert_eq!(config.node.name, "testhost");
    assert_eq!(config.node.memory, MemBytes::from_mib(8_000));
    assert_eq!(
        (config.node.max_sandboxes, config.node.clones_in_flight),
        (4096, 3)
    );
    assert_eq!(config.listen.unix, Path::new("/run/sandboxd/api.sock"));
    assert_eq!((config.listen.tcp, config.listen.unix_mode), (None, 0o660));
    assert_eq!(config.listen.metrics, Some(([127, 0, 0, 1], 9640).into()));
    assert_eq!(config.engine.kind, EngineKind::Qemu);
    assert_eq!(config.engine.vm_user.as_deref(), Some("sandboxd-vm"));
    assert_eq!(config.journal.sync, Sync::Auto);
    assert_eq!(config.access.operator_group.as_deref(), Some("sandboxd"));
    let sizes: Vec<_> = config
        .sizes
        .iter()
        .map(|(name, size)| (name.as_str(), size.vcpus.0, size.memory.mib()))
        .collect();
    assert_eq!(
        sizes,
        [("large", 4, 4096), ("medium", 2, 1024), ("small", 1, 256)]
    );
    assert_eq!(config.templates[&name("default")].image.to_string(), "busybox");
    assert!(config.pools.is_empty());
    let pool = &good("[pool.default]").pools[&name("default")];
    assert_eq!((pool.warm, pool.warm_max, pool.key.lane), (4, 8, Lane::None));
    assert_eq!(
        (pool.lease, pool.lease_max),
        (Duration::from_secs(3600), Duration::from_secs(86400))
    );
}

const EVERY_KEY: &str = r#"
journal.sync = "always"
log = { filter = "warn,sandboxd::pool=debug", format = "json" }
[node]
name = "n1"
state_dir = "/srv/s"
run_dir = "/srv/r"
memory = "4GiB"
max_sandboxes = 65535
clones_in_flight = 7
[net]
namespace = "cards"
slots = 7
[listen]
unix = "/srv/r/a.sock"
tcp = "0.0.0.0:8443"
tls = { cert = "/c.pem", key = "/k.pem" }
metrics = ""
[engine]
kind = "stub"
isolates_nothing = true
accel = "tcg"
qemu = "/opt/qemu"
vm_user = ""
blanks = 0
stub = { agent = "in_process", silkd = "/opt/silkd", faults = "fail clone 3" }
[access]
operator_group = "wheel"
[[access.token]]
name = "ci"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
role = "tenant"
tenant = "acme"
[[access.token]]
name = "ops"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b856"
role = "operator"
[tenant.acme]
pools = ["web"]
[tenant.other]
[template.py]
image = "/img/debian"
warmup = ["python3", "-c", "import json"]
warmup_timeout = "1m30s"
[size.small]
memory = "512MiB"
[size.tiny]
vcpus = 2
memory = "128MiB"
[pool.web]
template = "py"
lane = "none"
size = "tiny"
warm = 10
warm_max = 12
lease = "90s"
lease_max = "30d"
"#;

#[test]
fn every_key_is_taken() {
    let config = good(EVERY_KEY);
    assert_eq!(config.journal.sync, Sync::Always);
    assert_eq!(config.node.memory, MemBytes::from_mib(4096));
    assert_eq!((&config.net.namespace, config.net.slots), (&name("cards"), 7));
    assert!(
        matches!(&config.listen.tcp, Some(Tcp::Tls(addr, tls)) if addr.port() == 8443 && tls.key == Path::new("/k.pem"))
    );
    assert_eq!((config.listen.metrics, config.engine.vm_user), (None, None));
    assert_eq!(config.engine.stub.faults, "fail clone 3");
    assert_eq!(config.access.tokens[0].role, Role::Tenant(name("acme")));
    assert_eq!(config.access.tokens[0].sha256[..2], [0xe3, 0xb0]);
    assert!(
        config.tenants[&name("acme")].pools.contains(&name("web"))
            && !config.tenants[&name("acme")].pools.contains(&name("db"))
    );
    assert_eq!(config.tenants[&name("other")].pools, TenantPools::All);
    assert_eq!(config.sizes[&name("small")].memory.mib(), 512);
    let pool = &config.pools[&name("web")];
    assert_eq!((pool.warm, pool.warm_max, pool.lease.as_secs()), (10, 12, 90));
    assert_eq!(
        config.templates[&name("py")].warmup_timeout,
        Duration::from_secs(90)
    );
    assert!(
        !format!("{:?}", config.access).contains("sha256"),
        "no hash in a log"
    );
}

#[test]
fn all_mistakes_are_told_at_once_with_their_places() {
    let text = "\
[node]
memroy = \"80%\"
max_sandboxes = 70000
run_dir = \"run\"

[engine]
kind = \"stub\"

[pool.a]
template = \"nope\"
lane = \"guarded\"
warm = 9
warm_max = 3
lease = \"2d\"

[pool.Bad]
size = 4
";
    assert_eq!(
        bad(text),
        [
            "2:1 node.memroy",
            "3:17 node.max_sandboxes",
            "4:11 node.run_dir",
            "7:8 engine.kind",
            "10:12 pool.a.template",
            "11:8 pool.a.lane",
            "13:12 pool.a.warm_max",
            "14:9 pool.a.lease",
            "16:7 pool.Bad",
            "17:8 pool.Bad.size",
        ]
    );
    let mistakes = parse(text).unwrap_err();
    assert_eq!(mistakes.all()[5].reason, "LANE_UNAVAILABLE");
    assert_eq!(mistakes.all()[0].allowed, "did you mean `memory`?");
    let json = mistakes.to_json();
    assert_eq!(
        (
            &json["file"],
            &json["mistakes"][4]["line"],
            &json["mistakes"][4]["reason"]
        ),
        (&"test.toml".into(), &10.into(), &"CONFIG_INVALID".into())
    );
}

#[test]
fn a_mistake_is_shown_as_a_compiler_does() {
    let mistakes = parse("[node]\n\tmax_sandboxes = 0 # \u{e4}\n").unwrap_err();
    assert_eq!(
        mistakes.to_string(),
        "\
error[CONFIG_INVALID]: `node.max_sandboxes`: 0 is out of range
 --> test.toml:2:18
  |
2 |  max_sandboxes = 0 # \u{e4}
  |                  ^
  = help: a whole number, 1 to 65535

1 mistake in test.toml"
    );
    let escape = parse("x = \"\u{1b}[31mred\"\n").unwrap_err().to_string();
    assert!(
        escape.contains("\\u{1b}") && !escape.contains('\u{1b}'),
        "{escape}"
    );
}

#[test]
fn broken_toml_is_told_beside_the_mistakes_of_other_lines() {
    let told = bad("[node]\nname = \nmax_sandboxes = 0\n[node]\n");
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told[0].starts_with("2:"));
    assert_eq!(told[1], "3:17 node.max_sandboxes");
    assert!(told[2].starts_with("4:"), "{told:?}");
    // A doubled key, too.
    assert_eq!(bad("[listen]\ntcp = \"\"\ntcp = \"\"\n").len(), 1);
}

#[test]
fn a_hopeless_file_costs_little_and_tells_enough() {
    let text: String = (0..20_000).map(|n| format!("x{n} = 1\n")).collect();
    let mistakes = parse(&text).unwrap_err();
    assert_eq!(mistakes.all().len(), 100);
    assert!(
        mistakes
            .to_string()
            .ends_with("20000 mistakes in test.toml, 100 of them told")
    );
    assert_eq!(mistakes.to_json()["more"], 19_900);
    assert_eq!(parse(&"=\n".repeat(20_000)).unwrap_err().all().len(), 100);
}

#[test]
fn contradictions_are_refused() {
    for (text, keys) in [
        ("listen.tcp = \"0.0.0.0:1\"", vec!["1:14 listen.tcp"]),
        (
            "listen.tls = { cert = \"/c\", key = \"/k\" }",
            vec!["1:14 listen.tls"],
        ),
        (
            "listen = { tcp = \"[::1]:1\", tls = { cert = \"/c\" } }",
            vec!["1:35 listen.tls.key"],
        ),
        (
            "listen = { tcp = \"127.0.0.1:77\", metrics = \"127.0.0.1:77\" }",
            vec!["1:44 listen.metrics"],
        ),
        ("pool.a = { warm = 40 }", vec!["1:19 pool.a.warm"]),
        (
            "node.max_sandboxes = 3\npool.a.size = \"small\"",
            vec!["2:6 pool.a.warm"],
        ),
        (
            "access.token = [{ name = \"a\" }]",
            vec!["1:17 access.token.sha256", "1:17 access.token.role"],
        ),
        ("log.filter = \"inof\"", vec!["1:14 log.filter"]),
        ("log.filter = \"a=b=c\"", vec!["1:14 log.filter"]),
        ("pool = 3", vec!["1:8 pool"]),
        ("pool.a.lease = \"1500ms\"", vec!["1:16 pool.a.lease"]),
        ("pool.a.lease_max = \"31d\"", vec!["1:20 pool.a.lease_max"]),
        ("size.s.memory = \"1GB\"", vec!["1:17 size.s.memory"]),
        ("size.s.memory = \"200000KiB\"", vec!["1:17 size.s.memory"]),
        ("node.memory = \"0%\"", vec!["1:15 node.memory"]),
        (
            "node.memory = \"99999999999999999999GiB\"",
            vec!["1:15 node.memory"],
        ),
        ("node.run_dir = \"/a/../b\"", vec!["1:16 node.run_dir"]),
        ("template.t.image = \"../x\"", vec!["1:20 template.t.image"]),
        ("template.t.warmup = [\"a\", 1]", vec!["1:27 template.t.warmup"]),
        ("pool.a.upstream = \"x\"", vec!["1:19 pool.a.upstream"]),
        ("nets.slots = 5", vec!["1:1 nets"]),
        ("net.slots = 4097", vec!["1:13 net.slots"]),
        ("net.namespace = \"A\"", vec!["1:17 net.namespace"]),
    ] {
        assert_eq!(bad(text), keys, "{text}");
    }
    let long = format!("node.run_dir = \"/{}\"", "x".repeat(80));
    assert_eq!(bad(&long), ["1:16 node.run_dir"]);
}

#[test]
fn tokens_are_distinct_and_their_tenants_exist() {
    let hash = "a".repeat(64);
    let twice = format!(
        "[[access.token]]\nname = \"a\"\nsha256 = \"{hash}\"\nrole = \"operator\"\n\
         [[access.token]]\nname = \"b\"\nsha256 = \"{hash}\"\nrole = \"tenant\"\ntenant = \"who\"\n"
    );
    assert_eq!(bad(&twice), ["5:1 access.token", "9:10 access.token.tenant"]);
    let operator = format!(
        "access.token = [{{ name = \"a\", sha256 = \"{hash}\", role = \"operator\", tenant = \"t\" }}]"
    );
    assert_eq!(bad(&operator).len(), 1);
}

#[test]
fn a_reload_names_what_changes_and_what_has_to_wait() {
    let old = good("[pool.a]\n[pool.b]\nwarm = 2\n[tenant.t]\n");
    assert!(diff(&old, &old).is_empty());
    let new = good(
        "log.filter = \"debug\"\nnode.memory = \"50%\"\nengine.stub.faults = \"x\"\nlisten.tcp = \"[::1]:5\"\n\
         [pool.b]\nwarm = 3\n[pool.c]\n",
    );
    let found = diff(&old, &new);
    assert_eq!(
        found.changed,
        ["log.filter", "tenant.t", "pool.a", "pool.b", "pool.c"]
    );
    assert_eq!(
        found.needs_restart,
        ["node.memory", "engine.stub.faults", "listen.tcp"]
    );
    let tls = |key: &str| {
        good(&format!(
            "listen = {{ tcp = \"[::]:5\", tls = {{ cert = \"/c\", key = \"{key}\" }} }}"
        ))
    };
    assert_eq!(diff(&tls("/a"), &tls("/b")).changed, ["listen.tls"]);
    // What has to wait is told again at the next reload; what does not is in force.
    let moved = good("listen = { tcp = \"[::]:6\", tls = { cert = \"/c\", key = \"/b\" } }");
    for (old, new) in [
        (&old, &new),
        (&new, &old),
        (&tls("/a"), &moved),
        (&tls("/a"), &good("")),
    ] {
        let (wanted, now) = (diff(old, new), in_force(old, new));
        assert_eq!(diff(old, &now).changed, wanted.changed);
        assert!(diff(old, &now).needs_restart.is_empty());
        assert!(diff(&now, new).changed.is_empty());
        assert_eq!(diff(&now, new).needs_restart, wanted.needs_restart);
    }
    assert_eq!(diff(&good(""), &tls("/b")).needs_restart, ["listen.tcp"]);
}

fn dev(state_dir: &str, engine: EngineKind) -> DevOptions {
    DevOptions {
        state_dir: state_dir.into(),
        engine,
        warm: None,
        image: None,
        stub: Stub::default(),
    }
}

#[test]
fn dev_mode_keeps_to_its_folder() {
    let config = Config::dev(dev("/tmp/d", EngineKind::Stub), &host()).unwrap();
    assert_eq!(config.listen.unix, Path::new("/tmp/d/api.sock"));
    assert_eq!((config.listen.unix_mode, config.listen.metrics), (0o600, None));
    assert_eq!(config.node.run_dir, config.node.state_dir);
    let pool = &config.pools[&name("default")];
    assert_eq!((pool.warm, pool.warm_max), (32, 32));
    let qemu = DevOptions {
        warm: Some(5),
        image: Some("/img".into()),
        ..dev("/tmp/d", EngineKind::Qemu)
    };
    let config = Config::dev(qemu, &host()).unwrap();
    assert_eq!(config.pools[&name("default")].warm_max, 5);
    assert_eq!(config.templates[&name("default")].image.to_string(), "/img");

    let long = format!("/{}", "d".repeat(90));
    for dir in ["relative", "/a/../b", long.as_str()] {
        let refused = Config::dev(dev(dir, EngineKind::Stub), &host());
        assert!(matches!(refused, Err(DevError::StateDir { .. })), "{dir}");
    }
}

#[test]
fn a_pool_by_the_api_is_held_to_the_same_numbers() {
    let fields = |warm, warm_max, lease, lease_max| PoolFields {
        egress: None,
        require_claim_policy: false,
        upstream: None,
        key: good("[pool.a]").pools[&name("a")].key.clone(),
        warm,
        warm_max,
        lease_secs: lease,
        lease_max_secs: lease_max,
    };
    let pool = PoolConfig::new(fields(4_096, None, None, Some(60))).unwrap();
    assert_eq!((pool.warm_max, pool.lease.as_secs()), (8_192, 60));
    for (wrong, expected) in [
        (fields(4_097, None, None, None), vec!["warm"]),
        (
            fields(u32::MAX, Some(0), Some(0), Some(0)),
            vec!["warm", "warm_max", "lease_max_secs", "lease_secs"],
        ),
        (fields(5, Some(4), None, None), vec!["warm_max"]),
        (fields(5, Some(8_193), None, None), vec!["warm_max"]),
        (fields(5, None, Some(86_401), None), vec!["lease_secs"]),
        (fields(5, None, None, Some(u32::MAX)), vec!["lease_max_secs"]),
    ] {
        let faults = PoolConfig::new(wrong).unwrap_err();
        let named: Vec<_> = faults.iter().map(|fault| fault.field).collect();
        assert_eq!(named, expected, "{faults:?}");
    }
}

#[test]
fn a_file_is_read_or_its_absence_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    assert!(matches!(
        Config::read(&path, &host()),
        Err(ConfigError::Read { .. })
    ));
    crate::disk::write_atomic(&path, b"[pool.a]\n", 0o600).unwrap();
    assert_eq!(Config::read(&path, &host()).unwrap().pools.len(), 1);
    crate::disk::write_atomic(&path, &vec![b'#'; (1 << 20) + 1], 0o600).unwrap();
    assert!(matches!(
        Config::read(&path, &host()),
        Err(ConfigError::TooLong { .. })
    ));
    let here = Host::look();
    assert!(here.memory.0 > 0 && here.cores > 0);
}

proptest! {
    #[test]
    fn any_text_is_refused_or_taken_but_never_breaks_us(
        text in "(\\[|\\]|pool|node|size|\\.|a|=| |\n|\"|1|\\{|\\}|,|memory|\u{e4}|\r|\\\\|'|true|-){0,40}",
    ) {
        if let Err(mistakes) = parse(&text) {
            prop_assert!(!mistakes.all().is_empty());
            prop_assert!(!mistakes.to_string().contains('\r'));
            for mistake in mistakes.all() {
                let (line, column) = mistakes.place(mistake);
                prop_assert!(line >= 1 && column >= 1);
            }
        }
    }
}
