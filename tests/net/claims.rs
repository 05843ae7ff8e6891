//! A daemon on lane guarded: slots taken, doors bound, armed, shut and given back with its sandboxes. What the daemon's
//! stub engine runs has the TAP of a real VMM, and a namespace of the test's is the guest behind it.

use std::{collections::BTreeSet, io::Write as _, time::Duration};

use harness::{Daemon, HANG, Setup, World, eventually, refused, within};
use sandbox_sdk::{
    Client, Reason, Sandbox,
    v1::{self, State, Work},
};
use sandboxd::{net, words::Name};

use crate::{
    bench::{Space, namespace},
    guest::{Guest, tap_of},
};

/// A daemon with a lane in a namespace of the test's own.
pub(crate) struct Node {
    daemon: Daemon,
    space: Space,
    world: Option<World>,
    /// Behind the daemon, which has the namespace until it is dead.
    _purge: Purge,
}

struct Purge(Name);

impl Drop for Purge {
    fn drop(&mut self) {
        // A test that fails is not told of this too.
        drop(net::purge(&self.0));
    }
}

impl Node {
    /// With so many slots, and warm sandboxes of pool `default`, which may reach `allowed.test`.
    async fn new(slots: u16, warm: u32, more: &str, faults: &str) -> Self {
        let world = World::start().await;
        let node = Self::to(&world, slots, warm, more, faults).await;
        Self {
            world: Some(world),
            ..node
        }
    }

    /// The same, whose guests may reach another world.
    pub(crate) async fn to(world: &World, slots: u16, warm: u32, more: &str, faults: &str) -> Self {
        let namespace = namespace();
        let config = format!(
            "net.namespace = \"{namespace}\"\nnet.slots = {slots}\npool.default.lane = \"guarded\"\n{}{more}",
            world.config()
        );
        let setup = Setup::stub().warm(warm).stub_faults(faults).config(&config);
        let daemon = setup.start().await;
        Self {
            daemon,
            space: Space::at(&net::pin(&namespace)),
            world: None,
            _purge: Purge(namespace),
        }
    }

    fn world(&self) -> &World {
        self.world.as_ref().expect("it was made with one")
    }

    /// A row of each sandbox in this state.
    async fn row(&self, state: State) -> v1::Sandbox {
        let rows = self
            .daemon
            .until_rows(|rows| rows.values().any(|row| row.state() == state))
            .await;
        rows.into_values().find(|row| row.state() == state).unwrap()
    }

    pub(crate) async fn client(&self) -> Client {
        self.daemon.client().await
    }

    /// The guest of a claim.
    pub(crate) async fn guest(&self, sandbox: &Sandbox) -> Guest {
        let row = self.daemon.until_state(sandbox.id(), State::Claimed).await;
        Guest::of(row.pid.unwrap())
    }

    fn url(&self, host: &str) -> String {
        format!("http://{host}.test:{}/", self.world().port())
    }

    /// Links of ours, by name and number.
    fn links(&self) -> BTreeSet<String> {
        let text = self.space.command("ip -o link show");
        let links = text
            .lines()
            .map(|line| line.split(':').take(2).collect::<String>());
        links.filter(|link| link.contains(net::PREFIX)).collect()
    }

    /// Sockets that listen in the lane's namespace.
    fn listeners(&self) -> usize {
        let listens = |line: &&str| line.split_whitespace().nth(3) == Some("0A");
        self.space.table("tcp").lines().filter(listens).count()
    }

    /// Waits until nobody listens there.
    async fn until_shut(&self) {
        let shut = || async { (self.listeners() == 0).then_some(()) };
        eventually("all doors are shut", shut).await;
    }
}

