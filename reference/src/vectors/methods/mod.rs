//! Cases of the operations beside Marlin: shapes around the edges of tiles and blocks, and inputs that
//! hold every value a format has: zeros of both signs, NaN codes, e8m0's 255, scales of zero.

mod lattice;

pub(super) use lattice::lattice;

use super::values::activation_bits;
use super::{Rng, activations, half};
use crate::Result;
use crate::case::{
    Case, CaseConfig, Fp4MmConfig, Fp4QuantConfig, Fp8LayerConfig, Fp8MmConfig, MethodConfig,
    Nvfp4ExpertsConfig,
};
use crate::check::add_outputs;
use crate::tensor::{DType, Tensor};

/// A configuration in a few words: its keys' values.
pub(super) fn describe(config: &CaseConfig) -> String {
    let word = |(key, value): (&String, &serde_json::Value)| match value {
        serde_json::Value::Null => None,
        serde_json::Value::Object(_) => Some(key.clone()),
        serde_json::Value::String(text) => Some(text.clone()),
        other => Some(format!("{key} {other}")),
    };
    config.to_json().iter().filter_map(word).collect::<Vec<_>>().join(" ")
}

/// The case of `config`: random inputs, and every output of the reference.
pub(super) fn case(config: MethodConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let mut case = Case::new("", CaseConfig::Method(config.clone()), "");
    match &config {
        MethodConfig::Nvfp4Experts(c) => nvfp4_experts(&mut case, c, rng)?,
        MethodConfig::ScaledFp4Quant(c) => fp4_quant(&mut case, c, rng)?,
        MethodConfig::ScaledFp4Mm(c) => fp4_mm(&mut case, c, rng)?,
        MethodConfig::ScaledMm(c) => scaled_mm(&mut case, c, rng)?,
        MethodConfig::Fp8Moe(c) => fp8_moe(&mut case, c, rng)?,
        // Bits that are moved, or looked up: any will do, and scales are positive.
        _ => {
            // Scales that f16 cannot hold tell upstream's ways of requantizing apart.
            let tiny = rng.chance(1, 3);
            for rule in case.config.rules(0)? {
                let Some(name) = rule.name.strip_prefix("in.") else { continue };
                let shape = sizes(&rule.shape);
                let tensor = match rule.dtypes[0] {
                    DType::F32 if tiny => times(positive(rng, shape)?, 1.0 / (1 << 20) as f32)?,
                    DType::F32 => positive(rng, shape)?,
                    dtype => any_bits(rng, dtype, shape)?,
                };
                case.add_input(name, tensor);
            }
        }
    }
    add_outputs(&mut case)?;
    Ok(case)
}

/// The sizes of a rule that fixes them all.
fn sizes(dims: &[crate::case::Dim]) -> Vec<usize> {
    let size = |dim: &crate::case::Dim| match dim {
        crate::case::Dim::Is(size) => *size,
        _ => 1,
    };
    dims.iter().map(size).collect()
}

/// Kinds of a tensor of bytes.
#[derive(Clone, Copy)]
enum Kind {
    Noise,
    Same(u8),
    /// The ends of the format.
    Ends,
    /// Neighbours differ along every axis.
    Ramp,
}

fn kind(rng: &mut Rng) -> Kind {
    match rng.below(8) {
        0 => Kind::Same(rng.next_u32() as u8),
        1 => Kind::Ends,
        2 => Kind::Ramp,
        _ => Kind::Noise,
    }
}

/// `len` bytes of which `fix` makes allowed ones.
fn bytes(rng: &mut Rng, len: usize, fix: impl Fn(u8) -> u8) -> Vec<u8> {
    let kind = kind(rng);
    let ends = [0x00, 0x80, 0x7f, 0xff, 0x7e, 0xfe, 0x01, 0x81];
    let mut byte = |i: usize| match kind {
        Kind::Noise => rng.next_u32() as u8,
        Kind::Same(byte) => byte,
        Kind::Ends => rng.pick(&ends),
        Kind::Ramp => (i * 37 + i / 16 * 5) as u8,
    };
    (0..len).map(|i| fix(byte(i))).collect()
}

fn any_bits(rng: &mut Rng, dtype: DType, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let len = shape.iter().product::<usize>() * dtype.bytes();
    let data = bytes(rng, len, |b| b);
    Tensor::new("", dtype, shape, data)
}

/// One f32 of 2^-10 to 2^2.
fn scale(rng: &mut Rng) -> f32 {
    f32::from_bits(rng.between(117, 128) << 23 | rng.next_u32() >> 9)
}

/// Positive f32; now and then all alike.
fn positive(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let (same, alike) = (scale(rng), rng.chance(1, 8));
    let len = shape.iter().product();
    let values = (0..len).map(|_| if alike { same } else { scale(rng) }).collect();
    Tensor::from_vec("", DType::F32, shape, values)
}

/// e4m3 block scales: not negative, no NaN, zero among them.
fn block_scales(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let len = shape.iter().product();
    let data = bytes(rng, len, |b| (b & 0x7f).min(0x7e));
    Tensor::new("", DType::F8E4M3, shape, data)
}

/// e4m3fn codes that are numbers.
fn e4m3(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let len = shape.iter().product();
    let data = bytes(rng, len, |b| if b & 0x7f == 0x7f { b ^ 1 } else { b });
    Tensor::new("", DType::F8E4M3, shape, data)
}

