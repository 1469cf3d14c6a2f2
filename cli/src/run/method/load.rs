//! A layer of a checkpoint in the hub: weights prepared, and how its activations are quantized.

use marlinspike::checkpoint::nvfp4::{self, W13Scale};
use marlinspike::config::{ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme};
use marlinspike::layers::{MoeShard, ct_fp8_moe};
use marlinspike::layout::flashinfer::Nvfp4Backend;
use marlinspike::method::{Arithmetic, MethodLayer, Multiply, Product, Quantizer};
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::prepare::fp8::{ExpertMatrix, Fp8Experts, Fp8Options, largest_scale};
use marlinspike::tensor::{DType, Tensor};
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::ActivationsArg;
use crate::convert::error::ConvertError;
use crate::convert::load::{self, Reading};
use crate::convert::preparation::Preparation;
use crate::model::bind::{self, Bound, Part};
use crate::model::layers::{Layers, Role, Stack};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::input::{Halves, Inputs, Routing, Sizes};
use crate::run::report::Output;

/// What a layer depends on beside its checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How activations enter.
    pub activations: ActivationsArg,
    /// NVFP4: whose rule gives the activations' global scales.
    pub backend: Nvfp4Backend,
    /// How experts' numbers are prepared.
    pub preparation: Preparation,
}

/// A layer that can run.
#[derive(Debug)]
pub struct Loaded {
    /// Its module.
    pub module: String,
    /// How its weights are stored.
    pub format: String,
    /// What is to be said of its preparation.
    pub notes: Vec<String>,
    pub(super) kind: Kind,
}

/// What runs.
#[derive(Debug)]
pub(super) enum Kind {
    Linear { weight: Box<Weight<'static>>, quantizer: Quantizer },
    Moe(Box<Moe>),
}

/// A layer of experts.
#[derive(Debug)]
pub(super) struct Moe {
    pub(super) w13: Vec<Weight<'static>>,
    pub(super) w2: Vec<Weight<'static>>,
    pub(super) quantizers: [Quantizer; 2],
    pub(super) multipliers: Option<Vec<[f32; 2]>>,
    pub(super) routing: MoeRouting,
}

/// A stack with the tensors of its experts.
struct Matrices<'s> {
    module: &'s str,
    scheme: &'s Scheme,
    experts: Vec<Vec<Bound>>,
}

impl<'s> Matrices<'s> {
    fn bind(model: &Model<'_>, stack: &'s Stack) -> Result<Self, ModelError> {
        let of = |row: &Vec<_>| row.iter().map(|m| Bound::find(model, &stack.scheme, m)).collect();
        let experts: Vec<Vec<Bound>> = stack.experts.iter().map(of).collect::<Result<_, _>>()?;
        let shapes = |row: &[Bound]| row.iter().map(|b| b.shape).collect::<Vec<_>>();
        let first = &experts[0];
        if let Some(other) = experts.iter().find(|row| shapes(row) != shapes(first)) {
            let (a, b) = (&other[0], &first[0]);
            let found = format!("`{}` is {}, `{}` {}", a.name, a.shape, b.name, b.shape);
            return Err(ModelError::module(
                &stack.module,
                format!("{found}: experts must be alike"),
            ));
        }
        Ok(Self { module: &stack.module, scheme: &stack.scheme, experts })
    }

    fn size_k(&self) -> usize {
        self.experts[0][0].shape.size_k
    }

    /// Columns of an expert's matrices together.
    fn size_n(&self) -> usize {
        self.experts[0].iter().map(|b| b.shape.size_n).sum()
    }

    /// Every expert's weight in the hub.
    fn weights(&self, model: &Model<'_>, preparation: Preparation) -> Result<Vec<Weight<'static>>> {
        let one = |matrices: &Vec<Bound>| {
            let size_k = matrices[0].shape.size_k;
            let n: Vec<_> = matrices.iter().map(|b| 0..b.shape.size_n).collect();
            let size_n = n.iter().map(|r| r.len()).sum();
            let reading = Reading {
                scheme: self.scheme,
                n: &n,
                group_size: bind::group_size(self.scheme, size_k),
                act_order: bind::act_order(self.scheme),
                preparation,
            };
            Ok(load::load(model, reading, matrices, &(0..size_k), &(0..size_n))?.into_owned())
        };
        self.experts.par_iter().map(one).collect()
    }

    /// `part` of expert `e`, its matrices one after the other.
    fn part<'m>(&self, model: &Model<'m>, e: usize, part: Part) -> Result<Tensor<'m>> {
        let matrices = &self.experts[e];
        let n: Vec<_> = matrices.iter().map(|b| 0..b.shape.size_n).collect();
        let found = load::merged(model, matrices, part, &(0..matrices[0].shape.size_k), &n)?;
        found.ok_or_else(|| {
            Error::missing(format!("{}: its {part:?}", matrices[0].name), self.scheme.label())
        })
    }

    /// `part` of every expert, `[experts, values]`, widened to f32.
    fn floats(&self, model: &Model<'_>, part: Part) -> Result<Vec<Vec<f32>>> {
        (0..self.experts.len()).map(|e| load::floats(&self.part(model, e, part)?)).collect()
    }
}

