//! The lane thread: inside the namespace from its start to its end, it alone has the netlink sockets, makes TAPs and
//! binds what doors listen on. Who wants something of it asks by an order; what a slot does is noted beside it.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use rustix::io::Errno;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, mpsc, oneshot, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    NetError,
    filter::Filter,
    heal::{News, Watch},
    links::{Links, Queue},
    netlink::{self, Family, fault},
    place::{Hold, enter_or_make, no_foreign, settle},
    ruleset,
    slot::{Event, Laid, SlotCounts, Slots},
    taken::{Doors, Taken},
    tap_slot,
};
use crate::{clock::Clock, clock::Tick, names::SlotNumber, sys, tasks, telemetry::chain, words::Name, work};

/// Orders that wait, at most; who gives one more waits for room. A refill gives two for a sandbox, one after the other.
const ORDERS: usize = 64;
/// How long a slot that drains is waited for: those that are well are free within milliseconds.
const DRAINS: Duration = Duration::from_secs(1);
/// Pause between two looks at the generation, for news that never came.
const LOOK: Duration = Duration::from_secs(5);
/// Until laying ahead is tried again when the kernel refused: a refill lays what it needs itself.
const AHEAD_AGAIN: Duration = Duration::from_secs(10);
/// Pause between two tries to put the table back.
const AGAIN: Duration = Duration::from_millis(100);
/// Tampering is told in the log once in this time at most, with its count.
const TELL: Duration = Duration::from_secs(1);

/// Which lane.
#[derive(Debug, Clone)]
pub struct Options {
    /// `net.namespace`.
    pub namespace: Name,
    /// `net.slots`, at least 1.
    pub slots: u16,
    /// Slots that sandboxes of an earlier daemon have: [`Lane::adopt`] gives them out again, and nothing else does.
    pub held: BTreeSet<SlotNumber>,
    /// Time.
    pub clock: Clock,
}

/// How the lane is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The packet filter is in force. While it is not, all TAPs are down and no slot is handed out.
    pub locked: bool,
    /// How often somebody else changed the packet filter.
    pub tampered: u64,
}

type Answer<T> = oneshot::Sender<(Result<T, NetError>, Work)>;

/// What an order cost, counted where it was given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    messages: u64,
    binds: u64,
}

/// What the thread is asked for.
#[derive(Debug)]
pub(super) enum Order {
    Lay { count: usize, reply: Answer<()> },
    Attach { slot: SlotNumber, reply: Answer<File> },
    Bind { slot: SlotNumber, reply: Answer<Doors> },
}

/// What thread and callers share.
#[derive(Debug)]
pub(super) struct Shared {
    slots: Mutex<Slots>,
    /// Of an earlier daemon, and not adopted yet.
    held: Mutex<BTreeSet<SlotNumber>>,
    /// A slot's state changed.
    changed: Notify,
    /// One became free, or the packet filter is in force again.
    freed: watch::Sender<u64>,
    /// How many are to be laid, whoever has them.
    ahead: AtomicUsize,
    clock: Clock,
    orders: mpsc::Sender<Order>,
    count: u16,
}

impl Shared {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        // Nothing panics under it, and every change is whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a slot's doors have a policy: nothing that the thread has to know of.
    pub(super) fn tell_armed(&self, slot: SlotNumber) -> Result<(), NetError> {
        let told = self.slots().tell(slot, Event::Armed, self.clock.tick());
        told.map_err(|_out_of_place| NetError::OutOfPlace { slot })
    }

