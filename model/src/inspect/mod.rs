//! `inspect`: every quantized layer of a model folder, whether Marlin takes it, and which kernel
//! upstream runs its experts with.

mod experts;
mod routing;

use std::collections::BTreeMap;
use std::path::PathBuf;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike::config::Scheme;
use marlinspike::dims::Shape;
use marlinspike::layout::marlin::InputDtype;
use marlinspike::scalar::ScalarType;
use marlinspike::select::{Capability, MoeDesc, Selection};
use serde_json::{Value, json};

use crate::convert::config::weight_type;
use crate::convert::parallel::Ranks;
use crate::convert::plan::{self, Format, Settings};
use crate::convert::preparation::Preparation;
use crate::convert::report::size;
use crate::convert::verdict;
use crate::model::bind::{self, Bound};
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError, ModelFiles};
use crate::output::print;
use crate::style::{ColorChoice, printable};
use crate::{Outcome, args};

const DETAILS: &str = "\
One line for each quantized layer; the experts of a MoE layer are one line for w13 (gate and up)
and one for w2, as K x N x experts. Shapes are the whole layer's; with --tp-size the verdict is
about each rank's part. Below: which of all its kernels upstream (vLLM 0.21.0) runs FP8, NVFP4,
MXFP8 and GPTQ experts with, on one rank with every package installed; --json has all refusals.

Examples:
  marlinspike inspect ./Qwen3-30B-A3B-GPTQ
  marlinspike inspect model --capability 8.0 --tp-size 2
  marlinspike inspect model --json

Exit codes:
  0  the model was read, whatever Marlin says of its layers
  2  bad input or usage";

/// Show a checkpoint's quantized layers.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Folder with config.json and safetensors files.
    pub model_dir: PathBuf,
    /// Compute capability of the GPU to ask about.
    #[arg(long, default_value = "9.0", value_parser = capability, value_name = "MAJOR.MINOR")]
    pub capability: Capability,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = args::ranks)]
    pub tp_size: usize,
    /// Routing of the layers' tokens, as JSON, instead of the family's (see `run --help`).
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `major.minor`.
fn capability(text: &str) -> Result<Capability, String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    match parse() {
        Some((major, minor)) if (1..1000).contains(&major) && minor < 10 => {
            Ok(Capability::cuda(major, minor))
        }
        _ => Err(format!("found {text:?}, expected a compute capability such as 8.0 or 9.0")),
    }
}

