//! Cases of the int4 path with dynamic activations: every output, by the scalar definition.

use super::values::activation_bits;
use super::{ROWS, Rng};
use crate::Result;
use crate::case::{ActivationRounding, Case, CaseConfig, DynQuantConfig, Packing};
use crate::dims::{GroupSize, Shape};
use crate::layout::kleidi::{Columns, LhsLayout, MR, NR, RhsLayout};
use crate::scalar::{ScalarType, bf16_to_f32};
use crate::tensor::{DType, Tensor};
use crate::w4a8::scalar::Scalar;
use crate::w4a8::{Values, multiply, quantize};

/// K and group: a chunk, part of one, several groups of one chunk and of more.
const DEPTHS: [(usize, GroupSize); 8] = [
    (32, GroupSize::Channel),
    (44, GroupSize::Channel),
    (96, GroupSize::Channel),
    (256, GroupSize::Channel),
    (64, GroupSize::Of(32)),
    (256, GroupSize::Of(64)),
    (256, GroupSize::Of(128)),
    (320, GroupSize::Of(160)),
];

/// Whole blocks of either width, and columns left over.
const WIDTHS: [usize; 4] = [8, 20, 33, 64];

/// Every combination of types, sizes, packings and roundings.
pub(super) fn lattice() -> Vec<CaseConfig> {
    let packings = MR.into_iter().flat_map(|mr| NR.map(|nr| Packing { mr, nr, kr: 16, sr: 2 }));
    let packings: Vec<_> = packings.collect();
    let mut configs = Vec::new();
    for dtype in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
        for (size_k, group_size) in DEPTHS {
            for size_n in WIDTHS {
                for packing in &packings {
                    for (_, activation_rounding) in ActivationRounding::NAMED {
                        configs.extend([false, true].map(|has_bias| {
                            CaseConfig::DynQuant(DynQuantConfig {
                                dtype,
                                group_size,
                                has_bias,
                                size_m: 1,
                                size_n,
                                size_k,
                                packing: *packing,
                                activation_rounding: *activation_rounding,
                                kleidiai_variant: None,
                            })
                        }));
                    }
                }
            }
        }
    }
    configs
}

/// Activations of `ty`: mixed rows, rows of one value, of one sign, and of zeros.
fn activations(rng: &mut Rng, ty: ScalarType, rows: usize, size_k: usize) -> Result<Values> {
    let mut values = Vec::with_capacity(rows * size_k);
    for _ in 0..rows {
        let kind = rng.below(10);
        let same = activation_bits(rng, ScalarType::BFLOAT16);
        for _ in 0..size_k {
            let bits = match kind {
                0 => 0,
                1 => same,
                2 => activation_bits(rng, ScalarType::BFLOAT16) & 0x7fff,
                3 => activation_bits(rng, ScalarType::BFLOAT16) | 0x8000,
                _ => activation_bits(rng, ScalarType::BFLOAT16),
            };
            // f32 activations have a fraction that bf16 lacks; zero stays zero.
            let fine = if bits & 0x7fff == 0 { 0 } else { rng.next_u32() & 0xffff };
            values.push(match ty {
                ScalarType::FLOAT32 => f32::from_bits(u32::from(bits) << 16 | fine),
                _ => bf16_to_f32(bits),
            });
        }
    }
    Values::from_f32(values, ty)
}

/// The case of `c`, with a number of rows of its own.
pub(super) fn case(mut c: DynQuantConfig, rng: &mut Rng) -> Result<Case<'static>> {
    c.size_m = rng.pick(&ROWS);
    let shape = Shape::new(c.size_k, c.size_n);
    let groups = c.group_size.groups(shape.k())?;
    let x = activations(rng, c.dtype, c.size_m, c.size_k)?;
    // Some columns are all at one end of the range: the largest sums.
    let mut codes = Vec::with_capacity(shape.len());
    for _ in 0..c.size_n {
        let kind = rng.below(8);
        codes.extend((0..c.size_k).map(|_| match kind {
            0 => -8,
            1 => 7,
            _ => rng.below(16) as i8 - 8,
        }));
    }
    let pairs = codes.chunks_exact(2);
    let bytes: Vec<u8> = pairs.map(|p| (p[0] + 8) as u8 | ((p[1] + 8) as u8) << 4).collect();
    // 2^-10 to 2^-3.
    let scales: Vec<u16> =
        (0..c.size_n * groups).map(|_| (117 << 7) + rng.below(8 << 7) as u16).collect();
    let bias: Option<Vec<f32>> = c.has_bias.then(|| {
        let value = |rng: &mut Rng| bf16_to_f32(activation_bits(rng, ScalarType::BFLOAT16));
        (0..c.size_n).map(|_| value(rng)).collect()
    });

    let float = if c.dtype == ScalarType::FLOAT32 { DType::F32 } else { DType::BF16 };
    let tensor = |values: &Values, cols: usize| match values {
        Values::F32(v) => Tensor::from_vec("", float, vec![c.size_m, cols], v.clone()),
        Values::Bf16(v) => Tensor::from_vec("", float, vec![c.size_m, cols], v.clone()),
    };
    let mut case = Case::new("", CaseConfig::DynQuant(c.clone()), "");
    case.add_input("x", tensor(&x, c.size_k)?);
    let packed_k = c.size_k / 2;
    case.add_input("weight_u4", Tensor::new("", DType::U8, vec![c.size_n, packed_k], bytes)?);
    let columns = match c.group_size {
        GroupSize::Channel => {
            let scales: Vec<f32> = scales.iter().map(|&s| bf16_to_f32(s)).collect();
            let stored = Tensor::from_vec("", DType::F32, vec![c.size_n, 1], scales.clone())?;
            case.add_input("weight_scale", stored);
            Columns::channel_wise(shape, codes, &scales, bias.as_deref())?
        }
        GroupSize::Of(g) => {
            let stored = Tensor::from_vec("", DType::BF16, vec![c.size_n, groups], scales.clone())?;
            case.add_input("weight_scale", stored);
            Columns::group_wise(shape, g, codes, scales, bias.as_deref())?
        }
    };
    if let Some(bias) = bias {
        case.add_input("bias", Tensor::from_vec("", DType::F32, vec![c.size_n], bias)?);
    }

    let rows = quantize(&x, c.size_k, c.activation_rounding)?;
    let lhs = LhsLayout::new(c.size_m, c.size_k, c.packing.mr)?.pack(&rows)?;
    let rhs = RhsLayout::new(shape, c.group_size, c.packing.nr)?.pack(&columns)?;
    let y = multiply(&Scalar, &lhs, &rhs, c.dtype)?;
    for (name, bytes) in [("lhs_packed", lhs.bytes()), ("rhs_packed", rhs.bytes())] {
        case.add_output(name, Tensor::new("", DType::U8, vec![bytes.len()], bytes.to_vec())?);
    }
    case.add_output("y", tensor(&y, c.size_n)?);
    Ok(case)
}
