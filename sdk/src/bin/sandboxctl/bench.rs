//! `bench claim|exec|refill|burst`: a running daemon, measured from outside. Timings are ratios between arms of one
//! run, interleaved A B B A on one connection; the stop line is the reply in this process.

use std::{collections::BTreeMap, future::Future, time::Duration};

use futures_util::StreamExt as _;
use hdrhistogram::Histogram;
use sandbox_sdk::{Client, Error, ErrorReason, Sandbox, admin::PoolsWatch, v1::Pool};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::{
    Reach,
    args::{BenchArgs, BenchVerb},
    fault::Fault,
    print::{Out, Progress, table},
    text::word,
    within,
};

/// Rounds of A B B A.
const ROUNDS: u32 = 3;
/// Samples below which a p99 says nothing.
const P99_FROM: u64 = 1_000;
/// Samples below which a p99.9 says nothing.
const P999_FROM: u64 = 10_000;
/// What is left behind by a bench that is killed ends after this.
const LEASE: Duration = Duration::from_secs(300);
/// Releases that run at once.
const RELEASES: usize = 16;

pub(crate) async fn verb(reach: &Reach, verb: BenchVerb, out: Out) -> Result<(), Fault> {
    let (name, args) = match &verb {
        BenchVerb::Claim(args) => ("claim", args),
        BenchVerb::Exec(args) => ("exec", args),
        BenchVerb::Refill(args) => ("refill", args),
        BenchVerb::Burst(args) => ("burst", args),
    };
    let client = reach.client(None).await?;
    let info = client.node().info().await?;
    let progress = Progress::start(out, &format!("bench {name}"));
    let bench = Bench {
        client: &client,
        args,
        progress: &progress,
    };
    let measured = within(args.limit.timeout, async {
        match verb {
            BenchVerb::Claim(_) => bench.claim().await,
            BenchVerb::Exec(_) => bench.exec().await,
            BenchVerb::Refill(_) => bench.refill().await,
            BenchVerb::Burst(_) => bench.burst().await,
        }
    })
    .await;
    client.flush().await;
    drop(progress);
    let report = measured?;
    let engine = word(info.engine().as_str_name());
    let accel = word(info.accel().as_str_name());
    out.result(
        || {
            let mut object = report.json.clone();
            object.insert("bench".to_owned(), json!(name));
            object.insert("pool".to_owned(), json!(args.pool));
            object.insert("engine".to_owned(), json!(engine));
            object.insert("accel".to_owned(), json!(accel));
            object.insert("daemon".to_owned(), json!(info.version));
            Value::Object(object)
        },
        || {
            let engine = engine.clone().unwrap_or_default();
            let accel = accel.clone().unwrap_or_default();
            format!(
                "{name}, pool {}, engine {engine}, accel {accel}\n{}",
                args.pool, report.human
            )
        },
    )
}

struct Report {
    json: Map<String, Value>,
    human: String,
}

/// Times of one arm, in nanoseconds.
struct Arm(Histogram<u64>);

impl Arm {
    fn new() -> Result<Self, Fault> {
        // Up to ten minutes, three digits.
        Histogram::new_with_bounds(1, 600_000_000_000, 3)
            .map(Self)
            .map_err(|error| Fault::Io("bench", std::io::Error::other(error)))
    }

    fn add(&mut self, took: Duration) {
        self.0
            .saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Microseconds; nothing where the samples are too few.
    fn quantile(&self, quantile: f64, from: u64) -> Option<f64> {
        let enough = self.0.len() >= from.max(1);
        enough.then(|| {
            let took = Duration::from_nanos(self.0.value_at_quantile(quantile));
            (took.as_secs_f64() * 1e7).round() / 10.0
        })
    }

    fn quantiles(&self) -> [Option<f64>; 4] {
        [
            self.quantile(0.5, 1),
            self.quantile(0.9, 1),
            self.quantile(0.99, P99_FROM),
            self.quantile(0.999, P999_FROM),
        ]
    }

    fn json(&self) -> Value {
        let [p50, p90, p99, p999] = self.quantiles();
        json!({ "p50": p50, "p90": p90, "p99": p99, "p999": p999 })
    }

    fn row(&self, name: &str) -> [String; 6] {
        let [p50, p90, p99, p999] = self
            .quantiles()
            .map(|us| us.map(|us| format!("{us:.1}")).unwrap_or_default());
        [name.to_owned(), self.0.len().to_string(), p50, p90, p99, p999]
    }
}

const HEAD: [&str; 6] = ["ARM (us)", "N", "P50", "P90", "P99", "P99.9"];

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    let (one, other) = (one?, other?);
    (other > 0.0).then(|| (one / other * 100.0).round() / 100.0)
}

