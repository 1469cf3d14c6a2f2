//! Keys, tensors and generated cases of `cutlass_scaled_mm_azp`.

use serde_json::{Value, json};

use super::{Int8Mm, judge};
use crate::judge::{Declared, OutputReport};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{Rng, activation_bits, any_bits, small};
use crate::ops::schema::{
    CaseError, Demand, Inputs, Reader, TensorRule, finite, not_negative, stored,
};
use crate::ops::tensors::{
    F32, FLAGS, HALF, HALF_TYPES, I8, I32, half, input, is, name_of, output, whole,
};
use crate::ops::{CaseConfig, Operation};
use crate::products::Int8Epilogue;
use crate::{Error, Result};

/// The zero points of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Azp {
    /// One for all rows; `azp_adj` is already multiplied by it.
    Tensor,
    /// One for each row.
    Token,
}

const AZP: &[(&str, Azp)] = &[("tensor", Azp::Tensor), ("token", Azp::Token)];

/// Config of `cutlass_scaled_mm_azp`, and of `cutlass_scaled_mm` with int8 operands.
///
/// in: `a` `[M, K]` int8, `a_scales` `[1]`, or `[M, 1]` for `per_act_token_quant`; `weight` `[N, K]` int8,
/// `weight_scale` `[1]`, or `[N, 1]` for `per_out_ch_quant`; with `azp` the zero points `azp` `[1]` or
/// `[M, 1]` and `azp_adj` `[N]`, int32: the sums of the weight's columns, times azp for `tensor`; `bias`
/// `[N]` if `has_bias`. out: `y` `[M, N]`.
///
/// y = a_scales · weight_scale · (Σ a · w − azp · azp_adj) + bias. The bracket is an int32, exact modulo
/// 2^32, and is converted to f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Int8MmConfig {
    /// Type of y and of the bias.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 4.
    pub size_k: usize,
    /// Whether each row has its own scale.
    pub per_act_token_quant: bool,
    /// Whether each column has its own scale.
    pub per_out_ch_quant: bool,
    /// Zero points of the activations; `None` for symmetric ones.
    pub azp: Option<Azp>,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// The kernel's steps after the sum, compared bit for bit; `None` tries the known ones, then the
    /// bound of f32 steps in any order.
    pub epilogue: Option<Int8Epilogue>,
}

