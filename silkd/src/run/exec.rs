//! The stream of one Exec: Started, output, Exit, OK.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt as _, Stream};
use sandbox_protocol::v1::{AgentWork, Chunk, ExecIn, ExecOut, ExecStart, Exit, Started, exec_out::M};
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::{
    ExecCtx, Job, Kind, Shared,
    command::{self, Plan, Timeout},
    core::{Core, Ends, Event},
    entry::micros,
    input::{self, Source, Stdin},
    job::Birth,
};
use crate::{
    clock,
    gate::{InputSeat, Permit},
    refusal::Refusal,
    tasks,
};

type Asleep = Pin<Box<dyn Future<Output = Refusal> + Send>>;

/// The answer to one Exec, polled by its connection: no task and no queue stands between the program's pipes and
/// HTTP/2. Dropped before the exit was told, it ends the program and all that it started, at once.
pub struct ExecStream {
    core: Core,
    told: Told,
    pump: Option<JoinHandle<()>>,
    trace: Option<Trace>,
    asleep: Asleep,
    _permit: Permit,
    _seat: Option<InputSeat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Started,
    All,
}

/// When the request came, for the counts that were asked for.
#[derive(Debug, Clone, Copy)]
struct Trace {
    arrived: Duration,
}

impl std::fmt::Debug for ExecStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecStream")
            .field("core", &self.core)
            .field("told", &self.told)
            .finish_non_exhaustive()
    }
}

/// A request that passed every check that starts nothing.
struct Ready {
    plan: Plan,
    ends: Ends,
    job: Arc<Job>,
    timeout: Option<Timeout>,
    asleep: Asleep,
    permit: Permit,
    seat: Option<InputSeat>,
}

fn prepare(shared: &Arc<Shared>, ctx: ExecCtx, mut first: ExecStart) -> Result<Ready, Refusal> {
    let command = command::of_start(&mut first)?;
    let user = shared.users().resolve(command::user_of(&command, &ctx.claim))?;
    let wanted = command::plan(&command, &ctx.base_env, &ctx.claim, user)?;
    let seat = first.stdin.then(|| ctx.gate.input()).transpose()?;
    Ok(Ready {
        ends: Ends {
            stdin: first.stdin,
            merge: wanted.merge,
            tty: wanted.tty,
        },
        asleep: Box::pin(ctx.gate.hibernated()),
        job: shared.admit(Birth {
            kind: Kind::Exec,
            argv: wanted.argv,
            uid: wanted.uid,
            keep: wanted.keep,
        })?,
        plan: wanted.plan,
        timeout: wanted.timeout,
        permit: ctx.gate,
        seat,
    })
}

/// Starts the program of `first`. Cancel safe: what is not awaited to its end does not run, or not for long.
pub(super) async fn exec(
    shared: Arc<Shared>,
    ctx: ExecCtx,
    first: ExecStart,
    mut input: Streaming<ExecIn>,
) -> Result<ExecStream, Refusal> {
    let trace = first.trace.then(|| Trace {
        arrived: clock::since_boot(),
    });
    let Ready {
        plan,
        ends,
        job,
        timeout,
        asleep,
        permit,
        seat,
    } = prepare(&shared, ctx, first)?;
    let (core, stdin) = Core::start(&shared, plan, ends, job.clone()).await?;
    let stdin = match ends.tty {
        Some(_screen) => Stdin::terminal(stdin, ends.stdin),
        None => Stdin::pipe(stdin),
    };
    // Most clients have closed their half by now; then no task is needed for it.
    let source = match input.message().now_or_never() {
        Some(Ok(None)) => Source::over(),
        Some(Ok(Some(early))) => Source::open(Some(early), input),
        Some(Err(status)) => return Err(input::broken(&status)),
        None => Source::open(None, input),
    };
    let pump = (!source.is_over() || stdin.has_more() || timeout.is_some())
        .then(|| tasks::spawn(input::pump(job, source, stdin, timeout)));
    Ok(ExecStream {
        core,
        told: Told::Nothing,
        pump,
        trace,
        asleep,
        _permit: permit,
        _seat: seat,
    })
}

impl ExecStream {
    fn work(&self, trace: Trace, exit: &Exit) -> AgentWork {
        let account = self.core.job().account();
        let begun = account.begun.unwrap_or(trace.arrived);
        let wall = account
            .cloned
            .map(|cloned| cloned + Duration::from_micros(exit.wall_us));
        let short = |time: Duration| u32::try_from(micros(time)).unwrap_or(u32::MAX);
        AgentWork {
            clones: 1,
            leaves_taken: u32::from(self.core.job().shared().contains()),
            tasks_spawned: u32::from(self.pump.is_some()),
            rings_built: 0,
            reads: self.core.reads(),
            writes: account.writes,
            start_us: short(begun.saturating_sub(trace.arrived)),
            run_us: short(wall.unwrap_or(begun).saturating_sub(begun)),
        }
    }

    fn tell(&mut self, event: Event) -> M {
        let chunk = |data| Chunk { data };
        match event {
            Event::Stdout(data) => M::Stdout(chunk(data)),
            Event::Stderr(data) => M::Stderr(chunk(data)),
            Event::Exit(record) => {
                self.told = Told::All;
                let mut exit = record.on_the_wire();
                exit.work = self.trace.map(|trace| self.work(trace, &exit));
                M::Exit(exit)
            }
        }
    }
}

impl Stream for ExecStream {
    type Item = Result<ExecOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        match this.told {
            Told::Nothing => {
                this.told = Told::Started;
                let job = this.core.job();
                let started = Started {
                    id: job.id(),
                    pid: job.pid_u32(),
                };
                return Poll::Ready(Some(Ok(ExecOut {
                    m: Some(M::Started(started)),
                })));
            }
            Told::Started => {}
            Told::All => return Poll::Ready(None),
        }
        if let Poll::Ready(refusal) = this.asleep.as_mut().poll(cx) {
            this.told = Told::All;
            return Poll::Ready(Some(Err(refusal.into())));
        }
        match std::task::ready!(this.core.poll(cx)) {
            Ok(event) => {
                let m = this.tell(event);
                Poll::Ready(Some(Ok(ExecOut { m: Some(m) })))
            }
            Err(refusal) => {
                this.told = Told::All;
                Poll::Ready(Some(Err(refusal.into())))
            }
        }
    }
}

impl Drop for ExecStream {
    fn drop(&mut self) {
        // It holds nothing that needs more than being dropped; the runtime joins it.
        if let Some(pump) = &self.pump {
            pump.abort();
        }
    }
}