/// Two arms beside each other.
fn compare(name: &str, base: &Arm, arm: &Arm, concurrency: usize) -> Report {
    let [p50, _, p99, _] = arm.quantiles();
    let [base50, _, base99, _] = base.quantiles();
    let (p50, p99) = (ratio(p50, base50), ratio(p99, base99));
    let mut json = Map::new();
    json.insert("n".to_owned(), json!(arm.0.len()));
    json.insert("concurrency".to_owned(), json!(concurrency));
    json.insert("empty_rpc_us".to_owned(), base.json());
    json.insert(format!("{name}_us"), arm.json());
    json.insert("ratio".to_owned(), json!({ "p50": p50, "p99": p99 }));
    let show = |ratio: Option<f64>| ratio.map(|ratio| format!("x {ratio:.2}")).unwrap_or_default();
    let none = String::new;
    let rows = vec![
        base.row("empty rpc"),
        arm.row(name),
        ["ratio".to_owned(), none(), show(p50), none(), show(p99), none()],
    ];
    Report {
        json,
        human: table(HEAD, rows),
    }
}

async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let start = Instant::now();
    let done = work.await;
    (start.elapsed(), done)
}

/// Gives sandboxes back, many at once. What fails is left to the leases.
async fn release(sandboxes: Vec<Sandbox>) -> Result<(), Fault> {
    let mut releases =
        futures_util::stream::iter(sandboxes.into_iter().map(Sandbox::release)).buffer_unordered(RELEASES);
    while let Some(released) = releases.next().await {
        released?;
    }
    Ok(())
}

struct Bench<'a> {
    client: &'a Client,
    args: &'a BenchArgs,
    progress: &'a Progress,
}

