//! The stream of one Exec: Started, output, Exit, OK.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::Stream;
use sandbox_protocol::{
    limits::CHUNK_OUT,
    reason::Reason,
    v1::{Chunk, ExecIn, ExecOut, ExecStart, Exit, OnDisconnect, Started, exec_out::M},
};
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

use super::{
    ExecCtx, Job, Kind, Shared,
    command::{self, Timeout, Wanted},
    core::{Core, Ends, Event},
    detached::{self, Naming, RETAIN},
    input::{self, End, Source, Stdin},
    job::Birth,
    log::Side,
    logs::{Follow, Item, Reader},
    seat::Seat,
    time::Time,
};
use crate::{
    clock,
    gate::{InputSeat, Permit},
    refusal::Refusal,
    tasks,
};

type Asleep = Pin<Box<dyn Future<Output = Refusal> + Send>>;

/// The answer to one Exec, polled by its connection: no task and no queue stands between the program's pipes and
/// HTTP/2. Dropped before the exit was told, it ends the program and all that it started, at once; or leaves it,
/// detached, where that was asked for or the sandbox goes to sleep.
pub struct ExecStream {
    job: Arc<Job>,
    from: From,
    told: Told,
    pump: Option<JoinHandle<Result<(), Refusal>>>,
    pumped: bool,
    trace: Option<Trace>,
    /// What is watched beside the input.
    timeout: Option<Timeout>,
    asleep: Asleep,
    permit: Permit,
    _seat: Option<InputSeat>,
}

/// Where output comes from.
#[derive(Debug)]
enum From {
    Program(Box<Core>),
    /// The program waits for this reader of its log.
    Log(Reader),
    /// It goes on without us.
    Nothing,
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
            .field("from", &self.from)
            .field("told", &self.told)
            .finish_non_exhaustive()
    }
}

/// A request that passed every check that starts nothing.
struct Ready {
    wanted: Wanted,
    ends: Ends,
    asleep: Asleep,
    permit: Permit,
    seat: Option<InputSeat>,
    /// It is to go on without its caller.
    naming: Option<Naming>,
}

fn prepare(shared: &Shared, ctx: ExecCtx, mut first: ExecStart) -> Result<Ready, Refusal> {
    let command = command::taken(&mut first.command)?;
    let naming = match command::on_disconnect(&first)? {
        OnDisconnect::Unspecified | OnDisconnect::Kill => None,
        OnDisconnect::Detach => Some(Naming::of(&first.name, "", first.log_bytes, 0)?),
    };
    let user = shared.users().resolve(command::user_of(&command, &ctx.claim))?;
    let wanted = command::plan(&command, &ctx.base_env, &ctx.claim, user)?;
    let seat = first.stdin.then(|| ctx.gate.input()).transpose()?;
    Ok(Ready {
        ends: Ends {
            stdin: first.stdin,
            merge: wanted.merge,
            tty: wanted.tty,
        },
        wanted,
        asleep: Box::pin(ctx.gate.hibernated()),
        permit: ctx.gate,
        seat,
        naming,
    })
}

/// Starts the program of `first`. Cancel safe: what is not awaited to its end does not run, or not for long.
pub(super) async fn exec(
    shared: Arc<Shared>,
    ctx: ExecCtx,
    first: ExecStart,
    input: Streaming<ExecIn>,
) -> Result<ExecStream, Refusal> {
    let trace = first.trace.then(|| Trace {
        arrived: clock::since_boot(),
    });
    let Ready {
        wanted,
        ends,
        asleep,
        permit,
        seat,
        naming,
    } = prepare(&shared, ctx, first)?;
    let (plan, timeout) = (wanted.plan, wanted.timeout);
    let birth = Birth::new(Kind::Exec, wanted.argv, wanted.uid, wanted.keep);
    let (job, from, stdin, time) = match naming {
        None => {
            let job = shared.admit(birth)?;
            let (core, stdin) = Core::start(&shared, plan, ends, job.clone()).await?;
            (job, From::Program(Box::new(core)), stdin, Time::new(timeout))
        }
        Some(naming) => {
            let (job, owned) = detached::admit(&shared, &birth, &naming)?;
            let (core, stdin) = Core::start(&shared, plan, ends, job.clone()).await?;
            let (reader, _extent) = shared.logs.reader(job.id(), None, Follow::Hold)?;
            owned.log(core, Time::new(timeout));
            (job, From::Log(reader), stdin, Time::new(None))
        }
    };
    let mut stream = ExecStream {
        job: job.clone(),
        from,
        told: Told::Nothing,
        pump: None,
        pumped: false,
        trace,
        timeout,
        asleep,
        permit,
        _seat: seat,
    };
    let source = Source::look(input, End::ClosesStdin)?;
    let mut stdin = Stdin::new(Seat::first(&job, stdin)).typed(ends.stdin);
    if source.is_over() {
        stdin.nobody_gives();
    }
    if !source.is_over() || stdin.has_more() || !time.is_over() {
        let stays = stream.stays();
        stream.pumped = true;
        stream.pump = Some(tasks::spawn(async move {
            let fed = input::pump(job.clone(), source, stdin, time).await;
            // At once, whether or not the client still reads.
            if fed.is_err() && !stays {
                job.forsake();
            }
            fed
        }));
    }
    Ok(stream)
}

