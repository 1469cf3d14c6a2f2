//! A layer of a checkpoint in the hub: weights prepared, and how its activations are quantized.

use marlinspike::config::{ActivationScheme, Scheme};
use marlinspike::formats::global_scale::W13Scale;
use marlinspike::method::{MethodLayer, Product, Quantizer};
use marlinspike::moe::families::Tokens;
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::prepare::fp8::largest_scale;
use marlinspike::{Error, Result};

use super::matrices::Matrices;
use super::parts::{LayerWeights, Moe};
use super::{fp8, int8};
use crate::load;
use crate::load::preparation::Preparation;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::block::Surrounding;
use crate::run::block::tail::Engine;
use crate::run::error::RunError;
use crate::run::input::{Halves, Inputs, Routing, Sizes};
use crate::run::options::{Activations, MethodOptions};
use crate::run::origin::Partial;
use crate::run::output::{LayerKind, LogitsReport, Output};
use crate::run::routing::RoutingReport;

/// A layer that can run.
#[derive(Debug)]
pub struct Loaded {
    /// Its module.
    pub module: String,
    /// How its weights are stored.
    pub format: String,
    /// Notes on its preparation.
    pub notes: Vec<String>,
    pub(in crate::run) weights: LayerWeights,
    /// The block around experts.
    pub(super) surrounding: Surrounding,
    /// Present where the layer is one rank's part.
    pub(super) partial: Option<Partial>,
}

impl Loaded {
    /// The layer `module`.
    ///
    /// # Errors
    /// The reason why its tensors, its config or its method are refused.
    pub fn new(
        model: &Model<'_>,
        layers: &Layers,
        module: &str,
        options: MethodOptions,
    ) -> Result<Self, RunError> {
        let stack = |role| layers.stacks.iter().find(|s| s.module == module && s.role == role);
        layers.expect_taken(module)?;
        let mut notes = Vec::new();
        let mut surrounding = Surrounding::default();
        let (format, weights) = if let Some(stack) = stack(Role::Dense) {
            let matrices = Matrices::bind(model, stack)?;
            let weights =
                linear(model, &matrices, options, &mut notes).map_err(RunError::weight(module))?;
            (stack.scheme.label(), weights)
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
            let interleaved = w13.is_interleaved();
            let routing = MoeRouting::read(model, module, w13.experts.len(), interleaved)?;
            notes.extend(routing.notes.iter().cloned());
            let stacks = [Matrices::bind(model, w13)?, Matrices::bind(model, w2)?];
            let hidden = stacks[0].size_k();
            let dense = |s: &Stack, name: &str| s.role == Role::Dense && s.module == name;
            surrounding = Surrounding::read(
                model,
                module,
                &routing.rule,
                [w13.experts.len(), hidden],
                &|name| layers.stacks.iter().any(|s| dense(s, name)),
                |name| Ok(Box::new(Self::new(model, layers, name, options)?)),
            )?;
            notes.extend(surrounding.notes.iter().cloned());
            let moe = experts(model, module, &stacks, routing, options, &mut notes);
            let moe = moe.map_err(RunError::weight(module))?;
            let padded = surrounding.padded(hidden, moe.w13[0].shape().size_k);
            surrounding = padded.map_err(RunError::weight(module))?;
            (w13.scheme.label(), LayerWeights::Moe(Box::new(moe)))
        };
        let module = module.to_owned();
        Ok(Self { module, format, notes, weights, surrounding, partial: None })
    }

    /// The layer with scales and biases rounded to `dtype`, as the kernels of a device hold them.
    ///
    /// # Errors
    /// [`Error::Value`] for a number out of the range of `dtype`.
    pub(in crate::run) fn in_dtype(mut self, dtype: ScalarType) -> Result<Self> {
        let before = self.weights.scale_type();
        self.weights = self.weights.in_dtype(dtype)?;
        if before != self.weights.scale_type() {
            self.notes
                .push(format!("scales rounded from {before} to {dtype}, as Marlin holds them"));
        }
        Ok(self)
    }

    /// The sizes that its activations must match.
    pub fn sizes(&self) -> Sizes {
        match &self.weights {
            LayerWeights::Linear { weight, .. } => {
                Sizes { size_k: weight.shape().size_k, num_experts: None, has_router: false }
            }
            LayerWeights::Moe(moe) => {
                let size_k = moe.w13[0].shape().size_k;
                let has_router = self.surrounding.router.is_some();
                Sizes { size_k, num_experts: Some(moe.num_experts()), has_router }
            }
        }
    }

