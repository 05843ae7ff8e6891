//! A small workload, and what must be true after the daemon died somewhere in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use harness::{Daemon, HANG, process::Process, within};
use sandbox_sdk::{
    Client, Error, ErrorKind, Token,
    v1::{Lane, Pool, PoolKey, PoolSpec, Sandbox, State, pools_watch_reply},
};

/// Long enough for no lease to end in a test.
pub(crate) const LEASE: Duration = Duration::from_secs(3600);
/// The label that ties a sandbox to the step that asked for it.
const LABEL: &str = "step";

/// Whether the daemon answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// It was not asked.
    Never,
    /// It was asked, and died.
    None,
    /// It answered.
    Given,
}

/// A claim, as its claimer knows it.
#[derive(Debug)]
struct Claim {
    key: String,
    kind: Kind,
    granted: Option<Granted>,
    renewed: Answer,
    released: Answer,
}

/// How it is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    /// With environment, which costs a trip to the guest.
    Env,
    /// With a lease of a second, which is over when the model is compared.
    Short,
}

/// What a claimer was given.
#[derive(Debug, Clone)]
pub(crate) struct Granted {
    pub(crate) sandbox: String,
    pub(crate) claim: String,
    pub(crate) token: Token,
    pub(crate) expires_at: Option<SystemTime>,
}

