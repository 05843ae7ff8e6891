//! Who may what (the table of the API's page), and what outsiders learn: nothing.

use harness::{Daemon, Setup, refused, sandboxd};
use sandbox_sdk::{
    Client, Error, Reason, SandboxHandle, Token,
    admin::SandboxFilter,
    v1::{PoolKey, PoolSpec, TemplatesBuildRequest},
};

/// A token of `sandboxd token new`, and the lines for the configuration file.
async fn token(name: &str, tenant: Option<&str>) -> (String, String) {
    let mut args = vec!["--json", "token", "new", "--name", name];
    if let Some(tenant) = tenant {
        args.extend(["--role", "tenant", "--tenant", tenant]);
    }
    let made = sandboxd(args).await.value();
    let text = |key: &str| made[key].as_str().unwrap().to_owned();
    let tenant = tenant
        .map(|tenant| format!(", tenant = {tenant:?}"))
        .unwrap_or_default();
    let line = format!(
        "{{ name = {name:?}, sha256 = {:?}, role = {:?}{tenant} }}",
        text("sha256"),
        text("role")
    );
    (text("token"), line)
}

struct Host {
    daemon: Daemon,
    /// Plain TCP on loopback: nobody is anybody there without a token.
    tcp: String,
    operator: String,
    acme: String,
    other: String,
}

async fn host() -> Host {
    let (operator, operator_line) = token("ops", None).await;
    let (acme, acme_line) = token("ci", Some("acme")).await;
    let (other, other_line) = token("cd", Some("other")).await;
    let daemon = Setup::stub()
        .in_process()
        .warm(4)
        .config(&format!(
            "listen.tcp = \"127.0.0.1:0\"\naccess.token = [{operator_line}, {acme_line}, {other_line}]\n\
             tenant.acme.pools = [\"*\"]\ntenant.other.pools = [\"elsewhere\"]\n\
             pool.elsewhere.warm = 0\n"
        ))
        .start()
        .await;
    let ports = daemon.process().listening_ports();
    Host {
        tcp: format!("http://127.0.0.1:{}", ports[0]),
        daemon,
        operator,
        acme,
        other,
    }
}

impl Host {
    async fn client(&self, token: Option<&str>) -> Client {
        let mut options = Client::options();
        if let Some(token) = token {
            options = options.token(Token::new(token).unwrap());
        }
        options.connect(&self.tcp).await.unwrap()
    }
}

/// Every call that names a sandbox.
async fn touch(sandbox: &SandboxHandle) -> Vec<(&'static str, Error)> {
    let mut errors = Vec::new();
    let mut push = |call, outcome: Result<(), Error>| errors.push((call, outcome.unwrap_err()));
    push("get", sandbox.get().await.map(drop));
    let lease = std::time::Duration::from_secs(60);
    push("renew", sandbox.renew(lease).await.map(drop));
    push("info", sandbox.agent().await.map(drop));
    push("exec", sandbox.exec(["true"]).output().await.map(drop));
    errors
}

/// What a caller learns of a refusal, but for the number of the request.
fn told(error: &Error) -> String {
    let text = format!("{error:?}");
    text.replace(error.request_id().unwrap(), "rq")
}

#[tokio::test]
async fn an_unknown_sandbox_a_wrong_token_and_a_missing_one_read_the_same() {
    let host = host().await;
    let owner = host.daemon.client().await;
    let sandbox = owner.claim("default").await.unwrap();
    let another = owner.claim("default").await.unwrap();
    let good = sandbox.token().unwrap().expose().to_owned();
    let wrong = format!("sbt_{}", "x".repeat(43));
    let unknown = format!("sb_{}", "0".repeat(32));
    let callers = [
        ("unknown sandbox", Some(good.as_str()), unknown.as_str()),
        ("not an id", Some(good.as_str()), "x"),
        ("wrong token", Some(wrong.as_str()), sandbox.id()),
        ("no token", None, sandbox.id()),
        ("another's token", Some(good.as_str()), another.id()),
        ("cut token", good.get(..good.len() - 1), sandbox.id()),
        ("access token of nobody", Some("sba_x"), sandbox.id()),
        ("another tenant's token", Some(host.other.as_str()), sandbox.id()),
    ];
    let mut first: Vec<(&str, String)> = Vec::new();
    for (who, token, id) in callers {
        let client = host.client(token).await;
        let errors = touch(&client.sandbox(id, None)).await;
        for (call, error) in &errors {
            assert!(error.is(Reason::SandboxNotFound), "{who}, {call}: {error:?}");
        }
        let texts: Vec<_> = errors.iter().map(|(call, error)| (*call, told(error))).collect();
        if first.is_empty() {
            first = texts;
        } else {
            assert_eq!(texts, first, "{who}");
        }
        // Release takes what is unknown for ended; nothing was.
        let released = client.sandbox(id, None).release().await.unwrap();
        assert!(released.already, "{who}");
    }
    assert!(sandbox.exec(["true"]).output().await.is_ok() || sandbox.get().await.is_ok());
    assert!(another.get().await.is_ok());
}

