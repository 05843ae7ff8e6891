//! Claims of a pool that is refilled between them.

use std::{future::IntoFuture as _, time::Duration};

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use sandbox_sdk::{
    Client, Sandbox,
    admin::PoolsWatch,
    v1::{Lane, Pool, PoolKey, PoolSpec},
};
use tokio::time::Instant;

use crate::arm::{Arm, timed};

/// What tells pools of a daemon apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// The pool's name.
    pub(crate) name: &'static str,
    pub(crate) lane: Lane,
    /// The policy of its doors; empty: none, and they deny.
    pub(crate) egress: &'static str,
}

const PLAIN: Terms = Terms {
    name: "bench",
    lane: Lane::None,
    egress: "",
};
/// What is left behind by a bench that is killed ends after this.
const LEASE: Duration = Duration::from_secs(3600);
/// Releases that run at once.
const RELEASES: usize = 16;

/// A pool of the daemon's, seen through the SDK.
pub(crate) struct Stock {
    pub(crate) client: Client,
    watch: PoolsWatch,
    size: u32,
    terms: Terms,
}

impl Stock {
    /// A pool of this size, which is full.
    pub(crate) async fn open(client: Client, size: u32) -> Result<Self> {
        Self::of(client, size, PLAIN).await
    }

    /// The same, of other terms.
    pub(crate) async fn of(client: Client, size: u32, terms: Terms) -> Result<Self> {
        let watch = client.pools().watch(vec![]).await?;
        let mut stock = Self {
            client,
            watch,
            size,
            terms,
        };
        stock.fill().await?;
        Ok(stock)
    }

    pub(crate) fn batch(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// How many refill keeps in stock. With none it rests, and what is in stock stays for a minute.
    pub(crate) async fn aim(&self, warm: u32) -> Result<Pool> {
        let spec = PoolSpec {
            name: self.terms.name.to_owned(),
            key: Some(PoolKey {
                template: "default".to_owned(),
                lane: self.terms.lane.into(),
                size: "small".to_owned(),
            }),
            warm,
            warm_max: Some(warm),
            lease_secs: None,
            lease_max_secs: None,
            egress: self.terms.egress.to_owned(),
            require_claim_policy: false,
        };
        Ok(self.client.pools().apply(spec).await?)
    }

    /// Waits until the pool is full.
    pub(crate) async fn fill(&mut self) -> Result<()> {
        self.aim(self.size).await?;
        loop {
            let pools = self.client.pools().list().await?;
            let pool = pools.iter().find(|pool| {
                pool.spec
                    .as_ref()
                    .is_some_and(|spec| spec.name == self.terms.name)
            });
            let pool = pool.context("the pool is gone")?;
            if pool.warm == self.size && pool.making == 0 {
                return Ok(());
            }
            // What the watch tells may be of before: it is only the sign to look again.
            self.watch.next().await.context("the daemon ended the watch")??;
        }
    }

    /// One claim, from the call of the SDK to its reply.
    pub(crate) async fn claim(&self) -> (Duration, Result<Sandbox>) {
        let (took, claimed) = timed(async {
            let claim = self.client.claim(self.terms.name).warm_only().lease(LEASE);
            claim.into_future().await
        })
        .await;
        (took, claimed.context("claim"))
    }

    /// One claim whose work is counted.
    pub(crate) async fn traced(&self) -> Result<Sandbox> {
        let claim = self
            .client
            .claim(self.terms.name)
            .warm_only()
            .lease(LEASE)
            .trace();
        claim.into_future().await.context("traced claim")
    }

    /// Claims `n` at most as many at once as `at_once` says, and keeps them. All must be in stock.
    pub(crate) async fn take(&self, n: usize, at_once: usize, arm: &mut Arm) -> Result<Vec<Sandbox>> {
        let mut taken = Vec::with_capacity(n);
        if at_once == 1 {
            for _ in 0..n {
                let (took, claimed) = self.claim().await;
                taken.push(claimed?);
                arm.add(took);
            }
            return Ok(taken);
        }
        let claims = futures_util::stream::iter((0..n).map(|_| self.claim()));
        let mut claims = claims.buffer_unordered(at_once);
        while let Some((took, claimed)) = claims.next().await {
            taken.push(claimed?);
            arm.add(took);
        }
        Ok(taken)
    }

    /// Claims and releases `n`: in batches of what is in stock, refilled and released between them, while nothing is
    /// measured. Gives the time of the claims alone.
    pub(crate) async fn claims(&mut self, n: usize, at_once: usize, arm: &mut Arm) -> Result<Duration> {
        let (mut left, mut wall) = (n, Duration::ZERO);
        while left > 0 {
            self.fill().await?;
            self.aim(0).await?;
            let batch = left.min(self.batch());
            let began = Instant::now();
            let taken = self.take(batch, at_once, arm).await?;
            wall += began.elapsed();
            release(taken).await?;
            left -= batch;
        }
        Ok(wall)
    }

    /// The same, while refill replaces what is taken: released only when the stock is out.
    pub(crate) async fn claims_while_refilling(&mut self, n: usize, arm: &mut Arm) -> Result<()> {
        let mut left = n;
        while left > 0 {
            self.fill().await?;
            let batch = left.min(self.batch());
            let taken = self.take(batch, 1, arm).await?;
            release(taken).await?;
            left -= batch;
        }
        Ok(())
    }

    /// Claims until `live` are kept, or releases until no more are.
    pub(crate) async fn level(&mut self, kept: &mut Vec<Sandbox>, live: usize) -> Result<()> {
        let mut unmeasured = Arm::new()?;
        while kept.len() < live {
            self.fill().await?;
            let more = (live - kept.len()).min(self.batch());
            kept.extend(self.take(more, 64, &mut unmeasured).await?);
        }
        release(kept.split_off(live)).await
    }

    /// Calls that do nothing, on the same connection.
    pub(crate) async fn empty(&self, n: usize, at_once: usize, arm: &mut Arm) -> Result<()> {
        if at_once == 1 {
            for _ in 0..n {
                let (took, done) = timed(self.client.node().ping()).await;
                done?;
                arm.add(took);
            }
            return Ok(());
        }
        let calls = (0..n).map(|_| timed(async { self.client.node().ping().await }));
        let mut calls = futures_util::stream::iter(calls).buffer_unordered(at_once);
        while let Some((took, done)) = calls.next().await {
            done?;
            arm.add(took);
        }
        Ok(())
    }
}

/// Gives sandboxes back, many at once.
pub(crate) async fn release(sandboxes: Vec<Sandbox>) -> Result<()> {
    let releases = sandboxes.into_iter().map(Sandbox::release);
    let mut releases = futures_util::stream::iter(releases).buffer_unordered(RELEASES);
    while let Some(released) = releases.next().await {
        released?;
    }
    Ok(())
}
