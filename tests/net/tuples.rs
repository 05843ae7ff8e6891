//! Guests whose connections are equal to the last bit, and whose policies are not.

use std::{collections::BTreeMap, sync::Arc};

use harness::eventually;
use sandbox_protocol::id::{ClaimId, SandboxId};
use sandboxd::{
    clock::Clock,
    egress::{Door, Egress, PoolTerms, Settings},
    net::{HTTP_PORT, State},
    policy::{Effect, Layer, Mode, RuleFields},
    telemetry::metrics::Metrics,
    words::{Name, OPERATOR},
};

use crate::{
    bench::Bench,
    frames::{ACK, SYN, Segment, segment},
    wire::Wire,
};

/// As many as a daemon has slots.
const GUESTS: u16 = 1_000;
/// The port that all of them dial from.
const PORT: u16 = 40_000;
const ASKS: &[u8] = b"GET http://denied.test/ HTTP/1.1\r\nhost: denied.test\r\n\r\n";
const PUSH: u8 = 8;

/// A door that denies everything, by a rule of this name.
fn door(egress: &Egress, rule: &str) -> Door {
    let name: Name = rule.parse().unwrap();
    let fields = RuleFields {
        id: rule.into(),
        effect: Effect::Deny,
        host: vec!["*".into()],
        ..RuleFields::default()
    };
    let layer = Layer::new(Mode::Enforce, vec![fields], 1).unwrap();
    egress
        .book()
        .set(BTreeMap::from([(name.clone(), Arc::new(layer))]), BTreeMap::new());
    let terms = PoolTerms {
        policy: Some(name.clone()),
        requires_claim_layer: false,
    };
    egress.book().set_pool(&name, terms);
    let door = egress.door(SandboxId::from_random([1; 16]));
    let sides = egress.book().sides(Some(&name), OPERATOR, None);
    door.arm(ClaimId::from_random([2; 16]), OPERATOR.into(), Some(name), sides);
    door
}

/// Opens a connection and asks.
fn ask(wire: &mut Wire) {
    let syn = Segment::syn(PORT, HTTP_PORT);
    wire.send(&syn.frame());
    let answer = loop {
        let (answer, _) = segment(&wire.next()).expect("only TCP comes");
        if answer.flags == SYN | ACK {
            break answer;
        }
    };
    assert_eq!((answer.to.1, answer.ack), (PORT, syn.seq + 1), "{answer:?}");
    let at = Segment {
        flags: ACK,
        seq: answer.ack,
        ack: answer.seq.wrapping_add(1),
        ..syn
    };
    wire.send(&at.frame());
    let asks = Segment {
        flags: ACK | PUSH,
        ..at
    };
    wire.send(&asks.frame_with(ASKS));
}

/// The rule that the answer names.
fn rule(wire: &mut Wire) -> String {
    loop {
        let frame = wire.next();
        let (_, data) = segment(&frame).expect("only TCP comes");
        let text = String::from_utf8_lossy(&frame[frame.len() - data..]).into_owned();
        if let Some(line) = text
            .lines()
            .find_map(|line| line.strip_prefix("sandbox-deny-rule: "))
        {
            return line.to_owned();
        }
        assert_eq!(data, 0, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_equal_four_tuples() {
    let bench = Bench::new(GUESTS).await;
    let egress = Egress::new(Settings::default(), Metrics::new().door, Clock::host());
    let mut guests = Vec::new();
    for number in 0..GUESTS {
        let (taken, wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        let rule = format!("r{number}");
        let door = door(&egress, &rule);
        door.listen(doors.http, doors.socks5).unwrap();
        taken.arm().unwrap();
        guests.push((taken, wire, door, rule));
    }
    // All are open at once before the first is answered to its end.
    for (_, wire, ..) in &mut guests {
        ask(wire);
    }
    for (_, wire, _, expected) in &mut guests {
        assert_eq!(rule(wire), *expected);
    }
    // The next guest of a slot dials from the same port at once.
    let mut nexts = Vec::new();
    for (taken, wire, old, _) in guests.drain(..20) {
        old.stop().await;
        let draining = taken.release();
        draining.doors_shut().unwrap();
        drop(wire);
        draining.vmm_gone().unwrap();
        let free = || async { (bench.lane().slots().get(State::Free) == 1).then_some(()) };
        eventually("the slot is free", free).await;
        let (taken, mut wire) = bench.take().await;
        let doors = taken.bind().await.unwrap();
        let next = door(&egress, "next");
        next.listen(doors.http, doors.socks5).unwrap();
        ask(&mut wire);
        assert_eq!(rule(&mut wire), "next");
        nexts.push((taken, wire, next));
    }
    for (_, _, door) in &nexts {
        door.stop().await;
    }
    for (_, _, door, _) in &guests {
        door.stop().await;
    }
}