impl Bench<'_> {
    fn concurrency(&self, default: u32) -> usize {
        let wanted = self.args.concurrency.unwrap_or(default).max(1);
        usize::try_from(wanted).unwrap_or(usize::MAX)
    }

    /// Samples of one of an arm's segments: two to a round.
    fn segment(&self) -> usize {
        let n = self.args.n.unwrap_or(1_000).max(1);
        usize::try_from(n.div_ceil(2 * ROUNDS)).unwrap_or(usize::MAX)
    }

    async fn pool(&self) -> Result<Pool, Fault> {
        let pools = self.client.pools().list().await?;
        pools
            .into_iter()
            .find(|pool| pool.spec.as_ref().is_some_and(|spec| spec.name == self.args.pool))
            .ok_or_else(|| Fault::Usage(format!("--pool: the daemon has no pool {}", self.args.pool)))
    }

    async fn stock(&self) -> Result<Stock<'_>, Fault> {
        let pool = self.pool().await?;
        let watch = self.client.pools().watch(vec![self.args.pool.clone()]).await?;
        let size = usize::try_from(pool.target.max(pool.warm)).unwrap_or(usize::MAX);
        if size == 0 {
            return Err(Fault::Usage(format!(
                "--pool: {} keeps nothing warm",
                self.args.pool
            )));
        }
        Ok(Stock {
            bench: self,
            watch,
            size,
        })
    }

    async fn one_claim(&self) -> (Duration, Result<Sandbox, Error>) {
        let claim = self
            .client
            .claim(self.args.pool.as_str())
            .warm_only()
            .lease(LEASE)
            .label("bench", "sandboxctl");
        timed(claim.into_future()).await
    }

    async fn empty_calls(&self, arm: &mut Arm, n: usize, concurrency: usize) -> Result<(), Fault> {
        let calls = (0..n).map(|_| async { timed(self.client.node().ping()).await });
        let mut calls = futures_util::stream::iter(calls).buffer_unordered(concurrency);
        while let Some((took, done)) = calls.next().await {
            done?;
            arm.add(took);
        }
        Ok(())
    }

    async fn claims(&self, stock: &mut Stock<'_>, arm: &mut Arm, n: usize, c: usize) -> Result<(), Fault> {
        let mut left = n;
        while left > 0 {
            let batch = left.min(stock.size);
            stock.until(batch).await?;
            let claims = futures_util::stream::iter((0..batch).map(|_| self.one_claim())).buffer_unordered(c);
            let claims: Vec<_> = claims.collect().await;
            let mut sandboxes = Vec::with_capacity(batch);
            for (took, sandbox) in claims {
                sandboxes.push(sandbox?);
                arm.add(took);
            }
            release(sandboxes).await?;
            left -= batch;
        }
        Ok(())
    }

    async fn claim(&self) -> Result<Report, Fault> {
        let (concurrency, segment) = (self.concurrency(1), self.segment());
        let mut stock = self.stock().await?;
        let (mut empty, mut claim) = (Arm::new()?, Arm::new()?);
        for round in 1..=ROUNDS {
            self.progress
                .say(&format!("bench claim: round {round} of {ROUNDS}"));
            self.empty_calls(&mut empty, segment, concurrency).await?;
            self.claims(&mut stock, &mut claim, segment, concurrency).await?;
            self.claims(&mut stock, &mut claim, segment, concurrency).await?;
            self.empty_calls(&mut empty, segment, concurrency).await?;
        }
        Ok(compare("claim", &empty, &claim, concurrency))
    }

    async fn execs(&self, sandbox: &Sandbox, arm: &mut Arm, n: usize, c: usize) -> Result<(), Fault> {
        let calls = (0..n).map(|_| timed(sandbox.exec(["true"]).output()));
        let mut calls = futures_util::stream::iter(calls).buffer_unordered(c);
        while let Some((took, done)) = calls.next().await {
            if !done?.status.success() {
                return Err(Fault::Io(
                    "bench",
                    std::io::Error::other("`true` failed in the sandbox"),
                ));
            }
            arm.add(took);
        }
        Ok(())
    }

    async fn exec(&self) -> Result<Report, Fault> {
        let (concurrency, segment) = (self.concurrency(1), self.segment());
        let (_took, sandbox) = self.one_claim().await;
        let sandbox = sandbox?;
        let (mut empty, mut exec) = (Arm::new()?, Arm::new()?);
        for round in 1..=ROUNDS {
            self.progress
                .say(&format!("bench exec: round {round} of {ROUNDS}"));
            self.empty_calls(&mut empty, segment, concurrency).await?;
            self.execs(&sandbox, &mut exec, segment, concurrency).await?;
            self.execs(&sandbox, &mut exec, segment, concurrency).await?;
            self.empty_calls(&mut empty, segment, concurrency).await?;
        }
        sandbox.release().await?;
        Ok(compare("exec", &empty, &exec, concurrency))
    }

    async fn refill(&self) -> Result<Report, Fault> {
        let mut stock = self.stock().await?;
        let rounds = self.args.n.unwrap_or(ROUNDS).max(1);
        let mut walls = Vec::new();
        for round in 1..=rounds {
            self.progress
                .say(&format!("bench refill: round {round} of {rounds}"));
            stock.until(stock.size).await?;
            let claims = futures_util::future::join_all((0..stock.size).map(|_| self.one_claim())).await;
            let taken: Vec<Sandbox> = claims
                .into_iter()
                .map(|(_took, sandbox)| sandbox)
                .collect::<Result<_, _>>()?;
            let (wall, full) = timed(stock.until(stock.size)).await;
            full?;
            release(taken).await?;
            walls.push((wall.as_secs_f64() * 1e4).round() / 10.0);
        }
        let lead_ms = self.pool().await?.lead_ms;
        let mut json = Map::new();
        json.insert("n".to_owned(), json!(stock.size));
        json.insert("wall_ms".to_owned(), json!(walls));
        json.insert("lead_ms".to_owned(), json!(lead_ms));
        let size = stock.size.to_string();
        let rows = walls
            .iter()
            .map(|wall| [size.clone(), format!("{wall:.1} ms"), format!("{lead_ms} ms")]);
        Ok(Report {
            json,
            human: table(["CLONES", "0 TO FULL", "ONE CLONE"], rows.collect()),
        })
    }

    async fn burst(&self) -> Result<Report, Fault> {
        let concurrency = self.concurrency(64);
        let rounds = self.args.n.unwrap_or(10).max(1);
        let mut stock = self.stock().await?;
        let mut arm = Arm::new()?;
        let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
        for round in 1..=rounds {
            self.progress
                .say(&format!("bench burst: round {round} of {rounds}"));
            stock.until(stock.size.min(concurrency)).await?;
            let claims = (0..concurrency).map(|_| {
                let claim = self.client.claim(self.args.pool.as_str());
                timed(claim.lease(LEASE).label("bench", "sandboxctl").into_future())
            });
            let mut taken = Vec::new();
            for (took, sandbox) in futures_util::future::join_all(claims).await {
                let outcome = match sandbox {
                    Ok(sandbox) => {
                        arm.add(took);
                        let tier = word(sandbox.tier().as_str_name()).unwrap_or_default();
                        taken.push(sandbox);
                        tier
                    }
                    Err(error) => match error.reason().map(ErrorReason::as_str) {
                        Some(reason) => reason.to_owned(),
                        None => return Err(error.into()),
                    },
                };
                *outcomes.entry(outcome).or_default() += 1;
            }
            release(taken).await?;
        }
        let mut json = Map::new();
        json.insert("n".to_owned(), json!(arm.0.len()));
        json.insert("concurrency".to_owned(), json!(concurrency));
        json.insert("claim_us".to_owned(), arm.json());
        json.insert("outcomes".to_owned(), json!(outcomes));
        let counts: Vec<String> = outcomes
            .iter()
            .map(|(outcome, n)| format!("{n} {outcome}"))
            .collect();
        Ok(Report {
            json,
            human: format!("{}\n{}", table(HEAD, vec![arm.row("claim")]), counts.join(", ")),
        })
    }
}