impl Operation for Int8MmConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "dtype",
            "size_m",
            "size_n",
            "size_k",
            "per_act_token_quant",
            "per_out_ch_quant",
            "azp",
            "has_bias",
            "epilogue",
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            per_act_token_quant: r.flag("per_act_token_quant", false)?,
            per_out_ch_quant: r.flag("per_out_ch_quant", false)?,
            azp: r.optional_name("azp", AZP)?,
            has_bias: r.flag("has_bias", false)?,
            epilogue: r.optional_name("epilogue", Int8Epilogue::NAMED)?,
        };
        whole(r, "size_k", config.size_k, 4)?;
        if config.azp.is_some() && config.epilogue == Some(Int8Epilogue::Triton) {
            return Err(r.refuse("epilogue", "triton", "cutlass, the only one with azp"));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant,
            "azp": self.azp.map(|azp| name_of(AZP, &azp)), "has_bias": self.has_bias,
            "epilogue": self.epilogue.map(|e| name_of(Int8Epilogue::NAMED, &e)),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k, half) = (self.size_m, self.size_n, self.size_k, [stored(self.dtype)]);
        let [of_rows, of_weight] = self.scale_shapes();
        let dims = |shape: &[usize]| shape.iter().copied().map(is).collect::<Vec<_>>();
        let mut rules = vec![
            input("a", I8, &[is(m), is(k)]),
            input("a_scales", F32, &dims(&of_rows)),
            input("weight", I8, &[is(n), is(k)]),
            input("weight_scale", F32, &dims(&of_weight)),
            output("y", &half, &[is(m), is(n)]),
        ];
        if let Some(azp) = self.azp {
            let shape = if azp == Azp::Token { vec![m, 1] } else { vec![1] };
            rules.extend([input("azp", I32, &dims(&shape)), input("azp_adj", I32, &[is(n)])]);
        }
        if self.has_bias {
            rules.push(input("bias", &half, &[is(n)]));
        }
        Ok(rules)
    }

    /// `azp_adj` follows from the weight, so another one is not an input that a kernel is given.
    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        not_negative(&inputs["a_scales"])?;
        finite(&inputs["weight_scale"])?;
        let Some(azp) = self.azp else { return Ok(()) };
        let weight = inputs["weight"].bytes();
        let factor = match azp {
            Azp::Tensor => inputs["azp"].elements::<i32>()[0],
            Azp::Token => 1,
        };
        let adj = inputs["azp_adj"].elements::<i32>();
        for (n, (row, &found)) in weight.chunks_exact(self.size_k).zip(adj.iter()).enumerate() {
            let sum: i32 = row.iter().map(|&w| i32::from(w as i8)).sum();
            let expected = factor.wrapping_mul(sum);
            if found != expected {
                let of = match azp {
                    Azp::Tensor => "azp times the sum of the weight's row",
                    Azp::Token => "the sum of the weight's row",
                };
                let expected = format!("{expected}, {of}");
                return Err(Error::value(inputs["azp_adj"].name(), &[n], found, expected));
            }
        }
        Ok(())
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for (size_m, size_n, size_k) in [(1, 16, 32), (3, 24, 160), (17, 40, 384)] {
                for azp in [None, Some(Azp::Tensor), Some(Azp::Token)] {
                    for own in FLAGS {
                        for has_bias in FLAGS {
                            for epilogue in
                                [None, Some(Int8Epilogue::Cutlass), Some(Int8Epilogue::Triton)]
                            {
                                all.push(Self {
                                    dtype,
                                    size_m,
                                    size_n,
                                    size_k,
                                    per_act_token_quant: own || azp == Some(Azp::Token),
                                    per_out_ch_quant: own,
                                    azp,
                                    has_bias,
                                    epilogue,
                                });
                            }
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Int8Mm::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Int8Mm>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        let [of_rows, of_weight] = self.scale_shapes();
        case.add_input("a", any_bits(rng, DType::I8, vec![m, k])?);
        case.add_input("a_scales", small(rng, of_rows)?);
        let weight = any_bits(rng, DType::I8, vec![n, k])?;
        let sum = |row: &[u8]| row.iter().map(|&w| i32::from(w as i8)).sum::<i32>();
        let mut adj: Vec<i32> = weight.bytes().chunks_exact(k).map(sum).collect();
        case.add_input("weight", weight);
        case.add_input("weight_scale", small(rng, of_weight)?);
        if let Some(azp) = self.azp {
            // Those of quantized rows, of rows far from zero, and of rows of one value.
            let far = rng.chance(1, 6);
            let mut zero = || match far {
                true => rng.next_u32() as i32,
                false => rng.between(0, 255) as i32 - 128,
            };
            let shape = if azp == Azp::Token { vec![m, 1] } else { vec![1] };
            let zeros: Vec<i32> = (0..shape[0]).map(|_| zero()).collect();
            if azp == Azp::Tensor {
                adj.iter_mut().for_each(|sum| *sum = sum.wrapping_mul(zeros[0]));
            }
            case.add_input("azp", Tensor::from_vec("", DType::I32, shape, zeros)?);
            case.add_input("azp_adj", Tensor::from_vec("", DType::I32, vec![n], adj)?);
        }
        if self.has_bias {
            let bias = (0..n).map(|_| activation_bits(rng, self.dtype)).collect();
            case.add_input("bias", Tensor::from_vec("", half(self.dtype), vec![n], bias)?);
        }
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let product = Demand::product(self.size_m, self.size_n, self.size_k);
        Ok(case.output("y").map(|_| product).into_iter().collect())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        judge(case, &Int8Mm::new(case, self)?)
    }

    fn fixes_every_bit(&self) -> bool {
        self.epilogue.is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let rows: &[&str] = match (self.per_act_token_quant, self.azp) {
            (true, Some(Azp::Token)) => &["a", "a_scales", "azp"],
            (false, Some(Azp::Token)) => &["a", "azp"],
            (true, _) => &["a", "a_scales"],
            (false, _) => &["a"],
        };
        Some((Self { size_m: 1, ..self.clone() }.into(), rows))
    }
}

impl Int8MmConfig {
    /// Shapes of the scales of the activations and of the weight.
    fn scale_shapes(&self) -> [Vec<usize>; 2] {
        let own = |own: bool, size| if own { vec![size, 1] } else { vec![1] };
        [own(self.per_act_token_quant, self.size_m), own(self.per_out_ch_quant, self.size_n)]
    }
}
