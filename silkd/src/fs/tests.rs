//! Tests of the room: threads, steps, users.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures_util::StreamExt as _;
use sandbox_protocol::{reason::Reason, v1::ReadOut};
use tokio::sync::oneshot;

use super::{
    steps::{Made, Produce, Steps},
    workers::{Call, Cancel, Parked, Workers},
};
use crate::{
    gate::{Gate, Turn},
    refusal::Refusal,
    sys::Ids,
};

fn open_gate() -> Gate {
    let gate = Gate::new();
    gate.turn(Turn::Renew).unwrap();
    gate.turn(Turn::Renewed).unwrap();
    gate
}

fn call(gate: &Gate) -> Arc<Call> {
    Call::new(gate.permit().unwrap(), None, None)
}

/// Fails a test that hangs.
async fn within<F: Future>(future: F) -> F::Output {
    let patience = std::time::Duration::from_secs(60);
    tokio::time::timeout(patience, future).await.unwrap()
}

/// Says when it is dropped, and on which thread.
struct Told(Option<oneshot::Sender<Option<String>>>);

impl Told {
    fn new() -> (Self, oneshot::Receiver<Option<String>>) {
        let (tell, told) = oneshot::channel();
        (Self(Some(tell)), told)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let name = std::thread::current().name().map(str::to_owned);
        if let Some(tell) = self.0.take() {
            tell.send(name).ok();
        }
    }
}

struct Endless {
    made: Arc<AtomicUsize>,
    _told: Told,
}

impl Produce for Endless {
    type Item = ReadOut;

    fn next(&mut self, cancel: &Cancel) -> Result<Made<ReadOut>, Refusal> {
        cancel.check()?;
        self.made.fetch_add(1, Ordering::Relaxed);
        let data = vec![7; 64 * 1024].into();
        let m = Some(sandbox_protocol::v1::read_out::M::Data(data));
        Ok(Made::Item(ReadOut { m }))
    }
}

#[tokio::test]
async fn streams_that_nobody_reads_hold_no_thread_and_stay_small() {
    let (gate, workers) = (open_gate(), Workers::default());
    let made = Arc::new(AtomicUsize::new(0));
    let (mut streams, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let (told, end) = Told::new();
        let endless = Endless {
            made: made.clone(),
            _told: told,
        };
        let mut stream = within(Steps::open(&workers, call(&gate), |_| Ok(endless)))
            .await
            .unwrap();
        // One message is taken, which lets it work one batch ahead.
        within(stream.next()).await.unwrap().unwrap();
        streams.push(stream);
        ends.push(end);
    }
    for _ in 0..20 {
        within(workers.run(&call(&gate), |_| Ok(()))).await.unwrap();
    }
    assert!(
        made.load(Ordering::Relaxed) <= 80,
        "{made:?} chunks of 64 KiB for 40 streams"
    );
    drop(streams);
    for end in ends {
        assert_eq!(
            within(end).await.unwrap().as_deref(),
            Some("files"),
            "cleared up elsewhere"
        );
    }
    within(gate.idle()).await;
    workers.stop().await;
}

#[tokio::test]
async fn a_step_that_nobody_waits_for_ends_and_holds_the_gate_until_then() {
    let (gate, workers) = (open_gate(), Workers::default());
    let (began, begun) = oneshot::channel();
    let (told, end) = Told::new();
    let pending = workers.begin(&call(&gate), move |cancel| {
        began.send(()).unwrap();
        while !cancel.is_set() {
            std::thread::yield_now();
        }
        Ok(told)
    });
    within(begun).await.unwrap();
    assert_eq!(gate.open(), 1);
    drop(pending);
    assert_eq!(within(end).await.unwrap().as_deref(), Some("files"));
    within(gate.idle()).await;
    workers.stop().await;
}

#[tokio::test]
async fn a_panic_in_a_step_is_its_calls_alone() {
    let (gate, workers) = (open_gate(), Workers::default());
    for _ in 0..20 {
        let outcome: Result<(), Refusal> =
            within(workers.run(&call(&gate), |_| -> Result<(), Refusal> { panic!("on purpose") })).await;
        assert_eq!(outcome.unwrap_err().reason, Reason::AgentBug);
    }
    assert!(within(workers.run(&call(&gate), |_| Ok(()))).await.is_ok());
    within(gate.idle()).await;
    workers.stop().await;
    let late = workers.run(&call(&gate), |_| Ok(())).await;
    assert_eq!(late.unwrap_err().reason, Reason::NotReady);
}

#[tokio::test]
async fn the_queue_has_an_end_and_clearing_up_is_done_nevertheless() {
    let (gate, workers) = (open_gate(), Workers::default());
    let hold = Arc::new(std::sync::Barrier::new(9));
    let (here, mut held) = tokio::sync::mpsc::channel(8);
    let mut pending = Vec::new();
    for _ in 0..8 {
        let (hold, here) = (hold.clone(), here.clone());
        pending.push(workers.begin(&call(&gate), move |_| {
            here.blocking_send(()).unwrap();
            hold.wait();
            Ok(())
        }));
    }
    // A thread that comes late would make room in a queue that is full.
    for _ in 0..8 {
        within(held.recv()).await.unwrap();
    }
    let (told, end) = Told::new();
    let parked = Parked::new(&workers, &call(&gate), told);
    let refused = loop {
        match workers.begin(&call(&gate), |_| Ok(())) {
            Ok(more) => pending.push(Ok(more)),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refused.reason, Reason::StreamLimit);
    assert!(pending.len() >= 1024, "{}", pending.len());
    drop(parked);
    within(end).await.unwrap();
    hold.wait();
    for step in pending {
        within(step.unwrap()).await.unwrap();
    }
    workers.stop().await;
}

#[tokio::test]
async fn a_user_is_put_off_behind_each_step() {
    let (gate, workers) = (open_gate(), Workers::default());
    let ids = Ids {
        uid: 12_345,
        gid: 12_346,
        groups: vec![12_347],
    };
    let status = || {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::to_owned)
        };
        [line("Uid:"), line("Gid:"), line("Groups:")].map(Option::unwrap)
    };
    let before = status();
    let theirs = Call::new(gate.permit().unwrap(), Some(ids), None);
    for _ in 0..10 {
        let seen = within(workers.run(&theirs, move |_| {
            let user = status();
            let own = super::workers::as_silkd(|| Ok(status())).unwrap();
            Ok((user, own, status()))
        }));
        let (user, own, again) = seen.await.unwrap();
        assert_eq!(user[0].split_whitespace().next_back(), Some("12345"));
        assert_eq!(user[1].split_whitespace().next_back(), Some("12346"));
        assert_eq!(user[2].trim(), "12347");
        assert_eq!(own[..2], before[..2]);
        assert_eq!(again, user);
        let plain = within(workers.run(&call(&gate), move |_| Ok(status())))
            .await
            .unwrap();
        assert_eq!(plain, before);
    }
    workers.stop().await;
}
