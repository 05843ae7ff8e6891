//! Waiting for what the daemon tells.

use std::collections::BTreeMap;

use sandbox_sdk::{
    admin::SandboxFilter,
    v1::{Pool, Sandbox, State, claims_watch_reply, pools_watch_reply},
};

use crate::{Daemon, HANG, within};

/// Every state there is.
const ALL: [State; 7] = [
    State::Making,
    State::Warm,
    State::Claimed,
    State::Ending,
    State::Failed,
    State::Quarantined,
    State::Gone,
];

impl Daemon {
    /// Waits until a pool is as wanted, by `Pools.Watch`, and gives it.
    ///
    /// # Panics
    /// It never is.
    pub async fn until_pool(&self, name: &str, wanted: impl Fn(&Pool) -> bool) -> Pool {
        let client = self.client().await;
        let mut last = None;
        let waited = tokio::time::timeout(HANG, async {
            let mut changes = client.pools().watch(Vec::new()).await.unwrap();
            loop {
                let change = changes.next().await.expect("the watch goes on").unwrap();
                let Some(pools_watch_reply::Event::Pool(pool)) = change.event else {
                    continue;
                };
                if pool.spec.as_ref().is_none_or(|spec| spec.name != name) {
                    continue;
                }
                if wanted(&pool) {
                    return pool;
                }
                last = Some(pool);
            }
        });
        match waited.await {
            Ok(pool) => pool,
            Err(_elapsed) => panic!("pool {name} never was as wanted; last {last:?}"),
        }
    }

    /// Waits until pool `default` has this much warm stock and makes no more.
    ///
    /// # Panics
    /// It never has.
    pub async fn until_warm(&self, warm: u32) -> Pool {
        self.until_pool("default", |pool| pool.warm == warm && pool.making == 0)
            .await
    }

    /// Waits until the rows of all sandboxes, by id, are as wanted, by `Claims.Watch`, and gives them.
    ///
    /// # Panics
    /// They never are.
    pub async fn until_rows(
        &self,
        wanted: impl Fn(&BTreeMap<String, Sandbox>) -> bool,
    ) -> BTreeMap<String, Sandbox> {
        let client = self.client().await;
        let filter = SandboxFilter {
            states: ALL.to_vec(),
            ..SandboxFilter::default()
        };
        let mut rows = BTreeMap::new();
        let waited = tokio::time::timeout(HANG, async {
            let mut synced = false;
            let mut changes = client.claims().watch(&filter).await.unwrap();
            loop {
                let change = changes.next().await.expect("the watch goes on").unwrap();
                match change.event {
                    Some(claims_watch_reply::Event::Sandbox(row)) => {
                        rows.insert(row.sandbox.clone(), row);
                    }
                    Some(claims_watch_reply::Event::Synced(_)) => synced = true,
                    Some(claims_watch_reply::Event::Lost(_)) => {
                        rows.clear();
                        synced = false;
                    }
                    None => {}
                }
                if synced && wanted(&rows) {
                    return;
                }
            }
        });
        if waited.await.is_err() {
            panic!("the rows never were as wanted; last {rows:?}");
        }
        rows
    }

    /// Waits until one sandbox is in this state, and gives its row.
    ///
    /// # Panics
    /// It never is.
    pub async fn until_state(&self, sandbox: &str, state: State) -> Sandbox {
        let is = |row: &Sandbox| row.state() == state;
        let mut rows = self.until_rows(|rows| rows.get(sandbox).is_some_and(is)).await;
        rows.remove(sandbox).unwrap()
    }

    /// All rows in these states.
    ///
    /// # Panics
    /// The daemon does not answer.
    pub async fn rows(&self, states: &[State]) -> Vec<Sandbox> {
        let filter = SandboxFilter {
            states: states.to_vec(),
            ..SandboxFilter::default()
        };
        let client = self.client().await;
        within(HANG, client.claims().list(&filter)).await.unwrap()
    }
}
