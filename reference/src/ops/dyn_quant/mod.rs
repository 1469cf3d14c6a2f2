//! The Arm int4 path with dynamically quantized activations.

mod any_order;
mod bound;
mod bytes;
mod judge;
mod variants;

use serde_json::{Value, json};

use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::draw::{ROWS, Rng, activation_bits};
use crate::ops::quant::keys::{divisible, group_size, insert_some};
use crate::ops::schema::{
    CaseError, Demand, Dim, Inputs, Reader, TensorRule, finite, rule, stored,
};
use crate::ops::tensors::{F32, name_of};
use crate::w4a8::packed::{KEY_MEANINGS, LhsLayout, MR, NR, RhsLayout, VARIANT_KEY};
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::scalar::Scalar;
use crate::w4a8::{Values, multiply, quantize};

/// Tile sizes of a packed left or right matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Rows of x per tile.
    pub mr: usize,
    /// Columns of w per tile.
    pub nr: usize,
    /// k per tile.
    pub kr: usize,
    /// Number of parts into which a tile's k is split.
    pub sr: usize,
}

/// The kernels that a case's `y` may be from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DynQuantArithmetic {
    /// The operator's own: `y` is compared bit for bit.
    #[default]
    Operator,
    /// The operator's quantization and exact integer sums, then f32 in any order: `y` is within a derived
    /// bound.
    AnyOrder,
}

const ARITHMETICS: &[(&str, DynQuantArithmetic)] =
    &[("operator", DynQuantArithmetic::Operator), ("any_order", DynQuantArithmetic::AnyOrder)];

/// Config of `dyn_quant_linear`.
#[derive(Debug, Clone, PartialEq)]
pub struct DynQuantConfig {
    /// Activations and output: [`ScalarType::FLOAT32`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Rows of x.
    pub size_m: usize,
    /// Output features.
    pub size_n: usize,
    /// Input features.
    pub size_k: usize,
    /// Tile sizes.
    pub packing: Packing,
    /// How activations are rounded.
    pub activation_rounding: ActivationRounding,
    /// How `y` is judged.
    pub arithmetic: DynQuantArithmetic,
    /// Name of the micro-kernel; for information only.
    pub variant: Option<String>,
}

/// K and group size: one chunk, part of one, and several groups of one or more chunks.
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

/// Whole blocks of either width, and a remainder of columns.
const WIDTHS: [usize; 4] = [8, 20, 33, 64];

const TYPES: &[(&str, ScalarType)] =
    &[("float32", ScalarType::FLOAT32), ("bfloat16", ScalarType::BFLOAT16)];

/// Whether the library rounds activations of this type so: bfloat16 only to even.
fn rounds(dtype: ScalarType, rounding: ActivationRounding) -> bool {
    dtype != ScalarType::BFLOAT16 || rounding == ActivationRounding::HalfEven
}

