//! `marlinspike schema`: config keys and tensors of each operation.

use anyhow::{Context as _, Result};
use marlinspike::case::Op;
use marlinspike::num::tensor::DType;
use marlinspike::schema;
use serde_json::{Map, Value, json};

use crate::error::Explained;
use crate::{Outcome, args, output};

const ABOUT: &str = "\
Prints what case files of an operation hold: config keys with their values and defaults, tensors \
with their types and shapes. Without --op, lists the operations.

Example: marlinspike schema --op linear

With --config, prints the exact tensors, types and shapes under one config.";

const EXAMPLES: &str = "\
Examples:
  marlinspike schema --op linear
      keys and tensors of `linear`
  marlinspike schema --op router --json
      the same as JSON Schema
  marlinspike schema --op int4_fp8_preprocess --config '{\"checkpoint_format\": \"gptq\", \"size_k\": 128, \"size_n\": 64}'
      the tensors under one config";

/// Arguments of `schema`.
#[derive(Debug, clap::Args)]
#[command(long_about = ABOUT, after_long_help = EXAMPLES)]
pub struct Args {
    /// Operation: linear, moe, router, ...; `marlinspike schema` lists them; vLLM's names
    /// (`marlin_gemm`) are known
    #[arg(long, value_parser = args::operation)]
    op: Option<Op>,

    /// Print JSON Schema of one operation, or of all; with --config, the tensors as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Print the tensors under this config, a JSON object
    #[arg(long, value_name = "JSON", requires = "op", conflicts_with = "markdown")]
    config: Option<String>,

    /// Experts of this rank, the leading axis of a MoE case's weights; default: num_experts
    #[arg(long, value_name = "N", requires = "config")]
    local_experts: Option<usize>,

    /// Print the page of the documentation, with an example of each operation in Python and C++
    #[arg(long, conflicts_with_all = ["op", "json"])]
    markdown: bool,
}

/// Prints the schema.
///
/// # Errors
/// For a config that the operation refuses.
pub fn run(args: &Args) -> Result<Outcome> {
    let text = match (&args.op, &args.config) {
        _ if args.markdown => schema::page(&schema::all()?)?,
        (Some(op), Some(config)) => tensors(*op, config, args)?,
        (Some(op), None) if args.json => format!("{:#}\n", schema::describe(*op)?.to_json()),
        (Some(op), None) => schema::text(&schema::describe(*op)?),
        (None, _) if args.json => {
            let all: Vec<Value> = schema::all()?.iter().map(schema::OpSchema::to_json).collect();
            let draft = "https://json-schema.org/draft/2020-12/schema";
            format!("{:#}\n", json!({"$schema": draft, "oneOf": all}))
        }
        (None, _) => {
            let line = |&(name, op): &(&str, Op)| format!("{name:<46} {}\n", schema::about(op));
            let lines: String = Op::NAMED.iter().map(line).collect();
            format!("{lines}\n`marlinspike schema --op OP` prints keys and tensors\n")
        }
    };
    output::print(&text)?;
    Ok(Outcome::Pass)
}

/// The tensors under one config.
fn tensors(op: Op, config: &str, args: &Args) -> Result<String> {
    let help = format!("`marlinspike schema --op {op}` prints the keys");
    let config: Map<String, Value> =
        serde_json::from_str(config).context("--config: expected a JSON object")?;
    let rules = schema::tensors(op, &config, args.local_experts)
        .map_err(|error| Explained::new(error, help))?;
    let size = |dim: &marlinspike::case::Dim| match dim {
        marlinspike::case::Dim::Is(size) => json!(size),
        marlinspike::case::Dim::Some => json!("1 or more"),
        marlinspike::case::Dim::Any => json!("any"),
    };
    let mut text = String::new();
    let mut all = Vec::new();
    for rule in &rules {
        let dtypes: Vec<&str> = rule.dtypes.iter().copied().map(DType::name).collect();
        let shape: Vec<Value> = rule.shape.iter().map(size).collect();
        let needed = if rule.required { "  required" } else { "" };
        let printed = Value::from(shape.clone()).to_string().replace('"', "").replace(',', ", ");
        text += &format!("{:<28} {:<14} {printed}{needed}\n", rule.name, dtypes.join(" or "));
        all.push(json!({
            "name": rule.name, "dtypes": dtypes, "shape": shape, "required": rule.required,
        }));
    }
    Ok(if args.json { format!("{:#}\n", Value::from(all)) } else { text })
}