impl ExecStream {
    /// Whether the program goes on without this stream.
    const fn stays(&self) -> bool {
        matches!(self.from, From::Log(_))
    }

    fn tell_exit(&mut self, mut exit: Exit) -> M {
        self.told = Told::All;
        let reads = match &self.from {
            From::Program(core) => core.reads(),
            From::Log(_) | From::Nothing => 0,
        };
        exit.work = self
            .trace
            .map(|trace| self.job.work(trace.arrived, self.pumped, reads, exit.wall_us));
        M::Exit(exit)
    }

    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<M, Refusal>> {
        let said = |side, data| match side {
            Side::Stdout => M::Stdout(Chunk { data }),
            Side::Stderr => M::Stderr(Chunk { data }),
        };
        Poll::Ready(match &mut self.from {
            From::Program(core) => match ready!(core.poll(cx)) {
                Event::Said(side, data) => Ok(said(side, data)),
                Event::Exit(record) => Ok(self.tell_exit(record.on_the_wire())),
            },
            From::Log(reader) => match ready!(reader.poll(cx, CHUNK_OUT)) {
                Item::Piece(piece) => Ok(said(piece.side, piece.data.into())),
                Item::Gap { from, to } => Err(lost(self.job.id(), from, to)),
                Item::End => match self.job.record() {
                    Some(record) => Ok(self.tell_exit(record.on_the_wire())),
                    None => Err(lost(self.job.id(), 0, 0)),
                },
            },
            From::Nothing => return Poll::Pending,
        })
    }

    /// What the client did wrong, if it did.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Refusal> {
        let Some(pump) = &mut self.pump else {
            return Poll::Pending;
        };
        let ended = ready!(Pin::new(pump).poll(cx));
        self.pump = None;
        match ended {
            Ok(Err(refusal)) => Poll::Ready(refusal),
            Ok(Ok(())) => Poll::Pending,
            Err(panic) => Poll::Ready(Refusal::new(Reason::AgentBug, panic.to_string())),
        }
    }
}

/// The log gave up bytes that this stream had not taken: there is no message for that in an Exec.
fn lost(id: u64, from: u64, to: u64) -> Refusal {
    let message = format!(
        "output {from} to {to} had to be dropped, since all logs together are full: process {id} goes on, attach to it"
    );
    Refusal::new(Reason::MemoryExhausted, message)
}

impl Stream for ExecStream {
    type Item = Result<ExecOut, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        match this.told {
            Told::Nothing => {
                this.told = Told::Started;
                let started = Started {
                    id: this.job.id(),
                    pid: this.job.pid_u32(),
                };
                return Poll::Ready(Some(Ok(ExecOut {
                    m: Some(M::Started(started)),
                })));
            }
            Told::Started => {}
            Told::All => return Poll::Ready(None),
        }
        let ended = match this.asleep.as_mut().poll(cx) {
            Poll::Ready(refusal) => Poll::Ready(refusal),
            Poll::Pending => this.poll_input(cx),
        };
        let output = match ended {
            Poll::Ready(refusal) => Err(refusal),
            Poll::Pending => ready!(this.poll_output(cx)),
        };
        Poll::Ready(Some(match output {
            Ok(m) => Ok(ExecOut { m: Some(m) }),
            Err(refusal) => {
                this.leave();
                this.told = Told::All;
                Err(refusal.into())
            }
        }))
    }
}

impl ExecStream {
    /// The stream ends before the program: the program is left, or ended.
    fn leave(&mut self) {
        if let Some(pump) = &self.pump {
            // It holds nothing that needs more than being dropped; the runtime joins it.
            pump.abort();
        }
        if self.told == Told::All {
            return;
        }
        match std::mem::replace(&mut self.from, From::Nothing) {
            From::Program(core) if self.permit.is_asleep() => {
                detached::detach(*core, self.timeout, Vec::new());
            }
            From::Log(_reader) => self.job.detach(RETAIN),
            // Dropped with its tree.
            From::Program(_core) => {}
            From::Nothing => {}
        }
    }
}

impl Drop for ExecStream {
    fn drop(&mut self) {
        self.leave();
    }
}
