use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use sandbox_protocol::{
    id::SandboxId,
    reason::{DOMAIN, Reason},
    v1::{
        self,
        agent_control_server::{AgentControl, AgentControlServer},
    },
};
use tonic::{Request, Response, Status, body::Body, codegen::BoxStream};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::*;
use crate::{
    clock::{Clock, Tick, WallTime},
    link::{
        Answer, Link,
        fake::{opened, reply, within},
    },
    work,
};

fn local(clock: &Clock) -> Link {
    Link::in_process(Arc::new(Local), clock.clone())
}

fn spec() -> RenewSpec {
    RenewSpec {
        mode: RenewMode::Clone,
        renew_id: "r1".into(),
        seed: [7; 32],
        sandbox: SandboxId::from_random([1; 16]),
        hostname: "sb-1".into(),
        ask_doors: false,
    }
}

#[tokio::test]
async fn the_local_agent_answers_all() {
    let host = Clock::host();
    let link = local(&host);
    let ((), counts) = work::traced(async {
        let renewed = Box::pin(renew(&link, spec(), &host)).await.unwrap();
        assert_eq!(renewed.generation, 1);
    })
    .await;
    assert_eq!(counts.get(work::Kind::GuestRoundTrips), 1);
    assert!(!clock(&link, &host).await.unwrap().stepped);
    quiesce(&link, Quiesce::Template, Duration::from_secs(1))
        .await
        .unwrap();
    resume(&link).await.unwrap();
    set_claim(&link, Vec::new(), Bytes::new()).await.unwrap();
    assert_eq!(adopt(&link).await.unwrap().state, State::Ready);
    assert_eq!(info(&link, &host).await.unwrap().state, State::Ready);
    power_off(&link).await.unwrap();
    let mut news = events(&link).await.unwrap();
    assert!(futures_util::poll!(std::pin::pin!(news.next())).is_pending());
}

#[tokio::test]
async fn a_program_runs_to_its_end() {
    let link = local(&Clock::host());
    let run = |argv: &'static [&'static str]| {
        let argv: Vec<Bytes> = argv
            .iter()
            .map(|arg| Bytes::from_static(arg.as_bytes()))
            .collect();
        let link = link.clone();
        async move {
            within(exec_once(&link, &argv, Duration::from_secs(5)))
                .await
                .unwrap()
        }
    };
    assert_eq!(run(&["/bin/true"]).await.ended, Ended::Code(0));
    assert_eq!(run(&["false"]).await.ended, Ended::Code(1));
    let ran = run(&["/bin/echo", "a", "b\x1b[31m"]).await;
    assert_eq!(ran.output, b"a b\x1b[31m\n");
    assert_eq!(ran.said().as_str(), "a b\\u{1b}[31m\\n");
}