impl Loaded {
    /// The layer `module`.
    ///
    /// # Errors
    /// What its tensors, its config or its method are refused for.
    pub fn new(
        model: &Model<'_>,
        layers: &Layers,
        module: &str,
        options: Options,
    ) -> anyhow::Result<Self> {
        let stack = |role| layers.stacks.iter().find(|s| s.module == module && s.role == role);
        let weight_error = |e: Error| anyhow::Error::from(ConvertError::weight(module)(e));
        let mut notes = Vec::new();
        let (format, kind) = if let Some(stack) = stack(Role::Dense) {
            let matrices = Matrices::bind(model, stack)?;
            let kind = linear(model, &matrices, options, &mut notes).map_err(weight_error)?;
            (stack.scheme.label(), kind)
        } else {
            let (Some(w13), Some(w2)) = (stack(Role::W13), stack(Role::W2)) else {
                let reason = "found no quantized layer of this name";
                return Err(ModelError::module(module, reason).into());
            };
            if w13.scheme != w2.scheme {
                let (a, b) = (w13.scheme.label(), w2.scheme.label());
                let reason = format!("w13 is {a}, w2 {b}: expected one method");
                return Err(ModelError::module(module, reason).into());
            }
            let routing = MoeRouting::read(model, module, w13.experts.len())?;
            let stacks = [Matrices::bind(model, w13)?, Matrices::bind(model, w2)?];
            let moe = experts(model, module, &stacks, routing, options, &mut notes);
            (w13.scheme.label(), Kind::Moe(Box::new(moe.map_err(weight_error)?)))
        };
        Ok(Self { module: module.to_owned(), format, notes, kind })
    }

    /// What its activations must fit.
    pub fn sizes(&self) -> Sizes {
        match &self.kind {
            Kind::Linear { weight, .. } => {
                Sizes { size_k: weight.shape().size_k, num_experts: None }
            }
            Kind::Moe(moe) => {
                let size_k = moe.w13[0].shape().size_k;
                Sizes { size_k, num_experts: Some(moe.w13.len()) }
            }
        }
    }

    /// Runs the layer; the last of the outputs is `y`.
    ///
    /// # Errors
    /// As [`MethodLayer::forward`] and [`Product::compute`].
    pub fn forward(
        &self,
        inputs: &Inputs<Halves>,
        arithmetic: Arithmetic,
        multiply: Multiply,
    ) -> Result<Vec<Output>> {
        let Halves { ty: dtype, bits: x } = &inputs.x;
        let output = |name, size_n, bits: Vec<u16>| Output::halves(name, *dtype, size_n, &bits);
        match &self.kind {
            Kind::Linear { weight, quantizer } => {
                let shape = weight.shape();
                let expert_of = vec![Some(0); x.len() / shape.size_k];
                let product = Product {
                    rows: &quantizer.quantize(x, *dtype, shape.size_k, &expert_of)?,
                    expert_of: &expert_of,
                    weights: std::slice::from_ref(weight),
                    halves: None,
                    router_weights: None,
                    dtype: *dtype,
                };
                let y = match multiply {
                    Multiply::Compute => product.compute(arithmetic)?,
                    Multiply::Define => product.define(arithmetic)?,
                };
                Ok(vec![output("y", shape.size_n, y)])
            }
            Kind::Moe(moe) => {
                let routing;
                let routed = match &inputs.routing {
                    Routing::Given { top_k, ids, weights } => {
                        Routed { top_k: *top_k, topk_ids: ids, topk_weights: weights }
                    }
                    Routing::Logits(logits) => {
                        routing = moe.routing.router().route(logits, moe.w13.len())?;
                        let (topk_ids, topk_weights) = (&routing.topk_ids, &routing.topk_weights);
                        Routed { top_k: moe.routing.top_k, topk_ids, topk_weights }
                    }
                };
                let layer = MethodLayer {
                    layer: Layer {
                        w13: &moe.w13,
                        w2: &moe.w2,
                        orders: [None; 2],
                        num_experts: moe.w13.len(),
                        expert_map: None,
                        activation: moe.routing.activation,
                        dtype: *dtype,
                        input_dtype: None,
                        router_weight_on_input: moe.routing.weight_on_input,
                    },
                    quantizers: moe.quantizers.clone(),
                    w13_multipliers: moe.multipliers.as_deref(),
                };
                let (hidden, inner) = (layer.layer.hidden_size(), layer.layer.intermediate_size());
                let stages = layer.forward(x, routed, arithmetic, multiply)?;
                Ok(vec![
                    output("gate_up", moe.w13[0].shape().size_n, stages.gate_up),
                    output("activated", inner, stages.activated),
                    output("down", hidden, stages.down),
                    output("y", hidden, stages.y),
                ])
            }
        }
    }