    /// Wakes those who were refused.
    fn tell_freed(&self) {
        self.freed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Notes what happened to a slot.
    pub(super) fn tell(&self, slot: SlotNumber, event: Event) -> Result<(), NetError> {
        let told = self.slots().tell(slot, event, self.clock.tick());
        self.changed.notify_one();
        told.map_err(|_out_of_place| NetError::OutOfPlace { slot })
    }

    /// Gives an order and waits for its outcome. Cancelled: it is carried out all the same.
    pub(super) async fn order<T>(&self, order: impl FnOnce(Answer<T>) -> Order) -> Result<T, NetError> {
        let (reply, answer) = oneshot::channel();
        if self.orders.send(order(reply)).await.is_err() {
            return Err(NetError::Ended);
        }
        let Ok((outcome, cost)) = answer.await else {
            return Err(NetError::Ended);
        };
        work::count(work::Kind::NetlinkMessages, cost.messages);
        work::count(work::Kind::Binds, cost.binds);
        outcome
    }
}

/// A lane that is in force. Dropping it ends the thread and waits for that, as long as one order takes; table and TAPs stay.
#[derive(Debug)]
pub struct Lane {
    shared: Arc<Shared>,
    status: watch::Receiver<Status>,
    end: CancellationToken,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Lane {
    /// Makes what is missing of namespace and table, takes over the TAPs that are there, and watches.
    ///
    /// # Errors
    /// Not root, a kernel that lacks something, a namespace that leads somewhere or is another daemon's. Cancelled: the
    /// thread ends by itself.
    pub async fn open(options: Options) -> Result<Self, NetError> {
        let (orders, given) = mpsc::channel(ORDERS);
        let mut slots = Slots::new(options.slots);
        for slot in &options.held {
            slots.hold(*slot);
        }
        let shared = Arc::new(Shared {
            slots: Mutex::new(slots),
            held: Mutex::new(options.held),
            changed: Notify::new(),
            freed: watch::Sender::new(0),
            ahead: AtomicUsize::new(0),
            clock: options.clock,
            orders,
            count: options.slots,
        });
        let end = CancellationToken::new();
        let (ready, begun) = oneshot::channel();
        let (namespace, here, ending) = (options.namespace, Arc::clone(&shared), end.clone());
        let thread = tasks::thread("net lane", move || run(&namespace, here, given, &ending, ready))
            .map_err(|error| NetError::io("start a thread", None, error))?;
        let status = begun.await.unwrap_or(Err(NetError::Ended))?;
        Ok(Self {
            shared,
            status,
            end,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// How it is now, and news of that.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Slots by state.
    #[must_use]
    pub fn slots(&self) -> SlotCounts {
        self.shared.slots().counts()
    }

    /// Makes TAPs until there are `count`, or as many as the lane may have.
    ///
    /// # Errors
    /// The first that could not be made; the others are.
    pub async fn lay(&self, count: usize) -> Result<(), NetError> {
        self.shared.order(|reply| Order::Lay { count, reply }).await
    }

    /// Has TAPs made until there are `count`, or as many as the lane may have, one by one and behind whatever else the lane
    /// is asked for. Neither waits nor fails: who takes a slot that has none yet has it made. A lower number takes none away.
    pub fn lay_ahead(&self, count: usize) {
        if self.shared.ahead.swap(count, Ordering::Relaxed) < count {
            self.shared.changed.notify_one();
        }
    }

    /// News from now on for those whom [`take`](Self::take) refused: a slot became free, or the packet filter is in force
    /// again. The value has no meaning but that it differs.
    #[must_use]
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.shared.freed.subscribe()
    }

    /// Whether the packet filter is in force, as far as is known.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.status.borrow().locked
    }

    /// The slot of a sandbox of an earlier daemon, whose VMM has its TAP; once.
    ///
    /// # Errors
    /// It is not held, or beyond what the lane may have now.
    pub fn adopt(&self, slot: SlotNumber) -> Result<Taken, NetError> {
        if slot.0 >= self.shared.count {
            return Err(NetError::NoSlot {
                slots: self.shared.count,
            });
        }
        let is_held = self
            .shared
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&slot);
        if is_held {
            Ok(Taken::adopted(Arc::clone(&self.shared), slot))
        } else {
            Err(NetError::OutOfPlace { slot })
        }
    }

    /// A free slot; none if none is on its way to be free either.
    async fn free(&self) -> Option<SlotNumber> {
        // From before the look, so that none that becomes free behind it goes unseen.
        let mut freed = self.shared.freed.subscribe();
        loop {
            let (slot, wait) = {
                let mut slots = self.shared.slots();
                (slots.take(), slots.any_draining())
            };
            if slot.is_some() || !wait {
                return slot;
            }
            // Its sender is ours.
            drop(freed.changed().await);
        }
    }

    /// A free slot, with its TAP; where all are in use, one that is on its way back is waited for a little. Cancelled: it
    /// drains.
    ///
    /// # Errors
    /// No slot is free, the packet filter is not in force, the kernel's.
    pub async fn take(&self) -> Result<Taken, NetError> {
        if !self.is_locked() {
            return Err(NetError::Unlocked);
        }
        let slot = timeout(DRAINS, self.free()).await.ok().flatten();
        let slot = slot.ok_or(NetError::NoSlot {
            slots: self.shared.count,
        })?;
        let mut taken = Taken::new(Arc::clone(&self.shared), slot);
        taken.attached(self.shared.order(|reply| Order::Attach { slot, reply }).await?);
        Ok(taken)
    }

    /// Ends the thread and waits for it. Table and TAPs stay. Cancel safe.
    pub async fn stop(&self) {
        self.end.cancel();
        let mut status = self.status.clone();
        // Its sender goes with the thread.
        while status.changed().await.is_ok() {}
        self.join();
    }

    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the lane thread panicked");
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.end.cancel();
        self.join();
    }
}

type Ready = oneshot::Sender<Result<watch::Receiver<Status>, NetError>>;

fn run(
    namespace: &Name,
    shared: Arc<Shared>,
    orders: mpsc::Receiver<Order>,
    end: &CancellationToken,
    ready: Ready,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| NetError::io("start a runtime", None, error));
    let served = runtime.and_then(|runtime| {
        let _inside = runtime.enter();
        let desk = Desk::open(namespace, shared)?;
        Ok((runtime, desk))
    });
    match served {
        Ok((runtime, desk)) => {
            // Whoever opened it may have left; then nobody would end it.
            if ready.send(Ok(desk.status.subscribe())).is_ok() {
                runtime.block_on(desk.serve(orders, end));
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    }
}

/// What the thread has.
#[derive(Debug)]
struct Desk {
    filter: Filter,
    links: Links,
    news: AsyncFd<std::os::fd::OwnedFd>,
    watch: Watch,
    status: watch::Sender<Status>,
    shared: Arc<Shared>,
    /// Of the slots that are free.
    queues: HashMap<SlotNumber, Queue>,
    told: Option<Tick>,
    /// Nothing is laid ahead before that.
    ahead_at: Tick,
    _hold: Hold,
}

impl Drop for Desk {
    fn drop(&mut self) {
        // However the thread ends: without it nothing watches.
        self.status.send_modify(|status| status.locked = false);
    }
}

impl Desk {
    fn open(namespace: &Name, shared: Arc<Shared>) -> Result<Self, NetError> {
        let hold = Hold::take(namespace)?;
        enter_or_make(namespace)?;
        settle()?;
        let mut links = Links::open()?;
        no_foreign(namespace, &mut links)?;
        // News first: what happens behind our commit is not missed.
        let failed = |errno| NetError::io("hear of the packet filter", None, fault(errno));
        let news = netlink::listen(Family::Netfilter, ruleset::CHANGES).map_err(failed)?;
        let news = sys::watch(news, Interest::READABLE)
            .map_err(|error| NetError::io("hear of the packet filter", None, error))?;
        let mut filter = Filter::open()?;
        let watch = Watch::new(filter.replace()?);
        let now = shared.clock.tick();
        for link in links.list()? {
            let held = |slot: &SlotNumber| {
                shared
                    .held
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .contains(slot)
            };
            if let Some(slot) = tap_slot(&link.name).filter(|slot| !held(slot)) {
                shared.slots().found(slot, now);
            }
        }
        // They may be down from a day when the table was lost.
        links.raise()?;
        Ok(Self {
            filter,
            links,
            news,
            watch,
            status: watch::Sender::new(Status {
                locked: true,
                tampered: 0,
            }),
            shared,
            queues: HashMap::new(),
            told: None,
            ahead_at: now,
            _hold: hold,
        })
    }

    async fn serve(mut self, mut orders: mpsc::Receiver<Order>, end: &CancellationToken) {
        let mut look = tokio::time::interval(LOOK);
        let mut again = tokio::time::interval(AGAIN);
        again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.lay_due();
            let now = self.shared.clock.tick();
            let ahead = self.next_ahead();
            let rest = ahead.map(|_slot| self.ahead_at);
            let next = [self.shared.slots().next(), rest].into_iter().flatten().min();
            let next = next.map(|next| next.since(now));
            let ahead = ahead.filter(|_slot| self.ahead_at <= now);
            let shared = Arc::clone(&self.shared);
            tokio::select! {
                biased;
                () = end.cancelled() => return,
                ready = self.news.readable() => {
                    if let Ok(mut ready) = ready {
                        ready.clear_ready();
                    }
                    self.hear();
                }
                _ = look.tick() => self.look(),
                _ = again.tick(), if !self.watch.locked() => self.heal(),
                () = shared.changed.notified() => {}
                () = tokio::time::sleep(next.unwrap_or(LOOK)) => {}
                order = orders.recv() => match order {
                    Some(order) => self.carry_out(order),
                    None => return,
                },
                // Last: whoever waits for something is served between any two.
                () = std::future::ready(()), if ahead.is_some() => self.lay_ahead(ahead, now),
            }
        }
    }

    /// Reads all news, and puts the table back if any of them is not ours.
    fn hear(&mut self) {
        let mut tampered = false;
        loop {
            match netlink::receive(self.news.get_ref()) {
                Ok(replies) => {
                    tampered |= replies
                        .iter()
                        .filter_map(|reply| ruleset::generation(reply.kind, &reply.body))
                        .any(|seen| self.watch.tampered(News::Generation(seen)));
                }
                Err(Errno::AGAIN) => break,
                // ENOBUFS says that some were dropped; whatever else it is, we have not heard.
                Err(_lost) => {
                    tampered |= self.watch.tampered(News::Lost);
                    break;
                }
            }
        }
        if tampered {
            self.tampered();
        }
    }

    fn look(&mut self) {
        let seen = self.filter.generation().map_or(News::Lost, News::Generation);
        if self.watch.tampered(seen) {
            self.tampered();
        }
    }

    fn tampered(&mut self) {
        self.status.send_modify(|status| status.tampered += 1);
        let now = self.shared.clock.tick();
        if self.told.is_none_or(|told| now.since(told) >= TELL) {
            self.told = Some(now);
            let times = self.status.borrow().tampered;
            tracing::error!(
                times,
                "lane_lock_lost: somebody changed the packet filter of the guests' network; it is put back"
            );
        }
        self.heal();
    }

    /// Puts the table back, or takes every TAP down.
    fn heal(&mut self) {
        let was_locked = self.watch.locked();
        let healed = self.filter.replace().and_then(|own| {
            if self.watch.healed(own) {
                self.links.raise()?;
                tracing::info!("the packet filter of the guests' network is in force again");
            }
            Ok(())
        });
        if let Err(error) = healed {
            self.watch.failed();
            let lowered = self.links.lower();
            if was_locked {
                tracing::error!(error = %chain(&error), "the packet filter cannot be put back: every TAP goes down");
            }
            if let Err(error) = lowered {
                tracing::error!(error = %chain(&error), "TAPs cannot be taken down either");
            }
        }
        let locked = self.watch.locked();
        let is_news = self
            .status
            .send_if_modified(|status| std::mem::replace(&mut status.locked, locked) != locked);
        if is_news && locked {
            self.shared.tell_freed();
        }
    }

    /// Lays the slots whose doors and VMM are gone.
    fn lay_due(&mut self) {
        let now = self.shared.clock.tick();
        let due = self.shared.slots().due(now);
        for slot in due {
            let laid = match self.links.lay(slot, self.watch.locked()) {
                Ok(queue) => {
                    self.queues.insert(slot, queue);
                    Laid::Done
                }
                Err(error) => {
                    tracing::debug!(%slot, error = %chain(&error), "a network slot is not free yet");
                    Laid::NotYet
                }
            };
            self.shared.slots().laid(slot, laid, now);
            if laid == Laid::Done {
                self.shared.tell_freed();
            }
            // A link takes milliseconds, and there may be a thousand: news of the table do not wait for them.
            self.hear();
        }
    }

    fn carry_out(&mut self, order: Order) {
        let before = self.links.sent() + self.filter.sent();
        match order {
            Order::Lay { count, reply } => {
                let outcome = self.lay(count);
                self.answer(reply, outcome, before, 0);
            }
            Order::Attach { slot, reply } => {
                let outcome = self.attach(slot);
                self.answer(reply, outcome, before, 0);
            }
            Order::Bind { slot, reply } => {
                let outcome = Doors::bind(slot);
                self.answer(reply, outcome, before, Doors::COUNT);
            }
        }
    }

    fn answer<T>(&self, reply: Answer<T>, outcome: Result<T, NetError>, before: u64, binds: u64) {
        let messages = self.links.sent() + self.filter.sent() - before;
        // Who no longer waits gets nothing: descriptors close, and the slot drains by its own guard.
        drop(reply.send((outcome, Work { messages, binds })));
    }

    fn lay(&mut self, count: usize) -> Result<(), NetError> {
        let missing = self.shared.slots().missing(count);
        let mut outcome = Ok(());
        for slot in missing {
            outcome = outcome.and(self.lay_new(slot));
        }
        outcome
    }

    /// Lays one that has no TAP yet.
    fn lay_new(&mut self, slot: SlotNumber) -> Result<(), NetError> {
        let laid = self.links.lay(slot, self.watch.locked());
        let laid = laid.map(|queue| drop(self.queues.insert(slot, queue)));
        let result = if laid.is_ok() { Laid::Done } else { Laid::NotYet };
        self.shared.slots().laid(slot, result, self.shared.clock.tick());
        if laid.is_ok() {
            self.shared.tell_freed();
        }
        self.hear();
        laid
    }

    /// The next to be laid ahead; none while the packet filter is not in force.
    fn next_ahead(&self) -> Option<SlotNumber> {
        let ahead = self.shared.ahead.load(Ordering::Relaxed);
        let missing = self.shared.slots().missing(ahead);
        missing.first().copied().filter(|_slot| self.watch.locked())
    }

    fn lay_ahead(&mut self, slot: Option<SlotNumber>, now: Tick) {
        let laid = slot.map_or(Ok(()), |slot| self.lay_new(slot));
        if let Err(error) = laid {
            self.ahead_at = now.plus(AHEAD_AGAIN);
            tracing::warn!(error = %chain(&error), "a network slot cannot be laid ahead");
        }
    }

    fn attach(&mut self, slot: SlotNumber) -> Result<File, NetError> {
        match self.queues.remove(&slot) {
            Some(queue) if self.links.is(slot, &queue) => Ok(queue.file),
            // Somebody deleted it: it is made again.
            Some(_) | None => self.links.lay(slot, self.watch.locked()).map(|queue| queue.file),
        }
    }
}
