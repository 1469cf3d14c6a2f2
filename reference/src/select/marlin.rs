//! What Marlin supports: types, group sizes, shapes.

use super::{Capability, Platform};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// Group sizes of Marlin's kernels; −1 is channel-wise.
pub const MARLIN_GROUP_SIZES: [GroupSize; 4] =
    [GroupSize::Channel, GroupSize::Of(32), GroupSize::Of(64), GroupSize::Of(128)];

/// Output columns are a multiple of this.
pub(super) const MIN_THREAD_N: usize = 64;
/// Input rows of a dense layer are a multiple of this.
pub(super) const MIN_THREAD_K: usize = 128;

/// Why Marlin cannot run a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MarlinRefusal {
    /// The platform is not one Marlin runs on.
    #[error("Marlin does not run on {platform}")]
    Platform {
        /// The platform.
        platform: Platform,
    },
    /// The weight type is not supported on this device with these zero points.
    #[error(
        "weight type {weight_type} is not supported {zeros} on {device}; supported: {supported}"
    )]
    WeightType {
        /// The type.
        weight_type: ScalarType,
        /// `with run-time zero points` or `without run-time zero points`.
        zeros: &'static str,
        /// The device.
        device: String,
        /// Names of the supported types.
        supported: String,
    },
    /// The group size is not −1, 32, 64 or 128.
    #[error("group_size {group_size} is not one of -1, 32, 64, 128")]
    GroupSize {
        /// Group size found.
        group_size: GroupSize,
    },
    /// A size is not a multiple of what the kernel needs.
    #[error("{what} = {found} is not a multiple of {of}")]
    NotMultiple {
        /// Which size.
        what: &'static str,
        /// Its value.
        found: usize,
        /// Divisor.
        of: usize,
    },
    /// A tensor-parallel rank's part of K ends inside a quantization group.
    #[error(
        "a rank's part of K = {found}, of {size_k} in all, cuts a quantization group: expected a \
         multiple of group_size = {group_size}"
    )]
    CutsGroup {
        /// Rows on the rank.
        found: usize,
        /// Rows of the whole layer.
        size_k: usize,
        /// Rows that share a scale.
        group_size: usize,
    },
    /// Router weights would have to be applied to the input.
    #[error("router weights on the input are not supported")]
    RouterWeightOnInput,
}

/// Weight types that Marlin reads, without and with run-time zero points
/// (upstream `query_marlin_supported_quant_types`).
///
/// Empty on CUDA before 7.5 and if the compute capability is unknown (except on ROCm and CPUs; CPUs
/// support only 4-bit integers).
pub fn marlin_weight_types(zero_points: bool, device: &Capability) -> &'static [ScalarType] {
    let cpu = device.platform.is_cpu();
    if !cpu && device.platform != Platform::Rocm && device.to_int() < 75 {
        return &[];
    }
    match (zero_points, cpu) {
        (true, _) => &[ScalarType::UINT4],
        (false, true) => &[ScalarType::UINT4B8],
        (false, false) => &[
            ScalarType::UINT4B8,
            ScalarType::UINT8B128,
            ScalarType::FLOAT8_E4M3FN,
            ScalarType::FLOAT4_E2M1F,
        ],
    }
}

/// Whether Marlin reads this weight type and group size on `device`
/// (upstream `check_marlin_supported`).
///
/// # Errors
/// [`MarlinRefusal::WeightType`] or [`MarlinRefusal::GroupSize`].
pub fn check_marlin_supported(
    weight_type: ScalarType,
    group_size: GroupSize,
    zero_points: bool,
    device: &Capability,
) -> Result<(), MarlinRefusal> {
    let types = marlin_weight_types(zero_points, device);
    if !types.contains(&weight_type) {
        let names: Vec<_> = types.iter().map(|t| t.name()).collect();
        return Err(MarlinRefusal::WeightType {
            weight_type,
            zeros: if zero_points {
                "with run-time zero points"
            } else {
                "without run-time zero points"
            },
            device: device.to_string(),
            supported: if names.is_empty() { "none".to_owned() } else { names.join(", ") },
        });
    }
    if !MARLIN_GROUP_SIZES.contains(&group_size) {
        return Err(MarlinRefusal::GroupSize { group_size });
    }
    Ok(())
}

fn multiple(what: &'static str, found: usize, of: usize) -> Result<(), MarlinRefusal> {
    if found.is_multiple_of(of) {
        Ok(())
    } else {
        Err(MarlinRefusal::NotMultiple { what, found, of })
    }
}

/// Whether a rank that holds `part` of `size_k` rows has whole quantization groups. A group of at
/// least `size_k` rows spans all of K, and one scale for each column is repeated on every rank.
///
/// # Errors
/// [`MarlinRefusal::CutsGroup`].
pub fn check_rank_groups(
    size_k: usize,
    part: usize,
    group_size: GroupSize,
) -> Result<(), MarlinRefusal> {
    match group_size {
        GroupSize::Of(g) if g < size_k && !part.is_multiple_of(g) => {
            Err(MarlinRefusal::CutsGroup { found: part, size_k, group_size: g })
        }
        _ => Ok(()),
    }
}

/// Whether Marlin supports a dense layer's sizes (upstream `check_marlin_supports_shape`): a rank's
/// part of K whole groups, N a multiple of 64, K a multiple of 128.
///
/// # Errors
/// [`MarlinRefusal::CutsGroup`] or [`MarlinRefusal::NotMultiple`] with the first rule broken.
pub fn check_marlin_supports_shape(
    output_size_per_partition: usize,
    input_size_per_partition: usize,
    input_size: usize,
    group_size: GroupSize,
) -> Result<(), MarlinRefusal> {
    check_rank_groups(input_size, input_size_per_partition, group_size)?;
    multiple("output_size_per_partition", output_size_per_partition, MIN_THREAD_N)?;
    multiple("input_size_per_partition", input_size_per_partition, MIN_THREAD_K)
}

/// Whether Marlin supports a MoE layer (upstream `check_moe_marlin_supports_layer`): not ROCm,
/// hidden size a multiple of 128, intermediate size per rank a multiple of max(64, group), group
/// −1, 32, 64 or 128, and router weights not applied to the input. Lists all reasons against it.
pub fn check_moe_marlin_supports_layer(
    hidden_size: usize,
    intermediate_size_per_partition: usize,
    group_size: GroupSize,
    apply_router_weight_on_input: bool,
    device: &Capability,
) -> Vec<MarlinRefusal> {
    let mut refusals = Vec::new();
    if device.platform == Platform::Rocm {
        refusals.push(MarlinRefusal::Platform { platform: device.platform });
    }
    let unit = match group_size {
        GroupSize::Channel => 64,
        GroupSize::Of(g) => g.max(64),
    };
    refusals.extend(multiple("hidden_size", hidden_size, 128).err());
    refusals.extend(
        multiple("intermediate_size_per_partition", intermediate_size_per_partition, unit).err(),
    );
    if !MARLIN_GROUP_SIZES.contains(&group_size) {
        refusals.push(MarlinRefusal::GroupSize { group_size });
    }
    if apply_router_weight_on_input {
        refusals.push(MarlinRefusal::RouterWeightOnInput);
    }
    refusals
}