    /// Kind, sizes and method, for machines.
    pub fn describe(&self) -> Value {
        match &self.kind {
            Kind::Linear { weight, quantizer } => json!({
                "kind": "linear",
                "format": self.format,
                "size_k": weight.shape().size_k,
                "size_n": weight.shape().size_n,
                "activations": quantizer.to_string(),
            }),
            Kind::Moe(moe) => json!({
                "kind": "moe",
                "format": self.format,
                "num_experts": moe.w13.len(),
                "top_k": moe.routing.top_k,
                "hidden_size": moe.w13[0].shape().size_k,
                "intermediate_size": moe.w2[0].shape().size_k,
                "activations": moe.quantizers[0].to_string(),
            }),
        }
    }

    /// The same for people.
    pub fn summary(&self) -> String {
        match &self.kind {
            Kind::Linear { weight, quantizer } => {
                format!("{}, {}, activations {quantizer}", self.format, weight.shape())
            }
            Kind::Moe(moe) => format!(
                "{}, {} experts, top {}, H {}, I {}, activations {}",
                self.format,
                moe.w13.len(),
                moe.routing.top_k,
                moe.w13[0].shape().size_k,
                moe.w2[0].shape().size_k,
                moe.quantizers[0],
            ),
        }
    }
}

/// What the scheme's activations are, where they are no numbers of the file.
fn dynamic(scheme: &Scheme, how: ActivationsArg, is_moe: bool) -> Result<Option<Quantizer>> {
    if how == ActivationsArg::None {
        return Ok(Some(Quantizer::None));
    }
    if how == ActivationsArg::Mxfp8 {
        return match scheme {
            Scheme::Mxfp8 { .. } => Ok(Some(Quantizer::Mxfp8)),
            other => Err(Error::unsupported(
                format!("--activations mxfp8 of {}", other.label()),
                "the weights must be mxfp8",
            )),
        };
    }
    Ok(match scheme {
        Scheme::Fp8(f) => match f.activations {
            ActivationScheme::None => Some(Quantizer::None),
            ActivationScheme::StaticTensor => None,
            // Upstream's linear layers prefer a scale for each token where CUTLASS runs.
            ActivationScheme::DynamicTensor if is_moe => Some(Quantizer::Fp8Tensor(None)),
            ActivationScheme::DynamicTensor | ActivationScheme::DynamicToken => {
                Some(Quantizer::Fp8Token)
            }
            ActivationScheme::DynamicGroup(group) => Some(Quantizer::Fp8Group(group)),
        },
        Scheme::Nvfp4 { weight_only: false, .. } => None,
        Scheme::Wna16(_) | Scheme::Mxfp8 { .. } | Scheme::Mxfp4 { .. } | Scheme::Nvfp4 { .. } => {
            Some(Quantizer::None)
        }
        other => {
            return Err(Error::unsupported(other.label(), "no method here runs it"));
        }
    })
}

fn linear(
    model: &Model<'_>,
    matrices: &Matrices<'_>,
    options: Options,
    notes: &mut Vec<String>,
) -> Result<Kind> {
    let mut weights = matrices.weights(model, options.preparation)?;
    let quantizer = match dynamic(matrices.scheme, options.activations, false)? {
        Some(quantizer) => quantizer,
        None => {
            let scales = input_scales(model, matrices)?;
            match matrices.scheme {
                Scheme::Nvfp4 { .. } => {
                    Quantizer::Nvfp4(options.backend.activation_scales(&scales)?)
                }
                _ => Quantizer::Fp8Tensor(Some(largest_scale(&scales.concat()))),
            }
        }
    };
    if matches!(matrices.scheme, Scheme::Fp8(f) if f.activations == ActivationScheme::DynamicTensor)
        && quantizer == Quantizer::Fp8Token
    {
        notes.push(
            "dynamic activations have a scale for each token, as upstream runs them on CUTLASS"
                .into(),
        );
    }
    Ok(Kind::Linear { weight: Box::new(weights.swap_remove(0)), quantizer })
}

