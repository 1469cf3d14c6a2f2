//! `marlinspike vectors`: deterministic case files from a seed.

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use marlinspike::case::Op;
use marlinspike::vectors::Generator;
use marlinspike_proptests::campaign::{CampaignError, Filter};
use marlinspike_proptests::coverage;
use rayon::prelude::*;
use serde_json::json;

use crate::error::Explained;
use crate::style::{ColorChoice, counted, printable};
use crate::{Outcome, args, output};

const ABOUT: &str = "\
Writes case files: adversarial random inputs with the outputs that the reference computes from them.

Example: marlinspike vectors --op linear --count 1000 --out cases/

Consecutive cases cover every configuration of the operation that upstream accepts: checkpoint \
formats, types, group sizes, act-order, tensor-parallel ranks, shapes and more. Case i depends only \
on the seed and on i, and its bytes are the same on every machine. To write one case again, pass its \
seed with `--start i --count 1`; the provenance in the case records both.

Outputs that the reference does not compute (routing alone) are absent.";

const EXAMPLES: &str = "\
Examples:
  marlinspike vectors --op linear --count 1000 --out cases/
      a thousand cases from a random seed, which is printed
  marlinspike vectors --op moe --seed 0x2a --start 17 --count 1 --out cases/
      writes one case again
  marlinspike vectors --op linear --seed 1 --count 10 --out cases/ && marlinspike check cases/
      write, then check
  marlinspike vectors --op linear --where weight_type=uint4b8,desc_act=true --count 20 --out cases/
      only configurations with these values
  marlinspike vectors --op moe --list
      the configurations, one JSON object per line
  marlinspike vectors --coverage
      which law is tested with which value of which axis, on the CPU and on CUDA";

/// Arguments of `vectors`.
#[derive(Debug, clap::Args)]
#[command(long_about = ABOUT, after_long_help = EXAMPLES)]
pub struct Args {
    /// Operation: linear, moe, dyn_quant_linear, cutlass_scaled_mm, fused_experts_fp8_w8a8, ...;
    /// `marlinspike schema` lists them, and vLLM's names (`marlin_gemm`) are known
    #[arg(long, value_parser = args::operation, required_unless_present = "coverage")]
    op: Option<Op>,

    /// Only configurations with these values: KEY=VALUE|VALUE,KEY=VALUE, as for `fuzz`
    #[arg(long = "where", value_name = "FILTER", default_value = "", hide_default_value = true)]
    filter: String,

    /// Leave out the schedule of the reference's outputs, so that those of another kernel can take their
    /// place
    #[arg(long, conflicts_with = "list")]
    no_schedule: bool,

    /// 64-bit seed, decimal or 0x... [default: a random one, which is printed]
    #[arg(long, value_parser = seed)]
    seed: Option<u64>,

    /// Number of the first case
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    start: u64,

    /// Number of cases
    #[arg(long, default_value_t = 1, value_parser = args::cases)]
    count: u64,

    /// Folder for the cases; created if it does not exist
    #[arg(long, value_name = "DIR", required_unless_present_any = ["list", "coverage"])]
    out: Option<PathBuf>,

    /// Print one JSON object per line for each case, then one with the summary, and nothing else
    #[arg(long)]
    json: bool,

    /// Write nothing; print the configurations as JSON
    #[arg(long, conflicts_with_all = ["out", "seed", "start", "count"])]
    list: bool,

    /// Write nothing; print which law is tested with which value of which axis on which device, as
    /// Markdown: of --op, or of every operation with laws
    #[arg(long, conflicts_with_all = ["out", "seed", "start", "count", "list", "json"])]
    coverage: bool,
}

/// A seed, decimal or hexadecimal.
pub(crate) fn seed(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "");
    let parsed = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    parsed.map_err(|_| "expected a number from 0 below 2^64, decimal or 0x...".to_owned())
}

/// A random seed. `RandomState` takes its keys from the system's random source.
pub(crate) fn drawn_seed() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// The error of a filter.
fn unfit(error: CampaignError) -> Explained {
    Explained::new(error, "`marlinspike vectors --op OP --list` prints the configurations")
}

/// The generator of the configurations that `--where` selects.
fn filtered(generator: Generator, text: &str) -> Result<Generator> {
    let filter = Filter::parse(text).map_err(unfit)?;
    Ok(filter.restrict(generator).map_err(unfit)?)
}

