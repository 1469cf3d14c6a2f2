//! `marlinspike fuzz`: a kernel of any language on generated cases.

mod junit;
mod kernel;
mod merge;
mod text;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use marlinspike::case::Op;
use marlinspike_proptests::campaign::{
    Campaign, CampaignError, Event, Filter, HEADER, Judgement, Laws, Limit, Shard, serve,
    supervise, supervised,
};
use serde_json::{Map, Value};

use crate::check::declared;
use crate::error::Explained;
use crate::style::ColorChoice;
use crate::{Outcome, args, output, program};

const ABOUT: &str = "\
Runs a kernel on generated cases, checks its outputs, and shrinks each distinct failure to a small \
case that is kept in a file.

Example: marlinspike fuzz --op linear --cmd ./kernel

--cmd PROGRAM reads a case file with inputs and writes a safetensors file with its outputs: \
`PROGRAM INPUT OUTPUT`. Exit code 77 leaves out a configuration that the kernel does not support. \
With --persistent, one process answers many cases: it reads a line `INPUT<tab>OUTPUT` and prints `ok`, \
`skip REASON` or `error REASON`. --lib LIBRARY calls a C function in a process of its own, between \
guard pages; `marlinspike fuzz header` prints the header to compile it with.

The input file holds the inputs (`in.*`), the config (JSON under the metadata key `config`), the wanted \
outputs with their types and shapes (metadata key `outputs`), and the reference's packed weights (`ref.*`), \
so that a kernel can read Marlin's layout without packing it.

A crash, a hang, an unwritten byte and a write outside of a tensor are findings, too; the run continues \
until there are 8 distinct findings (--findings). The next run starts with the kept cases.";

const EXAMPLES: &str = "\
Examples:
  marlinspike fuzz --op linear --cmd ./kernel --where weight_type=uint4b8,dtype=bfloat16
  marlinspike fuzz --op linear --cmd 'python3 kernel.py' --persistent --time 600
  marlinspike fuzz --op moe --lib ./libkernel.so --seed 0x2a --case 17
      repeats one case
  marlinspike fuzz --op linear --lib ./libkernel.so --batch-invariant
      also compares the bits of a row alone with those in its batch
  marlinspike fuzz --op linear --cmd ./kernel --seed 0x2a --shard 2/4 --summary two.json
      the second quarter of the cases, for one of four machines
  marlinspike fuzz merge one.json two.json three.json four.json --regressions regressions
      merges the four summaries
  marlinspike vectors --op linear --list
      lists the configurations, whose keys --where takes

Exit codes:
  0  at least one case was judged, and all judged cases passed
  1  a finding, an unchecked case, or nothing was judged
  2  bad input or usage";

/// Seconds that a kernel may take for one case.
const DEFAULT_TIMEOUT: &str = "30";

/// Arguments of `fuzz`.
#[derive(Debug, clap::Args)]
#[command(long_about = ABOUT, after_long_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Operation, as for `marlinspike vectors`
    #[arg(long, required = true, value_parser = args::operation)]
    op: Option<Op>,

    /// The kernel: a program with its arguments
    #[arg(long, value_name = "PROGRAM", required_unless_present = "lib", conflicts_with = "lib")]
    cmd: Option<String>,

    /// The kernel: a shared library with the functions of marlinspike_kernel.h
    #[arg(long, value_name = "LIBRARY")]
    lib: Option<PathBuf>,

    /// Start the program once and send it one line for each case
    #[arg(long, requires = "cmd")]
    persistent: bool,

    /// Configurations to draw from: key=value|value,key=value
    #[arg(long = "where", value_name = "FILTER", default_value = "")]
    filter: String,

    /// Set a config key in every case: --set schedule=canonical (the value is JSON or text)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// An output that the kernel writes; may be repeated [default: y where the operation has it, else
    /// every output]
    #[arg(long = "output", value_name = "NAME")]
    outputs: Vec<String>,

    /// The kernel promises the same bits in every run: run each case twice and compare
    #[arg(long)]
    deterministic: bool,

    /// The kernel promises that a row has the same bits alone as in its batch: compare the last row
    #[arg(long)]
    batch_invariant: bool,

    /// Give the kernel only inputs, not the reference's packed weights
    #[arg(long)]
    no_reference: bool,

    /// 64-bit seed, decimal or 0x... [default: a random one, which is printed]
    #[arg(long, value_parser = crate::vectors::seed)]
    seed: Option<u64>,

    /// Number of cases
    #[arg(long, default_value_t = 200, value_parser = args::cases)]
    cases: u64,

    /// Run only case INDEX
    #[arg(long, value_name = "INDEX", conflicts_with_all = ["cases", "shard"])]
    case: Option<u64>,

    /// Start no new case after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    time: Option<Duration>,

    /// Stop after this many distinct findings: 1 for a first look at a broken kernel
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    findings: u32,

    /// Time limit of the kernel for one case, in seconds
    #[arg(long, value_name = "SECONDS", default_value = DEFAULT_TIMEOUT, value_parser = seconds)]
    timeout: Duration,

    /// Part I of N of the cases, for runs on several machines: --shard 1/4
    #[arg(long, value_name = "I/N", default_value_t)]
    shard: Shard,

    /// Folder of failing cases, which run first
    #[arg(long, value_name = "DIR", default_value = ".marlinspike")]
    keep: PathBuf,

    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,

    /// Write the summary that `marlinspike fuzz merge` reads: the object of --json
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,

    /// Print one JSON object: counts, findings, coverage, kept cases
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    declared: declared::Args,
}