    /// Runs the layer, its products by `engine`; the last of the outputs is `y`.
    ///
    /// # Errors
    /// As [`MethodLayer::forward`] and the engine.
    pub(crate) fn forward(
        &self,
        inputs: &Inputs<Halves>,
        engine: Engine<'_>,
    ) -> Result<Vec<Output>> {
        let multiply = engine.multiply;
        let Halves { ty: dtype, bits: x } = &inputs.x;
        let output = |name, size_n, bits: Vec<u16>| Output::halves(name, *dtype, size_n, &bits);
        match &self.weights {
            LayerWeights::Linear { weight, quantizer } => {
                let shape = weight.shape();
                let expert_of = vec![Some(0); x.len() / shape.size_k];
                let product = Product {
                    rows: &quantizer.quantize(
                        FloatView2::from_rows("x", *dtype, shape.size_k, x)?,
                        &expert_of,
                    )?,
                    expert_of: &expert_of,
                    weights: std::slice::from_ref(weight),
                    halves: None,
                    router_weights: None,
                    dtype: *dtype,
                };
                Ok(vec![output("y", shape.size_n, multiply(&product)?.into_bits())])
            }
            LayerWeights::Moe(moe) => {
                let routing;
                let routed = match &inputs.routing {
                    Routing::Given { top_k, ids, weights } => {
                        Routed::from_rows(*top_k, ids, weights)?
                    }
                    Routing::Logits(logits) => {
                        routing = moe.routing.route(logits, moe.num_experts())?;
                        routing.routed()?
                    }
                };
                let layer = MethodLayer {
                    layer: moe.layer(*dtype),
                    quantizers: moe.quantizers.clone(),
                    w13_multipliers: moe.multipliers.as_deref(),
                };
                let (hidden, inner) = (layer.layer.hidden_size(), layer.layer.intermediate_size());
                let x = FloatView2::from_rows("x", *dtype, hidden, x)?;
                let stages = layer.forward(x, routed, |_, product| multiply(product))?;
                let mut outputs = vec![
                    output("gate_up", moe.w13[0].shape().size_n, stages.gate_up.into_bits()),
                    output("activated", inner, stages.activated.into_bits()),
                    output("down", hidden, stages.down.into_bits()),
                ];
                outputs.extend(self.finish(inputs, stages.y.into_bits(), engine)?);
                Ok(outputs)
            }
        }
    }

    /// How activations enter the products.
    pub fn activations(&self) -> String {
        match &self.weights {
            LayerWeights::Linear { quantizer, .. } => quantizer.to_string(),
            LayerWeights::Moe(moe) => moe.quantizers[0].to_string(),
        }
    }

    /// The routing of `inputs`; with `check`, compared with a second implementation.
    ///
    /// # Errors
    /// For logits that cannot be routed.
    pub fn routing(&self, inputs: &Inputs<Halves>, check: bool) -> Result<Option<RoutingReport>> {
        let (LayerWeights::Moe(moe), Routing::Logits(logits)) = (&self.weights, &inputs.routing)
        else {
            return Ok(None);
        };
        let (routing, experts) = (&moe.routing, moe.num_experts());
        let made = check.then(|| routing.route(logits, experts)).transpose()?;
        let (source, rule) = (routing.source.clone(), routing.rule.clone());
        let given = (&logits[..], experts);
        RoutingReport::new(source, rule, (routing.tensors(), Tokens::default()), given, made)
            .map(Some)
    }

    /// Computes the logits that the inputs of experts lack, if the files have the router's weight.
    ///
    /// # Errors
    /// As [`Router::fill`](crate::run::block::router::Router::fill).
    pub(super) fn logits(
        &self,
        inputs: &mut Inputs<Halves>,
        check: bool,
    ) -> Result<Option<LogitsReport>> {
        let Halves { ty, bits } = &inputs.x;
        let Some(router) = &self.surrounding.router else { return Ok(None) };
        let x: Vec<f32> = bits.iter().map(|&b| ty.to_f64(b.into()) as f32).collect();
        router.fill(&x, *ty, None, &mut inputs.routing, check)
    }

    /// Kind and sizes.
    pub fn kind(&self) -> LayerKind {
        match &self.weights {
            LayerWeights::Linear { weight, .. } => LayerKind::Linear(weight.shape()),
            LayerWeights::Moe(moe) => LayerKind::Moe {
                num_experts: moe.num_experts(),
                top_k: moe.routing.rule.top_k,
                hidden_size: moe.w13[0].shape().size_k,
                intermediate_size: moe.w2[0].shape().size_k,
            },
        }
    }
}