fn nvfp4_experts(case: &mut Case<'_>, c: &Nvfp4ExpertsConfig, rng: &mut Rng) -> Result<()> {
    for rule in case.config.rules(0)? {
        let Some(name) = rule.name.strip_prefix("in.") else { continue };
        let shape = sizes(&rule.shape);
        let tensor = match rule.dtypes[0] {
            DType::F32 => {
                // Two shards have one global scale as often as two.
                let mut values = positive(rng, shape.clone())?.elements::<f32>().into_owned();
                if rng.chance(1, 2) {
                    values.chunks_mut(c.shards()).for_each(|pair| pair.fill(pair[0]));
                }
                Tensor::from_vec("", DType::F32, shape, values)?
            }
            DType::F8E4M3 => block_scales(rng, shape)?,
            dtype => any_bits(rng, dtype, shape)?,
        };
        case.add_input(name, tensor);
    }
    Ok(())
}

fn fp4_quant(case: &mut Case<'_>, c: &Fp4QuantConfig, rng: &mut Rng) -> Result<()> {
    let x = activations(rng, c.dtype, c.size_m, c.size_k)?;
    let values = x.elements::<u16>();
    let largest = values.iter().map(|&b| crate::moe::widen(c.dtype, b).abs()).fold(0.0, f32::max);
    // What upstream takes, or a scale under which blocks become zero or saturate.
    let usual = if largest > 0.0 { 448.0 * 6.0 / largest } else { 1.0 };
    let global = usual * rng.pick(&[1.0, 1.0, 1.0, 64.0, 1.0 / 4096.0]);
    drop(values);
    case.add_input("x", x);
    let global = Tensor::from_vec("", DType::F32, vec![1], vec![global])?;
    case.add_input("input_global_scale", global);
    Ok(())
}

fn fp4_mm(case: &mut Case<'_>, c: &Fp4MmConfig, rng: &mut Rng) -> Result<()> {
    let (m, n, k) = (c.size_m, c.size_n, c.size_k);
    case.add_input("a", any_bits(rng, DType::U8, vec![m, k / 2])?);
    case.add_input("a_scale", block_scales(rng, vec![m, k / 16])?);
    case.add_input("a_global_scale", positive(rng, vec![1])?);
    case.add_input("weight", any_bits(rng, DType::U8, vec![n, k / 2])?);
    case.add_input("weight_scale", block_scales(rng, vec![n, k / 16])?);
    case.add_input("weight_global_scale", positive(rng, vec![c.widths.len()])?);
    Ok(())
}

/// Scales of rows or columns that keep products of e4m3 numbers within f16.
fn small(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    times(positive(rng, shape)?, 1.0 / 4096.0)
}

/// f32 times a power of two.
fn times(tensor: Tensor<'_>, factor: f32) -> Result<Tensor<'static>> {
    let values = tensor.elements::<f32>().iter().map(|s| s * factor).collect();
    Tensor::from_vec("", DType::F32, tensor.shape().to_vec(), values)
}

fn scaled_mm(case: &mut Case<'_>, c: &Fp8MmConfig, rng: &mut Rng) -> Result<()> {
    let scales = |own: bool, size| if own { vec![size, 1] } else { vec![1] };
    let (m, n, k) = (c.size_m, c.size_n, c.size_k);
    case.add_input("a", e4m3(rng, vec![m, k])?);
    case.add_input("a_scales", small(rng, scales(c.per_act_token_quant, m))?);
    case.add_input("weight", e4m3(rng, vec![n, k])?);
    case.add_input("weight_scale", small(rng, scales(c.per_out_ch_quant, n))?);
    if c.has_bias {
        let bias = (0..n).map(|_| activation_bits(rng, c.dtype)).collect();
        case.add_input("bias", Tensor::from_vec("", half(c.dtype), vec![n], bias)?);
    }
    Ok(())
}

fn fp8_moe(case: &mut Case<'_>, c: &Fp8LayerConfig, rng: &mut Rng) -> Result<()> {
    let (m, l) = (c.size_m, c.num_local_experts);
    case.add_input("x", activations(rng, c.dtype, m, c.hidden_size)?);
    let mut ids: Vec<i32> = Vec::new();
    let mut experts: Vec<i32> = (0..c.num_experts as i32).collect();
    for _ in 0..m {
        rng.shuffle(&mut experts);
        ids.extend(&experts[..c.top_k]);
    }
    let weights = (0..ids.len()).map(|_| scale(rng).min(1.0)).collect();
    let topk = vec![m, c.top_k];
    case.add_input("topk_ids", Tensor::from_vec("", DType::I32, topk.clone(), ids)?);
    case.add_input("topk_weights", Tensor::from_vec("", DType::F32, topk, weights)?);
    if l != c.num_experts {
        // This rank's experts, in an order of their own.
        let mut map = vec![-1; c.num_experts];
        rng.shuffle(&mut experts);
        for (local, &global) in experts[..l].iter().enumerate() {
            map[global as usize] = local as i32;
        }
        case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
    }
    for (name, size_n, size_k) in c.matrices() {
        case.add_input(&format!("{name}_weight"), e4m3(rng, vec![l, size_n, size_k])?);
        let scales = if c.per_out_ch_quant { vec![l, size_n, 1] } else { vec![l] };
        case.add_input(&format!("{name}_weight_scale"), small(rng, scales)?);
        if !c.per_act_token_quant {
            case.add_input(&format!("{name}_input_scale"), small(rng, vec![1])?);
        }
    }
    Ok(())
}
