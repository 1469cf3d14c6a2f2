//! The keys that describe the quantized matrices of `linear` and `moe`.

pub(in crate::ops) mod keys;
pub(in crate::ops) mod lattice;
pub(in crate::ops) mod packed;
pub(in crate::ops) mod source;
pub(in crate::ops) mod stack;
pub(in crate::ops) mod tensors;
pub(in crate::ops) mod values;
mod variants;

pub use source::Source as MatrixSource;
pub use values::weight;

pub use crate::formats::Format as CheckpointFormat;
use crate::layers::{ParallelStyle, TensorParallel};
use crate::num::dims::{GroupSize, LogicalK};
use crate::num::scalar::ScalarType;
use crate::ops::schema::{CaseError, Inputs, finite, in_range};
use crate::products::Convention;
use crate::{Error, Result};

/// The description of the quantized matrices of `linear` and `moe`.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantConfig {
    /// How the weight inputs are stored.
    pub checkpoint_format: CheckpointFormat,
    /// Type of a code.
    pub weight_type: ScalarType,
    /// Activations, scales and output: [`ScalarType::FLOAT16`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// 8-bit activations: [`ScalarType::INT8`] or [`ScalarType::FLOAT8_E4M3FN`].
    pub input_dtype: Option<ScalarType>,
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether rows are ordered by activation size, with `g_idx`.
    pub desc_act: bool,
    /// Whether a rank holds the whole K.
    pub is_k_full: bool,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Present on a tensor-parallel rank.
    pub tensor_parallel: Option<TensorParallel>,
    /// Convention of the products; `None` tries every known convention.
    pub convention: Option<Convention>,
}

impl QuantConfig {
    /// Whether rows belong to groups by `g_idx`. With channel-wise scales `desc_act` has no meaning.
    pub fn has_act_order(&self) -> bool {
        self.desc_act && self.group_size != GroupSize::Channel
    }

    /// Number of scale rows of a matrix with `size_k` rows; `None` for a rank that holds a slice of
    /// K but all scales of the matrix, where any number is valid.
    pub fn scale_rows(&self, size_k: usize) -> crate::Result<Option<usize>> {
        let cut = self.tensor_parallel.is_some_and(|tp| tp.style == ParallelStyle::Row);
        if self.has_act_order() && (cut || !self.is_k_full) {
            return Ok(None);
        }
        self.group_size.groups(LogicalK(size_k)).map(Some)
    }

    /// A short description of the format.
    pub(super) fn describe(&self) -> String {
        let mut words = vec![
            self.checkpoint_format.to_string(),
            self.weight_type.to_string(),
            self.dtype.to_string(),
            format!("g{}", self.group_size),
        ];
        words.extend(self.input_dtype.map(|t| format!("{t} activations")));
        words.extend(self.desc_act.then(|| "desc_act".to_owned()));
        words.extend(self.has_bias.then(|| "bias".to_owned()));
        words.extend(self.tensor_parallel.map(|t| format!("{} {}/{}", t.style, t.rank, t.size)));
        words.join(" ")
    }

    /// Whether zero points are stored.
    pub fn has_zero_points(&self) -> bool {
        matches!(self.weight_type, ScalarType::UINT4 | ScalarType::UINT8)
    }

    /// Codes per 32-bit word.
    pub fn pack(&self) -> usize {
        32 / self.weight_type.size_bits().max(1) as usize
    }
}

/// Checks scales and, with act-order, the groups of rows.
pub(super) fn finite_scales(quant: &QuantConfig, inputs: &Inputs<'_>) -> Result<()> {
    for (name, tensor) in inputs {
        let bare = name.trim_start_matches("w13_").trim_start_matches("w2_");
        match bare {
            "scales" | "weight_scale" | "weight_global_scale" => finite(tensor)?,
            // Without act-order, `g_idx` is not read.
            "g_idx" if quant.has_act_order() => {
                let scales = name.replace("g_idx", "scales");
                let groups = inputs
                    .get(&scales)
                    .and_then(|s| s.shape().iter().rev().nth(1).copied())
                    .unwrap_or(0);
                in_range(tensor, 0, groups, "a group")?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Without act-order, row k belongs to group k / group_size. A slice of K may begin at any row.
pub(super) fn unordered(quant: &QuantConfig, inputs: &Inputs<'_>) -> Result<()> {
    let cut = quant.tensor_parallel.is_some_and(|tp| tp.style == ParallelStyle::Row);
    if quant.has_act_order() || cut {
        return Ok(());
    }
    for g_idx in ["g_idx", "w13_g_idx", "w2_g_idx"].iter().filter_map(|name| inputs.get(*name)) {
        let size_k = g_idx.shape().last().copied().unwrap_or(1).max(1);
        let group = |i: usize| match quant.group_size {
            GroupSize::Channel => 0,
            GroupSize::Of(size) => i % size_k / size,
        };
        let values = g_idx.elements::<i32>();
        if let Some(i) = (0..values.len()).find(|&i| usize::try_from(values[i]) != Ok(group(i))) {
            let at = crate::formats::unflatten(g_idx.shape(), i);
            let expected = format!("{}, the row's group without act-order (desc_act)", group(i));
            return Err(Error::value(g_idx.name(), &at, values[i], expected));
        }
    }
    Ok(())
}

/// Checks that the map of an expert-parallel rank has as many experts as upstream assigns to that
/// rank.
pub(super) fn ranks(
    num_experts: usize,
    ep_size: usize,
    ep_rank: usize,
    inputs: &Inputs<'_>,
) -> Result<()> {
    if ep_size <= 1 {
        return Ok(());
    }
    let contradiction = |with: &str| {
        let (key, found, with) = ("ep_size".to_owned(), ep_size.to_string(), with.to_owned());
        Err(CaseError::Contradiction { key, found, with }.into())
    };
    let Some(map) = inputs.get("expert_map") else {
        return contradiction("the absence of `in.expert_map`, which every rank has");
    };
    // Placement and load balancing decide which experts a rank has, but not how many.
    let found = map.elements::<i32>().iter().filter(|&&local| local >= 0).count();
    let expected = num_experts / ep_size + usize::from(ep_rank < num_experts % ep_size);
    if found == expected {
        return Ok(());
    }
    contradiction(&format!(
        "`in.expert_map`, which has {found} experts where rank {ep_rank} has {expected} of \
         {num_experts}"
    ))
}

/// Whether the kernel's format has a power of two in its block scales that the case must state.
pub(super) fn states_factor(q: &QuantConfig) -> bool {
    q.checkpoint_format.has_global_scale() && q.dtype == ScalarType::BFLOAT16
}
