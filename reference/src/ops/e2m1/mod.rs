//! The product of MXFP4 weights and activations quantized to int8 in groups of 32.

mod activated;
mod computation;
mod config;
mod layer;
mod stages;

use serde_json::{Value, json};

use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::layouts::e2m1::{E2m1Layout, GROUP, name};
use crate::num::dims::Shape;
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{ROWS, Rng, activation_bits};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, stored};
use crate::ops::tensors::{F32, FLAGS, U8, input, is, output, whole};
use crate::ops::{CaseConfig, Operation};
use crate::w4a8::Values;
use computation::Product;
pub use config::E2m1MoeConfig;

/// Config of `mxfp4_int8_linear`: MXFP4 weights times activations that are quantized to int8 with a
/// scale for each 32 k ([`w4a8::e2m1`](crate::w4a8::e2m1)).
///
/// in: `x` `[M, K]`, `weight` `[N, K / 2]` (even k in the low nibble), `weight_scale` `[N, K / 32]` e8m0,
/// `bias` `[N]` f32. out: `rhs_packed`, the bytes of [`E2m1Layout`]; `y` `[M, N]` in the type of `x`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct E2m1LinearConfig {
    /// Activations and output: [`ScalarType::FLOAT32`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Rows of x.
    pub size_m: usize,
    /// Output features.
    pub size_n: usize,
    /// Input features.
    pub size_k: usize,
}

/// The names of the operations.
pub(super) const LINEAR: &str = name!("_linear");
pub(super) const MOE: &str = name!("_moe");

const TYPES: &[(&str, ScalarType)] =
    &[("float32", ScalarType::FLOAT32), ("bfloat16", ScalarType::BFLOAT16)];

/// Element types of e8m0 scales.
const SCALES: &[DType] = &[DType::U8, DType::F8E8M0];

impl E2m1LinearConfig {
    fn layout(&self) -> Result<E2m1Layout> {
        E2m1Layout::new(Shape::new(self.size_k, self.size_n))
    }
}

impl Operation for E2m1LinearConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "has_bias", "size_m", "size_n", "size_k"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            dtype: r.name("dtype", TYPES)?,
            has_bias: r.flag("has_bias", false)?,
            size_m: r.count("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
        };
        whole(r, "size_k", config.size_k, GROUP)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "has_bias": self.has_bias, "size_m": self.size_m,
            "size_n": self.size_n, "size_k": self.size_k,
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), self.size_k);
        let float = [stored(self.dtype)];
        let mut rules = vec![
            input("x", &float, &[m, is(k)]),
            input("weight", U8, &[n, is(k / 2)]),
            input("weight_scale", SCALES, &[n, is(k / GROUP)]),
        ];
        if self.has_bias {
            rules.push(input("bias", F32, &[n]));
        }
        rules.push(output("rhs_packed", U8, &[is(self.layout()?.packed_len())]));
        rules.push(output("y", &float, &[m, n]));
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        inputs.get("bias").map_or(Ok(()), |bias| finite(bias))?;
        finite(&inputs["weight_scale"])
    }

    /// Columns around blocks of 16; one group, and several.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for (_, dtype) in TYPES {
            for size_k in [32, 64, 160, 288] {
                for size_n in [1, 15, 16, 17, 33, 48] {
                    all.extend(FLAGS.map(|has_bias| Self {
                        dtype: *dtype,
                        has_bias,
                        size_m: 1,
                        size_n,
                        size_k,
                    }));
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Product::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Product>()
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        computation::judge(case, self)
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let c = Self { size_m: rng.pick(&ROWS), ..self.clone() };
        case.config = c.clone().into();
        let (n, k) = (c.size_n, c.size_k);
        let (weight, scales) = (codes(rng, n, k), scales(rng, n * k / GROUP));
        case.add_input("x", activations(rng, c.dtype, c.size_m, k)?);
        case.add_input("weight", Tensor::new("", DType::U8, vec![n, k / 2], weight)?);
        case.add_input("weight_scale", Tensor::new("", DType::U8, vec![n, k / GROUP], scales)?);
        if c.has_bias {
            let value = |rng: &mut Rng| bf16_to_f32(activation_bits(rng, ScalarType::BFLOAT16));
            let bias: Vec<f32> = (0..n).map(|_| value(rng)).collect();
            case.add_input("bias", Tensor::from_vec("", DType::F32, vec![n], bias)?);
        }
        Ok(())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["x"]))
    }
}