/// The pool's warm clones, as the daemon tells of them.
struct Stock<'a> {
    bench: &'a Bench<'a>,
    watch: PoolsWatch,
    size: usize,
}

impl Stock<'_> {
    /// Waits until there are so many. What the daemon told last may be of before a claim, so each change that it
    /// tells of is only the sign to ask for the state itself.
    async fn until(&mut self, warm: usize) -> Result<(), Fault> {
        loop {
            let pool = self.bench.pool().await?;
            if usize::try_from(pool.warm).is_ok_and(|now| now >= warm) {
                return Ok(());
            }
            match self.watch.next().await {
                Some(change) => drop(change?),
                None => {
                    return Err(Fault::Io(
                        "bench",
                        std::io::Error::other("the daemon ended the watch"),
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_need_their_samples() {
        let mut arm = Arm::new().unwrap();
        assert_eq!(arm.quantiles(), [None; 4]);
        for us in 1..=999_u64 {
            arm.add(Duration::from_micros(us));
        }
        let [p50, _, p99, _] = arm.quantiles();
        assert!((p50.unwrap() - 500.0).abs() < 2.0);
        assert_eq!(p99, None);
        arm.add(Duration::from_micros(1_000));
        let [_, _, p99, p999] = arm.quantiles();
        assert!(p99.is_some() && p999.is_none());
        assert_eq!(ratio(Some(3.0), Some(2.0)), Some(1.5));
        assert_eq!(ratio(Some(3.0), None), None);
    }
}
