//! Packed layers of the int4 path in a safetensors file. A mapped file is ready to run.
//!
//! | layer | tensors | description under |
//! | --- | --- | --- |
//! | linear | `<module>.rhs_packed`, U8 `[packed_len]` | `marlinspike.w4a8.<module>` |
//! | experts | `<module>.w13_packed` and `.w2_packed`, U8 `[E, packed_len]` | `marlinspike.w4a8.<module>` |
//!
//! `packed_len` is [`RhsLayout::packed_len`]; in w13 the gate's columns come before those of up. The
//! description is a JSON object in the file's `__metadata__`: a [`LinearDescription`] or a
//! [`MoeDescription`]. It states every size, and the tensors must agree with it. Loading neither
//! reads nor copies packed bytes, and assumes no alignment. Experts in another format than int4 name
//! it under `weights` (version 3); `packed_len` is then [`CpuSizes::packed_len`]. Int4 matrices with tables
//! after their blocks state `zero_points` and `act_order` (linear: version 2, experts: version 4).

use std::borrow::Cow;

mod dense;
mod load;
mod routing;
mod tables;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::RhsLayout;

use crate::container::Container;
use crate::layouts::CPU_INT4;
use crate::layouts::cpu::{CpuFormat, CpuSizes, CpuTables};
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::num::dims::{GroupSize, Shape};
use crate::{Error, Result};
pub use dense::LinearDescription;
pub use load::{expert_bytes, experts, linear, linear_bytes};
pub use routing::{OperatorRouting, StoredRouting};
use tables::tables;

/// Prefix of the descriptions' keys in `__metadata__`.
pub const PREFIX: &str = "marlinspike.w4a8.";

/// Version of the descriptions that upstream's settings suffice for, and of the tensor names.
pub const VERSION: u32 = 1;

/// Version of experts' descriptions with a family's routing rule. [`VERSION`] is still written and
/// read where the rule is upstream's.
pub const FAMILY_VERSION: u32 = 2;

/// Version of descriptions that name a format other than int4 under `weights`. The rest is as in
/// [`FAMILY_VERSION`] for experts, as in [`LINEAR_TABLES_VERSION`] for linear layers.
pub const FORMAT_VERSION: u32 = 3;

/// Version of experts' descriptions with tables after the blocks. The rest is as in [`FORMAT_VERSION`].
pub const TABLES_VERSION: u32 = 4;

/// Version of linear layers' descriptions with tables after the blocks.
pub const LINEAR_TABLES_VERSION: u32 = 2;

/// Largest number of experts of a layer; real layers have a few hundred.
const MAX_EXPERTS: usize = 1 << 16;

/// Largest H and I of experts; real ones are below 65,536. The limit matters for a rank without
/// experts, which has no bytes to compare with.
const MAX_SIZE: usize = 1 << 20;

/// Longest description, in bytes: room for an expert map of [`MAX_EXPERTS`].
const MAX_DESCRIPTION: usize = 1 << 20;

/// A description's first two keys.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Head {
    version: u32,
    layer: String,
}

/// A file's description of one rank's experts of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeDescription {
    /// The format of the matrices.
    pub format: &'static CpuFormat,
    /// H.
    pub hidden_size: usize,
    /// I of this rank.
    pub intermediate_size: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub expert_map: Option<Vec<i32>>,
    /// The checkpoint's group size; −1: one scale per column.
    pub group_size: GroupSize,
    /// Columns of a block.
    pub nr: usize,
    /// Tables after each matrix's blocks.
    pub tables: CpuTables,
    /// Router and activation.
    pub routing: StoredRouting,
}

/// A file's description of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum Description {
    /// One matrix.
    Linear(LinearDescription),
    /// Experts.
    Moe(MoeDescription),
}

impl Description {
    /// The description as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Linear(linear) => linear.to_json(),
            Self::Moe(moe) => moe.to_json(),
        }
    }

    /// The description of `module` in `file`, of either kind.
    ///
    /// # Errors
    /// As [`LinearDescription::read`] and [`MoeDescription::read`].
    pub fn read(file: &Container<'_>, module: &str) -> Result<Self> {
        match head(file, module)?.layer.as_str() {
            "moe" => MoeDescription::read(file, module).map(Self::Moe),
            _ => LinearDescription::read(file, module).map(Self::Linear),
        }
    }
}

/// The keys of the experts' description, [`VERSION`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MoeKeys {
    version: u32,
    layer: Cow<'static, str>,
    hidden_size: usize,
    intermediate_size: usize,
    num_experts: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_map: Option<Vec<i32>>,
    group_size: i64,
    nr: usize,
    top_k: usize,
    scoring_func: Cow<'static, str>,
    renormalize: bool,
    activation: Cow<'static, str>,
    apply_router_weight_on_input: bool,
}