#[test]
fn only_the_end_of_an_output_is_kept() {
    let all: Vec<u8> = (0..20_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    for chunk in [1, 100, 4095, 4096, 9000] {
        let mut tail = std::collections::VecDeque::new();
        for part in all.chunks(chunk) {
            exec::keep(&mut tail, part);
            assert!(tail.len() <= OUTPUT_KEPT);
        }
        assert_eq!(Vec::from(tail), all[20_000 - OUTPUT_KEPT..]);
    }
}

/// A silkd whose clock calls take the times given, and whose other calls refuse.
struct Slow {
    clock: Clock,
    takes: Mutex<Vec<u64>>,
    steps: AtomicU32,
}

#[derive(Clone)]
struct Shared(Arc<Slow>);

impl Answer for Shared {
    fn answer(
        &self,
        request: http::Request<Body>,
    ) -> Pin<Box<dyn Future<Output = http::Response<Body>> + Send>> {
        use tower_service::Service as _;
        let answer = AgentControlServer::new(self.clone()).call(request);
        Box::pin(async move { answer.await.unwrap() })
    }
}

impl Slow {
    fn pass(&self) {
        let millis = self.takes.lock().unwrap().remove(0);
        self.clock.advance(Duration::from_millis(millis));
    }
}

fn refusal() -> Status {
    let details = ErrorDetails::with_error_info("QUIESCE_BUSY", DOMAIN, std::collections::HashMap::new());
    Status::with_error_details(tonic::Code::FailedPrecondition, "open:\n\x1b[31mpid 7", details)
}

#[tonic::async_trait]
impl AgentControl for Shared {
    async fn quiesce(
        &self,
        _: Request<v1::ControlQuiesceRequest>,
    ) -> Result<Response<v1::ControlQuiesceReply>, Status> {
        Err(refusal())
    }

    async fn resume(
        &self,
        _: Request<v1::ControlResumeRequest>,
    ) -> Result<Response<v1::ControlResumeReply>, Status> {
        Err(refusal())
    }

    async fn renew(
        &self,
        request: Request<v1::ControlRenewRequest>,
    ) -> Result<Response<v1::ControlRenewReply>, Status> {
        let request = request.into_inner();
        assert_eq!((request.seed.len(), request.mode), (32, 2));
        self.0.pass();
        Ok(Response::new(v1::ControlRenewReply {
            generation: 3,
            guest_time: None,
            doors: None,
        }))
    }

    async fn adopt(
        &self,
        _: Request<v1::ControlAdoptRequest>,
    ) -> Result<Response<v1::ControlAdoptReply>, Status> {
        let condition = |name: &str| v1::Condition {
            name: name.into(),
            count: 1,
            last_at: None,
        };
        Ok(Response::new(v1::ControlAdoptReply {
            state: 2,
            generation: 3,
            sandbox_id: "nonsense".into(),
            conditions: ["OOM_KILL", "x\nforged", "DOORS_LOST", "OOM_KILL", "TMP_FULL"]
                .map(condition)
                .into(),
        }))
    }

    async fn clock(
        &self,
        _: Request<v1::ControlClockRequest>,
    ) -> Result<Response<v1::ControlClockReply>, Status> {
        self.0.steps.fetch_add(1, Ordering::Relaxed);
        self.0.pass();
        Ok(Response::new(v1::ControlClockReply {
            guest_time: None,
            stepped: true,
        }))
    }

    async fn set_claim(
        &self,
        _: Request<v1::ControlSetClaimRequest>,
    ) -> Result<Response<v1::ControlSetClaimReply>, Status> {
        Err(refusal())
    }

    async fn events(
        &self,
        _: Request<v1::ControlEventsRequest>,
    ) -> Result<Response<BoxStream<v1::ControlEvent>>, Status> {
        use v1::control_event::Event;
        let events = [
            None,
            Some(Event::LogLine(Bytes::from_static(b"\x1b[31mred"))),
            Some(Event::Dropped(4)),
        ];
        let events: Vec<_> = events
            .into_iter()
            .map(|event| Ok(v1::ControlEvent { event }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }

    async fn power_off(
        &self,
        _: Request<v1::ControlPowerOffRequest>,
    ) -> Result<Response<v1::ControlPowerOffReply>, Status> {
        Err(refusal())
    }
}

fn slow(takes: &[u64]) -> (Link, Arc<Slow>, Clock) {
    let clock = Clock::manual(Tick::from_nanos(1), WallTime::default());
    let slow = Arc::new(Slow {
        clock: clock.clone(),
        takes: Mutex::new(takes.to_vec()),
        steps: AtomicU32::new(0),
    });
    let link = Link::in_process(Arc::new(Shared(Arc::clone(&slow))), clock.clone());
    (link, slow, clock)
}

#[tokio::test]
async fn a_slow_renewal_sets_the_clock_again_until_it_is_sure() {
    for (takes, steps, within_ms) in [
        (&[400][..], 0, 400),
        (&[401, 3], 1, 3),
        (&[9_000, 500, 500, 10], 3, 10),
        (&[9_000, 501, 502, 503, 504, 505], 5, 505),
    ] {
        let (link, slow, clock) = slow(takes);
        let renewed = renew(&link, spec(), &clock).await.unwrap();
        assert_eq!(renewed.generation, 3);
        assert_eq!(
            renewed.clock_within,
            Duration::from_millis(within_ms),
            "{takes:?}"
        );
        assert_eq!(slow.steps.load(Ordering::Relaxed), steps, "{takes:?}");
    }
}

#[tokio::test]
async fn refusals_keep_their_reason_and_lose_their_colours() {
    let (link, _, _) = slow(&[]);
    let error = quiesce(&link, Quiesce::Template, Duration::from_secs(1))
        .await
        .unwrap_err();
    let AgentError::Refused {
        reason, code, said, ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert_eq!(*reason, Some(Reason::QuiesceBusy));
    assert_eq!(*code, tonic::Code::FailedPrecondition);
    assert_eq!(said.as_str(), "open:\\n\\u{1b}[31mpid 7");
    assert!(error.to_string().contains("QUIESCE_BUSY"), "{error}");
}

#[tokio::test]
async fn inv_16_what_a_guest_tells_is_cut_and_sorted() {
    let (link, _, _) = slow(&[]);
    let adopted = adopt(&link).await.unwrap();
    assert_eq!(adopted.sandbox, None);
    let names: Vec<_> = adopted.conditions.iter().map(|c| c.name).collect();
    assert_eq!(names, [ConditionName::OomKill, ConditionName::TmpFull]);

    let mut news = events(&link).await.unwrap();
    assert_eq!(
        news.next().await.unwrap(),
        Some(News::Log(GuestText::head(b"\x1b[31mred")))
    );
    assert_eq!(news.next().await.unwrap(), Some(News::Dropped(4)));
    assert_eq!(news.next().await.unwrap(), None);
}

#[tokio::test]
async fn a_lost_link_is_told_as_such() {
    let (opened, guest) = opened(Clock::host(), |_request, respond| async move {
        drop(respond);
    })
    .await;
    opened.link.close();
    let error = within(resume(&opened.link)).await.unwrap_err();
    assert!(matches!(error, AgentError::Link { .. }), "{error:?}");
    within(guest).await.unwrap();
}

#[tokio::test]
async fn a_reply_that_is_too_large_is_refused_not_stored() {
    let (opened, _guest) = opened(Clock::host(), |_request, mut respond| async move {
        let mut out = respond.send_response(reply(), false).unwrap();
        // A message that says it is 1 GiB long.
        drop(out.send_data(Bytes::from_static(&[0, 0x40, 0, 0, 0]), false));
        std::future::pending::<()>().await;
    })
    .await;
    let error = within(adopt(&opened.link)).await.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Refused {
                code: tonic::Code::OutOfRange,
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_never_ends_a_program_is_late() {
    let (opened, _guest) = opened(Clock::host(), |request, mut respond| async move {
        let _out = respond.send_response(reply(), false).unwrap();
        let _request = request;
        std::future::pending::<()>().await;
    })
    .await;
    let error = exec_once(&opened.link, &[Bytes::from_static(b"x")], Duration::from_secs(3))
        .await
        .unwrap_err();
    assert!(matches!(error, AgentError::Late { .. }), "{error:?}");
}
