//! An example of each operation in Python and in C++: a case file with random inputs, to which a
//! kernel's outputs are added.

use serde_json::Value;

use super::OpSchema;
use crate::check::add_outputs;
use crate::num::tensor::DType;
use crate::ops::schema::{Dim, TensorRule};
use crate::ops::{CaseConfig, Op};
use crate::vectors::{Rng, case_of};
use crate::{Error, Result};

/// Writes a case file from numpy arrays; the page's Python examples import it.
pub(super) const PYTHON: &str = include_str!("case_file.py");
/// Writes a case file from vectors; the page's C++ examples include it.
pub(super) const CPP: &str = include_str!("case_file.hpp");

/// Rows of an input whose length the config does not fix.
const ROWS: usize = 4;
/// Experts of logits whose number the config does not fix.
const EXPERTS: usize = 8;

/// Optional keys of layers that an example does not state.
const LAYER_KEYS: [&str; 5] =
    ["router_weight_on", "gate_up_layout", "swiglu_limit", "swiglu_alpha", "swiglu_beta"];

/// A small config of an operation: few inputs, few elements.
pub(super) fn config(op: Op) -> Result<CaseConfig> {
    let lattice = (op.entry().lattice)()?;
    let plain = lattice.iter().filter_map(|config| without_schedules(op, config));
    // A rank's layer would need an expert map.
    let is_whole = |config: &CaseConfig| {
        let ep_size = config.to_json().get("ep_size").and_then(Value::as_u64);
        ep_size.is_none_or(|ep_size| ep_size == 1) && inputs(config).is_ok()
    };
    let plain = plain.filter(is_whole);
    let cost = |config: &CaseConfig| {
        let json = config.to_json();
        let experts = json.get("num_experts").and_then(Value::as_u64).unwrap_or(4);
        let rules = inputs(config).unwrap_or_default();
        let elements: u64 = rules.iter().map(TensorRule::elements).sum();
        // Optional keys of layers have no place in an example.
        let stated = json.keys().filter(|key| LAYER_KEYS.contains(&key.as_str())).count();
        (stated, rules.len(), experts < 4, elements)
    };
    plain.min_by_key(cost).ok_or_else(|| Error::size(format!("configurations of `{op}`"), 0, "one"))
}

/// The config without schedules, which have a page of their own.
fn without_schedules(op: Op, config: &CaseConfig) -> Option<CaseConfig> {
    let mut json = config.to_json();
    json.retain(|key, value| !key.starts_with("schedule") && !value.is_null());
    CaseConfig::from_json(op, &json).ok()
}

/// The inputs of an example: those that are required, and what a product multiplies.
pub(super) fn inputs(config: &CaseConfig) -> Result<Vec<TensorRule>> {
    let experts = config.to_json().get("num_experts").and_then(Value::as_u64).unwrap_or(0);
    let mut rules = config.rules(experts as usize)?;
    let wanted = |rule: &TensorRule| {
        rule.required || ["in.x", "in.router_logits"].contains(&rule.name.as_str())
    };
    rules.retain(|rule| rule.name.starts_with("in.") && wanted(rule));
    for rule in &mut rules {
        for (at, dim) in rule.shape.iter_mut().enumerate() {
            if !matches!(dim, Dim::Is(_)) {
                *dim = Dim::Is(if at == 0 { ROWS } else { EXPERTS });
            }
        }
    }
    Ok(rules)
}

/// The outputs that a kernel's results are added as.
fn outputs(config: &CaseConfig) -> Result<Vec<TensorRule>> {
    let experts = config.to_json().get("num_experts").and_then(Value::as_u64).unwrap_or(0);
    let mut rules = config.rules(experts as usize)?;
    rules.retain(|rule| rule.name.starts_with("out."));
    Ok(rules)
}

/// What an input is filled with.
#[derive(Debug, Clone, Copy)]
enum Fill {
    Words,
    Bytes,
    Int8,
    E4m3,
    E8m0,
    F16,
    Bf16,
    F32,
    Normal,
    TopkIds,
}

impl Fill {
    fn of(rule: &TensorRule) -> Self {
        match (rule.name.as_str(), rule.dtypes[0]) {
            ("in.topk_ids", _) => Self::TopkIds,
            ("in.router_logits", _) => Self::Normal,
            (name, DType::U8) if name.ends_with("scale") => Self::E8m0,
            (_, DType::F8E4M3) => Self::E4m3,
            (_, DType::F8E8M0) => Self::E8m0,
            (_, DType::F16) => Self::F16,
            (_, DType::BF16) => Self::Bf16,
            (_, DType::F32) => Self::F32,
            (_, DType::I8) => Self::Int8,
            (_, DType::I32) => Self::Words,
            _ => Self::Bytes,
        }
    }

    fn python(self, shape: &str, experts: u64) -> String {
        match self {
            Self::Words => {
                format!("rng.integers(-(2**31), 2**31, {shape}).astype(np.int32)")
            }
            Self::Bytes => format!("rng.integers(0, 256, {shape}, dtype=np.uint8)"),
            Self::Int8 => format!("rng.integers(-127, 128, {shape}, dtype=np.int8)"),
            Self::E4m3 => format!("rng.integers(0, 0x7F, {shape}, dtype=np.uint8)"),
            Self::E8m0 => format!("rng.integers(120, 135, {shape}, dtype=np.uint8)"),
            Self::F16 => format!("rng.uniform(0.5, 1.5, {shape}).astype(np.float16)"),
            Self::Bf16 => format!("bf16(rng.uniform(0.5, 1.5, {shape}))"),
            Self::F32 => format!("rng.uniform(0.5, 1.5, {shape}).astype(np.float32)"),
            Self::Normal => format!("rng.standard_normal({shape}).astype(np.float32)"),
            Self::TopkIds => format!("topk_ids({shape}, num_experts={experts})"),
        }
    }