/// The metadata key of `module`'s description.
pub fn key(module: &str) -> String {
    format!("{PREFIX}{module}")
}

/// Modules that the file describes, sorted by name.
pub fn modules<'f>(file: &'f Container<'_>) -> impl Iterator<Item = &'f str> {
    file.metadata().keys().filter_map(|key| key.strip_prefix(PREFIX))
}

/// A key's name in errors.
fn place(module: &str, key: &str) -> String {
    let dot = if key.is_empty() { "" } else { "." };
    format!("__metadata__ {PREFIX}{module}{dot}{key}")
}

/// The text of `module`'s description.
fn text<'f>(file: &'f Container<'_>, module: &str) -> Result<&'f str> {
    let text = file.metadata().get(&key(module)).map(String::as_str);
    let text = text.ok_or_else(|| Error::missing(place(module, ""), "a packed layer"))?;
    if text.len() > MAX_DESCRIPTION {
        let found = format!("{} bytes", text.len());
        let expected = format!("at most {MAX_DESCRIPTION}");
        return Err(Error::value(place(module, ""), &[], found, expected));
    }
    Ok(text)
}

/// The beginning of an untrusted text.
fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Reads kind and version first, because the meaning of other keys depends on the version.
fn head(file: &Container<'_>, module: &str) -> Result<Head> {
    let text = text(file, module)?;
    let head: Head = serde_json::from_str(text).map_err(|e| {
        let expected = format!("a JSON object with `version` and `layer` ({e})");
        Error::value(place(module, ""), &[], short(text), expected)
    })?;
    let newest = if head.layer == "moe" { TABLES_VERSION } else { FORMAT_VERSION };
    if !(VERSION..=newest).contains(&head.version) {
        let expected = format!("{VERSION} to {newest}");
        return Err(Error::value(place(module, "version"), &[], head.version, expected));
    }
    if !matches!(head.layer.as_str(), "linear" | "moe") {
        let found = short(&head.layer);
        return Err(Error::value(place(module, "layer"), &[], found, "linear or moe"));
    }
    Ok(head)
}

/// The description of `module`, which must be of the kind `layer`.
fn read<K: DeserializeOwned>(file: &Container<'_>, module: &str, layer: &str) -> Result<K> {
    let head = head(file, module)?;
    let text = text(file, module)?;
    if head.layer != layer {
        return Err(Error::value(place(module, "layer"), &[], head.layer, layer));
    }
    let mut de = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut de).map_err(|e| {
        let path = e.path().to_string();
        let path = if path == "." { String::new() } else { path };
        let expected = format!("the description of a {layer} layer ({})", e.inner());
        Error::value(place(module, &path), &[], short(text), expected)
    })
}

/// A count between 1 and `limit`.
fn count(module: &str, key: &str, found: usize, limit: usize) -> Result<usize> {
    if (1..=limit).contains(&found) {
        return Ok(found);
    }
    Err(Error::value(place(module, key), &[], found, format!("1 to {limit}")))
}

fn named<T: Copy>(module: &str, key: &str, found: &str, table: &[(&str, T)]) -> Result<T> {
    let value = table.iter().find(|(name, _)| *name == found);
    value.map(|&(_, value)| value).ok_or_else(|| {
        let names: Vec<_> = table.iter().map(|(name, _)| *name).collect();
        Error::value(place(module, key), &[], short(found), format!("one of {}", names.join(", ")))
    })
}

/// What was built from a file's sizes and numbers: the error names the description.
fn described<T>(module: &str, found: Result<T>) -> Result<T> {
    found.map_err(|e| match e {
        Error::Size { what, found, expected } => {
            Error::size(format!("{}: {what}", place(module, "")), found, expected)
        }
        Error::Unsupported { what, reason } => {
            Error::unsupported(format!("{}: {what}", place(module, "")), reason)
        }
        other => other,
    })
}

fn group_size(module: &str, found: i64) -> Result<GroupSize> {
    GroupSize::from_config(found)
        .map_err(|_| Error::value(place(module, "group_size"), &[], found, "-1, or 1 and more"))
}

impl MoeDescription {
    /// `[K, N]` of each expert's w13, `[H, 2I]`, and w2, `[I, H]`.
    ///
    /// # Errors
    /// [`Error::Size`] if 2I overflows.
    pub fn shapes(&self) -> Result<[Shape; 2]> {
        let double = self.intermediate_size.checked_mul(2);
        let size_n = double.ok_or_else(|| {
            Error::size("intermediate_size", self.intermediate_size, "a number that can be doubled")
        })?;
        let w2 = Shape::new(self.intermediate_size, self.hidden_size);
        Ok([Shape::new(self.hidden_size, size_n), w2])
    }