#[tokio::test]
async fn who_may_what() {
    let host = host().await;
    let daemon = host.daemon.client().await;
    let claimed = daemon.claim("default").await.unwrap();
    let claimer = host.client(claimed.token().map(Token::expose)).await;
    let (operator, acme) = (
        host.client(Some(&host.operator)).await,
        host.client(Some(&host.acme)).await,
    );
    let (nobody, stranger) = (host.client(None).await, host.client(Some("sba_nobody")).await);

    let spec = || PoolSpec {
        name: "made".to_owned(),
        key: Some(PoolKey {
            template: "default".to_owned(),
            ..PoolKey::default()
        }),
        ..PoolSpec::default()
    };
    let build = || TemplatesBuildRequest {
        name: "default".to_owned(),
        ..TemplatesBuildRequest::default()
    };
    // Operators only: everybody else is told why.
    for (client, reason) in [
        (&acme, Reason::NotAllowed),
        (&claimer, Reason::NotAllowed),
        (&nobody, Reason::TokenRequired),
        (&stranger, Reason::TokenInvalid),
    ] {
        refused(client.pools().apply(spec()).await, reason);
        refused(client.pools().delete("made").await, reason);
        refused(client.templates().build(build()).await, reason);
        refused(client.templates().delete("default").await, reason);
        refused(client.node().doctor().await, reason);
        refused(client.node().reload().await, reason);
    }
    assert_eq!(
        operator.pools().apply(spec()).await.unwrap().spec.unwrap().name,
        "made"
    );
    operator.pools().delete("made").await.unwrap();
    assert!(!operator.node().doctor().await.unwrap().checks.is_empty());
    operator.node().reload().await.unwrap();

    // Operators and tenants.
    for client in [&operator, &acme] {
        assert_eq!(client.pools().list().await.unwrap().len(), 2);
        client.templates().list().await.unwrap();
        client.node().info().await.unwrap();
        drop(client.claim("default").await.unwrap());
    }
    for (client, reason) in [
        (&claimer, Reason::NotAllowed),
        (&nobody, Reason::TokenRequired),
        (&stranger, Reason::TokenInvalid),
    ] {
        refused(client.pools().list().await, reason);
        refused(client.pools().watch(Vec::new()).await, reason);
        refused(client.templates().list().await, reason);
        refused(client.templates().get("default").await, reason);
        refused(client.node().info().await, reason);
        refused(client.claim("default").await, reason);
    }
    for client in [&nobody, &stranger] {
        client.claims().list(&SandboxFilter::default()).await.unwrap_err();
        client
            .claims()
            .watch(&SandboxFilter::default())
            .await
            .unwrap_err();
    }
}

#[tokio::test]
async fn a_tenant_has_its_own_sandboxes_and_its_own_pools_only() {
    let host = host().await;
    let (operator, acme, other) = (
        host.client(Some(&host.operator)).await,
        host.client(Some(&host.acme)).await,
        host.client(Some(&host.other)).await,
    );
    let mine = acme.claim("default").await.unwrap();
    let ops = operator.claim("default").await.unwrap();
    // A pool that is not its own reads as if it were not there.
    let hidden = refused(other.claim("default").await, Reason::PoolNotFound);
    let absent = refused(other.claim("absent").await, Reason::PoolNotFound);
    assert_eq!(
        hidden.message().replace("default", ""),
        absent.message().replace("absent", "")
    );
    let key = PoolKey {
        template: "default".to_owned(),
        size: "large".to_owned(),
        ..PoolKey::default()
    };
    refused(other.claim_key(key).await, Reason::NotAllowed);

    let ids = |rows: Vec<sandbox_sdk::v1::Sandbox>| {
        let mut ids: Vec<String> = rows.into_iter().map(|row| row.sandbox).collect();
        ids.sort();
        ids
    };
    let all = SandboxFilter::default();
    assert_eq!(ids(acme.claims().list(&all).await.unwrap()), [mine.id()]);
    assert_eq!(ids(other.claims().list(&all).await.unwrap()), [] as [&str; 0]);
    let mut both = [mine.id().to_owned(), ops.id().to_owned()];
    both.sort();
    assert_eq!(ids(operator.claims().list(&all).await.unwrap()), both);
    // A claimer sees the one that its token opens.
    let claimer = host.client(ops.token().map(Token::expose)).await;
    assert_eq!(ids(claimer.claims().list(&all).await.unwrap()), [ops.id()]);

    // A tenant's own token opens its sandbox without the claim's; place and process are for operators.
    let row = acme.sandbox(mine.id(), None).get().await.unwrap();
    assert_eq!((row.owner.as_str(), row.slot, row.pid), ("acme", None, None));
    let row = operator.sandbox(mine.id(), None).get().await.unwrap();
    assert!(row.slot.is_some());
    refused(
        other.sandbox(mine.id(), None).get().await,
        Reason::SandboxNotFound,
    );
    refused(acme.sandbox(ops.id(), None).get().await, Reason::SandboxNotFound);
    assert!(!acme.sandbox(mine.id(), None).release().await.unwrap().already);
}

#[tokio::test]
async fn a_token_that_is_taken_out_of_the_file_stops_opening_at_the_reload() {
    let mut host = host().await;
    let acme = host.client(Some(&host.acme)).await;
    acme.node().info().await.unwrap();
    host.daemon
        .configure("listen.tcp = \"127.0.0.1:0\"\npool.elsewhere.warm = 0\n");
    let reply = host.daemon.client().await.node().reload().await.unwrap();
    assert!(reply.changed.contains(&"access.token".to_owned()), "{reply:?}");
    refused(acme.node().info().await, Reason::TokenInvalid);
}
