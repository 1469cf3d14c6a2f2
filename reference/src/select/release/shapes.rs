//! Sizes that Marlin takes, refuses or pads, by release.

use super::super::{
    LinearDesc, MARLIN_GROUP_SIZES, MarlinRefusal, MoeDesc, check_marlin_supports_shape,
    check_rank_groups,
};
use super::Release;
use crate::num::dims::GroupSize;

/// What a release does with the sizes of a layer that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// The sizes are multiples of the kernel's tiles.
    None,
    /// A linear layer is padded with zeros.
    Linear {
        /// Columns after padding.
        size_n: usize,
        /// Rows after padding.
        size_k: usize,
    },
    /// The intermediate size of experts after padding with zeros.
    Intermediate(usize),
}

fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}

const fn rows(group_size: GroupSize) -> usize {
    match group_size {
        GroupSize::Of(g) => g,
        GroupSize::Channel => 1,
    }
}

/// N and K after padding in vLLM 0.33.0 (`marlin_padded_nk`): the smaller product of N up to 64 with
/// K up to 128, and N up to 128 with K up to 64. K stays a multiple of the group.
pub fn padded_nk(size_n: usize, size_k: usize, group_size: GroupSize) -> [usize; 2] {
    let to = |n: usize, k: usize| {
        [size_n.next_multiple_of(n), size_k.next_multiple_of(lcm(k, rows(group_size)))]
    };
    let [first, second] = [to(64, 128), to(128, 64)];
    let cost = |[n, k]: [usize; 2]| (n as u128 * k as u128, n + k);
    if cost(second) < cost(first) { second } else { first }
}

/// The intermediate size after padding in vLLM 0.33.0 (`marlin_moe_padded_intermediate`): the next
/// multiple of 64 and of the group.
pub fn padded_intermediate(intermediate_size: usize, group_size: GroupSize) -> usize {
    intermediate_size.next_multiple_of(lcm(64, rows(group_size)))
}

/// What Marlin does with a linear layer's sizes.
///
/// # Errors
/// [`MarlinRefusal::CutsGroup`] in both releases; [`MarlinRefusal::NotMultiple`] in 0.21.0 for a size
/// that is not a multiple of the tile.
pub fn linear_padding(
    release: Release,
    desc: &LinearDesc,
    group_size: GroupSize,
) -> Result<Padding, MarlinRefusal> {
    let (size_n, size_k) = (desc.output_size_per_partition, desc.input_size_per_partition);
    if release == Release::V0_21 {
        check_marlin_supports_shape(size_n, size_k, desc.input_size, group_size)?;
        return Ok(Padding::None);
    }
    check_rank_groups(desc.input_size, size_k, group_size)?;
    let [padded_n, padded_k] = padded_nk(size_n, size_k, group_size);
    Ok(match (padded_n, padded_k) == (size_n, size_k) {
        true => Padding::None,
        false => Padding::Linear { size_n: padded_n, size_k: padded_k },
    })
}

/// What Marlin does with the sizes of experts.
///
/// # Errors
/// [`MarlinRefusal`]: the hidden size is not a multiple of 128; the intermediate size is not a
/// multiple of the group or, in 0.21.0, of 64; the group is not −1, 32, 64 or 128.
pub fn experts_padding(
    release: Release,
    desc: &MoeDesc,
    group_size: GroupSize,
) -> Result<Padding, MarlinRefusal> {
    let multiple = |what, found: usize, of| match found.is_multiple_of(of) {
        true => Ok(()),
        false => Err(MarlinRefusal::NotMultiple { what, found, of }),
    };
    let inner = desc.intermediate_size_per_partition;
    multiple("hidden_size", desc.hidden_size, 128)?;
    let unit = match release {
        Release::V0_21 => rows(group_size).max(64),
        Release::V0_33 => rows(group_size),
    };
    multiple("intermediate_size_per_partition", inner, unit)?;
    if !MARLIN_GROUP_SIZES.contains(&group_size) {
        return Err(MarlinRefusal::GroupSize { group_size });
    }
    let padded = padded_intermediate(inner, group_size);
    Ok(if padded == inner { Padding::None } else { Padding::Intermediate(padded) })
}
