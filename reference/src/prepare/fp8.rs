//! Prepares the loaded tensors of W8A8-FP8 experts for kernels in upstream's order: e4m3fnuz if the
//! device uses it, the largest static activation scale, one scale for w1 and w3.
//!
//! Source: vLLM 0.21.0 `process_weights_after_loading` of
//! `compressed_tensors_moe_w8a8_fp8.py` and `fp8.py`, `process_fp8_input_tensor_strategy_moe`.

use super::fnuz::{normalize_codes, normalize_scale};
use super::requantize::{Fp8Type, Requantize, merge_shards};
use crate::config::{ActivationScheme, Fp8Scheme, ScaleStrategy};
use crate::formats::fp8::{Fp8Scales, Fp8Tensors};
use crate::layers::{LayerParams, MoeShard, ct_fp8_moe};
use crate::num::tensor::{DType, Tensor};
use crate::weight::Weight;
use crate::{Error, Result};

/// The tensors of a rank's experts. Shapes are those of [`ct_fp8_moe`], for any number of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Experts<'a> {
    /// `[experts, 2 · intermediate, hidden]` e4m3fn (without a gate: half of the rows).
    pub w13: Tensor<'a>,
    /// `[experts, hidden, intermediate]` e4m3fn.
    pub w2: Tensor<'a>,
    /// float32: `[experts, 2]` per tensor (w1, w3; one without a gate), `[experts, rows, 1]` per
    /// channel, `[experts, row blocks, column blocks]` per block.
    pub w13_scale: Tensor<'a>,
    /// float32: `[experts]`, `[experts, hidden, 1]`, or per block.
    pub w2_scale: Tensor<'a>,
    /// Static activations: `[experts]` float32.
    pub w13_input_scale: Option<Tensor<'a>>,
    /// Static activations: `[experts]` float32.
    pub w2_input_scale: Option<Tensor<'a>>,
}

/// Options of the preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fp8Options {
    /// FP8 type of the device: e4m3fnuz on MI300.
    pub device_type: Fp8Type,
    /// How codes are requantized to the larger of two scales.
    pub requantize: Requantize,
}

/// A matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertMatrix {
    /// Gate and up.
    W13,
    /// Down.
    W2,
}

/// Prepared experts, before any kernel layout.
#[derive(Debug, Clone, PartialEq)]
pub struct PreparedFp8Experts {
    /// The tensors. Per-tensor `w13_scale` is `[experts]`; static activation scales are scalars,
    /// `[]`.
    pub tensors: Fp8Experts<'static>,
    /// Meaning of the codes.
    pub ty: Fp8Type,
    strategy: ScaleStrategy,
}

impl Fp8Experts<'_> {
    /// Runs every step that upstream runs before the kernel's own layout.
    ///
    /// # Errors
    /// [`LayerError`](crate::layers::LayerError) for pairs of strategies and sizes that upstream
    /// refuses, including blocks that do not divide the rank's intermediate size; [`Error::Shape`],
    /// [`Error::Dtype`]; [`Error::Missing`] and [`Error::Unsupported`] for activation scales that
    /// are absent or not expected; [`Error::Value`] for scales that are not positive and finite
    /// (upstream uses them and gets NaN from zeros).
    pub fn prepare(
        self,
        scheme: &Fp8Scheme,
        shard: &MoeShard,
        options: Fp8Options,
    ) -> Result<PreparedFp8Experts> {
        let params = ct_fp8_moe(scheme, shard)?;
        expect(&self.w13, &params, "w13_weight")?;
        expect(&self.w2, &params, "w2_weight")?;
        let mut w13_scale = scales(&self.w13_scale, &params, "w13_weight_scale")?;
        let mut w2_scale = scales(&self.w2_scale, &params, "w2_weight_scale")?;
        let is_static = scheme.activations == ActivationScheme::StaticTensor;
        let mut inputs = [None, None];
        let given =
            [(&self.w13_input_scale, "w13_input_scale"), (&self.w2_input_scale, "w2_input_scale")];
        for (largest, (tensor, name)) in inputs.iter_mut().zip(given) {
            *largest = match (tensor, is_static) {
                (Some(t), true) => Some(largest_scale(&scales(t, &params, name)?)),
                (None, false) => None,
                (None, true) => return Err(Error::missing(name, "static activations")),
                (Some(t), false) => {
                    let what = format!("tensor `{}`", t.name());
                    return Err(Error::unsupported(what, "activations are scaled at run time"));
                }
            };
        }
        let (mut w13, mut w2) = (self.w13.bytes().to_vec(), self.w2.bytes().to_vec());
        if options.device_type == Fp8Type::E4m3fnuz {
            normalize_codes(&mut w13);
            normalize_codes(&mut w2);
            let all = w13_scale.iter_mut().chain(&mut w2_scale).chain(inputs.iter_mut().flatten());
            all.for_each(|scale| *scale = normalize_scale(*scale));
        }
        let mut w13_scale_shape = self.w13_scale.shape().to_vec();
        if scheme.strategy == ScaleStrategy::Tensor {
            w13_scale =
                one_scale_per_expert(self.w13_scale.name(), &mut w13, &w13_scale, shard, options)?;
            w13_scale_shape = vec![shard.num_experts];
        }
        let float = |t: &Tensor<'_>, shape: Vec<usize>, values: Vec<f32>| {
            Tensor::from_vec(t.name(), DType::F32, shape, values)
        };
        let input = |t: &Option<Tensor<'_>>, largest: Option<f32>| {
            t.as_ref().zip(largest).map(|(t, s)| float(t, Vec::new(), vec![s])).transpose()
        };
        let codes = |t: &Tensor<'_>, codes: Vec<u8>| {
            Tensor::from_vec(t.name(), DType::F8E4M3, t.shape().to_vec(), codes)
        };
        let tensors = Fp8Experts {
            w13: codes(&self.w13, w13)?,
            w2: codes(&self.w2, w2)?,
            w13_scale: float(&self.w13_scale, w13_scale_shape, w13_scale)?,
            w2_scale: float(&self.w2_scale, self.w2_scale.shape().to_vec(), w2_scale)?,
            w13_input_scale: input(&self.w13_input_scale, inputs[0])?,
            w2_input_scale: input(&self.w2_input_scale, inputs[1])?,
        };
        Ok(PreparedFp8Experts { tensors, ty: options.device_type, strategy: scheme.strategy })
    }
}

