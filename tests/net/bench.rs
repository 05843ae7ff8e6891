//! Namespaces that the tests make, and what is looked at in them.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sandboxd::{
    clock::Clock,
    net::{self, Lane, Options, Taken},
    words::Name,
};
use serde_json::Value;

use crate::wire::Wire;

/// Beginning of the names of our namespaces; behind it stands the process that made one.
const OURS: &str = "sbt-";

type Job = Box<dyn FnOnce() + Send>;

/// A thread inside a network namespace, which does what it is told there.
pub(crate) struct Space {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Space {
    /// In a namespace of its own.
    pub(crate) fn new() -> Self {
        Self::after(|| sandboxd::sys::new_network_namespace().unwrap())
    }

    /// In one that is pinned.
    pub(crate) fn at(pin: &Path) -> Self {
        let pin = fs::File::open(pin).unwrap();
        Self::after(move || {
            use std::os::fd::AsFd as _;
            move_into_link_name_space(pin.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        })
    }

    fn after(enter: impl FnOnce() + Send + 'static) -> Self {
        let (jobs, given) = mpsc::channel::<Job>();
        let thread = std::thread::spawn(move || {
            enter();
            for job in given {
                job();
            }
        });
        let space = Self {
            jobs: Some(jobs),
            thread: Some(thread),
        };
        space.run(|| ());
        space
    }

    /// Does something there.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (reply, answer) = mpsc::channel();
        let job = Box::new(move || drop(reply.send(work())));
        self.jobs.as_ref().unwrap().send(job).unwrap();
        answer.recv().expect("the work there did not panic")
    }

    /// Does something there that goes on for as long as the test.
    pub(crate) fn beside(&self, work: impl FnOnce() + Send + 'static) {
        self.run(move || drop(std::thread::spawn(work)));
    }

    /// Runs a program there; it must succeed.
    pub(crate) fn command(&self, line: &str) -> String {
        let (outcome, text) = self.attempt(line);
        assert!(outcome, "{line}: {text}");
        text
    }

    /// Runs a program there. Whether it succeeded, and what it said.
    pub(crate) fn attempt(&self, line: &str) -> (bool, String) {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        self.run(move || {
            let output = Command::new(&words[0])
                .args(&words[1..])
                .output()
                .unwrap_or_else(|error| panic!("{} (`deploy/deps test` brings it): {error}", words[0]));
            let said = [&output.stdout[..], &output.stderr].concat();
            (output.status.success(), String::from_utf8(said).unwrap())
        })
    }

    /// Starts a program there that goes on.
    pub(crate) fn start(&self, program: &'static str, argument: &'static str) -> std::process::Child {
        self.run(move || {
            Command::new(program)
                .arg(argument)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap_or_else(|error| panic!("{program} (`deploy/deps test` brings it): {error}"))
        })
    }

    /// Sets a number below `/proc/sys/net`.
    pub(crate) fn set(&self, name: &str, value: &'static str) {
        let path = Path::new("/proc/sys/net").join(name);
        self.run(move || fs::write(path, value).unwrap());
    }

    /// What a file below `/proc/thread-self/net` says there.
    pub(crate) fn table(&self, name: &str) -> String {
        let path = Path::new("/proc/thread-self/net").join(name);
        self.run(move || fs::read_to_string(path).unwrap())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A job that panicked has failed the test already.
            drop(thread.join());
        }
    }
}

/// A name that no other test has. Needs root, and says so.
pub(crate) fn namespace() -> Name {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    assert!(
        rustix::process::geteuid().is_root(),
        "the layer `net` makes network namespaces: run it as root"
    );
    sweep();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{OURS}{}-{number}", std::process::id()).parse().unwrap()
}

/// Drops the namespaces of test processes that were killed.
fn sweep() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let pid = name.strip_prefix(OURS).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Another process may do it too.
            drop(net::purge(&name.parse().unwrap()));
        }
    }
}

/// A lane in a namespace of its own, dropped with all in it.
pub(crate) struct Bench {
    pub(crate) namespace: Name,
    pub(crate) space: Space,
    lane: Option<Lane>,
}

impl Bench {
    /// With this many slots, all laid.
    pub(crate) async fn new(slots: u16) -> Self {
        let bench = Self::bare(slots).await;
        bench.lane().lay(usize::from(slots)).await.unwrap();
        bench
    }

    /// With none laid yet.
    pub(crate) async fn bare(slots: u16) -> Self {
        let namespace = namespace();
        let lane = open(&namespace, slots).await;
        Self {
            space: Space::at(&net::pin(&namespace)),
            namespace,
            lane: Some(lane),
        }
    }

    pub(crate) fn lane(&self) -> &Lane {
        self.lane.as_ref().unwrap()
    }

    /// A slot and what its guest sees.
    pub(crate) async fn take(&self) -> (Taken, Wire) {
        let mut taken = self.lane().take().await.unwrap();
        let wire = Wire::new(taken.take_tap().unwrap());
        (taken, wire)
    }

    /// Ends the lane's thread; table and TAPs stay.
    pub(crate) async fn stop(&mut self) {
        if let Some(lane) = self.lane.take() {
            lane.stop().await;
        }
    }

    /// Our table as `nft` reads it, without its counters.
    pub(crate) fn ruleset(&self) -> String {
        self.space.command("nft -s list ruleset")
    }

    /// Packets that each rule has dropped, by chain, in order.
    pub(crate) fn drops(&self, chain: &str) -> Vec<u64> {
        let text = self.space.command("nft -j list table inet sandboxd");
        let all: Value = serde_json::from_str(&text).unwrap();
        let rules = all["nftables"].as_array().unwrap().iter();
        rules
            .map(|entry| &entry["rule"])
            .filter(|rule| rule["chain"] == chain)
            .filter_map(|rule| {
                let parts = rule["expr"].as_array().unwrap();
                parts.iter().find_map(|part| part["counter"]["packets"].as_u64())
            })
            .collect()
    }

    /// Our links, each with its number and whether it is up.
    pub(crate) fn links(&self) -> Vec<(String, u64, bool)> {
        let text = self.space.command("ip -j link show");
        let all: Value = serde_json::from_str(&text).unwrap();
        let links = all.as_array().unwrap().iter();
        links
            .map(|link| {
                let up = link["flags"].as_array().unwrap().iter().any(|flag| flag == "UP");
                let name = link["ifname"].as_str().unwrap().to_owned();
                (name, link["ifindex"].as_u64().unwrap(), up)
            })
            .filter(|(name, ..)| name.starts_with(net::PREFIX))
            .collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        drop(self.lane.take());
        // A test that fails is not told of this too.
        drop(net::purge(&self.namespace));
    }
}

/// Opens a lane.
pub(crate) async fn open(namespace: &Name, slots: u16) -> Lane {
    let options = Options {
        namespace: namespace.clone(),
        slots,
        held: Default::default(),
        clock: Clock::host(),
    };
    Lane::open(options).await.unwrap()
}