/// Doors that listen by TCP.
const DOORS: usize = 3;
const OK: &str = "HTTP/1.1 200 OK";
const NOT_ARMED: &str = "HTTP/1.1 403 not_armed";
const NOT_ALLOWED: &str = "HTTP/1.1 403 host_not_allowed";

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_claim_opens_the_doors_and_release_shuts_them() {
    let node = Node::new(4, 1, "", "").await;
    node.daemon.until_warm(1).await;
    // Before the claim: denied, and nobody was asked for the name.
    let warm = node.row(State::Warm).await;
    let guest = Guest::of(warm.pid.unwrap());
    assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(NOT_ARMED));
    assert_eq!(node.world().asked(), Vec::<String>::new());
    let client = node.client().await;
    let sandbox = client.claim("default").warm_only().wait(HANG).await.unwrap();
    assert_eq!(sandbox.id(), warm.sandbox);
    assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(OK));
    assert_eq!(guest.get(&node.url("other")).as_deref(), Some(NOT_ALLOWED));
    let target = format!("allowed.test:{}", node.world().port());
    let tunnel = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\nto and fro");
    let said = guest.said(tunnel).unwrap();
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    assert!(said.ends_with("to and fro"), "the guest ended first: {said}");
    assert!(!node.world().asked().iter().any(|name| name.starts_with("other")));
    sandbox.release().await.unwrap();
    node.daemon.until_state(&warm.sandbox, State::Gone).await;
    assert!(
        !guest.reaches(net::HTTP_PORT),
        "the doors of a sandbox that is gone are shut"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_no_policy_is_locked() {
    let namespace = namespace();
    let config = format!("net.namespace = \"{namespace}\"\nnet.slots = 4\npool.default.lane = \"guarded\"");
    let node = Node {
        daemon: Setup::stub().warm(1).config(&config).start().await,
        space: Space::at(&net::pin(&namespace)),
        world: Some(World::start().await),
        _purge: Purge(namespace),
    };
    let client = node.client().await;
    let sandbox = client.claim("default").wait(HANG).await.unwrap();
    let guest = node.guest(&sandbox).await;
    let said = guest.get(&node.url("allowed"));
    assert_eq!(said.as_deref(), Some("HTTP/1.1 403 no_policy"));
    for port in [22, 80, 8_080] {
        assert!(!guest.reaches(port), "{port}");
    }
    sandbox.release().await.unwrap();
}

/// Two pools on the one slot there is: what the one may reach the other may not, and neither learns of that.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_reuse_keeps_no_policy() {
    let more = "egress.policy.none.rules = []\n\
                pool.other.lane = \"guarded\"\npool.other.warm = 0\npool.other.egress = \"none\"\n";
    let node = Node::new(1, 0, more, "").await;
    let client = node.client().await;
    let mut taps = BTreeSet::new();
    for round in 0..50 {
        for (pool, expected) in [("default", OK), ("other", NOT_ALLOWED)] {
            // The slot may be that of a template's build, too.
            let claim = || async { client.claim(pool).wait(Duration::ZERO).await.ok() };
            let sandbox = eventually("the slot is free", claim).await;
            let guest = node.guest(&sandbox).await;
            taps.insert(guest.tap.clone());
            let said = guest.get(&node.url("allowed"));
            assert_eq!(said.as_deref(), Some(expected), "{pool} in round {round}");
            drop(guest);
            let id = sandbox.id().to_owned();
            sandbox.release().await.unwrap();
            node.daemon.until_state(&id, State::Gone).await;
        }
    }
    assert_eq!((taps.len(), node.links().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_waits_for_vmm_death() {
    let node = Node::new(1, 0, "", "").await;
    let client = node.client().await;
    let claim = async || client.claim("default").wait(Duration::ZERO).await;
    // The slot may be that of a template's build, too.
    let again = || async { claim().await.ok() };
    let sandbox = eventually("the slot is free", again).await;
    let row = node.daemon.until_state(sandbox.id(), State::Claimed).await;
    // Part of the VMM lives on, as one that hangs in a driver does: its TAP is not let go.
    let (queue, _name) = tap_of(row.pid.unwrap());
    assert_eq!(node.listeners(), DOORS);
    sandbox.release().await.unwrap();
    node.until_shut().await;
    node.daemon.until_state(&row.sandbox, State::Gone).await;
    // There is no other slot, and this one is given to nobody.
    refused(claim().await, Reason::Capacity);
    assert_eq!(node.listeners(), 0);
    drop(queue);
    eventually("the slot is free", again)
        .await
        .release()
        .await
        .unwrap();
}

/// With every slot in use claims are told so, and refill rests until one comes back: it asks for none meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slots_used_up_are_told_and_waited_for() {
    let node = Node::new(1, 1, "pool.default.warm_max = 1\n", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client.claim("default").warm_only().wait(HANG).await.unwrap();
    let pid = node.row(State::Claimed).await.pid.unwrap();
    let is_parked = |pool: &v1::Pool| pool.parked.is_some();
    let parked = node.daemon.until_pool("default", is_parked).await.parked.unwrap();
    assert_eq!((parked.reason.as_str(), parked.retry_at), ("CAPACITY", None));
    assert_eq!(parked.message, "all 1 network slots are in use");
    refused(
        client.claim("default").wait(Duration::ZERO).await,
        Reason::Capacity,
    );
    // Its VMM seems to live on: the node has room again, and the slot is not free.
    let (queue, _name) = tap_of(pid);
    let id = sandbox.id().to_owned();
    sandbox.release().await.unwrap();
    node.daemon.until_state(&id, State::Gone).await;
    drop(queue);
    let pool = node.daemon.until_warm(1).await;
    assert_eq!(pool.parked, None);
}

/// Cards are there before the sandboxes that will have them: one for each of the stock and each claim, and a tenth more.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slots_are_laid_ahead_of_refill() {
    let node = Node::new(8, 2, "pool.default.warm_max = 2\n", "").await;
    let laid = |count| {
        let node = &node;
        let there = move || async move { (node.links().len() == count).then_some(()) };
        eventually("the cards are there", there)
    };
    node.daemon.until_warm(2).await;
    laid(3).await;
    let client = node.client().await;
    let sandbox = client.claim("default").warm_only().wait(HANG).await.unwrap();
    node.daemon.until_warm(2).await;
    laid(4).await;
    // A pool of lane none needs none, and the number that there may be is the most.
    let spec = |name: &str, lane, warm| v1::PoolSpec {
        name: name.to_owned(),
        key: Some(v1::PoolKey {
            template: "default".to_owned(),
            lane: i32::from(lane),
            ..v1::PoolKey::default()
        }),
        warm,
        ..v1::PoolSpec::default()
    };
    client
        .pools()
        .apply(spec("none", v1::Lane::None, 1))
        .await
        .unwrap();
    node.daemon.until_pool("none", |pool| pool.warm == 1).await;
    assert_eq!(node.links().len(), 4);
    client
        .pools()
        .apply(spec("more", v1::Lane::Guarded, 40))
        .await
        .unwrap();
    laid(8).await;
    sandbox.release().await.unwrap();
}

/// Whatever step of a making fails: no link, neighbour, listener or slot is lost by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_failpoints_leave_nothing() {
    const SLOTS: u16 = 4;
    // The first machines are those of the template, and of the first that is warm.
    let faults = "fail clone 3-5,die 5,die 6,mute 8";
    let node = Node::new(SLOTS, 1, "pool.default.warm_max = 1\n", faults).await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let claim = async || client.claim("default").wait(Duration::ZERO).await;
    let mut failed = 0;
    for _ in 0..10 {
        match within(HANG, claim()).await {
            Ok(sandbox) => drop(sandbox.release().await.unwrap()),
            Err(_broken) => failed += 1,
        }
    }
    assert!(failed > 0, "the faults were met by claims too");
    // All slots can still be had at once, and no more.
    let mut all = Vec::new();
    let again = || async { claim().await.ok() };
    for _ in 0..SLOTS {
        all.push(eventually("a slot is free", again).await);
    }
    refused(claim().await, Reason::Capacity);
    let links = node.links();
    assert_eq!(links.len(), usize::from(SLOTS), "{links:?}");
    let neighbours = node.space.command("ip neigh show");
    assert_eq!(neighbours.lines().count(), usize::from(SLOTS), "{neighbours}");
    assert_eq!(node.listeners(), DOORS * usize::from(SLOTS));
    for sandbox in all {
        sandbox.release().await.unwrap();
    }
    node.daemon.until_warm(1).await;
    let one = || async { (node.listeners() == DOORS).then_some(()) };
    eventually("the doors of the warm one alone listen", one).await;
    assert_eq!(node.links(), links);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_restart_keeps_traffic() {
    let mut node = Node::new(4, 1, "", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client.claim("default").wait(HANG).await.unwrap();
    let (id, token) = (sandbox.id().to_owned(), sandbox.token().cloned());
    let guest = node.guest(&sandbox).await;
    assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(OK));
    node.daemon.until_warm(1).await;
    let before = node.links();
    drop(sandbox.keep());
    for _ in 0..2 {
        node.daemon.kill9().await;
        node.daemon.start_again().await;
        assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(OK));
        assert_eq!(guest.get(&node.url("other")).as_deref(), Some(NOT_ALLOWED));
        node.daemon.until_warm(1).await;
        assert_eq!(node.links(), before);
    }
    // The warm one denies as before, is claimed as before, and has a slot of its own.
    let client = node.client().await;
    let second = client.claim("default").warm_only().wait(HANG).await.unwrap();
    let its_guest = node.guest(&second).await;
    assert_ne!(its_guest.tap, guest.tap);
    assert_eq!(its_guest.get(&node.url("allowed")).as_deref(), Some(OK));
    drop((guest, its_guest));
    second.release().await.unwrap();
    client.sandbox(id.clone(), token).release().await.unwrap();
    node.daemon.until_state(&id, State::Gone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_claim_costs_no_bind_message_or_task() {
    let node = Node::new(4, 1, "", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client
        .claim("default")
        .trace()
        .warm_only()
        .wait(HANG)
        .await
        .unwrap();
    let Work {
        netlink_messages,
        binds,
        tasks_spawned,
        qmp_commands,
        guest_round_trips,
        ..
    } = *sandbox.work().unwrap();
    assert_eq!(
        [
            netlink_messages,
            binds,
            tasks_spawned,
            qmp_commands,
            guest_round_trips
        ],
        [0; 5]
    );
    sandbox.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lane_unlocked_is_refused_to_claims() {
    let node = Node::new(4, 1, "", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    // A table of our name that belongs to another process: the daemon cannot put its own back.
    let mut foreign = node.space.start("nft", "-i");
    let line = "delete table inet sandboxd; add table inet sandboxd { flags owner; }\n";
    foreign
        .stdin
        .as_mut()
        .unwrap()
        .write_all(line.as_bytes())
        .unwrap();
    let unlocked = || async {
        let claimed = client.claim("default").wait(Duration::ZERO).await;
        match claimed {
            Err(error) if error.is(Reason::LaneUnlocked) => Some(()),
            Err(error) => panic!("{error:?}"),
            Ok(early) => {
                early.release().await.unwrap();
                None
            }
        }
    };
    eventually("claims are refused", unlocked).await;
    drop(foreign.stdin.take());
    assert!(foreign.wait().unwrap().success());
    let claimed = || async { client.claim("default").wait(Duration::ZERO).await.ok() };
    let sandbox = eventually("claims are served again", claimed).await;
    let guest = node.guest(&sandbox).await;
    assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(OK));
    drop(guest);
    sandbox.release().await.unwrap();
}

/// Somebody deletes the cards while no daemon lives: what is claimed lives on, says so and can be released; what is warm is
/// handed out to nobody; and both slots are whole again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slot_taps_deleted_by_hand() {
    let mut node = Node::new(2, 1, "pool.default.warm_max = 1\n", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client.claim("default").warm_only().wait(HANG).await.unwrap();
    let (id, token) = (sandbox.id().to_owned(), sandbox.token().cloned());
    drop(sandbox.keep());
    node.daemon.until_warm(1).await;
    let warm = node.row(State::Warm).await;
    node.daemon.kill9().await;
    assert_eq!(node.links().len(), 2);
    for link in node.links() {
        let (_number, tap) = link.split_once(' ').unwrap();
        node.space.command(&format!("ip link delete {tap}"));
    }
    node.daemon.start_again().await;
    let row = node.row(State::Claimed).await;
    assert_eq!(row.sandbox, id);
    let conditions: Vec<_> = row
        .conditions
        .iter()
        .map(|one| (one.name.as_str(), one.count))
        .collect();
    assert_eq!(conditions, [("DOORS_LOST", 1)]);
    let client = node.client().await;
    assert!(!client.egress().get(&id).await.unwrap().linked);
    // The warm one is not handed out; another is made in its place, on its slot.
    node.daemon.until_state(&warm.sandbox, State::Gone).await;
    node.daemon.until_warm(1).await;
    client.sandbox(id.clone(), token).release().await.unwrap();
    node.daemon.until_state(&id, State::Gone).await;
    // Both slots serve.
    let mut held = Vec::new();
    for _ in 0..2 {
        let sandbox = client.claim("default").wait(HANG).await.unwrap();
        let guest = node.guest(&sandbox).await;
        assert_eq!(guest.get(&node.url("allowed")).as_deref(), Some(OK));
        held.push((sandbox, guest));
    }
    let taps: BTreeSet<_> = held.iter().map(|(_, guest)| guest.tap.clone()).collect();
    assert_eq!((taps.len(), node.links().len()), (2, 2));
}

/// However a guest comes to its door, and whatever it puts between: what it asks for is judged.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn door_judges_target_not_path() {
    let node = Node::new(4, 1, "", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client.claim("default").warm_only().wait(HANG).await.unwrap();
    let guest = node.guest(&sandbox).await;
    let proxy = guest.proxy();
    let port = node.world().port();
    let other = format!("other.test:{port}");
    let asked = [
        format!("GET http://{other}/ HTTP/1.1\r\nhost: allowed.test:{port}\r\n\r\n"),
        format!("CONNECT {other} HTTP/1.1\r\nhost: allowed.test:{port}\r\n\r\n"),
        format!(
            "GET http://{}:3128/ HTTP/1.1\r\nhost: a\r\n\r\n",
            net::HOST_ADDRESS
        ),
        // The door by the door, which would look like an address of its own.
        format!("CONNECT {}:3128 HTTP/1.1\r\nhost: a\r\n\r\n", net::HOST_ADDRESS),
        format!("CONNECT {}:3128 HTTP/1.1\r\nhost: a\r\n\r\n", net::GUEST_ADDRESS),
        format!("GET http://allowed.test:{port}/ HTTP/1.1\r\nhost: a\r\n\r\n"),
    ];
    let expected = [
        NOT_ALLOWED,
        NOT_ALLOWED,
        "HTTP/1.1 403 address_literal",
        "HTTP/1.1 403 address_literal",
        "HTTP/1.1 403 address_literal",
        OK,
    ];
    for (text, expected) in asked.iter().zip(expected) {
        for door in [net::HOST_ADDRESS, proxy] {
            let said = guest.said_by(door, text.clone()).unwrap();
            assert_eq!(said.lines().next(), Some(expected), "{text} by {door}");
        }
    }
    assert!(!node.world().asked().iter().any(|name| name.starts_with("other")));
    drop(guest);
    sandbox.release().await.unwrap();
}

/// Two restarts one behind the other: what the first bound is displaced by the second, and connections of before are in
/// nobody's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn door_rebind_twice_connects() {
    let mut node = Node::new(2, 1, "", "").await;
    node.daemon.until_warm(1).await;
    let client = node.client().await;
    let sandbox = client.claim("default").wait(HANG).await.unwrap();
    let (id, token) = (sandbox.id().to_owned(), sandbox.token().cloned());
    let guest = node.guest(&sandbox).await;
    drop(sandbox.keep());
    for round in 0..5 {
        let target = format!("allowed.test:{}", node.world().port());
        let head = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
        let before = guest.open(head);
        for _ in 0..2 {
            node.daemon.kill9().await;
            node.daemon.start_again().await;
        }
        assert_eq!(
            guest.get(&node.url("allowed")).as_deref(),
            Some(OK),
            "round {round}"
        );
        assert_eq!(
            guest.get(&node.url("other")).as_deref(),
            Some(NOT_ALLOWED),
            "round {round}"
        );
        drop(before);
    }
    drop(guest);
    node.client().await.sandbox(id, token).release().await.unwrap();
}
