//! The log: one line an event on stderr, as JSON or text.
//!
//! Whoever logs never waits for who reads: lines go through a bounded queue to a thread of their own, and what does
//! not fit is counted. A warning or error that repeats is told once a second, with a count.

use std::{
    collections::HashMap,
    fmt,
    io::{self, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use serde_json::json;
use tokio::sync::mpsc;
use tracing::{Event, Level, Metadata, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    fmt::MakeWriter,
    layer::{Context, SubscriberExt as _},
    reload,
};

use crate::{
    clock::{Clock, Tick},
    tasks,
};

/// Lines that wait for the writer; some 1 MiB, a second of a very busy daemon. More are dropped and counted.
const LINES: usize = 4_096;
/// How long one fault is silent after it was told.
const QUIET: Duration = Duration::from_secs(1);
/// The writer's pause after a batch: who logs meanwhile wakes nobody. Without it every claim's line woke the writer's
/// thread, and a stop waits no longer for it than this.
const REST: Duration = Duration::from_millis(5);
/// Bytes written by one call at most, and the room for lines that wait for it.
const BATCH: usize = 64 * 1024;

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is none.
    #[error("{filter:?} is not a log filter")]
    Filter {
        /// What was said.
        filter: String,
        /// Why.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The writer could not start.
    #[error("cannot start the log's thread")]
    Thread(#[source] io::Error),
    /// This process has a log already.
    #[error("a log is installed already")]
    Twice(#[source] tracing::subscriber::SetGlobalDefaultError),
    /// The log has stopped.
    #[error("the log has stopped")]
    Stopped(#[source] reload::Error),
}

/// How a log is started.
#[derive(Debug, Clone, Copy)]
pub struct LogOptions<'a> {
    /// `log.filter`.
    pub filter: &'a str,
    /// `SANDBOXD_LOG`, which wins over it for good.
    pub overriding: Option<&'a str>,
    /// An object a line, else text.
    pub json: bool,
    /// Colours; only for text on a terminal.
    pub colours: bool,
}

/// The log of this process.
#[derive(Debug)]
pub struct Logging {
    filter: reload::Handle<EnvFilter, Registry>,
    overridden: bool,
    queue: Lines,
    writer: JoinHandle<()>,
}

impl Logging {
    /// Starts the log of this process on stderr.
    ///
    /// # Errors
    /// A wrong filter, no thread, or a log is there already.
    pub fn start(options: LogOptions<'_>) -> Result<Self, LogError> {
        let (queue, receiver) = Lines::new();
        let (subscriber, filter) = subscriber(options, queue.clone(), Clock::host())?;
        let lost = Arc::clone(&queue.lost);
        let writer = tasks::thread("log", move || {
            write_lines(receiver, &lost, options.json, io::stderr())
        })
        .map_err(LogError::Thread)?;
        tracing::subscriber::set_global_default(subscriber).map_err(LogError::Twice)?;
        Ok(Self {
            filter,
            overridden: options.overriding.is_some(),
            queue,
            writer,
        })
    }

    /// Takes another filter. `false`: `SANDBOXD_LOG` was set and stays in force.
    ///
    /// # Errors
    /// It is no filter, and the old one stays.
    pub fn set_filter(&self, filter: &str) -> Result<bool, LogError> {
        let filter = parse(filter)?;
        if self.overridden {
            return Ok(false);
        }
        self.filter.reload(filter).map_err(LogError::Stopped)?;
        Ok(true)
    }

    /// Lines dropped so far because nobody read them fast enough.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.queue.lost.load(Ordering::Relaxed)
    }

    /// Writes what waits and ends the writer; what is logged later is dropped. Blocks until it is written, unless
    /// nobody reads and the queue is full.
    pub fn stop(self) {
        if self.queue.send.try_send(Item::Stop).is_ok() {
            // A panic of the writer has nowhere left to be told.
            drop(self.writer.join());
        }
    }
}

/// Logs panics as errors, with their place, in addition to what they end.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("a value that is no text");
        let place = panic.location().map(ToString::to_string);
        tracing::error!(place = place.as_deref().unwrap_or("unknown"), "panic: {message}");
    }));
}

fn parse(filter: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|source| LogError::Filter {
            filter: filter.to_owned(),
            source,
        })
}

type Handle = reload::Handle<EnvFilter, Registry>;