    /// Sizes of each expert's packed w13 and w2.
    ///
    /// # Errors
    /// As [`MoeDescription::shapes`]; [`Error::Size`] for sizes that the format does not have.
    pub fn sizes(&self) -> Result<[CpuSizes; 2]> {
        let [w13, w2] = self.shapes()?;
        let of = |shape| (self.format.sizes)(shape, self.group_size, self.nr, self.tables);
        Ok([of(w13)?, of(w2)?])
    }

    /// Int4: layout of each expert's gate and up, `[H, 2I]`.
    ///
    /// # Errors
    /// As [`RhsLayout::new`]; [`Error::Size`] if 2I overflows.
    pub fn w13_layout(&self) -> Result<RhsLayout> {
        RhsLayout::new(self.shapes()?[0], self.group_size, self.nr)?.with_tables(self.tables)
    }

    /// Int4: layout of each expert's down, `[I, H]`.
    ///
    /// # Errors
    /// As [`RhsLayout::new`].
    pub fn w2_layout(&self) -> Result<RhsLayout> {
        RhsLayout::new(self.shapes()?[1], self.group_size, self.nr)?.with_tables(self.tables)
    }

    /// Number of local experts.
    pub fn local_num_experts(&self) -> usize {
        match &self.expert_map {
            None => self.num_experts,
            Some(map) => map.iter().filter(|&&local| local >= 0).count(),
        }
    }

    /// The description as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let routing = match &self.routing {
            StoredRouting::Operator(routing)
                if *self.format == CPU_INT4 && self.tables == CpuTables::NONE =>
            {
                routing
            }
            StoredRouting::Operator(o) => return routing::to_json(self, &o.rule(), <_>::default()),
            StoredRouting::Family(f) => return routing::to_json(self, f.rule(), f.tensors()),
        };
        serde_json::json!(MoeKeys {
            version: VERSION,
            layer: "moe".into(),
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_experts: self.num_experts,
            expert_map: self.expert_map.clone(),
            group_size: self.group_size.to_config(),
            nr: self.nr,
            top_k: routing.top_k,
            scoring_func: routing.scoring_func.name().into(),
            renormalize: routing.renormalize,
            activation: routing.activation.name().into(),
            apply_router_weight_on_input: routing.router_weight_on_input,
        })
    }

    /// The description of the experts of `module` in `file`.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none; [`Error::Value`] and [`Error::Size`] naming the key.
    pub fn read(file: &Container<'_>, module: &str) -> Result<Self> {
        if head(file, module)?.version >= FAMILY_VERSION {
            return routing::read_family(file, module)?.checked(module);
        }
        let keys: MoeKeys = read(file, module, "moe")?;
        let num_experts = count(module, "num_experts", keys.num_experts, MAX_EXPERTS)?;
        let found = Self {
            format: &CPU_INT4,
            hidden_size: keys.hidden_size,
            intermediate_size: keys.intermediate_size,
            num_experts,
            expert_map: keys.expert_map,
            group_size: group_size(module, keys.group_size)?,
            nr: keys.nr,
            tables: CpuTables::NONE,
            routing: StoredRouting::Operator(OperatorRouting {
                top_k: count(module, "top_k", keys.top_k, num_experts)?,
                scoring_func: named(
                    module,
                    "scoring_func",
                    &keys.scoring_func,
                    ScoringFunc::NAMED,
                )?,
                renormalize: keys.renormalize,
                activation: named(module, "activation", &keys.activation, Activation::NAMED)?,
                router_weight_on_input: keys.apply_router_weight_on_input,
            }),
        };
        found.checked(module)
    }

    /// The description, if its sizes and its expert map are valid.
    fn checked(self, module: &str) -> Result<Self> {
        described(module, self.sizes())?;
        count(module, "hidden_size", self.hidden_size, MAX_SIZE)?;
        count(module, "intermediate_size", self.intermediate_size, MAX_SIZE)?;
        self.check_map(module)?;
        Ok(self)
    }

    /// Fails unless the map has an entry per expert and names each local expert exactly once.
    fn check_map(&self, module: &str) -> Result<()> {
        let Some(map) = &self.expert_map else { return Ok(()) };
        let name = || place(module, "expert_map");
        if map.len() != self.num_experts {
            return Err(Error::shape(name(), &[map.len()], format!("[{}]", self.num_experts)));
        }
        let local = self.local_num_experts();
        let mut seen = vec![false; local];
        for (i, &e) in map.iter().enumerate().filter(|(_, e)| **e != -1) {
            let slot = usize::try_from(e).ok().and_then(|e| seen.get_mut(e));
            match slot {
                Some(slot) if !*slot => *slot = true,
                _ => {
                    let expected = format!("-1, or each local expert below {local} once");
                    return Err(Error::value(name(), &[i], e, expected));
                }
            }
        }
        Ok(())
    }
}
