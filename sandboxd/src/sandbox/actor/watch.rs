//! Keeping watch: over the machine's death, the loss of its link, the guest's news and its clock.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{
    Actor,
    steps::{DYING, StepError, open_link},
};
use crate::{
    agent,
    link::Link,
    sandbox::{
        entry::Sandbox,
        life::{Event, Life, Why, WhyKind},
        registry::Sandboxes,
        relinks::Relinks,
    },
    telemetry::chain,
};

/// How often a guest's wall clock is looked after.
const CLOCK_EVERY: Duration = Duration::from_secs(600);

/// What became of a broken link.
enum Relinked {
    /// There is another.
    Up,
    /// The sandbox ends.
    Ends,
    /// The daemon stops; the next one sees to it.
    Left,
}

/// The guest's wall clock is set anew after [`CLOCK_EVERY`]. One that cannot be told the time is told again later, or
/// found to be lost by its link.
async fn next_clock_step(sandbox: &Sandbox, sandboxes: &Sandboxes) {
    tokio::time::sleep(CLOCK_EVERY).await;
    if let Some(link) = sandbox.link() {
        let means = sandboxes.means();
        let stepping = Box::pin(agent::clock(&link, &means.clock));
        drop(timeout(means.deadlines.hello, stepping).await);
    }
}

/// The stream of a guest's own news.
enum News {
    Unasked,
    Open(Box<agent::Events>),
    /// The guest has none, or ended it.
    Over,
}

impl News {
    /// The next condition; never, once there are no more. Cancel safe.
    async fn next(&mut self, link: &Link) -> agent::Condition {
        loop {
            match self {
                Self::Unasked => {
                    *self = Box::pin(agent::events(link))
                        .await
                        .map_or(Self::Over, |events| Self::Open(Box::new(events)))
                }
                Self::Open(events) => match events.next().await {
                    Ok(Some(agent::News::Condition(condition))) => return condition,
                    Ok(Some(agent::News::Log(line))) => tracing::debug!(guest = %line, "a guest's log"),
                    Ok(Some(agent::News::Dropped(count))) => {
                        tracing::debug!(count, "news of a guest were dropped")
                    }
                    Ok(None) | Err(_) => *self = Self::Over,
                },
                Self::Over => std::future::pending::<()>().await,
            }
        }
    }
}

impl Actor {
    /// Keeps watch until the end, or until the daemon stops and leaves the machine to the next.
    pub(super) async fn keep(self) {
        let (sandbox, sandboxes) = (Arc::clone(&self.sandbox), self.sandboxes.clone());
        let (mut news, mut relinks) = (News::Unasked, Relinks::default());
        // Of its own, so that neither other news puts it off nor a mute guest holds the others up; and none for a guest
        // that has no clock.
        let mut clock_due = None;
        while let (Some(machine), Some(link)) = (&self.machine, sandbox.link()) {
            tokio::select! {
                biased;
                () = sandbox.wake.notified() => break,
                report = machine.exited() => {
                    // The wish to end may have come first.
                    drop(sandbox.apply(&sandboxes, Event::Died(Why::with(WhyKind::VmExited, report))));
                    break;
                }
                why = link.lost() => {
                    news = News::Unasked;
                    let may = relinks.may(why, self.sandboxes.means().clock.tick());
                    match Box::pin(self.relink(&why.to_string(), may)).await {
                        Relinked::Up => {}
                        Relinked::Ends => break,
                        Relinked::Left => {
                            sandbox.door().stop().await;
                            return;
                        }
                    }
                }
                () = sandboxes.owners().stopping() => {
                    link.close();
                    sandbox.door().stop().await;
                    return;
                }
                condition = news.next(&link), if machine.identity().pid.is_some() => sandboxes.noted(&sandbox, condition),
                () = async {
                    let step = || Box::pin(next_clock_step(&sandbox, &sandboxes));
                    clock_due.get_or_insert_with(step).await;
                }, if machine.identity().pid.is_some() => clock_due = None,
            }
        }
        Box::pin(self.end()).await;
    }

    /// The link broke. That of a claimed one, if it `may` come back, must be back in time; a warm one ends.
    async fn relink(&self, lost: &str, may: bool) -> Relinked {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        let means = self.sandboxes.means();
        let Some(machine) = &self.machine else {
            return Relinked::Ends;
        };
        // From here on no claim is given it.
        sandbox.set_link(None);
        let opened = async {
            if may && sandbox.with_life(|life| matches!(life, Life::Claimed(_))) {
                let opening = open_link(machine.as_ref(), &self.sandboxes, means.deadlines.relink);
                return opening.await.map_err(|error| match &error {
                    StepError::Exited(report) => Why::with(WhyKind::VmExited, report),
                    StepError::Late { .. }
                    | StepError::Engine(_)
                    | StepError::Net(_)
                    | StepError::Serve(_)
                    | StepError::Unproved(_)
                    | StepError::Link(_)
                    | StepError::Agent(_)
                    | StepError::NotReady(_)
                    | StepError::Foreign => {
                        Why::with(WhyKind::AgentLost, format_args!("{lost}; {}", chain(&error)))
                    }
                });
            }
            match timeout(DYING, machine.exited()).await {
                Ok(report) => Err(Why::with(WhyKind::VmExited, report)),
                Err(_lives) => Err(Why::with(WhyKind::AgentLost, lost)),
            }
        };
        let opened = tokio::select! {
            biased;
            () = sandbox.wake.notified() => return Relinked::Ends,
            () = owners.stopping() => return Relinked::Left,
            opened = opened => opened,
        };
        match opened {
            Ok(opened) => {
                opened.link.pace(means.paces.claimed);
                sandbox.set_link(Some(opened.link));
                Relinked::Up
            }
            Err(why) => {
                drop(sandbox.apply(&self.sandboxes, Event::Died(why)));
                Relinked::Ends
            }
        }
    }

    /// Quarantined: nothing is touched until somebody wants it ended.
    pub(super) async fn guard(self) {
        let sandbox = Arc::clone(&self.sandbox);
        let owners = self.sandboxes.owners().clone();
        tokio::select! {
            biased;
            () = sandbox.wake.notified() => Box::pin(self.end()).await,
            () = owners.stopping() => {}
        }
    }
}