impl Operation for DynQuantConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "weight_type",
            "dtype",
            "group_size",
            "has_bias",
            "size_m",
            "size_n",
            "size_k",
            "packing",
            "activation_rounding",
            "arithmetic",
            "checkpoint_format",
            "input_dtype",
            VARIANT_KEY,
            "adversarial_rows",
        ]
    }

    fn key_meanings() -> &'static [(&'static str, &'static str)] {
        KEY_MEANINGS
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        r.name("weight_type", &[("int4", ())])?;
        let p = r.needed_object("packing", "packing.", &["mr", "nr", "kr", "sr"])?;
        let packing =
            Packing { mr: p.size("mr")?, nr: p.size("nr")?, kr: p.size("kr")?, sr: p.size("sr")? };
        r.optional_name("checkpoint_format", &[("int4", ())])?;
        r.optional_name("input_dtype", &[("int8", ())])?;
        let variant = r.text(VARIANT_KEY)?;
        let (group_size, size_k) = (group_size(r)?, r.size("size_k")?);
        if let GroupSize::Of(g) = group_size {
            divisible("size_k", size_k, g, "whole groups")?;
        }
        divisible("size_k", size_k, 2, "codes of a byte")?;
        let dtype = r.name("dtype", TYPES)?;
        let activation_rounding = r.name("activation_rounding", ActivationRounding::NAMED)?;
        if !rounds(dtype, activation_rounding) {
            let expected = "half_even: every version of the library rounds bfloat16 to even";
            return Err(r.refuse("activation_rounding", activation_rounding.name(), expected));
        }
        Ok(DynQuantConfig {
            dtype,
            group_size,
            has_bias: r.flag("has_bias", false)?,
            size_m: r.count("size_m")?,
            size_n: r.size("size_n")?,
            size_k,
            packing,
            activation_rounding,
            arithmetic: r.optional_name("arithmetic", ARITHMETICS)?.unwrap_or_default(),
            variant,
        })
    }

    fn lattice() -> Result<Vec<Self>> {
        let packings = MR.into_iter().flat_map(|mr| NR.map(|nr| Packing { mr, nr, kr: 16, sr: 2 }));
        let packings: Vec<_> = packings.collect();
        let mut configs = Vec::new();
        for dtype in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
            for (size_k, group_size) in DEPTHS {
                for size_n in WIDTHS {
                    for packing in &packings {
                        for (_, activation_rounding) in ActivationRounding::NAMED {
                            configs.extend([false, true].map(|has_bias| DynQuantConfig {
                                dtype,
                                group_size,
                                has_bias,
                                size_m: 1,
                                size_n,
                                size_k,
                                packing: *packing,
                                activation_rounding: *activation_rounding,
                                arithmetic: DynQuantArithmetic::Operator,
                                variant: None,
                            }));
                        }
                    }
                }
            }
        }
        let fits = |c: &Self| {
            rounds(c.dtype, c.activation_rounding)
                && RhsLayout::new(Shape::new(c.size_k, c.size_n), c.group_size, c.packing.nr)
                    .is_ok()
        };
        configs.retain(fits);
        Ok(configs)
    }

    fn json(&self) -> Value {
        let p = self.packing;
        let mut v = json!({
            "weight_type": "int4", "dtype": self.dtype.name(),
            "group_size": self.group_size.to_config(), "has_bias": self.has_bias,
            "size_m": self.size_m, "size_n": self.size_n, "size_k": self.size_k,
            "packing": {"mr": p.mr, "nr": p.nr, "kr": p.kr, "sr": p.sr},
            "activation_rounding": self.activation_rounding.name(),
        });
        if self.arithmetic != DynQuantArithmetic::Operator {
            v["arithmetic"] = json!(name_of(ARITHMETICS, &self.arithmetic));
        }
        insert_some(&mut v, VARIANT_KEY, self.variant.clone());
        v
    }

    fn describe(&self) -> String {
        let bias = if self.has_bias { " bias" } else { "" };
        let (Packing { mr, nr, .. }, g) = (&self.packing, self.group_size);
        let sizes = format!("k{} n{}", self.size_k, self.size_n);
        format!("{} g{g} {} mr{mr} nr{nr}{bias} {sizes}", self.dtype, self.activation_rounding)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        let float = [stored(self.dtype)];
        let groups = self.group_size.groups(crate::num::dims::LogicalK(k))?;
        let scale = if self.group_size == GroupSize::Channel { DType::F32 } else { DType::BF16 };
        let is = Dim::Is;
        let mut rules = vec![
            rule("in.x", &float, &[is(m), is(k)]),
            rule("in.weight_u4", &[DType::U8], &[is(n), is(k / 2)]).required(true),
            rule("in.weight_scale", &[scale], &[is(n), is(groups)]).required(true),
            rule("out.lhs_packed", &[DType::U8], &[Dim::Any]),
            rule("out.rhs_packed", &[DType::U8], &[Dim::Any]),
            rule("out.y", &float, &[is(m), is(n)]),
        ];
        if self.has_bias {
            rules.push(rule("in.bias", F32, &[is(n)]).required(true));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        inputs.get("weight_scale").map_or(Ok(()), finite)
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let has = |name: &str| case.outputs.contains_key(name);
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        let lhs = if has("lhs_packed") { m } else { 0 };
        let rhs = if has("rhs_packed") { n } else { 0 };
        let mut all = vec![
            Demand::packing("mr", lhs, self.packing.mr, k),
            Demand::packing("nr", rhs, self.packing.nr, k),
        ];
        all.extend(has("y").then(|| Demand::product(m, n, k)));
        Ok(all)
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        judge::linear(case, self)
    }

    fn fixes_every_bit(&self) -> bool {
        self.arithmetic == DynQuantArithmetic::Operator
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        let shape = Shape::new(self.size_k, self.size_n);
        let x = Values::from_tensor(case.input("x")?)?;
        let columns = judge::columns(case, self, shape)?;
        let rows = quantize(&x, self.size_k, self.activation_rounding)?;
        let lhs = LhsLayout::new(self.size_m, self.size_k, self.packing.mr)?.pack(&rows)?;
        let rhs = RhsLayout::new(shape, self.group_size, self.packing.nr)?.pack(&columns)?;
        let y = multiply(&Scalar, &lhs, &rhs, self.dtype)?;
        for (name, bytes) in [("lhs_packed", lhs.bytes()), ("rhs_packed", rhs.bytes())] {
            case.add_output(name, Tensor::new("", DType::U8, vec![bytes.len()], bytes.to_vec())?);
        }
        case.add_output("y", tensor(y, [self.size_m, self.size_n])?);
        Ok(())
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let c = Self { size_m: rng.pick(&ROWS), ..self.clone() };
        case.config = c.clone().into();
        let shape = Shape::new(c.size_k, c.size_n);
        let groups = c.group_size.groups(shape.k())?;
        let x = activation_rows(rng, c.dtype, c.size_m, c.size_k)?;
        // Some columns hold only extreme codes, which gives the largest sums.
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

        case.add_input("x", tensor(x, [c.size_m, c.size_k])?);
        let packed_k = c.size_k / 2;
        case.add_input("weight_u4", Tensor::new("", DType::U8, vec![c.size_n, packed_k], bytes)?);
        match c.group_size {
            GroupSize::Channel => {
                let scales: Vec<f32> = scales.iter().map(|&s| bf16_to_f32(s)).collect();
                let stored = Tensor::from_vec("", DType::F32, vec![c.size_n, 1], scales)?;
                case.add_input("weight_scale", stored);
            }
            GroupSize::Of(_) => {
                let stored = Tensor::from_vec("", DType::BF16, vec![c.size_n, groups], scales)?;
                case.add_input("weight_scale", stored);
            }
        }
        if let Some(bias) = bias {
            case.add_input("bias", Tensor::from_vec("", DType::F32, vec![c.size_n], bias)?);
        }
        Ok(())
    }
}

