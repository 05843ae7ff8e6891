//! How much stock a pool should have, and what refill does next: pure numbers, time given by the caller.
//!
//! The target follows two averages: how often claims come and how long a piece takes to make. While one piece is being
//! made, `m = rate x lead` claims come on the average; with arrivals that know nothing of each other more than
//! `m + 2 sqrt(m)` come in one case of forty, so that much is kept, within the bounds that the operator set. It goes up
//! at once and comes down after a minute of surplus.

use std::time::Duration;

use sandbox_protocol::reason::Reason;

use crate::clock::Tick;

/// Memory of the arrival average: long enough that one burst does not set the target, short enough to follow a rush
/// within a minute.
const ARRIVALS_OVER: Duration = Duration::from_secs(60);
/// How long stock must be in surplus before the oldest of it is ended.
pub const SURPLUS: Duration = Duration::from_secs(60);
/// Weight of the newest piece in the average of the lead time.
const LEAD_WEIGHT: f64 = 0.2;
/// Below this many expected arrivals per lead time there is no demand to speak of (2 sqrt(m) falls slowly).
const NO_DEMAND: f64 = 0.01;
/// First pause; a single failure costs none, since the next piece may well succeed.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What the operator set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    warm: u32,
    warm_max: u32,
}

impl Bounds {
    /// Floor and ceiling of the target; a ceiling below the floor is raised to it.
    #[must_use]
    pub fn new(warm: u32, warm_max: u32) -> Self {
        Self {
            warm,
            warm_max: warm_max.max(warm),
        }
    }
}

/// What is so now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Facts {
    /// In stock.
    pub warm: u32,
    /// On their way into the stock: being made, or out for a probe.
    pub coming: u32,
    /// Claims in line.
    pub waiting: u32,
    /// Pieces that the node lets us begin now (`node.clones_in_flight` less what all pools make).
    pub may_begin: u32,
}

/// What refill does next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Pieces to begin.
    pub start: u32,
    /// Pieces to end, oldest first.
    pub shrink: u32,
    /// When to plan again though nothing happened; never needed to begin the first piece.
    pub wake_at: Option<Tick>,
}

/// Why a pool makes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parked {
    /// Its reason.
    pub reason: Reason,
    /// What failed, in words.
    pub message: String,
    /// Since when nothing succeeded.
    pub since: Tick,
    /// When it is tried again. `None`: on news of room.
    pub retry_at: Option<Tick>,
}

/// Where there is no room for a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// On the node: memory, or places.
    Node,
    /// On lane guarded: slots, or its packet filter.
    Lane,
}

#[derive(Debug, Clone)]
enum Health {
    Well,
    /// The last pieces failed.
    Failing {
        count: u32,
        why: Parked,
    },
    /// There is no room.
    Full(Room, Parked),
}

/// Averages, target and health of one pool.
#[derive(Debug, Clone)]
pub struct Policy {
    bounds: Bounds,
    /// Arrivals per second as of `counted_at`.
    rate: f64,
    counted_at: Tick,
    /// Seconds that a piece takes.
    lead: Option<f64>,
    /// Since when there is more than the target, and the least surplus since then.
    surplus: Option<(Tick, u32)>,
    health: Health,
}

impl Policy {
    /// A pool that knows nothing yet.
    #[must_use]
    pub const fn new(bounds: Bounds, now: Tick) -> Self {
        Self {
            bounds,
            rate: 0.0,
            counted_at: now,
            lead: None,
            surplus: None,
            health: Health::Well,
        }
    }