/// The activations' scales of each expert's matrices, as multipliers.
fn input_scales(model: &Model<'_>, matrices: &Matrices<'_>) -> Result<Vec<Vec<f32>>> {
    let of = |e: usize| -> Result<Vec<f32>> {
        let tensor = matrices.part(model, e, Part::InputScale)?;
        match matrices.scheme {
            Scheme::Nvfp4 { container, .. } => {
                nvfp4::multipliers(&tensor, load::global_scale(*container))
            }
            _ => {
                let values = load::floats(&tensor)?;
                expect_shared(matrices, e, &values)?;
                match values.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
                    Some(i) => {
                        let expected = "a positive finite scale";
                        Err(Error::value(tensor.name(), &[i], values[i], expected))
                    }
                    None => Ok(values),
                }
            }
        }
    };
    (0..matrices.experts.len()).map(of).collect()
}

/// The activations of w1 and w3 are the same, so upstream refuses scales of compressed-tensors that are
/// more than 1e-5 apart.
fn expect_shared(matrices: &Matrices<'_>, e: usize, values: &[f32]) -> Result<()> {
    let ct = matches!(matrices.scheme, Scheme::Fp8(f) if f.container == FloatContainer::CompressedTensors);
    let apart = values.iter().position(|v| (v - values[0]).abs() > 1e-5);
    match (ct, apart) {
        (true, Some(i)) => {
            let own = matrices.experts[e].get(i).unwrap_or(&matrices.experts[e][0]);
            let first = &matrices.experts[e][0].name;
            let expected = format!("{} to within 1e-5, as `{first}` has it", values[0]);
            Err(Error::value(format!("{}.input_scale", own.name), &[], values[i], expected))
        }
        _ => Ok(()),
    }
}

fn experts(
    model: &Model<'_>,
    module: &str,
    stacks: &[Matrices<'_>; 2],
    routing: MoeRouting,
    options: Options,
    notes: &mut Vec<String>,
) -> Result<Moe> {
    let scheme = stacks[0].scheme;
    let known = dynamic(scheme, options.activations, true)?;
    if let Scheme::Fp8(f) = scheme
        && known != Some(Quantizer::None)
    {
        return fp8_experts(model, stacks, f, routing, options, notes);
    }
    // With scales of their own, gate and up are read under w1's, and multiplied by their own below.
    let first = Preparation { w13_scale: W13Scale::First, ..options.preparation };
    let [w13, w2] = [stacks[0].weights(model, first)?, stacks[1].weights(model, first)?];
    let mut multipliers = None;
    if let Scheme::Nvfp4 { container, .. } = scheme {
        let policy = options.preparation.w13_scale;
        let scales = load::w13_scales(model, module, &stacks[0].experts, *container, policy)?;
        let rule = match policy {
            W13Scale::First => "w1's is used for both (--w13-scale own: each its own)",
            W13Scale::Own => "each has its own (upstream uses w1's for both)",
        };
        notes.extend(scales.mismatches.iter().map(|m| format!("warning: {m}: {rule}")));
        multipliers = (policy == W13Scale::Own).then_some(scales.multipliers);
    }
    let quantizers = match known {
        Some(quantizer) => [quantizer.clone(), quantizer],
        None => {
            let of = |m: &Matrices<'_>| -> Result<Quantizer> {
                Ok(Quantizer::Nvfp4(options.backend.activation_scales(&input_scales(model, m)?)?))
            };
            [of(&stacks[0])?, of(&stacks[1])?]
        }
    };
    Ok(Moe { w13, w2, quantizers, multipliers, routing })
}

