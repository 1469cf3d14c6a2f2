//! The product in plain loops: the definition, from packed and from unpacked data.

use super::kernel::{E2m1Run, Kernel};
use super::{DOUBLED, QuantizedGroups, scale_value};
use crate::layouts::e2m1::{CODE_BYTES, E2m1Rows, GROUP, GROUP_BYTES, NR};
use crate::num::scalar::ScalarType;
use crate::w4a8::{Panel, Values};
use crate::{Error, Result};

/// `y` `[M, N]` of type `ty` from data that is not interleaved: the same bits as any kernel's.
///
/// # Errors
/// [`Error::Shape`] for parts whose lengths do not agree; [`Error::Unsupported`] for types other than
/// FLOAT32 and BFLOAT16.
pub fn product(rows: &QuantizedGroups, weight: E2m1Rows<'_>, ty: ScalarType) -> Result<Values> {
    let sums = product_with(rows, weight, Steps::default())?;
    Values::from_f32(sums, ty)
}

/// Known mistakes of implementations.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Steps {
    /// Multiplications and additions are rounded separately.
    pub(crate) unfused: bool,
    /// Groups are added from the last to the first.
    pub(crate) descending: bool,
    /// The offset of the weights is not subtracted.
    pub(crate) offset_kept: bool,
    /// Sums of four neighbouring products saturate at 16 bits.
    pub(crate) saturated: bool,
}

pub(crate) fn product_with(
    rows: &QuantizedGroups,
    weight: E2m1Rows<'_>,
    steps: Steps,
) -> Result<Vec<f32>> {
    let (size_k, groups) = (rows.size_k, rows.size_k / GROUP);
    let size_n = weight.scales.len() / groups.max(1);
    let lengths = [
        ("codes", rows.codes.len(), rows.half_scales.len() * GROUP),
        ("blocks", weight.blocks.len(), size_n * size_k / 2),
        ("scales", weight.scales.len(), size_n * groups),
        ("bias", weight.bias.map_or(size_n, <[f32]>::len), size_n),
    ];
    if let Some((name, found, expected)) = lengths.into_iter().find(|l| l.1 != l.2) {
        return Err(Error::shape(name, &[found], format!("[{expected}]")));
    }
    let mut y = Vec::with_capacity(rows.codes.len() / size_k.max(1) * size_n);
    let all = rows.codes.chunks_exact(size_k).zip(rows.half_scales.chunks_exact(groups));
    for (q, half_scales) in all {
        for n in 0..size_n {
            let w = &weight.blocks[n * size_k / 2..][..size_k / 2];
            let scales = &weight.scales[n * groups..][..groups];
            let term = |g: usize, a: f32| {
                let (q, w) = (&q[g * GROUP..][..GROUP], &w[g * GROUP / 2..][..GROUP / 2]);
                let factor = half_scales[g] * scale_value(scales[g]);
                let sum = group_sum(q, w, steps) as f32;
                if steps.unfused { a + sum * factor } else { sum.mul_add(factor, a) }
            };
            let mut a = 0f32;
            match steps.descending {
                false => (0..groups).for_each(|g| a = term(g, a)),
                true => (0..groups).rev().for_each(|g| a = term(g, a)),
            }
            y.push(a + weight.bias.map_or(0.0, |bias| bias[n]));
        }
    }
    Ok(y)
}

/// Σ q · 2w of a group.
fn group_sum(q: &[i8], w: &[u8], steps: Steps) -> i32 {
    let code = |k: usize| usize::from(w[k / 2] >> (4 * (k & 1)) & 15);
    let offset = if steps.offset_kept { super::OFFSET } else { 0 };
    let product = |k: usize| i32::from(q[k]) * (i32::from(DOUBLED[code(k)]) + offset);
    let saturated = |sum: i32| sum.clamp(i16::MIN.into(), i16::MAX.into());
    match steps.saturated {
        false => (0..GROUP).map(product).sum(),
        true => saturated((0..GROUP).map(product).sum()),
    }
}

/// The definition as a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

impl Kernel for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        rhs.check(panel, y, stride, panel.rows());
        let (layout, rows) = (rhs.layout, panel.rows());
        for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
            let (groups, bias) = block.split_at(layout.groups() * GROUP_BYTES);
            for m in 0..rows {
                for n in 0..NR.min(rhs.columns - b * NR) {
                    let mut a = 0f32;
                    for (g, group) in groups.chunks_exact(GROUP_BYTES).enumerate() {
                        let sum: i32 = (0..GROUP)
                            .map(|k| {
                                let byte = group[k % 16 / 4 * 4 * NR + 4 * n + k % 4];
                                let w = DOUBLED[usize::from(byte >> (k / 16 * 4) & 15)];
                                let q =
                                    panel.codes()[((g * 4 + k / 8) * rows + m) * 8 + k % 8] as i8;
                                i32::from(q) * i32::from(w)
                            })
                            .sum();
                        let scale = scale_value(group[CODE_BYTES + n]);
                        a = (sum as f32).mul_add(panel.scales()[g * rows + m] * scale, a);
                    }
                    let bias = [0, 1, 2, 3].map(|i| bias[4 * n + i]);
                    y[m * stride + b * NR + n] = a + f32::from_le_bytes(bias);
                }
            }
        }
    }
}
