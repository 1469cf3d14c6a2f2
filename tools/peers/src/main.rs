//! Times this project's int4 product and layer, candle's and ggml's in one process.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use marlinspike::num::dims::GroupSize;
use marlinspike_bench::{Workload, machine, threads, workload};
use marlinspike_peers::compare::{BEGINS, Case, Plan};
use marlinspike_peers::ggml;
use serde_json::json;

/// Times dense products and Mixture-of-Experts layers with 4-bit weights: this project's, candle's
/// Q4_K (dense) and, built with GGML_DIR, ggml's Q4_0, Q4_K and IQ4_XS, on the same matrices, in turns.
///
/// Weights are cold: calls cycle through more than 160 MB of them. candle fixes its number of
/// threads once per process, so each number of threads gets a separate process.
#[derive(Debug, Clone, Parser)]
#[command(version)]
struct Args {
    /// A named workload (4096x4096, 4096x14336, 2048x1536, qwen3-30b-a3b, mixtral-8x7b), KxN, or
    /// experts x experts per token x H x I [default: the named ones]
    #[arg(long = "shape", value_delimiter = ',')]
    shapes: Vec<Workload>,

    /// Tokens per call
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 512],
          value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    tokens: Vec<u32>,

    /// Threads of every contender [default: 1 and the number of CPUs that the process may use]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Vec<u32>,

    /// Group size of this project's weights, −1 for one scale per column; the others' is 32
    #[arg(long, default_value_t = 32, allow_negative_numbers = true)]
    group: i64,

    /// Calls of each contender
    #[arg(long, default_value_t = 50)]
    calls: u32,

    /// Seconds after which a case ends with fewer calls (three at least)
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,

    /// One matrix for all calls of a product
    #[arg(long)]
    warm: bool,

    /// Layers with MXFP4 weights and gpt-oss's activation; next to ggml's MXFP4
    #[arg(long)]
    mxfp4: bool,

    /// Do not pin threads to CPUs
    #[arg(long)]
    no_pin: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// The process that measures, with candle's threads set by its environment
    #[arg(long, hide = true)]
    child: bool,
}

/// The experts of gpt-oss-20b.
const GPT_OSS_20B: Workload = Workload::moe(32, 4, 2880, 2880);

fn main() -> ExitCode {
    let args = Args::parse();
    let done = if args.child { measure(&args) } else { lead(&args) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Checks, then a process for each number of threads.
fn lead(args: &Args) -> Result<()> {
    let group = GroupSize::from_config(args.group)?;
    ensure!((0.0..=86400.0).contains(&args.seconds), "--seconds {}: not 0 to 86400", args.seconds);
    for shape in shapes(args) {
        // Fails for groups that do not divide K, H or I.
        marlinspike_bench::ours::check(shape, group)?;
    }
    let mut counts = args.threads.clone();
    if counts.is_empty() {
        counts.push(1);
        counts.extend(Some(threads::available() as u32).filter(|&n| n > 1));
    }
    let mut cases = Vec::new();
    for &count in &counts {
        cases.extend(child(args, count)?);
    }
    if args.json {
        let report = json!({
            "cpu": machine::cpu_name(), "group_size": args.group,
            "kernel": marlinspike::w4a8::fastest().name(),
            "ggml": ggml::missing().is_none(), "cases": cases,
        });
        println!("{report}");
    } else {
        print(&cases);
    }
    Ok(())
}

fn shapes(args: &Args) -> Vec<Workload> {
    match args.shapes.is_empty() {
        true if args.mxfp4 => vec![GPT_OSS_20B],
        true => workload::NAMED.map(|(_, workload)| workload).to_vec(),
        false => args.shapes.clone(),
    }
}

/// The CPUs of `count` threads: the first ones, some twice where there are fewer.
fn cpus(count: usize) -> Vec<usize> {
    let all = threads::cpus();
    let all = if all.is_empty() { vec![0] } else { all };
    (0..count).map(|i| all[i % all.len()]).collect()
}

fn child(args: &Args, count: u32) -> Result<Vec<Case>> {
    let program = std::env::current_exe().context("this program's path")?;
    let list = |numbers: Vec<String>| numbers.join(",");
    let mut command = Command::new(program);
    command.args(["--child", "--threads", &count.to_string()]);
    command.args(["--shape", &list(shapes(args).iter().map(ToString::to_string).collect())]);
    command.args(["--tokens", &list(args.tokens.iter().map(ToString::to_string).collect())]);
    command.args(["--group", &args.group.to_string(), "--calls", &args.calls.to_string()]);
    command.args(["--seconds", &args.seconds.to_string()]);
    let flags = [(args.warm, "--warm"), (args.mxfp4, "--mxfp4"), (args.no_pin, "--no-pin")];
    command.args(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag));
    command.env("RAYON_NUM_THREADS", count.to_string());
    command.env("CANDLE_NUM_THREADS", count.to_string());
    // The calling thread is candle's last worker, and runs on the last CPU.
    let cpus = cpus(count as usize);
    let (_, others) = cpus.split_last().context("no threads")?;
    if !args.no_pin && !others.is_empty() {
        command.env("CANDLE_CPU_MASK", list(others.iter().map(ToString::to_string).collect()));
    }
    let output = command.stderr(Stdio::inherit()).output().context("a process to measure in")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        // A signal, as of an instruction that the CPU lacks, leaves no other message.
        let last = text.lines().rev().find_map(|line| line.strip_prefix(BEGINS));
        let (last, status) = (last.unwrap_or("the first contender"), output.status);
        bail!("measuring with {count} threads: {status} in {last}");
    }
    let measured = text.lines().rev().find(|line| !line.starts_with(BEGINS));
    serde_json::from_str(measured.unwrap_or_default()).context("what was measured")
}

fn measure(args: &Args) -> Result<()> {
    let cpus = cpus(args.threads.first().copied().unwrap_or(1) as usize);
    if let (false, Some(&last)) = (args.no_pin, cpus.last()) {
        threads::pin(last);
    }
    let plan = Plan {
        shapes: shapes(args),
        tokens: args.tokens.iter().map(|&tokens| tokens as usize).collect(),
        group: GroupSize::from_config(args.group)?,
        cpus,
        pinned: !args.no_pin,
        calls: args.calls as usize,
        seconds: args.seconds,
        warm: args.warm,
        mxfp4: args.mxfp4,
    };
    println!("{}", serde_json::to_string(&plan.measure()?)?);
    Ok(())
}

fn print(cases: &[Case]) {
    println!("{}, kernel {}", machine::cpu_name(), marlinspike::w4a8::fastest().name());
    if let Some(reason) = ggml::missing() {
        println!("ggml: {reason}");
    }
    println!("ratio: times as long as marlinspike; difference: of results, relative\n");
    println!(
        "{:<16}{:>7}{:>8}  {:<18}{:>11}{:>11}{:>9}{:>8}{:>8}{:>12}",
        "shape",
        "tokens",
        "threads",
        "",
        "best ms",
        "median",
        "GMAC/s",
        "ratio",
        "median",
        "difference"
    );
    for case in cases {
        for found in &case.contenders {
            println!(
                "{:<16}{:>7}{:>8}  {:<18}{:>11.3}{:>11.3}{:>9.1}{:>8.2}{:>8.2}{:>12.4}",
                case.shape,
                case.tokens,
                case.threads,
                found.name,
                found.best * 1e3,
                found.median * 1e3,
                case.macs as f64 / 1e9 / found.best,
                found.ratio_best,
                found.ratio_median,
                found.difference,
            );
        }
    }
}