/// What `fuzz` does other than running a kernel.
#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Merge the summaries and failing cases of several machines.
    #[command(long_about = merge::ABOUT)]
    Merge(merge::Args),

    /// Print marlinspike_kernel.h, the header of libraries for --lib
    ///
    /// Example: marlinspike fuzz header > marlinspike_kernel.h
    Header,
}

impl Args {
    /// Whether the command prints JSON.
    pub(crate) fn is_json(&self) -> bool {
        match &self.command {
            Some(Command::Merge(args)) => args.json,
            Some(Command::Header) => false,
            None => self.json,
        }
    }
}

/// Arguments of the worker process, which calls a library.
#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    /// The library.
    library: PathBuf,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let parsed = text.parse::<f64>().ok().filter(|s| (0.001..=1e7).contains(s));
    parsed
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("found {text}, expected seconds from 0.001 to 10000000"))
}

/// Calls a library's kernel for [`run`], case by case.
///
/// # Errors
/// For a library that cannot be loaded.
pub fn worker(args: &WorkerArgs) -> Result<Outcome> {
    serve(&args.library).map_err(explained)?;
    Ok(Outcome::Pass)
}

fn explained(error: CampaignError) -> Explained {
    let help = match &error {
        CampaignError::Filter { .. } => {
            "`marlinspike vectors --op OP --list` prints all configurations"
        }
        CampaignError::Kernel { .. } => {
            "`marlinspike help fuzz` describes the kernel's inputs and outputs"
        }
        CampaignError::Exchange { .. } => {
            "nothing was said about the kernel; see that the folder stays and has free space"
        }
        _ => "`marlinspike help fuzz` has examples",
    };
    Explained::new(error, help)
}

/// Runs [`run`] in a child process, so that a signal leaves neither kernels nor files behind. Returns `None`
/// in that child, and for what starts no kernel.
///
/// # Errors
/// For a child that cannot be started.
pub fn supervise_run(args: &Args) -> Result<Option<u8>> {
    if args.command.is_some() || supervised() {
        return Ok(None);
    }
    let code = supervise(&program::own()?, std::env::args_os().skip(1))?;
    Ok(Some(u8::try_from(code).unwrap_or(Outcome::BadInput as u8)))
}

/// Fuzzes the kernel, or merges summaries.
///
/// # Errors
/// For a filter, a kernel or a folder that cannot be used.
pub fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    match (&args.command, args.op) {
        (Some(Command::Merge(merge)), _) => merge::run(merge, color),
        (Some(Command::Header), _) => {
            output::print(HEADER)?;
            Ok(Outcome::Pass)
        }
        (None, Some(op)) => fuzz(args, op, color),
        (None, None) => Err(Explained::new("--op is absent", "for example --op linear").into()),
    }
}

