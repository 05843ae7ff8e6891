//! Doors of a virtual machine: its programs reach what the policy allows, by the environment that they find.

use harness::{HANG, Setup, World, sandboxd, within};
use sandbox_sdk::{
    How, SandboxHandle,
    process::LogEvent,
    v1::{EgressDecision, State, egress_watch_reply::Event},
};

use crate::node::{Node, seeded, sh, state_dir};

#[tokio::test]
async fn door_client_wget_unaided() {
    let world = World::start().await;
    let config = format!("pool.default.warm = 1\n{}", world.config());
    let setup = Setup::qemu().from_file().config(&config);
    let node = Box::pin(Node::on(seeded().await, setup)).await;
    node.until_warm(1).await;
    let client = node.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = node.claim().await;
    assert_eq!(
        sh(&sandbox, "echo $http_proxy $SANDBOX_SOCKS5").await,
        "http://127.0.0.1:3128 127.0.0.1:1080\n"
    );
    let port = world.port();
    let fetched = sh(&sandbox, &format!("wget -q -O - http://allowed.test:{port}/a")).await;
    assert_eq!(fetched, "hello from /a\n");
    let refused = sh(
        &sandbox,
        &format!("wget -O - http://other.test:{port}/ 2>&1 || true"),
    )
    .await;
    assert!(refused.contains("403 host_not_allowed"), "{refused}");
    // There is no other way out: no card, no route, and the doors' own host is not theirs to give.
    assert_eq!(sh(&sandbox, "ls /sys/class/net").await.trim(), "lo");
    let routes = sh(&sandbox, "cat /proc/net/route").await;
    assert_eq!(routes.lines().count(), 1, "a head and no route: {routes}");
    let mut decided = Vec::new();
    while decided.len() < 2 {
        if let Some(Event::Decision(decision)) = within(HANG, tail.next()).await.unwrap().unwrap().event {
            decided.push((decision.allowed, decision.reason));
        }
    }
    assert_eq!(
        decided,
        [(true, String::new()), (false, "host_not_allowed".to_owned())]
    );
    drop((tail, client));
    sandbox.release().await.unwrap();
}

/// What a script says in the four ways that there are to run one, by the way's name.
async fn in_all_ways(sandbox: &SandboxHandle, script: &str) -> Vec<(&'static str, String)> {
    let argv = ["bash", "-c", script];
    let exec = within(HANG, sandbox.exec(argv).output()).await.unwrap();
    assert_eq!(exec.status.how, How::Code(0), "{}", exec.stderr_text());
    let tty = sandbox.exec(argv).tty(80, 24).output();
    let tty = within(HANG, tty).await.unwrap();
    let session = sandbox.session().await.unwrap();
    let run = within(HANG, session.run(script).output()).await.unwrap();
    let process = sandbox.spawn(argv).await.unwrap();
    let mut log = process.logs().follow().open().await.unwrap();
    let mut detached = Vec::new();
    loop {
        match within(HANG, log.next()).await.unwrap().unwrap() {
            LogEvent::Stdout { data, .. } => detached.extend_from_slice(&data),
            LogEvent::Exit(_) => break,
            other @ (LogEvent::Stderr { .. } | LogEvent::Gap { .. }) => panic!("{other:?}"),
        }
    }
    vec![
        ("exec", exec.stdout_text().into_owned()),
        ("pty", tty.stdout_text().replace("\r\n", "\n")),
        ("session", run.stdout_text().into_owned()),
        ("detached", String::from_utf8(detached).unwrap()),
    ]
}