/// Writes the cases, each atomically.
///
/// # Errors
/// Returns an error if the operation's cases cannot be generated or a file cannot be written.
pub fn run(args: &Args, _color: ColorChoice) -> Result<Outcome> {
    let Some(op) = args.op.filter(|_| !args.coverage) else {
        let text = match args.op {
            Some(op) => coverage::table(op).map(|table| table.markdown()),
            None => coverage::markdown(),
        };
        output::print(&text?)?;
        return Ok(Outcome::Pass);
    };
    let seed = args.seed.unwrap_or_else(drawn_seed);
    let generator = Generator::new(op, seed)
        .map_err(|e| Explained::new(e, "`marlinspike help vectors` lists the operations"))?;
    let generator = filtered(generator, &args.filter)?;
    let Some(out) = &args.out else {
        let lines: Vec<String> = generator
            .lattice()
            .iter()
            .map(|c| format!("{}\n", serde_json::Value::Object(c.to_json())))
            .collect();
        output::print(&lines.concat())?;
        return Ok(Outcome::Pass);
    };
    let end = args.start.checked_add(args.count).ok_or_else(|| {
        Explained::new(
            format!("--start {} plus --count {} exceeds 2^64", args.start, args.count),
            "choose a smaller --start or --count",
        )
    })?;
    fs::create_dir_all(out).with_context(|| format!("{}: cannot be created", out.display()))?;
    if !args.json {
        let points = generator.lattice().len();
        output::print(&format!(
            "seed {seed:#018x}: {} of `{op}` over {}\n",
            counted(args.count as usize, "case"),
            counted(points, "configuration")
        ))?;
    }
    // Batches print lines early and in order while the threads write files.
    const BATCH: u64 = 64;
    let mut bytes = 0;
    let mut first = args.start;
    while first < end {
        let batch = first..end.min(first + BATCH);
        let written: Vec<Written> = batch
            .clone()
            .into_par_iter()
            .map(|i| write(&generator, i, out, args.no_schedule))
            .collect::<Result<_>>()?;
        bytes += written.iter().map(|w| w.bytes).sum::<usize>();
        let lines: Vec<String> = written.iter().map(|w| w.line(args.json)).collect();
        output::print(&lines.concat())?;
        first = batch.end;
    }
    let (start, count) = (args.start, args.count);
    let mut replay = format!("--op {op} --seed {seed:#018x} --start {start} --count {count}");
    if let (false, Ok(filter)) = (args.filter.is_empty(), shlex::try_quote(&args.filter)) {
        // The number of a case depends on the configurations.
        replay.push_str(&format!(" --where {filter}"));
    }
    if args.no_schedule {
        replay.push_str(" --no-schedule");
    }
    if args.json {
        let seed = format!("{seed:#018x}");
        let summary = json!({
            "cases": args.count, "bytes": bytes, "op": op.name(), "seed": seed,
            "start": args.start, "configurations": generator.lattice().len(),
        });
        output::print(&format!("{}\n", json!({ "summary": summary })))?;
    } else {
        let folder = out.display().to_string();
        output::print(&format!(
            "{}, {bytes} bytes, in {}\nto repeat: marlinspike vectors {replay} --out DIR\n",
            counted(args.count as usize, "case"),
            printable(&folder)
        ))?;
    }
    Ok(Outcome::Pass)
}

/// A case that was written.
struct Written {
    index: u64,
    name: String,
    path: PathBuf,
    bytes: usize,
    outputs: usize,
}

impl Written {
    fn line(&self, json: bool) -> String {
        let path = self.path.display().to_string();
        if json {
            let Self { index, name, bytes, outputs, .. } = self;
            let line = json!({
                "path": path, "index": index, "name": name, "bytes": bytes, "outputs": outputs,
            });
            return format!("{line}\n");
        }
        format!("{}  {}\n", printable(&path), self.name)
    }
}

fn write(generator: &Generator, index: u64, out: &Path, no_schedule: bool) -> Result<Written> {
    let mut case = generator.case(index)?;
    if no_schedule {
        case.config = case.config.without_schedules()?;
    }
    let bytes = case.to_bytes()?;
    let path = out.join(generator.file_name(index));
    output::write_whole(&path, &bytes)?;
    let (name, outputs) = (case.name, case.outputs.len());
    Ok(Written { index, name, path, bytes: bytes.len(), outputs })
}