fn fuzz(args: &Args, op: Op, color: ColorChoice) -> Result<Outcome> {
    let seed = args.seed.unwrap_or_else(crate::vectors::drawn_seed);
    let campaign = campaign(args, op, seed)?;
    let mut kernel = kernel::of(args)?;
    let mut kernel =
        kernel::ReferenceFilter { kernel: kernel.as_mut(), reference: !args.no_reference };
    let paint = color.for_stdout();
    let print = |text: String| if args.json { Ok(()) } else { output::print(&text) };
    print(text::head(&campaign, seed))?;
    if let Some(index) = args.case {
        let judgement = campaign.trial(index).and_then(|trial| campaign.judge(&mut kernel, &trial));
        let judgement = judgement.map_err(explained)?;
        output::print(&text::single(index, &judgement, paint))?;
        let passes = matches!(judgement, Judgement::Pass);
        return Ok(if passes { Outcome::Pass } else { Outcome::Mismatch });
    }
    let bar = bar(args);
    let limit = Limit { cases: args.cases, time: args.time, findings: args.findings as usize };
    let mut printed = Ok(());
    let run = campaign.run_with_kept(Some(&args.keep), &mut kernel, &limit, &mut |event| {
        if let Event::Kept(path, judgement) = event {
            let line = print(text::kept(path, judgement, paint));
            printed = std::mem::replace(&mut printed, Ok(())).and(line);
        }
        show(args, &bar, &event);
    });
    bar.finish_and_clear();
    let run = run.map_err(explained)?;
    printed?;
    let own = own_options(args);
    for (finding, file) in run.summary.findings.iter().zip(&run.files) {
        let again = text::replay(op, &own, seed, &args.filter, finding.index);
        print(text::finding(finding, file, &again, paint))?;
    }
    if let Some(path) = &args.junit {
        output::write_whole(path, junit::report(&run.summary, &run.files).as_bytes())?;
    }
    let json = format!("{}\n", run.to_json().map_err(explained)?);
    if let Some(path) = &args.summary {
        output::write_whole(path, json.as_bytes())?;
    }
    output::print(&if args.json { json } else { text::summary(&run, paint) })?;
    Ok(if run.success { Outcome::Pass } else { Outcome::Mismatch })
}

/// The options of the kernel and its inputs, for a command that repeats a case.
fn own_options(args: &Args) -> Vec<String> {
    let mut own = Vec::new();
    let mut option = |name: &str, value: &str| own.extend([name.to_owned(), value.to_owned()]);
    if let Some(command) = &args.cmd {
        option("--cmd", command);
    }
    if let Some(library) = &args.lib {
        option("--lib", &library.display().to_string());
    }
    args.set.iter().for_each(|pair| option("--set", pair));
    args.outputs.iter().for_each(|name| option("--output", name));
    if seconds(DEFAULT_TIMEOUT) != Ok(args.timeout) {
        option("--timeout", &args.timeout.as_secs_f64().to_string());
    }
    let flags = [
        ("--persistent", args.persistent),
        ("--no-reference", args.no_reference),
        ("--deterministic", args.deterministic),
        ("--batch-invariant", args.batch_invariant),
    ];
    own.extend(flags.iter().filter(|(_, set)| *set).map(|(name, _)| (*name).to_owned()));
    own.extend(args.declared.words());
    own
}

fn campaign(args: &Args, op: Op, seed: u64) -> Result<Campaign> {
    let filter = Filter::parse(&args.filter).map_err(explained)?;
    let campaign = Campaign::new(op, seed, filter).map_err(explained)?;
    let mut campaign = campaign.with_set(set(&args.set)?).map_err(explained)?;
    campaign.outputs = args.outputs.clone();
    campaign.declared = args.declared.read()?;
    campaign.laws =
        Laws { deterministic: args.deterministic, batch_invariant: args.batch_invariant };
    campaign.shard = args.shard;
    Ok(campaign)
}

/// Parses `--set KEY=VALUE`; a value that is not JSON is text.
fn set(pairs: &[String]) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=') else {
            let message = format!("--set: found `{pair}`, expected KEY=VALUE");
            return Err(Explained::new(message, "for example --set schedule=canonical").into());
        };
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        map.insert(key.to_owned(), value);
    }
    Ok(map)
}

fn bar(args: &Args) -> ProgressBar {
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = "{bar:30} {pos}/{len} cases, {msg} {elapsed}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(args.cases).with_style(style).with_message("0 failed")
}

fn show(args: &Args, bar: &ProgressBar, event: &Event<'_>) {
    match event {
        Event::Judged(index, judgement) => {
            bar.set_position(index + 1);
            if let Judgement::Wrong(failure) = judgement {
                bar.set_message(format!("last failure: {}", failure.signature()));
            }
        }
        Event::Shrinking(signature) => bar.set_message(format!("shrinking {signature}")),
        Event::Found(finding) if !args.json => {
            let line = text::found(finding);
            bar.suspend(|| eprintln!("{line}"));
        }
        Event::Kept(..) | Event::Found(_) => {}
    }
}