/// Values as a tensor.
fn tensor(values: Values, shape: [usize; 2]) -> Result<Tensor<'static>> {
    match values {
        Values::F32(v) => Tensor::from_vec("", DType::F32, shape.to_vec(), v),
        Values::Bf16(v) => Tensor::from_vec("", DType::BF16, shape.to_vec(), v),
    }
}

/// Activations of `ty`: mixed rows, rows of one value, of one sign, of zeros, and of numbers halfway
/// between two codes.
fn activation_rows(rng: &mut Rng, ty: ScalarType, rows: usize, size_k: usize) -> Result<Values> {
    let mut values = Vec::with_capacity(rows * size_k);
    for _ in 0..rows {
        let kind = rng.below(10);
        let same = activation_bits(rng, ScalarType::BFLOAT16);
        if kind == 4 && rng.is_hard() {
            values.extend(halfway_row(rng, size_k));
            continue;
        }
        for _ in 0..size_k {
            let bits = match kind {
                0 => 0,
                1 => same,
                2 => activation_bits(rng, ScalarType::BFLOAT16) & 0x7fff,
                3 => activation_bits(rng, ScalarType::BFLOAT16) | 0x8000,
                _ => activation_bits(rng, ScalarType::BFLOAT16),
            };
            // f32 activations get fraction bits that bf16 lacks; zero stays zero.
            let fine = if bits & 0x7fff == 0 { 0 } else { rng.next_u32() & 0xffff };
            values.push(match ty {
                ScalarType::FLOAT32 => f32::from_bits(u32::from(bits) << 16 | fine),
                _ => bf16_to_f32(bits),
            });
        }
    }
    Values::from_f32(values, ty)
}

/// Half-integers from -127.5 to 127.5: the row's scale is 1, so every value is a tie.
fn halfway_row(rng: &mut Rng, size_k: usize) -> Vec<f32> {
    let mut row: Vec<f32> = (0..size_k).map(|_| rng.below(256) as f32 - 127.5).collect();
    let ends = [-127.5, 127.5];
    row.iter_mut().zip(ends).for_each(|(value, end)| *value = end);
    row
}