    fn cpp(self, shape: &str, experts: u64) -> String {
        match self {
            Self::Words | Self::Bytes | Self::Int8 => "random_bytes".to_owned(),
            Self::E4m3 => "random_e4m3".to_owned(),
            Self::E8m0 => "random_e8m0".to_owned(),
            Self::F16 => "random_f16".to_owned(),
            Self::Bf16 => "random_bf16".to_owned(),
            Self::F32 | Self::Normal => "random_f32".to_owned(),
            Self::TopkIds => format!("file.add_topk_ids({shape}, {experts});"),
        }
    }
}

fn sizes(rule: &TensorRule) -> Vec<String> {
    let size = |dim: &Dim| match dim {
        Dim::Is(size) => size.to_string(),
        _ => "any".to_owned(),
    };
    rule.shape.iter().map(size).collect()
}

fn bare(rule: &TensorRule) -> &str {
    rule.name.split_once('.').map_or(rule.name.as_str(), |(_, bare)| bare)
}

/// Bare name, type and sizes of each output that the reference computes from the example's inputs.
fn results(config: &CaseConfig) -> Result<Vec<(String, DType, String)>> {
    let given = inputs(config)?;
    let mut case = case_of(config.clone(), &mut Rng::for_case(0, 0))?;
    case.inputs.retain(|name, _| given.iter().any(|rule| bare(rule) == name));
    case.outputs.clear();
    add_outputs(&mut case)?;
    let computed = |rule: TensorRule| {
        let dtype = case.outputs.get(bare(&rule))?.dtype();
        Some((bare(&rule).to_owned(), dtype, sizes(&rule).join(", ")))
    };
    Ok(outputs(config)?.into_iter().filter_map(computed).collect())
}

fn experts(config: &CaseConfig) -> u64 {
    config.to_json().get("num_experts").and_then(Value::as_u64).unwrap_or(EXPERTS as u64)
}

/// The config as Python.
fn python_value(value: &Value, indent: &str) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(flag) => if *flag { "True" } else { "False" }.to_owned(),
        Value::Object(map) => {
            let inner = format!("{indent}    ");
            let item = |(key, value): (&String, &Value)| {
                format!("{inner}\"{key}\": {},\n", python_value(value, &inner))
            };
            format!("{{\n{}{indent}}}", map.iter().map(item).collect::<String>())
        }
        other => other.to_string(),
    }
}

impl OpSchema {
    /// A Python program that writes a case of the example config: `PYTHON` is its module
    /// `case_file`.
    ///
    /// # Errors
    /// None for the operations in the table.
    pub fn python_example(&self) -> Result<String> {
        let config = &self.example;
        let mut text =
            "import numpy as np\nfrom case_file import bf16, rng, topk_ids, write_case\n\n"
                .to_owned();
        let json =
            Value::Object(config.to_json().into_iter().filter(|(_, v)| !v.is_null()).collect());
        text += &format!("config = {}\n", python_value(&json, ""));
        text += "inputs = {\n";
        for rule in inputs(config)? {
            let shape = format!("({},)", sizes(&rule).join(", ")).replace(",,", ",");
            let shape = if rule.shape.len() > 1 { shape.replace(",)", ")") } else { shape };
            let (fill, dtype) = (Fill::of(&rule), rule.dtypes[0]);
            let value = fill.python(&shape, experts(config));
            text += &format!("    \"{}\": (\"{dtype}\", {value}),\n", bare(&rule));
        }
        text += "}\n";
        text += "# Add the outputs of your kernel, as pairs like those of inputs:\n";
        for (name, dtype, shape) in results(config)? {
            text += &format!("#   \"{name}\": {dtype} [{shape}]\n");
        }
        text += "outputs = {}\n";
        text += &format!(
            "write_case(\"case.safetensors\", \"{}\", config, inputs, outputs)\n",
            self.op
        );
        Ok(text)
    }

    /// A C++ program that writes a case of the example config: `CPP` is its header.
    ///
    /// # Errors
    /// None for the operations in the table.
    pub fn cpp_example(&self) -> Result<String> {
        let config = &self.example;
        let json =
            Value::Object(config.to_json().into_iter().filter(|(_, v)| !v.is_null()).collect());
        let mut text = "#include \"case_file.hpp\"\n\nint main() {\n".to_owned();
        text += &format!("    CaseFile file(\"{}\", R\"({json})\");\n", self.op);
        for rule in inputs(config)? {
            let shape = format!("{{{}}}", sizes(&rule).join(", "));
            let fill = Fill::of(&rule);
            let call = fill.cpp(&shape, experts(config));
            text += &match fill {
                Fill::TopkIds => format!("    {call}\n"),
                _ => {
                    format!(
                        "    file.add(\"{}\", \"{}\", {shape}, {call});\n",
                        rule.name, rule.dtypes[0]
                    )
                }
            };
        }
        text += "    // Add the outputs of your kernel:\n";
        for (name, dtype, shape) in results(config)? {
            text +=
                &format!("    //   file.add(\"out.{name}\", \"{dtype}\", {{{shape}}}, bytes);\n");
        }
        text += "    file.write(\"case.safetensors\");\n}\n";
        Ok(text)
    }
}