/// W8A8-FP8 experts, prepared in upstream's order.
fn fp8_experts(
    model: &Model<'_>,
    stacks: &[Matrices<'_>; 2],
    scheme: &Fp8Scheme,
    routing: MoeRouting,
    options: Options,
    notes: &mut Vec<String>,
) -> Result<Moe> {
    let [w13, w2] = stacks;
    let experts = w13.experts.len();
    let shard = MoeShard::new(experts, w13.size_k(), w2.size_k(), 1)?;
    // Refusals of the pair of strategies and of sizes come before any tensor is read.
    ct_fp8_moe(scheme, &shard)?;
    let is_static = scheme.activations == ActivationScheme::StaticTensor;
    let input = |m: &Matrices<'_>, name: &str| -> Result<Option<Tensor<'static>>> {
        if !is_static {
            return Ok(None);
        }
        let largest = input_scales(model, m)?.iter().map(|own| largest_scale(own)).collect();
        Tensor::from_vec(name, DType::F32, vec![experts], largest).map(Some)
    };
    let inputs = [input(w13, "w13_input_scale")?, input(w2, "w2_input_scale")?];
    let quantizers = |scales: [Option<f32>; 2]| -> [Quantizer; 2] {
        scales.map(|scale| match scheme.activations {
            ActivationScheme::DynamicToken => Quantizer::Fp8Token,
            ActivationScheme::DynamicGroup(group) => Quantizer::Fp8Group(group),
            _ => Quantizer::Fp8Tensor(scale),
        })
    };
    let one = |t: &Option<Tensor<'_>>| t.as_ref().map(|t| largest_scale(&t.elements::<f32>()));
    let Some(requantize) = options.preparation.requantize else {
        // Each shard keeps its scale.
        let [w13, w2] = [w13, w2].map(|m| m.weights(model, options.preparation));
        let quantizers = quantizers([one(&inputs[0]), one(&inputs[1])]);
        return Ok(Moe { w13: w13?, w2: w2?, quantizers, multipliers: None, routing });
    };
    let [w13_input_scale, w2_input_scale] = inputs;
    let stored = Fp8Experts {
        w13: codes(model, w13, "w13_weight")?,
        w2: codes(model, w2, "w2_weight")?,
        w13_scale: scales(model, w13, "w13_weight_scale", scheme.strategy)?,
        w2_scale: scales(model, w2, "w2_weight_scale", scheme.strategy)?,
        w13_input_scale,
        w2_input_scale,
    };
    let changed = match scheme.strategy {
        ScaleStrategy::Tensor => {
            let pairs = stored.w13_scale.elements::<f32>();
            pairs.chunks_exact(2).filter(|pair| pair[0] != pair[1]).count()
        }
        _ => 0,
    };
    notes.extend(load::requantized(&w13.module, changed, experts, requantize));
    let device = Fp8Options { requantize, ..Fp8Options::default() };
    let prepared = stored.prepare(scheme, &shard, device)?;
    let inputs = [&prepared.tensors.w13_input_scale, &prepared.tensors.w2_input_scale].map(one);
    Ok(Moe {
        w13: prepared.matrices(ExpertMatrix::W13)?,
        w2: prepared.matrices(ExpertMatrix::W2)?,
        quantizers: quantizers(inputs),
        multipliers: None,
        routing,
    })
}

/// Codes of all experts, `[experts, N, K]`.
fn codes(model: &Model<'_>, matrices: &Matrices<'_>, name: &str) -> Result<Tensor<'static>> {
    let mut bytes = Vec::new();
    for e in 0..matrices.experts.len() {
        let tensor = matrices.part(model, e, Part::Weight)?;
        tensor.expect_dtype(&[DType::F8E4M3])?;
        bytes.extend_from_slice(tensor.bytes());
    }
    let shape = vec![matrices.experts.len(), matrices.size_n(), matrices.size_k()];
    Tensor::from_vec(name, DType::F8E4M3, shape, bytes)
}

/// Scales of all experts as [`Fp8Experts`] has them.
fn scales(
    model: &Model<'_>,
    matrices: &Matrices<'_>,
    name: &str,
    strategy: ScaleStrategy,
) -> Result<Tensor<'static>> {
    let (experts, each) = (matrices.experts.len(), matrices.experts[0].len());
    let mut shape = match strategy {
        ScaleStrategy::Tensor if each == 1 => vec![experts],
        ScaleStrategy::Tensor => vec![experts, each],
        ScaleStrategy::Channel => vec![experts, matrices.size_n(), 1],
        ScaleStrategy::Block { .. } => vec![experts],
    };
    if let ScaleStrategy::Block { .. } = strategy {
        let tensor = matrices.part(model, 0, Part::Scale)?;
        shape.extend(tensor.dims2()?);
    }
    let values = matrices.floats(model, Part::Scale)?.concat();
    let len: usize = shape.iter().product();
    if values.len() != len {
        let first = &matrices.experts[0][0].name;
        return Err(Error::shape(
            format!("{first}: scales of all experts"),
            &[values.len()],
            format!("{shape:?}"),
        ));
    }
    Tensor::from_vec(name, DType::F32, shape, values)
}