/// How the scheme quantizes activations; `None` if that depends on scales in the file.
pub(super) fn dynamic(
    scheme: &Scheme,
    options: MethodOptions,
    is_moe: bool,
) -> Result<Option<Quantizer>> {
    let how = options.activations;
    if how == Activations::SixteenBit {
        return Ok(Some(Quantizer::None));
    }
    if let Activations::Block(wanted) = how {
        return match scheme {
            Scheme::Block { format, .. } if *format == wanted => {
                Ok(Some(Quantizer::Block { format: wanted, multipliers: Vec::new() }))
            }
            other => Err(Error::unsupported(
                format!("--activations {} of {}", wanted.name, other.label()),
                format!("the weights must be {}", wanted.name),
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
            groups => fp8::groups(groups, options.group_rule),
        },
        Scheme::Block { weight_only: false, .. } => None,
        Scheme::Wna16(_) | Scheme::Block { .. } => Some(Quantizer::None),
        Scheme::W4A8Fp8 { group_size: GroupSize::Of(128) } => Some(Quantizer::Fp8Token),
        Scheme::W4A8Fp8 { group_size } => {
            let what = format!("{}: group_size {group_size}", scheme.label());
            return Err(Error::unsupported(what, "128, as every kernel of it has"));
        }
        Scheme::W8A8Int8 { strategy, activations, input_symmetric } => {
            int8::dynamic(*strategy, *activations, *input_symmetric, is_moe)?
        }
        other => {
            return Err(Error::unsupported(other.label(), "no method here runs it"));
        }
    })
}

fn linear(
    model: &Model<'_>,
    matrices: &Matrices<'_>,
    options: MethodOptions,
    notes: &mut Vec<String>,
) -> Result<LayerWeights> {
    let mut weights = matrices.weights(model, options.preparation)?;
    let quantizer = match dynamic(matrices.scheme, options, false)? {
        Some(quantizer) => quantizer,
        None => {
            let scales = matrices.input_scales(model)?;
            match matrices.scheme {
                Scheme::Block { format, .. } => {
                    let multipliers = options.backend.activation_scales(&scales)?;
                    Quantizer::Block { format, multipliers }
                }
                Scheme::W8A8Int8 { input_symmetric, .. } => {
                    int8::fixed(model, matrices, *input_symmetric, &scales.concat())?
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
    Ok(LayerWeights::Linear { weight: Box::new(weights.swap_remove(0)), quantizer })
}

pub(super) fn experts(
    model: &Model<'_>,
    module: &str,
    stacks: &[Matrices<'_>; 2],
    routing: MoeRouting,
    options: MethodOptions,
    notes: &mut Vec<String>,
) -> Result<Moe> {
    let scheme = stacks[0].scheme;
    let known = dynamic(scheme, options, true)?;
    if let Scheme::Fp8(f) = scheme
        && known != Some(Quantizer::None)
    {
        return fp8::experts(model, stacks, f, routing, options, notes);
    }
    // Where gate and up have scales of their own, both are read with w1's; the multipliers below
    // correct that.
    let first = Preparation { w13_scale: W13Scale::First, ..options.preparation };
    let [w13, w2] = [stacks[0].weights(model, first)?, stacks[1].weights(model, first)?];
    let mut multipliers = None;
    let has_gate = stacks[0].experts.iter().all(|matrices| matrices.len() > 1);
    if let Scheme::Block { format, container, .. } = scheme
        && format.has_global_scale()
        && has_gate
    {
        let policy = options.preparation.w13_scale;
        let scales = load::w13_scales(model, module, &stacks[0].experts, *container, policy)?;
        let rule = match policy {
            W13Scale::First => "w1's is used for both (--w13-scale own: each keeps its own)",
            W13Scale::Own => "each has its own (upstream uses w1's for both)",
        };
        notes.extend(scales.mismatches.iter().map(|m| format!("warning: {m}: {rule}")));
        multipliers = (policy == W13Scale::Own).then_some(scales.multipliers);
    }
    let quantizers = match known {
        Some(quantizer) => [quantizer.clone(), quantizer],
        None => {
            let of = |m: &Matrices<'_>| -> Result<Quantizer> {
                let multipliers = options.backend.activation_scales(&m.input_scales(model)?)?;
                let Scheme::Block { format, .. } = scheme else {
                    return Err(Error::unsupported(
                        scheme.label(),
                        "its activations have no scales",
                    ));
                };
                Ok(Quantizer::Block { format, multipliers })
            };
            [of(&stacks[0])?, of(&stacks[1])?]
        }
    };
    Ok(Moe { w13, w2, quantizers, multipliers, routing, shared: None })
}