fn subscriber(
    options: LogOptions<'_>,
    lines: Lines,
    clock: Clock,
) -> Result<(impl Subscriber + Send + Sync + use<>, Handle), LogError> {
    let (filter, handle) = reload::Layer::new(parse(options.overriding.unwrap_or(options.filter))?);
    let limit = Limit {
        clock,
        lines: lines.clone(),
        json: options.json,
        faults: Mutex::default(),
        due: AtomicU64::new(u64::MAX),
    };
    let layer = tracing_subscriber::fmt::layer().with_writer(lines);
    let layer = if options.json {
        layer.json().flatten_event(true).with_current_span(false).boxed()
    } else {
        layer.with_ansi(options.colours).boxed()
    };
    let subscriber = Registry::default().with(filter).with(limit).with(layer);
    Ok((subscriber, handle))
}

#[derive(Debug)]
enum Item {
    Line(Vec<u8>),
    Stop,
}

/// The way to the writer.
#[derive(Debug, Clone)]
struct Lines {
    send: mpsc::Sender<Item>,
    lost: Arc<AtomicU64>,
}

impl Lines {
    fn new() -> (Self, mpsc::Receiver<Item>) {
        let (send, receive) = mpsc::channel(LINES);
        let lost = Arc::default();
        (Self { send, lost }, receive)
    }

    fn line(&self, line: Vec<u8>) {
        if self.send.try_send(Item::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Write for &Lines {
    // A line comes as one write: the layer formats it whole first.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Lines;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

fn write_lines(mut lines: mpsc::Receiver<Item>, lost: &AtomicU64, json: bool, mut out: impl Write) {
    let mut told = 0;
    let mut batch = Vec::new();
    let mut going = true;
    while going {
        let mut next = lines.blocking_recv();
        loop {
            match next {
                Some(Item::Line(line)) => batch.extend_from_slice(&line),
                Some(Item::Stop) | None => going = false,
            }
            if !going || batch.len() >= BATCH {
                break;
            }
            let Ok(item) = lines.try_recv() else { break };
            next = Some(item);
        }
        let now = lost.load(Ordering::Relaxed);
        if now > told {
            batch.extend_from_slice(lost_lines(now - told, json).as_bytes());
            told = now;
        }
        // A broken stderr cannot be told to anybody.
        drop(out.write_all(&batch));
        batch.clear();
        if going {
            #[expect(
                clippy::disallowed_methods,
                reason = "the pause itself is wanted: lines gather meanwhile"
            )]
            std::thread::sleep(REST);
        }
    }
}

fn lost_lines(count: u64, json: bool) -> String {
    let message = "log lines were lost";
    if json {
        format!(
            "{}\n",
            json!({ "level": "WARN", "message": message, "count": count })
        )
    } else {
        format!(" WARN {message} count={count}\n")
    }
}

/// Lets a warning or error through once a second per place in the code, and tells how many it kept back.
struct Limit {
    clock: Clock,
    lines: Lines,
    json: bool,
    /// By callsite, of which a program has a fixed number.
    faults: Mutex<HashMap<Identifier, Fault>>,
    /// The earliest tick at which a count is due, or the end of time.
    due: AtomicU64,
}

struct Fault {
    told: Tick,
    kept_back: u64,
    metadata: &'static Metadata<'static>,
}

impl Limit {
    fn admit(&self, metadata: &'static Metadata<'static>) -> bool {
        let now = self.clock.tick();
        if now.as_nanos() >= self.due.load(Ordering::Relaxed) {
            self.tell_counts(now);
        }
        if *metadata.level() > Level::WARN {
            return true;
        }
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(fault) = faults.get_mut(&metadata.callsite()) else {
            let fault = Fault {
                told: now,
                kept_back: 0,
                metadata,
            };
            faults.insert(metadata.callsite(), fault);
            return true;
        };
        if now.since(fault.told) >= QUIET {
            fault.told = now;
            return true;
        }
        fault.kept_back += 1;
        self.due
            .fetch_min(fault.told.plus(QUIET).as_nanos(), Ordering::Relaxed);
        false
    }

    /// Tells what was kept back and is due.
    fn tell_counts(&self, now: Tick) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = Tick::from_nanos(u64::MAX);
        for fault in faults.values_mut().filter(|fault| fault.kept_back > 0) {
            if now.since(fault.told) >= QUIET {
                self.lines.line(self.count(fault));
                fault.kept_back = 0;
            } else {
                due = due.min(fault.told.plus(QUIET));
            }
        }
        self.due.store(due.as_nanos(), Ordering::Relaxed);
    }

    fn count(&self, fault: &Fault) -> Vec<u8> {
        let at = self.clock.wall();
        let (level, target) = (fault.metadata.level(), fault.metadata.target());
        let line = fault.metadata.line().unwrap_or_default();
        let count = fault.kept_back;
        if self.json {
            let told = json!({
                "timestamp": at.to_string(), "level": level.as_str(), "target": target, "line": line,
                "message": "the same fault again", "count": count,
            });
            format!("{told}\n").into_bytes()
        } else {
            format!("{at} {level:>5} {target}: the same fault again count={count} line={line}\n").into_bytes()
        }
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit").finish_non_exhaustive()
    }
}

// As a layer of the whole subscriber and not as a filter of the writing layer: tracing-subscriber 0.3 forgets to clear
// what a layer's own filter said of an event that nobody wanted, and the next event is then lost.
impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        self.admit(event.metadata())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{clock::WallTime, telemetry::GuestText};