impl PreparedFp8Experts {
    /// One matrix of every expert as weights, for a layout to pack.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for e4m3fnuz, which no layout supports; as [`Fp8Tensors::unpack`] if
    /// K does not fill whole blocks.
    pub fn matrices(&self, matrix: ExpertMatrix) -> Result<Vec<Weight<'static>>> {
        let (weight, scale) = match matrix {
            ExpertMatrix::W13 => (&self.tensors.w13, &self.tensors.w13_scale),
            ExpertMatrix::W2 => (&self.tensors.w2, &self.tensors.w2_scale),
        };
        if self.ty == Fp8Type::E4m3fnuz {
            let what = format!("tensor `{}` as e4m3fnuz", weight.name());
            return Err(Error::unsupported(what, "layouts take e4m3fn"));
        }
        let [experts, size_n, _] = weight.dims3()?;
        let scheme = match self.strategy {
            ScaleStrategy::Tensor => Fp8Scales::Tensor { widths: vec![size_n] },
            ScaleStrategy::Channel => Fp8Scales::Channel,
            ScaleStrategy::Block { block_n, block_k } => Fp8Scales::Block { block_n, block_k },
        };
        (0..experts)
            .map(|e| {
                let (weight, weight_scale) = (weight.index0(e)?, scale.index0(e)?);
                let name = weight.name().to_owned();
                Fp8Tensors { weight, weight_scale, bias: None }.unpack(&name, &scheme)
            })
            .collect()
    }
}

/// The largest scale of all experts, since kernels take only one (upstream `.max()`).
pub fn largest_scale(scales: &[f32]) -> f32 {
    scales.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Requantizes w1 and w3 of each expert to the larger of their scales and returns it for each
/// expert. Without a gate there is only one scale and nothing changes.
fn one_scale_per_expert(
    name: &str,
    w13: &mut [u8],
    scales: &[f32],
    shard: &MoeShard,
    options: Fp8Options,
) -> Result<Vec<f32>> {
    let widths = vec![shard.intermediate_size_per_partition; shard.w13_num_shards()];
    let len = w13.len() / shard.num_experts.max(1);
    let rule = (options.requantize, options.device_type);
    scales
        .chunks_exact(widths.len())
        .enumerate()
        .map(|(e, scales)| {
            let codes = &mut w13[e * len..(e + 1) * len];
            merge_shards(name, codes, shard.hidden_size, &widths, scales, rule)
        })
        .collect()
}

/// Checks that the tensor has the shape and type of the parameter `name`.
fn expect(tensor: &Tensor<'_>, params: &LayerParams, name: &str) -> Result<()> {
    let Some(spec) = params.get(name) else {
        return Err(Error::missing(name, "the layer's parameters"));
    };
    tensor.expect_dtype(&[spec.dtype])?.expect_shape(&spec.shape)?;
    Ok(())
}

/// The scales of a parameter: positive and finite.
fn scales(tensor: &Tensor<'_>, params: &LayerParams, name: &str) -> Result<Vec<f32>> {
    expect(tensor, params, name)?;
    let values = tensor.elements::<f32>().into_owned();
    match values.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        Some(i) => Err(Error::value(tensor.name(), &[i], values[i], "a positive finite scale")),
        None => Ok(values),
    }
}
