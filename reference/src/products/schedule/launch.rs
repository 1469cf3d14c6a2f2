//! How upstream's dense Marlin operator cuts a product into kernel launches and thread blocks.

use std::ops::Range;

use super::{Cta, Extras, Schedule};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// One launch of the kernel: a range of rows of x and its thread block.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Rows of x.
    pub rows: Range<usize>,
    /// The thread block.
    pub cta: Cta,
    /// The schedule for only these rows; its row 0 is the first of `rows`.
    pub schedule: Schedule,
}

/// All launches of one call of vLLM 0.21.0's `marlin_gemm`, as its host code selects them
/// (`csrc/quantization/marlin/marlin.cu`), on a GPU with 227 KiB of shared memory per thread block,
/// where every tile fits. The rule was compared with an H200's outputs: see
/// `docs/src/internals/tensor-cores.md`.
#[derive(Debug, Clone, PartialEq)]
pub struct Launches(Vec<Launch>);

/// k, columns and threads of a tile, in order of preference, for up to 16 rows and for more.
const SMALL: [(usize, usize, usize); 3] = [(128, 128, 256), (64, 128, 128), (128, 64, 128)];
const LARGE: [(usize, usize, usize); 3] = [(64, 256, 256), (64, 128, 128), (128, 64, 128)];
/// Used instead if the preferred tiles would occupy at most a quarter of the GPU.
const NARROW: (usize, usize, usize) = (128, 64, 128);

/// Largest number of rows of a thread block.
const BLOCK_ROWS: usize = 64;

impl Launches {
    /// The launches for `size_m` rows, on a GPU of `multiprocessors` (H200, H100 SXM: 132).
    ///
    /// A weight with act-order whose scales have more groups than its k (a rank's slice) counts as
    /// `is_k_full` false.
    ///
    /// # Errors
    /// [`Error::Size`] for a shape that no tile divides, [`Error::Unsupported`] as
    /// [`Schedule::marlin`].
    pub fn new(
        weight: &Weight<'_>,
        dtype: ScalarType,
        input: ScalarType,
        size_m: usize,
        multiprocessors: usize,
    ) -> Result<Self> {
        let shape = weight.shape();
        let group = group_of_tiles(weight);
        let wide = input.size_bits() == 16;
        let mut launches = Vec::new();
        let mut start = 0;
        while start < size_m {
            let rows = next_rows(size_m - start, shape.size_n);
            let cta = block(rows, shape, group, wide, multiprocessors.max(1))?;
            let schedule = Schedule::marlin(weight, dtype, input, cta)?;
            launches.push(Launch { rows: start..start + rows, cta, schedule });
            start += rows;
        }
        Ok(Self(launches))
    }

    /// The launches, by ascending rows.
    pub fn all(&self) -> &[Launch] {
        &self.0
    }

    /// The launches, mutable.
    pub fn all_mut(&mut self) -> &mut [Launch] {
        &mut self.0
    }

    /// The output `[M, N]` of all launches, bits row-major; `x` and `extras` as for
    /// [`Schedule::execute`], for all rows.
    ///
    /// # Errors
    /// As [`Schedule::execute`]; [`Error::Shape`] if x does not have the launches' rows.
    pub fn execute(&self, x: &[u32], weight: &Weight<'_>, extras: Extras<'_>) -> Result<Vec<u32>> {
        let size_k = weight.shape().size_k;
        let size_m = self.0.last().map_or(0, |l| l.rows.end);
        let lengths = [
            ("x", Some(x.len()), size_m * size_k),
            ("activation_scales", extras.activation_scales.map(<[f32]>::len), size_m),
            ("router_weights", extras.router_weights.map(<[f32]>::len), size_m),
        ];
        for (name, found, expected) in lengths {
            if let Some(found) = found.filter(|&f| f != expected) {
                return Err(Error::shape(name, &[found], format!("{expected} elements")));
            }
        }
        let mut out = Vec::with_capacity(size_m * weight.shape().size_n);
        for launch in &self.0 {
            let rows = launch.rows.clone();
            let part = |values: Option<&'_ [f32]>| values.map(|v| v[rows.clone()].to_vec());
            let activations = part(extras.activation_scales);
            let router = part(extras.router_weights);
            let extras = Extras {
                activation_scales: activations.as_deref(),
                router_weights: router.as_deref(),
                order: extras.order,
            };
            let x = &x[rows.start * size_k..rows.end * size_k];
            out.extend(launch.schedule.execute(x, weight, extras)?);
        }
        Ok(out)
    }
}

/// Rows of the next launch: whole blocks of 64 first, then the rest.
fn next_rows(left: usize, size_n: usize) -> usize {
    let most = if size_n <= 4096 { 128 } else { 16 };
    match left / BLOCK_ROWS {
        0 => left,
        blocks => blocks.min(most) * BLOCK_ROWS,
    }
}

/// k per group if runs of tiles must not begin inside a group.
fn group_of_tiles(weight: &Weight<'_>) -> Option<usize> {
    let shape = weight.shape();
    let groups = weight.scales.rows();
    let whole = match &weight.groups {
        Groups::Uniform(_) => true,
        Groups::Indexed { group_size: GroupSize::Of(g), .. } => groups * g == shape.size_k,
        Groups::Indexed { .. } => false,
    };
    (groups > 1 && whole).then(|| shape.size_k / groups)
}

/// The thread block for a launch of `rows` rows.
fn block(
    rows: usize,
    shape: Shape,
    group: Option<usize>,
    wide: bool,
    multiprocessors: usize,
) -> Result<Cta> {
    let Shape { size_k, size_n } = shape;
    let fits =
        |&(k, n, _): &(usize, usize, usize)| size_k.is_multiple_of(k) && size_n.is_multiple_of(n);
    let block_rows = rows.div_ceil(16).min(4) * 16;
    let preferred = if block_rows > 16 { &LARGE } else { &SMALL };
    let Some(&(mut tile)) = preferred.iter().find(|t| fits(t)) else {
        let expected = "128 or 64 divides k, 64 or 128 divides n";
        return Err(Error::size("weight", shape, expected));
    };
    let blocks = rows.div_ceil(block_rows);
    if size_n / tile.1 * blocks * 4 <= multiprocessors && fits(&NARROW) {
        tile = NARROW;
    }
    let (tile_k, tile_n, threads) = tile;
    // A warp's columns: 64, with 8-bit activations 32.
    let warps_n = tile_n / if wide { 64 } else { 32 };
    let tiles = size_k / tile_k;
    let columns = size_n / tile_n * blocks;
    // Tiles beyond whole waves of the GPU are distributed in runs, together with another wave if they
    // fill less than about a third of one.
    let mut dealt = columns;
    if columns > multiprocessors {
        dealt = columns % multiprocessors;
        if dealt * 3 <= multiprocessors {
            dealt += multiprocessors;
        }
    }
    let run = (tiles * dealt).div_ceil(multiprocessors);
    let run = match group {
        Some(group) if group >= tile_k => run.next_multiple_of(group / tile_k),
        _ => run,
    };
    let rows = (blocks > 1).then_some(block_rows);
    let warps_k = threads / 32 / warps_n;
    Ok(Cta { tile_k, tile_n, warps_k, run, rows, whole: columns - dealt })
}