    fn options(json: bool) -> LogOptions<'static> {
        LogOptions {
            filter: "info",
            overriding: None,
            json,
            colours: false,
        }
    }

    /// What `log` logs, by a clock that it may move.
    fn logged(options: LogOptions<'_>, log: impl FnOnce(&Clock, &Handle)) -> Vec<String> {
        let clock = Clock::manual(Tick::from_nanos(0), WallTime::from_micros(0));
        let (lines, mut receiver) = Lines::new();
        let (subscriber, handle) = subscriber(options, lines, clock.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || log(&clock, &handle));
        let mut logged = Vec::new();
        while let Ok(Item::Line(line)) = receiver.try_recv() {
            logged.push(String::from_utf8(line).unwrap());
        }
        logged
    }

    #[test]
    fn a_repeated_fault_is_told_once_a_second_with_a_count() {
        let fault = || tracing::warn!("disk is slow");
        let lines = logged(options(true), |clock, _| {
            for _ in 0..1_000 {
                fault();
            }
            tracing::warn!("something else");
            clock.advance(QUIET);
            // Any event brings the count that is due.
            tracing::info!("all is well");
            fault();
        });
        let parsed: Vec<serde_json::Value> = lines
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let told: Vec<_> = parsed
            .iter()
            .map(|line| (line["message"].as_str().unwrap(), line["count"].as_u64()))
            .collect();
        assert_eq!(
            told,
            [
                ("disk is slow", None),
                ("something else", None),
                ("the same fault again", Some(999)),
                ("all is well", None),
                ("disk is slow", None),
            ]
        );
    }

    #[test]
    fn a_line_is_one_line_whatever_a_guest_says() {
        for json in [true, false] {
            let lines = logged(options(json), |_, _| {
                let said = GuestText::head(b"x\n\x1b[31mERROR forged");
                tracing::info!(console = %said, "guest ended");
            });
            assert_eq!(lines.len(), 1);
            assert_eq!(lines[0].matches('\n').count(), 1, "{lines:?}");
            assert!(!lines[0].contains('\u{1b}'));
        }
    }

    #[test]
    fn the_filter_can_change_and_the_environment_wins() {
        let lines = logged(options(false), |_, handle| {
            tracing::debug!("unheard");
            handle.reload(parse("debug").unwrap()).unwrap();
            tracing::debug!("heard");
        });
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("heard") && lines[0].contains("DEBUG"));
        let overriding = LogOptions {
            overriding: Some("error"),
            ..options(false)
        };
        assert!(logged(overriding, |_, _| tracing::warn!("unheard")).is_empty());
        assert!(matches!(parse("a=b=c"), Err(LogError::Filter { .. })));
    }

    #[test]
    fn what_does_not_fit_is_counted_and_the_writer_ends() {
        let (lines, receiver) = Lines::new();
        for _ in 0..LINES + 5 {
            lines.line(b"line\n".to_vec());
        }
        let lost = Arc::clone(&lines.lost);
        assert_eq!(lost.load(Ordering::Relaxed), 5);
        drop(lines);
        let mut out = Vec::new();
        write_lines(receiver, &lost, true, &mut out);
        let out = String::from_utf8(out).unwrap();
        assert_eq!(out.matches("line\n").count(), LINES);
        assert!(out.contains("log lines were lost") && out.contains("\"count\":5"));
    }
}