/// Rows of codes `[rows, K / 2]`. Some rows hold only extreme codes, which gives the largest sums.
fn codes(rng: &mut Rng, rows: usize, size_k: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(rows * size_k / 2);
    for _ in 0..rows {
        let fixed = rng.pick(&[0x77u8, 0xff, 0xf7]);
        let extreme = rng.below(4) == 0;
        all.extend((0..size_k / 2).map(|_| if extreme { fixed } else { rng.next_u32() as u8 }));
    }
    all
}

/// 2^-11 to 1, and sometimes code 0: 2^-127 is not zero.
fn scales(rng: &mut Rng, len: usize) -> Vec<u8> {
    let zeros = rng.chance(1, 8);
    let scale = |rng: &mut Rng| match zeros && rng.chance(1, 4) {
        true => 0,
        false => rng.between(116, 127) as u8,
    };
    (0..len).map(|_| scale(rng)).collect()
}

/// Activations whose groups are mixed, zeros, of one value, ties between two codes, or too small for a
/// scale.
fn activations(rng: &mut Rng, ty: ScalarType, rows: usize, cols: usize) -> Result<Tensor<'static>> {
    let mut values = Vec::with_capacity(rows * cols);
    for _ in 0..rows * cols / GROUP {
        let kind = rng.below(10);
        let same = activation_bits(rng, ScalarType::BFLOAT16);
        values.extend((0..GROUP).map(|i| match kind {
            0 => 0.0,
            1 => bf16_to_f32(same),
            // Half-integers of a scale of 1: the first value is the largest.
            2 if i == 0 => -127.0,
            2 => rng.below(253) as f32 - 126.0 + 0.5,
            3 => bf16_to_f32(0x0400 | same & 0x80ff),
            _ => {
                let bits = activation_bits(rng, ScalarType::BFLOAT16);
                // f32 activations get fraction bits that bf16 lacks.
                let fine = if ty == ScalarType::FLOAT32 { rng.next_u32() & 0xffff } else { 0 };
                f32::from_bits(u32::from(bits) << 16 | fine)
            }
        }));
    }
    match Values::from_f32(values, ty)? {
        Values::F32(v) => Tensor::from_vec("", DType::F32, vec![rows, cols], v),
        Values::Bf16(v) => Tensor::from_vec("", DType::BF16, vec![rows, cols], v),
    }
}

/// The bits that represent every NaN, whose sign and payload depend on the processor.
const NAN: u32 = 0x7fc0_0000;

/// `bits` of `ty` with one NaN.
fn one_nan(bits: Vec<u32>, ty: ScalarType) -> Vec<u32> {
    let nan = if ty == ScalarType::FLOAT32 { NAN } else { NAN >> 16 };
    bits.into_iter().map(|bits| if ty.to_f64(bits).is_nan() { nan } else { bits }).collect()
}

/// A tensor of f32 or bf16 with one NaN.
fn plain_nan(found: &Tensor<'_>) -> Result<Tensor<'static>> {
    let (name, shape) = (found.name(), found.shape().to_vec());
    match found.dtype() {
        DType::F32 => {
            let bits = found.elements::<f32>().iter().map(|v| v.to_bits()).collect();
            let values =
                one_nan(bits, ScalarType::FLOAT32).into_iter().map(f32::from_bits).collect();
            Tensor::from_vec::<f32>(name, DType::F32, shape, values)
        }
        dtype => {
            let bits = found.elements::<u16>().iter().map(|&v| v.into()).collect();
            let bits = one_nan(bits, ScalarType::BFLOAT16);
            Tensor::from_vec::<u16>(
                name,
                dtype,
                shape,
                bits.into_iter().map(|v| v as u16).collect(),
            )
        }
    }
}