/// What is known of one stack.
struct Line {
    module: String,
    scheme: Scheme,
    shape: Shape,
    experts: usize,
    is_moe: bool,
    is_w13: bool,
    bytes: u64,
    chosen: Option<&'static str>,
    reasons: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// [`ModelError`] for a folder that cannot be read.
pub fn run(args: &Args, color: ColorChoice) -> anyhow::Result<Outcome> {
    let files = ModelFiles::open(&args.model_dir)?.with_routing(args.routing.as_deref())?;
    let model = Model::new(&files)?;
    let layers = Layers::group(&model)?;
    let settings = Settings {
        format: Format::Marlin,
        dtype: ScalarType::BFLOAT16,
        input: InputDtype::Model,
        tp: Ranks { size: args.tp_size, rank: 0 },
        ep: Ranks::ONE,
        device: args.capability,
        skip_unsupported: true,
        shard_bytes: u64::MAX,
        preparation: Preparation::UPSTREAM,
    };
    let lines = layers
        .stacks
        .iter()
        .map(|s| line(&model, s, &settings))
        .collect::<Result<Vec<_>, ModelError>>()?;
    let mut unquantized: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for u in &layers.unquantized {
        unquantized.entry(&u.reason).or_default().push(&u.module);
    }
    let w13 = lines.iter().filter(|l| l.is_w13).map(|l| {
        let inner = l.shape.size_n / 2 / settings.tp.size;
        (&l.scheme, MoeDesc::new(l.shape.size_k, inner))
    });
    let kernels = experts::kernels(w13, &args.capability);
    let routings = routing::of(&model, &layers);
    let method = model.quant.as_ref().map_or("none", |q| q.method());
    if args.json {
        let value = json!({
            "model": args.model_dir,
            "quant_method": method,
            "capability": args.capability.to_string(),
            "tp_size": settings.tp.size,
            "layers": lines.iter().map(as_json).collect::<Vec<_>>(),
            "moe_kernels": kernels.iter().map(experts::Kernels::as_json).collect::<Vec<_>>(),
            "routing": routings.iter().map(routing::LayerRouting::as_json).collect::<Vec<_>>(),
            "fused_experts": layers.fused.iter().map(|f| json!({
                "module": f.module, "reasons_against": [f.reason],
            })).collect::<Vec<_>>(),
            "unquantized": unquantized,
            "totals": totals(&model, &lines),
        });
        print(&format!("{value}\n"))?;
        return Ok(Outcome::Pass);
    }
    let paint = color.for_stdout();
    let mut text = format!("{}\n\n", paint.strong(&format!("quantization: {method}")));
    if !lines.is_empty() {
        text.push_str(&table(&lines).to_string());
        text.push_str("\n\n");
    }
    for l in lines.iter().filter(|l| l.chosen.is_none()) {
        let reasons = l.reasons.join("; ");
        text.push_str(&format!("{} {}\n", paint.odd(&printable(&l.module)), printable(&reasons)));
    }
    for f in &layers.fused {
        text.push_str(&format!("{} {}\n", paint.odd(&printable(&f.module)), printable(&f.reason)));
    }
    for routing in &routings {
        text.push_str(&printable(&routing.line()));
        text.push('\n');
    }
    for kernels in &kernels {
        text.push_str(&printable(&kernels.line(&args.capability)));
        text.push('\n');
    }
    for (reason, modules) in &unquantized {
        let example = modules.first().copied().unwrap_or_default();
        let count = modules.len();
        let line = format!("not quantized: {count} modules such as `{example}`: {reason}");
        text.push_str(&paint.dim(&printable(&line)));
        text.push('\n');
    }
    let totals = totals(&model, &lines);
    text.push_str(&format!(
        "\n{} layers, {} of them for Marlin; {} quantized of {} in {} files\n",
        totals["layers"],
        totals["for_marlin"],
        size(totals["quantized_bytes"].as_u64().unwrap_or(0)),
        size(totals["bytes"].as_u64().unwrap_or(0)),
        totals["files"],
    ));
    print(&text)?;
    Ok(Outcome::Pass)
}

/// Binds a stack and asks the selection about rank 0's part.
fn line(model: &Model<'_>, stack: &Stack, settings: &Settings) -> Result<Line, ModelError> {
    let mut bytes = 0;
    let mut whole: Option<Shape> = None;
    for row in &stack.experts {
        let bound: Vec<_> =
            row.iter().map(|m| Bound::find(model, &stack.scheme, m)).collect::<Result<_, _>>()?;
        bytes += bound.iter().map(|b| b.bytes).sum::<u64>();
        let size_n = bound.iter().map(|b| b.shape.size_n).sum();
        let shape = Shape::new(bound[0].shape.size_k, size_n);
        if whole.is_some_and(|w| w != shape) {
            let found = format!("`{}` makes {shape}", bound[0].name);
            let expected = whole.unwrap_or(shape);
            let reason = format!("{found}, expected {expected} as the first expert");
            return Err(ModelError::module(&stack.module, reason));
        }
        whole = Some(shape);
    }
    let shape = whole.unwrap_or(Shape::new(0, 0));
    let (selection, mut reasons) = plan::ask(model, stack, settings)?;
    let chosen = selection.as_ref().and_then(|s: &Selection| s.chosen).map(|b| b.name());
    if let Some(s) = &selection {
        reasons.extend(verdict::against(s));
    }
    let suffix = stack.role.prefix().trim_end_matches('_');
    let module = match stack.role {
        Role::Dense => stack.module.clone(),
        _ => format!("{}.{suffix}", stack.module),
    };
    Ok(Line {
        module,
        scheme: stack.scheme.clone(),
        shape,
        experts: stack.experts.len(),
        is_moe: stack.role != Role::Dense,
        is_w13: stack.role == Role::W13,
        bytes,
        chosen: if reasons.is_empty() { chosen } else { None },
        reasons,
    })
}

fn as_json(l: &Line) -> Value {
    json!({
        "module": l.module,
        "format": l.scheme.label(),
        "weight_type": weight_type(&l.scheme),
        "bits": l.scheme.bits(),
        "group_size": bind::group_size(&l.scheme, l.shape.size_k).to_config(),
        "act_order": bind::act_order(&l.scheme),
        "size_k": l.shape.size_k,
        "size_n": l.shape.size_n,
        "experts": l.is_moe.then_some(l.experts),
        "bytes": l.bytes,
        "backend": l.chosen,
        "reasons_against": l.reasons,
    })
}

fn totals(model: &Model<'_>, lines: &[Line]) -> Value {
    json!({
        "layers": lines.len(),
        "for_marlin": lines.iter().filter(|l| l.chosen.is_some()).count(),
        "quantized_bytes": lines.iter().map(|l| l.bytes).sum::<u64>(),
        "bytes": model.entries().map(|e| e.byte_len()).sum::<u64>(),
        "files": model.shards.len(),
    })
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "layer",
        "format",
        "type",
        "bits",
        "group",
        "act-order",
        "K x N",
        "size",
        "backend",
    ]);
    for l in lines {
        let experts = if l.is_moe { format!(" x {}", l.experts) } else { String::new() };
        let group = bind::group_size(&l.scheme, l.shape.size_k).to_config();
        table.add_row([
            printable(&l.module).into_owned(),
            l.scheme.label(),
            weight_type(&l.scheme).to_owned(),
            l.scheme.bits().map_or_else(String::new, |b| b.to_string()),
            group.to_string(),
            if bind::act_order(&l.scheme) { "yes" } else { "no" }.to_owned(),
            format!("{} x {}{experts}", l.shape.size_k, l.shape.size_n),
            size(l.bytes),
            l.chosen.unwrap_or("none, see below").to_owned(),
        ]);
    }
    for column in [3, 4, 7] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