/// A step of the workload. Names are of one round: see [`Model::round`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Claim(&'static str, Kind),
    Renew(&'static str),
    Release(&'static str),
    /// A pool of one warm sandbox.
    Apply(&'static str),
    /// Waits until that pool has its sandbox.
    Stocked(&'static str),
    Delete(&'static str),
}

/// What the client knows.
#[derive(Debug, Default)]
pub(crate) struct Model {
    round: u32,
    claims: Vec<Claim>,
    /// Pools: whether making was answered, and whether deleting was.
    pools: BTreeMap<String, (Answer, Answer)>,
}

/// The key of the template that is always there.
pub(crate) fn key() -> PoolKey {
    PoolKey {
        template: "default".into(),
        lane: Lane::None.into(),
        size: "small".into(),
    }
}

impl Model {
    /// From now on the names of steps are new ones.
    pub(crate) fn round(&mut self) {
        self.round += 1;
    }

    fn name(&self, name: &str) -> String {
        format!("r{}-{name}", self.round)
    }

    /// Does the steps until the daemon dies of its failpoint, and waits for that.
    ///
    /// # Panics
    /// It does not die, or otherwise.
    pub(crate) async fn run_to_death(&mut self, daemon: &mut Daemon, steps: &[Step]) {
        let client = daemon.client().await;
        let process = daemon.process();
        for step in steps {
            let ended = tokio::select! {
                biased;
                done = self.step(&client, *step) => match done {
                    Ok(()) => false,
                    // The connection may break a moment before the process is seen to end.
                    Err(error) if is_broken(&error) => true,
                    Err(error) => panic!("{step:?}: {error:?}"),
                },
                () = process.gone() => true,
            };
            if ended {
                break;
            }
        }
        let status = daemon.ends().await;
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{status}"
        );
    }

    /// Does the steps, with a daemon that does not die.
    pub(crate) async fn run(&mut self, daemon: &Daemon, steps: &[Step]) {
        let client = daemon.client().await;
        for step in steps {
            self.step(&client, *step).await.unwrap();
        }
    }

    async fn step(&mut self, client: &Client, step: Step) -> Result<(), Error> {
        match step {
            Step::Claim(name, kind) => {
                let key = self.name(name);
                self.claims.push(Claim {
                    key: key.clone(),
                    kind,
                    granted: None,
                    renewed: Answer::Never,
                    released: Answer::Never,
                });
                let granted = ask(client, &key, kind).await?;
                self.claims.last_mut().expect("just pushed").granted = Some(granted);
            }
            Step::Renew(name) => {
                let claim = self.claim_mut(name);
                let granted = claim.granted.clone().expect("it was granted");
                claim.renewed = Answer::None;
                let handle = client.sandbox(&granted.sandbox, Some(granted.token.clone()));
                let expires_at = Some(handle.renew(2 * LEASE).await?);
                claim.renewed = Answer::Given;
                claim.granted = Some(Granted {
                    expires_at,
                    ..granted
                });
            }
            Step::Release(name) => self.claim_mut(name).release(client).await?,
            Step::Apply(name) => {
                let name = self.name(name);
                self.pools.insert(name.clone(), (Answer::None, Answer::Never));
                client.pools().apply(pool(&name)).await?;
                self.pools.insert(name, (Answer::Given, Answer::Never));
            }
            Step::Stocked(name) => stocked(client, &self.name(name)).await?,
            Step::Delete(name) => {
                let name = self.name(name);
                self.pools.insert(name.clone(), (Answer::Given, Answer::None));
                client.pools().delete(&name).await?;
                self.pools.insert(name, (Answer::Given, Answer::Given));
            }
        }
        Ok(())
    }

    fn claim_mut(&mut self, name: &str) -> &mut Claim {
        let key = self.name(name);
        let mut claims = self.claims.iter_mut();
        claims.find(|claim| claim.key == key).expect("it was claimed")
    }

    /// Compares a daemon that was started again with what it answered before. A claim that was not answered is asked
    /// for again, and is known from then on.
    pub(crate) async fn holds(&mut self, daemon: &Daemon) {
        let client = daemon.client().await;
        self.short_leases_are_over(daemon).await;
        let mut rows: BTreeMap<String, Vec<Sandbox>> = BTreeMap::new();
        for row in daemon.rows(&[State::Claimed]).await {
            rows.entry(row.labels[LABEL].clone()).or_default().push(row);
        }
        for claim in &mut self.claims {
            let rows = rows.remove(&claim.key).unwrap_or_default();
            assert!(
                rows.len() <= 1,
                "{}: two claims of one request: {rows:?}",
                claim.key
            );
            within(HANG, claim.holds(daemon, &client, rows.first())).await;
        }
        assert!(rows.is_empty(), "nobody asked for {rows:?}");
        self.pools_hold(daemon, &client).await;
        host_agrees(daemon).await;
    }

    async fn short_leases_are_over(&mut self, daemon: &Daemon) {
        let mut short: Vec<&mut Claim> = self
            .claims
            .iter_mut()
            .filter(|claim| claim.kind == Kind::Short)
            .collect();
        if short.iter().all(|claim| claim.released == Answer::Given) {
            return;
        }
        let keys: BTreeSet<&str> = short.iter().map(|claim| &*claim.key).collect();
        let over = |row: &Sandbox| {
            row.state() != State::Claimed || row.labels.get(LABEL).is_none_or(|key| !keys.contains(&**key))
        };
        daemon.until_rows(|rows| rows.values().all(over)).await;
        for claim in &mut short {
            claim.released = Answer::Given;
        }
    }

    async fn pools_hold(&mut self, daemon: &Daemon, client: &Client) {
        let there = client
            .pools()
            .list()
            .await
            .unwrap()
            .into_iter()
            .filter_map(|pool| pool.spec);
        let there: BTreeSet<String> = there.map(|spec| spec.name).collect();
        for (name, answers) in &mut self.pools {
            let is_there = there.contains(name);
            match answers {
                (Answer::Given, Answer::Never) => assert!(is_there, "{name} is missing"),
                (_, Answer::Given) => assert!(!is_there, "{name} rose again"),
                // Asked for and not answered: either, but one of the two.
                (Answer::None, _) | (_, Answer::None) => {
                    *answers = (
                        Answer::Given,
                        if is_there { Answer::Never } else { Answer::Given },
                    );
                }
                (Answer::Never, Answer::Never) => {}
            }
        }
        for name in there {
            daemon.until_pool(&name, is_full).await;
        }
    }

    /// Ends everything, so that the next round begins with warm stock alone.
    pub(crate) async fn settle(&mut self, daemon: &Daemon) {
        let client = daemon.client().await;
        for claim in self
            .claims
            .iter_mut()
            .filter(|claim| claim.released != Answer::Given)
        {
            claim.release(&client).await.unwrap();
        }
        for (name, answers) in &mut self.pools {
            if answers.1 != Answer::Given {
                client.pools().delete(name).await.unwrap();
                answers.1 = Answer::Given;
            }
        }
        daemon.until_pool("default", is_full).await;
        // What is still ending would go on ending in the next life.
        host_agrees(daemon).await;
    }
}

/// Waits until a pool has what it wants; unlike the harness, it survives the daemon's death.
async fn stocked(client: &Client, name: &str) -> Result<(), Error> {
    let mut changes = client.pools().watch(vec![name.to_owned()]).await?;
    while let Some(change) = changes.next().await {
        if let Some(pools_watch_reply::Event::Pool(pool)) = change?.event
            && is_full(&pool)
        {
            return Ok(());
        }
    }
    panic!("the watch of {name} ended");
}

impl Claim {
    async fn release(&mut self, client: &Client) -> Result<(), Error> {
        let granted = self.granted.as_ref().expect("it was granted");
        self.released = Answer::None;
        let handle = client.sandbox(&granted.sandbox, Some(granted.token.clone()));
        assert!(handle.release().await?.recorded);
        self.released = Answer::Given;
        Ok(())
    }

    async fn holds(&mut self, daemon: &Daemon, client: &Client, row: Option<&Sandbox>) {
        let key = &self.key;
        match (&self.granted, self.released, row) {
            (_, Answer::Given, row) => assert!(row.is_none(), "{key} rose again: {row:?}"),
            // Its record was or was not written; it is over in either case once it is asked for again.
            (Some(_), Answer::None, None) => self.released = Answer::Given,
            (Some(granted), Answer::None | Answer::Never, row) => {
                let row = row.unwrap_or_else(|| panic!("{key} is lost"));
                assert_eq!(
                    (&row.sandbox, &row.claim),
                    (&granted.sandbox, &granted.claim),
                    "{key}"
                );
                if self.renewed != Answer::None {
                    let expires_at = row.expires_at.and_then(|at| SystemTime::try_from(at).ok());
                    assert_eq!(expires_at, granted.expires_at, "{key}");
                }
                self.works(client).await;
                let again = ask(client, key, self.kind).await.unwrap();
                assert_eq!(again.claim, granted.claim, "{key}: one request, one claim");
                assert_eq!(again.token.expose(), granted.token.expose(), "{key}");
            }
            // Not answered: there it is whole, or there is nothing of it.
            (None, Answer::None | Answer::Never, row) => {
                let again = ask(client, key, self.kind).await.unwrap();
                if let Some(row) = row {
                    assert_eq!(
                        (&row.sandbox, &row.claim),
                        (&again.sandbox, &again.claim),
                        "{key}"
                    );
                }
                let rows = daemon.rows(&[State::Claimed]).await;
                let own = rows.iter().filter(|row| row.labels.get(LABEL) == Some(key));
                assert_eq!(own.count(), 1, "{key}: one request, one claim");
                self.granted = Some(again);
                self.works(client).await;
            }
        }
    }

    /// It is claimed, its token opens it, its agent answers.
    async fn works(&self, client: &Client) {
        let granted = self.granted.as_ref().expect("it was granted");
        let handle = client.sandbox(&granted.sandbox, Some(granted.token.clone()));
        assert_eq!(
            handle.get().await.unwrap().state(),
            State::Claimed,
            "{}",
            self.key
        );
        let said = handle
            .exec(["sh", "-c", "echo \"<$STEP>\""])
            .output()
            .await
            .unwrap();
        let wanted = match self.kind {
            Kind::Env => format!("<{}>", self.key),
            Kind::Plain | Kind::Short => "<>".to_owned(),
        };
        assert_eq!(said.stdout_text().trim(), wanted, "{said:?}");
    }
}

fn is_full(pool: &Pool) -> bool {
    pool.warm == pool.target && pool.making == 0
}

fn is_broken(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Broken | ErrorKind::Unreachable)
}

fn pool(name: &str) -> PoolSpec {
    PoolSpec {
        name: name.into(),
        key: Some(key()),
        warm: 1,
        warm_max: Some(1),
        ..PoolSpec::default()
    }
}

/// Claims from pool `default`; the same for the same key.
pub(crate) async fn ask(client: &Client, key: &str, kind: Kind) -> Result<Granted, Error> {
    let lease = match kind {
        Kind::Plain | Kind::Env => LEASE,
        Kind::Short => Duration::from_secs(1),
    };
    let claim = client.claim("default").request_key(key).label(LABEL, key);
    let claim = claim.lease(lease).wait(HANG);
    let claim = match kind {
        Kind::Env => claim.env("STEP", key.to_owned()),
        Kind::Plain | Kind::Short => claim,
    };
    let sandbox = claim.await?;
    let (claim, expires_at) = (sandbox.claim_id().to_owned(), sandbox.expires_at());
    let handle = sandbox.keep();
    Ok(Granted {
        sandbox: handle.id().to_owned(),
        claim,
        token: handle.token().expect("a claim has one").clone(),
        expires_at,
    })
}

/// Waits until nothing is on its way, and compares rows, folders and processes.
pub(crate) async fn host_agrees(daemon: &Daemon) {
    let at_rest = |row: &Sandbox| !matches!(row.state(), State::Making | State::Ending);
    let rows = daemon.until_rows(|rows| rows.values().all(at_rest)).await;
    let has_machine =
        |row: &&Sandbox| matches!(row.state(), State::Warm | State::Claimed | State::Quarantined);
    let living: Vec<&Sandbox> = rows.values().filter(has_machine).collect();
    let failed = rows.values().find(|row| row.state() == State::Failed);
    assert!(failed.is_none(), "{failed:?}");
    let slots: BTreeSet<String> = living
        .iter()
        .map(|row| format!("{:04x}", row.slot.unwrap()))
        .collect();
    assert_eq!(
        slots.len(),
        living.len(),
        "two sandboxes have one slot: {living:?}"
    );
    // What is in no record is ended behind the first calls.
    let agree = || async {
        let dirs: BTreeSet<String> = daemon.slot_dirs().into_iter().collect();
        (dirs == slots && inside(daemon).len() >= slots.len()).then_some(())
    };
    harness::eventually(&format!("the folders of {slots:?}"), agree).await;
    let known: BTreeSet<u32> = living.iter().filter_map(|row| row.pid).collect();
    let found: BTreeSet<u32> = daemon
        .sandbox_processes()
        .into_iter()
        .map(|found| u32::try_from(found.pid).unwrap())
        .collect();
    assert!(found.is_superset(&known), "{known:?} do not all live: {found:?}");
    assert_eq!(found.len(), slots.len(), "processes and rows differ");
    assert_eq!(inside(daemon), found, "processes that no folder tells of");
}

/// Every process that works in one of the daemon's folders, whatever these say: the kernel knows.
fn inside(daemon: &Daemon) -> BTreeSet<u32> {
    let run = daemon.dir().join("run");
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let work = std::fs::read_link(format!("/proc/{pid}/cwd"));
        work.is_ok_and(|work| work.starts_with(&run)) && Process::look(i32::try_from(*pid).unwrap()).is_some()
    })
    .collect()
}
