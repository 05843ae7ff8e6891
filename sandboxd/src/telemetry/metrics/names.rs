//! Names and label values: interfaces, so each is listed here and nowhere else.

/// A closed set of label values.
pub(super) trait Label: Copy + Sized + 'static {
    /// All of them, in the order of their numbers.
    const ALL: &'static [Self];
    /// The value in a label.
    fn text(self) -> &'static str;
    /// Its place in [`ALL`](Self::ALL).
    fn index(self) -> usize;
}

macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// The text in a label.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl Label for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];

            fn text(self) -> &'static str {
                self.as_str()
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

labels! {
    /// A step of a claim (the walk of a claim, in its order).
    ClaimStep {
        /// Request decoded, caller known.
        Admit = "admit",
        /// Request key reserved, policy found.
        Key = "key",
        /// Taken from the stock.
        Take = "take",
        /// Waited in line.
        Wait = "wait",
        /// Made on demand.
        Make = "make",
        /// Record written.
        Record = "record",
        /// Handed over: the life posted, the lease in the heap.
        Hand = "hand",
        /// Environment and user set in the guest.
        Setup = "setup",
    }
}
labels! {
    /// A step of a refill.
    RefillStep {
        /// Place and intent: reservation and record.
        Reserve = "reserve",
        /// The machine starts.
        Start = "start",
        /// The agent answers.
        Link = "link",
        /// It has its own identity.
        Renew = "renew",
        /// Probed, recorded and put.
        Stock = "stock",
        /// All of them: the lead time.
        All = "all",
    }
}
labels! {
    /// How a claim or a refill ended.
    Outcome {
        /// It was served.
        Ok = "ok",
        /// It was refused with advice to come again, or with a mistake named.
        Refused = "refused",
        /// It failed.
        Failed = "failed",
        /// The caller left, or we stopped.
        Left = "left",
    }
}
labels! {
    /// States that sandboxes are counted by.
    SandboxState {
        /// On its way into the stock.
        Making = "making",
        /// In stock.
        Warm = "warm",
        /// Somebody's.
        Claimed = "claimed",
        /// Its end is under way.
        Ending = "ending",
        /// Ended by a fault that its claimer is still owed the news of.
        Failed = "failed",
        /// Cannot be trusted to be gone.
        Quarantined = "quarantined",
    }
}
labels! {
    /// Why a sandbox ended.
    EndedWhy {
        /// Its claimer released it.
        Released = "released",
        /// Its lease was over.
        LeaseOver = "lease_over",
        /// Its machine ended by itself.
        Exited = "exited",
        /// Its agent did not come back in time.
        LinkLost = "link_lost",
        /// It never became warm.
        MakeFailed = "make_failed",
        /// It left the stock and was nobody's.
        Abandoned = "abandoned",
        /// It was stock in surplus.
        Surplus = "surplus",
        /// It was stock that did not answer, or of an older template.
        Stale = "stale",
        /// Its pool was deleted, or the daemon drained.
        Drained = "drained",
        /// After a restart it could not be taken up.
        NotAdopted = "not_adopted",
        /// The host was booted.
        HostBooted = "host_booted",
        /// An operator ended it.
        Operator = "operator",
        /// A bug of the daemon.
        Bug = "bug",
    }
}
labels! {
    /// Which files of the audit.
    LedgerFile {
        /// Decisions and connections.
        Audit = "audit",
        /// What claims used.
        Usage = "usage",
    }
}
labels! {
    /// Where something is dropped rather than waited for.
    DroppedAt {
        /// Lines of the log.
        Log = "log",
        /// Events of a watcher that fell behind.
        Watch = "watch",
        /// Bytes of a guest's console.
        Console = "console",
    }
}

/// Claims that no tier served.
pub(super) const NO_TIER: &str = "none";

macro_rules! metrics {
    ($($variant:ident = $name:literal, $help:literal;)*) => {
        /// A metric; its name comes behind `sandboxd_`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Metric { $($variant,)* }

        impl Metric {
            #[cfg(test)]
            pub(super) const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub(super) const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            pub(super) const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)* }
            }
        }
    };
}

metrics! {
    ClaimSeconds = "claim_seconds", "Claims from decoded request to reply, by tier, pool and outcome";
    ClaimStepSeconds = "claim_step_seconds", "Steps of claims, by step, tier and pool";
    PoolWarm = "pool_warm", "Warm sandboxes in stock";
    PoolTarget = "pool_target", "Warm sandboxes that refill aims at";
    PoolMaking = "pool_making", "Sandboxes on their way into the stock";
    PoolWaiting = "pool_waiting", "Claims in line";
    PoolClaimed = "pool_claimed", "Sandboxes that are somebody's";
    PoolParked = "pool_parked", "1 while refill rests after failures or for want of room";
    RefillSeconds = "refill_seconds", "Steps of refills, by step and pool";
    Refills = "refills", "Refills, by pool and outcome";
    JournalAppendSeconds = "journal_append_seconds", "Appends to the journal";
    JournalSyncSeconds = "journal_sync_seconds", "Syncs of the journal";
    JournalBytes = "journal_bytes", "Bytes appended to the journal";
    JournalFailed = "journal_failed", "1 once a write or sync of the journal failed";
    Sandboxes = "sandboxes", "Sandboxes, by state";
    Ended = "ended", "Sandboxes that ended, by cause";
    EndingStuck = "ending_stuck", "Sandboxes whose end has failed at least once and is tried again";
    Dropped = "dropped", "Things dropped rather than waited for";
    BuildInfo = "build_info", "1, with version, engine and accelerator";
    MemoryBudget = "memory_budget_bytes", "Memory that guests may have";
    MemoryReserved = "memory_reserved_bytes", "Memory reserved for guests";
    SandboxesMax = "sandboxes_max", "Places for sandboxes";
    DoorDecisions = "door_decisions", "Decisions of doors, by door, lane, verdict and reason";
    DoorConnections = "door_connections", "Connections of guests to doors, by door and lane";
    DoorOpen = "door_open", "Connections of guests that are open, by door and lane";
    DoorBytes = "door_bytes", "Bytes between guests and doors, by lane and direction";
    DoorDialSeconds = "door_dial_seconds", "Dials of doors from the first address to a connection, or to none";
    AuditLines = "audit_lines", "Lines written, by file";
    AuditLost = "audit_lost", "Lines that were lost rather than waited for, by file";
    AuditFailing = "audit_failing", "1 while a file cannot be written";
    NetSlots = "net_slots", "Slots of lane guarded, by state";
    LaneLockLost = "lane_lock_lost", "Times that somebody else changed the packet filter of lane guarded";
    Ready = "ready", "1 while claims are taken";
}