    /// Takes other bounds; averages and health stay.
    pub fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
    }

    /// A claim came, whether it was served or not.
    pub fn arrived(&mut self, now: Tick) {
        self.rate = self.rate_at(now) + 1.0 / ARRIVALS_OVER.as_secs_f64();
        self.counted_at = now.max(self.counted_at);
    }

    /// A piece succeeded, `lead` after it was begun.
    pub fn succeeded(&mut self, lead: Duration) {
        let lead = lead.as_secs_f64();
        self.lead = Some(self.lead.map_or(lead, |old| old + LEAD_WEIGHT * (lead - old)));
        self.health = Health::Well;
    }

    /// A piece failed. After the second failure in a row refill pauses, each time twice as long, and tries with one
    /// piece at a time until one succeeds. `jitter` in 0 ..= 1 spreads pools that fail together.
    pub fn failed(&mut self, reason: Reason, message: String, now: Tick, jitter: f64) {
        let (count, since, retry_at) = match &self.health {
            Health::Well | Health::Full(..) => (1, now, None),
            // What was begun together fails together: one failure.
            Health::Failing { count, why } if why.retry_at.is_some_and(|at| now < at) => {
                (*count, why.since, why.retry_at)
            }
            Health::Failing { count, why } => {
                let pause = pause(*count, jitter);
                (count.saturating_add(1), why.since, Some(now.plus(pause)))
            }
        };
        let why = Parked {
            reason,
            message,
            since,
            retry_at,
        };
        self.health = Health::Failing { count, why };
    }

    /// There is no room for a piece: refill rests until [`has_room`](Self::has_room) tells of the same.
    pub fn no_room(&mut self, room: Room, reason: Reason, message: String, now: Tick) {
        let since = match &self.health {
            Health::Full(_, why) => why.since,
            Health::Well | Health::Failing { .. } => now,
        };
        self.health = Health::Full(
            room,
            Parked {
                reason,
                message,
                since,
                retry_at: None,
            },
        );
    }

    /// Something was given back: try again, if that is what was lacking. What a piece that finds no slot gives back to the node
    /// is no reason to try it again.
    pub fn has_room(&mut self, room: Room) {
        if matches!(self.health, Health::Full(lacks, _) if lacks == room) {
            self.health = Health::Well;
        }
    }

    /// Why nothing is made, if so. A single failure does not park a pool.
    #[must_use]
    pub fn parked(&self) -> Option<&Parked> {
        match &self.health {
            Health::Well => None,
            Health::Failing { why, .. } => why.retry_at.is_some().then_some(why),
            Health::Full(_, why) => Some(why),
        }
    }

    /// What refill aims at.
    #[must_use]
    pub fn target(&self, now: Tick) -> u32 {
        self.demand(now).clamp(self.bounds.warm, self.bounds.warm_max)
    }

    /// Claims per minute, on the average of the last minute or so.
    #[must_use]
    pub fn arrivals_per_min(&self, now: Tick) -> f64 {
        self.rate_at(now) * 60.0
    }

    /// Average time from begun to stocked; zero before the first.
    #[must_use]
    pub fn lead(&self) -> Duration {
        self.lead
            .and_then(|secs| Duration::try_from_secs_f64(secs).ok())
            .unwrap_or_default()
    }

    /// What to do now. Call it again when any of the facts changed, and at `wake_at`.
    pub fn plan(&mut self, facts: Facts, now: Tick) -> Plan {
        let target = self.target(now);
        let have = facts.warm.saturating_add(facts.coming);
        let (may_begin, retry_at) = self.may_begin(facts, now);
        let want = target
            .saturating_add(facts.waiting)
            .saturating_sub(have)
            .min(may_begin);
        let shrink = self.shrink(target, facts, now);
        let surplus_over = self.surplus.map(|(since, _)| since.plus(SURPLUS));
        // A target above its floor comes down by itself, with nobody to say so.
        let step_down = (target > self.bounds.warm).then(|| self.steps_down_at(target, now));
        Plan {
            start: want,
            shrink,
            wake_at: [retry_at, surplus_over, step_down.flatten()]
                .into_iter()
                .flatten()
                .min(),
        }
    }

    /// How many may be begun, and when that changes without news.
    fn may_begin(&self, facts: Facts, now: Tick) -> (u32, Option<Tick>) {
        match &self.health {
            Health::Well => (facts.may_begin, None),
            Health::Full(..) => (0, None),
            Health::Failing { why, .. } => match why.retry_at {
                Some(at) if now < at => (0, Some(at)),
                // One at a time until one succeeds.
                Some(_) => (facts.may_begin.min(1_u32.saturating_sub(facts.coming)), None),
                None => (facts.may_begin, None),
            },
        }
    }

    fn shrink(&mut self, target: u32, facts: Facts, now: Tick) -> u32 {
        let over = facts.warm.saturating_sub(target);
        if over == 0 || facts.waiting > 0 {
            self.surplus = None;
            return 0;
        }
        let (since, least) = self
            .surplus
            .map_or((now, over), |(since, least)| (since, least.min(over)));
        if now.since(since) < SURPLUS {
            self.surplus = Some((since, least));
            return 0;
        }
        self.surplus = (over > least).then_some((now, over - least));
        least
    }

    fn rate_at(&self, now: Tick) -> f64 {
        let over = now.since(self.counted_at).as_secs_f64() / ARRIVALS_OVER.as_secs_f64();
        self.rate * (-over).exp()
    }

    /// Expected arrivals during one lead time.
    fn mean(&self, now: Tick) -> f64 {
        self.rate_at(now) * self.lead.unwrap_or(0.0)
    }

    fn demand(&self, now: Tick) -> u32 {
        let mean = self.mean(now);
        if mean < NO_DEMAND {
            return 0;
        }
        ceil(mean + 2.0 * mean.sqrt())
    }

    /// When the demand alone will have fallen below `target`: with m + 2 sqrt(m) = target - 1, sqrt(m) is
    /// sqrt(target) - 1, and m falls by e in [`ARRIVALS_OVER`].
    fn steps_down_at(&self, target: u32, now: Tick) -> Option<Tick> {
        let mean = self.mean(now);
        let then = (f64::from(target).sqrt() - 1.0).powi(2).max(NO_DEMAND);
        let wait = ARRIVALS_OVER.as_secs_f64() * (mean / then).ln().max(0.0);
        // A little later, so that rounding does not wake us just before.
        let wait = Duration::try_from_secs_f64(wait).ok()? + Duration::from_millis(10);
        Some(now.plus(wait))
    }
}

/// The pause after `failures` in a row, of which the first costs nothing: half of it fixed, half of it by chance.
fn pause(failures: u32, jitter: f64) -> Duration {
    let doubled = PAUSE
        .saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(16)))
        .min(PAUSE_MAX);
    doubled.mul_f64(0.5 + 0.5 * jitter.clamp(0.0, 1.0))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float casts saturate, and NaN is 0: a demand beyond u32 is as good as u32::MAX"
)]
fn ceil(x: f64) -> u32 {
    x.ceil() as u32
}
