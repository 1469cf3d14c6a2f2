//! The origin of a packed layer of the int4 path: which rank's part it is, and whether its
//! checkpoint quantizes activations.

use std::path::Path;

use marlinspike::container::Container;
use marlinspike::w4a8::stored::{Description, MoeDescription};
use serde_json::Value;

use crate::convert::parallel::Style;
use crate::convert::settings::Format;

/// The key of a file's `__metadata__` under which `convert` states which rank's part it is.
pub use crate::convert::plan::RANKS_KEY;

/// A rank among the ranks that share a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// This rank.
    pub rank: u64,
    /// All ranks.
    pub size: u64,
}

/// Which part of a layer runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial {
    /// Tensor parallelism, above one rank.
    pub tp: Option<Rank>,
    /// Expert parallelism, above one rank.
    pub ep: Option<Rank>,
    /// This rank's experts and the experts of all ranks, where ranks share them.
    pub experts: Option<[usize; 2]>,
    /// How `y` relates to the layer's output.
    pub output: PartialOutput,
}

/// How a rank's output relates to the layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialOutput {
    /// A summand: the ranks' outputs are added.
    Sum,
    /// Some of its columns.
    Columns,
}

/// The `marlinspike` section of the config next to a packed file, if there is one.
pub fn config_section(file: &Path) -> Option<Value> {
    let config = file.parent()?.join("config.json");
    let size = std::fs::metadata(&config).ok().filter(|m| m.is_file())?.len();
    if size > 64 << 20 {
        return None;
    }
    let value: Value = serde_json::from_slice(&std::fs::read(&config).ok()?).ok()?;
    let section = value.get("marlinspike")?;
    let format = Format::of_section(section)?;
    format.target().runs_packed().then(|| section.clone())
}

/// Which part of its layer `module` is: by the file's own metadata, else by the config's section.
pub fn partial(
    file: &Container<'_>,
    section: Option<&Value>,
    module: &str,
    moe: Option<&MoeDescription>,
) -> Option<Partial> {
    let stated = file.metadata().get(RANKS_KEY);
    let stated: Option<Value> = stated.and_then(|text| serde_json::from_str(text).ok());
    let experts = moe.map(|m| {
        let shared = m.expert_map.is_some();
        shared.then(|| [m.local_num_experts(), m.num_experts])
    });
    of_ranks(stated.as_ref().or(section), module, experts)
}

/// Which part of its layer `module` is, by the ranks that a file or a converted config states.
/// `experts` is present for a layer of experts: this rank's experts and those of all ranks, where
/// ranks share them.
pub fn of_ranks(
    ranks: Option<&Value>,
    module: &str,
    experts: Option<Option<[usize; 2]>>,
) -> Option<Partial> {
    let rank = |kind: &str| {
        let size = ranks?.get(format!("{kind}_size"))?.as_u64().filter(|&n| n > 1)?;
        Some(Rank { rank: ranks?.get(format!("{kind}_rank"))?.as_u64()?, size })
    };
    let (tp, ep) = (rank("tp"), rank("ep"));
    let found = match experts {
        // Where each rank holds whole experts, tensor parallelism cuts only dense layers.
        Some(experts) => {
            Partial { tp: tp.filter(|_| ep.is_none()), ep, experts, output: PartialOutput::Sum }
        }
        None => {
            let output = match Style::of(module) {
                Style::Row => PartialOutput::Sum,
                // Only layers that `convert` merged are cut for several ranks.
                Style::Column | Style::KeyValue | Style::Merged => PartialOutput::Columns,
                Style::Replicated => return None,
            };
            Partial { tp, ep: None, experts: None, output }
        }
    };
    (found.tp.is_some() || found.ep.is_some() || found.experts.is_some()).then_some(found)
}

/// How the int4 path computes, and whether the checkpoint's method computes differently.
pub fn arithmetic(described: &Description, quantizes: Option<bool>) -> String {
    let format = match described {
        Description::Moe(moe) => moe.format,
        Description::Linear(linear) => linear.format,
    };
    let path = format!("int8 activations, {}", format.activations);
    match quantizes {
        Some(true) => format!(
            "{path}; the checkpoint's method (W4A16) keeps activations in 16 bits \
             (--arithmetic exact on the checkpoint runs that)"
        ),
        Some(false) => path,
        None => format!("{path}, whatever the checkpoint's method does"),
    }
}

/// Whether a section says that the checkpoint of `module` keeps activations in 16 bits.
pub fn quantizes(section: Option<&Value>, module: &str) -> Option<bool> {
    let layers = section?.get("layers")?;
    let layer = layers.get(module).or_else(|| layers.get(format!("{module}.w13")))?;
    Some(!matches!(layer["scheme"].as_str()?, "w4a8 int8" | "w8a8 int8"))
}
