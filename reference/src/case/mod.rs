//! Case files: the inputs, the configuration and the outputs of one operation, in one safetensors
//! file. `check` reads them; `vectors` or a kernel under test writes them.
//!
//! Metadata: `format` = `marlinspike-case`, `version` = `1`, `op`, `name`, `config` (JSON),
//! `provenance`. Tensors are named `in.<name>` and `out.<name>`; a name that the operation does not
//! define is an error. [`CaseConfig::rules`] lists the names of each operation.
//! Tensors `ref.<name>` are skipped: the fuzzing kit hands them to kernels besides the inputs.

mod limits;
mod misfit;
mod router_golden;

use std::collections::BTreeMap;

pub use crate::ops::UPSTREAM_NAMES;
pub use crate::ops::configs::*;
pub use crate::ops::schema::{CONFIG_BYTES, CONFIG_MEMORY, CaseError, Dim, TensorRule};
pub use limits::Limits;
pub use misfit::{Misfit, MisfitKind};

use crate::ops::schema::{Demand, object};

// Types of the fields of a config.
pub use crate::moe::ScoringFunc;
pub use crate::moe::activation::Activation;
pub use crate::w4a8::quantize::ActivationRounding;

use crate::container::{Container, write_container};
use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// `format` of every case file.
pub const FORMAT: &str = "marlinspike-case";
/// `version` of the format that is read and written.
pub const VERSION: &str = "1";

impl<'a> Case<'a> {
    /// Reads a case file's bytes; the tensors borrow them.
    ///
    /// # Errors
    /// [`ContainerError`](crate::container::ContainerError) for a malformed file; [`CaseError`] for
    /// metadata and configuration; [`Error::Unknown`], [`Error::Missing`], [`Error::Dtype`],
    /// [`Error::Shape`] and [`Error::Value`] for tensors, as in [`Case::validate`]. Outputs of a
    /// wrong type or shape are not errors: [`Case::misfits`] lists them.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let container = Container::parse(bytes)?;
        if router_golden::is_router_golden(&container) {
            return router_golden::parse(&container);
        }
        let metadata = |key: &str| {
            container
                .metadata()
                .get(key)
                .map(String::as_str)
                .ok_or_else(|| CaseError::MissingMetadata { key: key.to_owned() })
        };
        let format = metadata("format")?;
        if format != FORMAT {
            return Err(CaseError::Format { found: format.to_owned() }.into());
        }
        let version = metadata("version")?;
        if version != VERSION {
            return Err(CaseError::Version { found: version.to_owned() }.into());
        }
        let found = metadata("op")?;
        let op = Op::from_name(found).ok_or_else(|| {
            let known: Vec<_> = Op::NAMED.iter().map(|(name, _)| *name).collect();
            CaseError::UnknownOp { found: found.to_owned(), expected: known.join(", ") }
        })?;
        let raw_config = object(metadata("config")?)?;
        let config = CaseConfig::from_json(op, &raw_config)?;
        // Both are optional. `check` accepts known deviations only of a producer that is named.
        let text = |key| metadata(key).unwrap_or_default().to_owned();
        let (name, provenance) = (text("name"), text("provenance"));
        let mut case = Self { raw_config, ..Self::new(name, config, provenance) };
        for tensor in container.tensors() {
            let tensor = tensor?;
            let full = tensor.name().to_owned();
            if let Some(name) = full.strip_prefix("in.") {
                case.inputs.insert(name.to_owned(), tensor);
            } else if let Some(name) = full.strip_prefix("out.") {
                case.outputs.insert(name.to_owned(), tensor);
            } else if !full.starts_with("ref.") {
                return Err(case.unknown(full, "names that begin with `in.` or `out.`".to_owned()));
            }
        }
        case.validate()?;
        Ok(case)
    }

    /// Every tensor that the operation knows under the case's config and number of experts.
    ///
    /// # Errors
    /// For sizes that the operation cannot have.
    pub fn rules(&self) -> Result<Vec<TensorRule>> {
        self.config.rules(self.local_experts())
    }

    /// Checks the names of all tensors. Of the inputs it also checks presence, types, shapes, and
    /// the values that a recomputation depends on (finite scales; `g_idx`, `expert_map` and
    /// `topk_ids` in range). Outputs are judged instead: see [`Case::misfits`].
    pub fn validate(&self) -> Result<()> {
        if self.op != self.config.op() {
            let (found, expected) = (self.op.to_string(), self.config.op().to_string());
            return Err(CaseError::UnknownOp { found, expected }.into());
        }
        let rules = self.rules()?;
        let find = |name: &str| rules.iter().find(|r| r.name == name);
        for (prefix, tensors) in [("in", &self.inputs), ("out", &self.outputs)] {
            for (name, tensor) in tensors {
                let full = format!("{prefix}.{name}");
                let Some(rule) = find(&full) else {
                    let known: Vec<_> = rules.iter().map(|r| r.name.as_str()).collect();
                    return Err(self.unknown(full, known.join(", ")));
                };
                if prefix == "in" {
                    rule.check(tensor)?;
                }
            }
        }
        for rule in rules.iter().filter(|r| r.required) {
            self.input(rule.name.trim_start_matches("in."))?;
        }
        self.config.operation().check_inputs(&self.inputs)
    }

    /// Serializes the case. Keeps the remarks of [`Case::raw_config`]. Returns the errors of
    /// [`Case::validate`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.validate()?;
        let mut config = self.raw_config.clone();
        config.extend(self.config.to_json());
        let text = |s: &str| s.to_owned();
        let metadata = BTreeMap::from([
            (text("format"), text(FORMAT)),
            (text("version"), text(VERSION)),
            (text("op"), text(self.op.name())),
            (text("name"), self.name.clone()),
            (text("provenance"), self.provenance.clone()),
            (text("config"), serde_json::Value::Object(config).to_string()),
        ]);
        let named = |prefix: &'static str, tensors: &BTreeMap<String, Tensor<'a>>| {
            let rename = |(n, t): (&String, &Tensor<'a>)| t.clone().renamed(format!("{prefix}{n}"));
            tensors.iter().map(rename).collect::<Vec<_>>()
        };
        let mut tensors = named("in.", &self.inputs);
        tensors.extend(named("out.", &self.outputs));
        write_container(&tensors, &metadata, Vec::new())
            .map_err(|e| CaseError::Write { problem: e.to_string() }.into())
    }

    fn unknown(&self, tensor: String, expected: String) -> Error {
        let symmetric = self.config.quant().map(|q| q.weight_type).filter(|ty| ty.bias() != 0);
        let remedy = match symmetric {
            Some(ty) if tensor.ends_with("qzeros") => format!(
                " with weight_type {ty}, which has no zero points (leave out the constant zeros of a \
                 symmetric checkpoint)"
            ),
            _ => String::new(),
        };
        Error::Unknown { tensor, context: format!("operation `{}`{remedy}", self.op), expected }
    }
}