/// What was said, without the numbers that refusals have in the host's records.
fn unnumbered(said: &str) -> String {
    let mut parts = said.split("\"audit_seq\":");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |said, part| {
        said + part.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

#[tokio::test]
async fn door_answers_alike_from_all_ways() {
    let world = World::start().await;
    let setup = Setup::qemu_of("debian").from_file().config(&world.config());
    let node = Node::full("debian", setup, 1).await;
    let client = node.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = node.claim().await;
    let port = world.port();
    // By the environment alone: in the clear, through a tunnel, through SOCKS5; what is allowed and what is not. curl
    // gives what it got and how it ended.
    let how = "-s -w '%{http_code} %{http_connect} %{exitcode}\\n'";
    let (allowed, other) = (
        format!("http://allowed.test:{port}/a"),
        format!("http://other.test:{port}/b"),
    );
    let script = format!(
        "env | grep -i -e _proxy= -e ^SANDBOX_SOCKS5 -e ^NODE_USE | sort; \
         curl {how} {allowed} {other} --next {how} -p {allowed} {other} \
         --next {how} --socks5-hostname $SANDBOX_SOCKS5 {allowed} {other} --next {how} --noproxy '*' {allowed}; true"
    );
    let said = in_all_ways(&sandbox, &script).await;
    let first = unnumbered(&said[0].1);
    for (way, said) in &said {
        assert_eq!(unnumbered(said), first, "{way} and exec");
    }
    for part in [
        "http_proxy=http://127.0.0.1:3128\n",
        "HTTPS_PROXY=http://127.0.0.1:3128\n",
        "SANDBOX_SOCKS5=127.0.0.1:1080\n",
        // Allowed: each answered by the origin. Refused: by the door, with its reason, in the clear; by its number else.
        "hello from /a\n200 000 0\n",
        "\"reason\":\"host_not_allowed\"",
        "403 000 0\n",
        "hello from /a\n200 200 0\n",
        "000 403 56\n",
        "000 000 97\n",
    ] {
        assert!(first.contains(part), "{part} in {first}");
    }
    assert!(!world.asked().iter().any(|name| name == "other.test"));
    // And the host judged them alike: six of each way, in order, of this sandbox.
    let mut seen: Vec<EgressDecision> = Vec::new();
    while seen.len() < 6 * said.len() {
        match within(HANG, tail.next()).await.unwrap().unwrap().event {
            Some(Event::Decision(decision)) => seen.push(decision),
            other => panic!("{other:?}"),
        }
    }
    let short = |decisions: &[EgressDecision]| -> Vec<(String, bool, String)> {
        let short = |one: &EgressDecision| (one.door.clone(), one.allowed, one.reason.clone());
        decisions.iter().map(short).collect()
    };
    let expected = ["http", "http", "http", "http", "socks5", "socks5"];
    let expected: Vec<_> = expected
        .iter()
        .zip([true, false].iter().cycle())
        .map(|(door, allowed)| {
            let reason = if *allowed { "" } else { "host_not_allowed" };
            ((*door).to_owned(), *allowed, reason.to_owned())
        })
        .collect();
    for of_one in seen.chunks(6) {
        assert_eq!(short(of_one), expected);
    }
    assert!(seen.iter().all(|decision| decision.sandbox == sandbox.id()));
}

/// What a program with full rights finds that leads out of a guest of lane none. Each line says what came of one way.
const WAYS_OUT: &str = r#"
use Socket qw(:DEFAULT AF_INET6 inet_pton pack_sockaddr_in6);
sub way { my ($name, $family, $type, $protocol, $to) = @_;
  my $made = socket(my $s, $family, $type, $protocol);
  if (!$made) { print "$name: no socket\n"; return }
  $SIG{ALRM} = sub { print "$name: silence\n"; exit 1 };
  alarm 20;
  my $went = $to =~ /^./s && ($type == SOCK_RAW ? send($s, "x" x 32, 0, $to) : connect($s, $to) && ($type != SOCK_DGRAM || send($s, "x", 0)));
  alarm 0;
  print "$name: ", ($went ? "went" : "refused"), "\n";
}
my $v4 = sub { pack_sockaddr_in($_[1], inet_aton($_[0])) };
my $v6 = sub { pack_sockaddr_in6($_[1], inet_pton(AF_INET6, $_[0])) };
my $vsock = sub { pack("S S L L x4", 40, 0, $_[1], $_[0]) };
for my $to ("192.0.2.7", "8.8.8.8", "169.254.169.254", "169.254.1.1", "10.0.2.2", "255.255.255.255", "224.0.0.1") {
  way("tcp $to", AF_INET, SOCK_STREAM, 0, $v4->($to, 80));
  way("udp $to", AF_INET, SOCK_DGRAM, 0, $v4->($to, 53));
  way("raw $to", AF_INET, SOCK_RAW, 1, $v4->($to, 0));
}
for my $to ("2001:4860:4860::8888", "fe80::1", "ff02::1", "::ffff:8.8.8.8") {
  way("tcp $to", AF_INET6, SOCK_STREAM, 0, $v6->($to, 80));
  way("udp $to", AF_INET6, SOCK_DGRAM, 0, $v6->($to, 53));
}
for my $cid (0, 1, 2, 3) {
  for my $port (1, 22, 1024) { way("vsock $cid:$port", 40, SOCK_STREAM, 0, $vsock->($cid, $port)); }
}
"#;

#[tokio::test]
async fn lane_none_proves_itself() {
    let node = Node::debian(1).await;
    let sandbox = node.claim().await;
    let cards = sh(&sandbox, "ls /sys/class/net").await;
    assert_eq!(cards.trim(), "lo");
    let ports = sh(&sandbox, "cat /sys/class/virtio-ports/*/name | sort").await;
    assert_eq!(ports, "silkd.agent\nsilkd.egress\n");
    // No other device to speak by: the disk, the serial ports' controller, and what the kernel asks for randomness.
    let devices = sh(&sandbox, "cat /sys/bus/virtio/devices/*/device | sort -u").await;
    assert!(
        !devices.contains("0x0001") && !devices.contains("0x0013"),
        "a card or vsock: {devices}"
    );
    let said = within(HANG, sandbox.exec(["perl", "-e", WAYS_OUT]).output())
        .await
        .unwrap();
    assert_eq!(
        said.status.how,
        How::Code(0),
        "{}{}",
        said.stdout_text(),
        said.stderr_text()
    );
    let said = said.stdout_text().into_owned();
    assert_eq!(said.lines().count(), 7 * 3 + 4 * 2 + 4 * 3, "{said}");
    for line in said.lines() {
        assert!(
            line.ends_with(": refused") || line.ends_with(": no socket"),
            "{line} in {said}"
        );
    }
    // The same program sees a way where there is one.
    let to_itself = WAYS_OUT.replace("192.0.2.7", "127.0.0.1");
    let said = within(HANG, sandbox.exec(["perl", "-e", &to_itself]).output())
        .await
        .unwrap();
    for way in ["udp 127.0.0.1: went\n", "raw 127.0.0.1: went\n"] {
        assert!(said.stdout_text().contains(way), "{}", said.stdout_text());
    }
}

/// What a pool of such guests is parked for, and that none of them lives.
pub(crate) async fn unproved(node: &Node) -> String {
    let parked = node
        .until_pool("default", |pool| pool.parked.is_some())
        .await
        .parked
        .unwrap();
    assert_eq!(parked.reason, "TEMPLATE_FAILED");
    let rows = node.rows(&[State::Warm, State::Claimed]).await;
    assert_eq!(rows, [], "none became warm");
    parked.message
}

/// A warm-up that leaves guests without loopback: their programs find no door.
pub(crate) const NO_LOOPBACK: &str = r#"template.default.warmup = ["ip", "link", "set", "lo", "down"]"#;

#[tokio::test]
async fn door_that_does_not_answer_in_the_guest_makes_no_clone() {
    let config = format!("pool.default.warm = 1\n{NO_LOOPBACK}");
    let node = Node::on(state_dir(), Setup::qemu().from_file().config(&config)).await;
    let why = unproved(&node).await;
    assert!(
        why.contains("the http door does not answer in the guest"),
        "{why}"
    );
}

/// A template that is built while the node has a CA has the roots where programs look for them, and its clones tell them so.
#[tokio::test]
async fn tls_roots_are_in_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca");
    for command in ["init", "issue-node"] {
        let made = sandboxd(["ca", command, "--dir", ca.to_str().unwrap()]).await;
        assert_eq!(made.code, 0, "{}", made.stderr);
    }
    let config = format!(
        "pool.default.warm = 1\npool.default.egress = \"in\"\negress.tls.ca_dir = \"{}\"\n\
         egress.policy.in.rules = [{{ id = \"in\", host = [\"a.test\"], intercept = true }}]\n",
        ca.display()
    );
    let node = Node::on(state_dir(), Setup::qemu().from_file().config(&config)).await;
    node.until_warm(1).await;
    let sandbox = node.claim().await;
    let roots = std::fs::read_to_string(ca.join("bundle.pem")).unwrap();
    assert_eq!(sh(&sandbox, "cat $NODE_EXTRA_CA_CERTS").await, roots);
    for key in [
        "SSL_CERT_FILE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "CARGO_HTTP_CAINFO",
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
    ] {
        let store = sh(&sandbox, &format!("cat ${key}")).await;
        assert!(store.ends_with(&roots), "{key}: {store}");
    }
    assert!(
        sh(&sandbox, "cat /etc/ssl/certs/ca-certificates.crt")
            .await
            .ends_with(&roots)
    );
    let config = node.config_file();
    let checked = sandboxd(["ca", "check", "--config", config.to_str().unwrap()]).await;
    assert!(checked.text().contains("trusts the root"), "{}", checked.text());
    sandbox.release().await.unwrap();
}
