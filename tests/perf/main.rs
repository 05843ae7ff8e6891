//! `sandbox-bench`: what the daemon costs, measured from outside. Counts first; timings are ratios between arms of one
//! run, interleaved A B B A on one connection. Writes `<part>.json` and `<part>.md` into the folder of `--out`.
//!
//! The client has one thread and drives its connection on it, so that the empty call, which everything is compared
//! with, is as cheap as it can be.

mod agent;
mod agent_files;
mod agent_io;
mod arm;
mod claim;
mod daemon;
mod egress;
mod guest;
mod host;
mod proxies;
mod report;
mod report_egress;
mod rows;
mod stock;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail};

use self::proxies::tls::Certificates;

const USAGE: &str =
    "usage: sandbox-bench --out DIR --bin DIR --image DIR [--no-vms] [--write-docs] [claim|agent|egress]";

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Bench {
    /// Where results go, and the state of the daemons that are measured: a disk.
    pub(crate) out: PathBuf,
    /// Where the programs are.
    pub(crate) bin: PathBuf,
    /// The guests' image.
    pub(crate) image: PathBuf,
    /// Whether virtual machines are measured too.
    pub(crate) vms: bool,
    write_docs: bool,
    /// Empty: every part.
    parts: Vec<Part>,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Claim,
    Agent,
    Egress,
}

impl Part {
    const ALL: [Self; 3] = [Self::Claim, Self::Agent, Self::Egress];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Agent => "agent",
            Self::Egress => "egress",
        }
    }
}

impl Bench {
    fn of(args: impl Iterator<Item = String>) -> Result<Self> {
        let (mut out, mut bin, mut image) = (None, None, None);
        let (mut vms, mut write_docs) = (true, false);
        let mut parts = Vec::new();
        let mut args = args;
        while let Some(arg) = args.next() {
            let mut value = || args.next().map(PathBuf::from).context(USAGE);
            match arg.as_str() {
                "--out" => out = Some(value()?),
                "--bin" => bin = Some(value()?),
                "--image" => image = Some(value()?),
                "--no-vms" => vms = false,
                "--write-docs" => write_docs = true,
                other => match Part::ALL.into_iter().find(|part| part.as_str() == other) {
                    Some(part) => parts.push(part),
                    None => bail!("{other}: unknown\n{USAGE}"),
                },
            }
        }
        let there = |path: Option<PathBuf>| {
            let path = path.context(USAGE)?;
            path.canonicalize().with_context(|| path.display().to_string())
        };
        let image = image.context(USAGE)?;
        let out = out.context(USAGE)?;
        std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
        Ok(Self {
            out: there(Some(out))?,
            bin: there(bin)?,
            // The stub engine needs none.
            image: image
                .canonicalize()
                .or_else(|error| {
                    if vms {
                        Err(error)
                    } else {
                        std::path::absolute(&image)
                    }
                })
                .with_context(|| image.display().to_string())?,
            vms,
            write_docs,
            parts,
        })
    }

    /// Tells a person how far it is.
    #[expect(clippy::print_stderr, reason = "the printer of a program that is run by hand")]
    pub(crate) fn say(&self, text: &str) {
        eprintln!("bench: {text}");
    }
}

async fn run(bench: &Bench) -> Result<String> {
    let mut all = String::new();
    for part in Part::ALL {
        if bench.parts.is_empty() || bench.parts.contains(&part) {
            all.push_str(&one(bench, part).await?);
        }
    }
    Ok(all)
}

async fn one(bench: &Bench, part: Part) -> Result<String> {
    let (results, report) = match part {
        Part::Claim => {
            let results = Box::pin(claim::run(bench)).await?;
            let report = report::claim(&results);
            (results, report)
        }
        Part::Agent => {
            let results = Box::pin(agent::run(bench)).await?;
            let report = report::agent(&results);
            (results, report)
        }
        Part::Egress => {
            let results = Box::pin(egress::run(bench)).await?;
            let report = report_egress::egress(&results);
            (results, report)
        }
    };
    let write = async |kind: &str, text: &str| {
        let path = bench.out.join(part.as_str()).with_extension(kind);
        tokio::fs::write(&path, text)
            .await
            .with_context(|| path.display().to_string())
    };
    write("json", &format!("{results:#}\n")).await?;
    write("md", &report).await?;
    if bench.write_docs {
        report::write_docs(part.as_str(), &report).await?;
    }
    Ok(report)
}

/// The bench, or one of its own helpers, which it starts by these words.
async fn whichever() -> Result<String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["origin", dir] => proxies::world::origin(Certificates(dir.as_ref()))
            .await
            .map(|()| String::new()),
        ["door", dir, audited @ ..] => {
            let audited = audited.first().map(AsRef::as_ref);
            let serving = proxies::door::serve(Certificates(dir.as_ref()), audited);
            Box::pin(serving).await.map(|()| String::new())
        }
        _ => Box::pin(run(&Bench::of(args.into_iter())?)).await,
    }
}

#[expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the printer of a program that is run by hand"
)]
fn main() -> ExitCode {
    let outcome = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(Box::pin(whichever())));
    match outcome {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench: {error:?}");
            ExitCode::FAILURE
        }
    }
}
