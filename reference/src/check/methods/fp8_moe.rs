//! A layer of FP8 weights and activations: each stage from the case's own stage before it. A stage that
//! the case lacks is recomputed as its schedule says.

use super::scaled_mm::{self, better_diagnosis, other_promotion};
use super::{Computation, Expected, Form, Mistake, known};
use crate::Result;
use crate::case::{Case, CheckpointFormat, Fp8LayerConfig, MoeConfig, QuantConfig, ScoringFunc};
use crate::check::compare::{Candidate, Rows, elements};
use crate::check::layer::{activated, summed};
use crate::check::product::{Part, Stage};
use crate::check::scheduled::{self, Product};
use crate::check::{Declared, OutputReport, Verdict};
use crate::dims::GroupSize;
use crate::gemm::schedule::{Fp8Kernel, Schedule};
use crate::gemm::{self, Extras};
use crate::method::{self, Activations, MethodLayer, Quantizer, Scales};
use crate::moe::activation::Definition;
use crate::moe::layer::{Layer, Routed};
use crate::moe::{narrow, widen};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::weight::Weight;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Codes and scales of what enters w13 and w2.
const QUANTIZED: [[&str; 2]; 2] = [["a1q", "a1q_scale"], ["a2q", "a2q_scale"]];

/// `fused_experts_fp8_w8a8`.
#[derive(Debug, Clone)]
pub(super) struct Fp8Moe {
    config: Fp8LayerConfig,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    map: Option<Vec<i32>>,
    weights: [Vec<Weight<'static>>; 2],
    quantizers: [Quantizer; 2],
    schedules: [Schedule; 2],
    /// What x is limited to: nothing, by definition.
    limit: Option<f32>,
}

impl Fp8Moe {
    pub(super) fn new(case: &Case<'_>, c: &Fp8LayerConfig) -> Result<Self> {
        let floats = |name: &str| Ok::<_, crate::Error>(case.input(name)?.elements::<f32>());
        let stack = |(name, n, k): (&str, usize, usize)| {
            let (weight, scales) =
                (case.input(&format!("{name}_weight"))?, floats(&format!("{name}_weight_scale"))?);
            let per = scales.len() / c.num_local_experts;
            let one = |e| {
                let scales = &scales[e * per..][..per];
                scaled_mm::weight(&weight.index0(e)?, scales, [n, k])
            };
            (0..c.num_local_experts).map(one).collect::<Result<Vec<_>>>()
        };
        let [w13, w2] = c.matrices();
        let weights = [stack(w13)?, stack(w2)?];
        let quantizer = |scale: &str| {
            Ok::<_, crate::Error>(match c.per_act_token_quant {
                true => Quantizer::Fp8Token,
                false => Quantizer::Fp8Tensor(Some(floats(scale)?[0])),
            })
        };
        let quantizers = [quantizer("w13_input_scale")?, quantizer("w2_input_scale")?];
        let schedule =
            |choice: &Option<crate::case::ScheduleChoice>, weights: &[Weight<'_>]| match choice {
                Some(choice) => choice.resolve(weights, c.dtype, E4M3),
                None => Schedule::w8a8_fp8(Fp8Kernel::Triton, c.dtype, false),
            };
        let schedules =
            [schedule(&c.schedule_w13, &weights[0])?, schedule(&c.schedule_w2, &weights[1])?];
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        Ok(Self {
            x: case.input("x")?.elements::<u16>().into_owned(),
            topk_ids: case.input("topk_ids")?.elements::<i32>().into_owned(),
            topk_weights: floats("topk_weights")?.into_owned(),
            map,
            weights,
            quantizers,
            schedules,
            limit: None,
            config: c.clone(),
        })
    }

    fn layer(&self) -> MethodLayer<'_> {
        let c = &self.config;
        let layer = Layer {
            w13: &self.weights[0],
            w2: &self.weights[1],
            orders: [None, None],
            num_experts: c.num_experts,
            expert_map: self.map.as_deref(),
            activation: Definition::new(c.activation),
            dtype: c.dtype,
            input_dtype: None,
            router_weight_on_input: c.apply_router_weight_on_input,
        };
        MethodLayer { layer, quantizers: self.quantizers.clone(), w13_multipliers: None }
    }

    /// What enters w13 (`which` 0: rows of tokens) or w2 (1: of slots) of `rows`.
    fn quantize(&self, which: usize, rows: &[u16]) -> Result<Activations> {
        let size_k = self.size_k(which);
        let experts = vec![None; rows.len() / size_k];
        self.quantizers[which].quantize(rows, self.config.dtype, size_k, &experts)
    }

    fn routed(&self) -> Routed<'_> {
        let (topk_ids, topk_weights) = (&self.topk_ids, &self.topk_weights);
        Routed { top_k: self.config.top_k, topk_ids, topk_weights }
    }

    fn quantized(&self, which: usize, rows: &Activations) -> [Expected; 2] {
        let (names, cols, size_m) = (QUANTIZED[which], rows.size_k, rows.rows());
        let scales = match self.config.per_act_token_quant {
            true => Expected::floats(names[1], &[size_m, 1], scales(rows)),
            // A case's rows are at least one.
            false => Expected::floats(names[1], &[1], &scales(rows)[..1]),
        };
        let codes = Expected {
            name: names[0].to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![size_m, cols],
            elements: rows.codes.clone(),
            form: Form::lines(Rows::K, [cols, size_m], 8, None),
        };
        [codes, scales]
    }

    fn half(&self, name: &str, cols: usize, values: &[u16]) -> Expected {
        let rows = values.len() / cols;
        Expected {
            name: name.to_owned(),
            dtype: if self.config.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 },
            shape: vec![rows, cols],
            elements: values.iter().map(|&b| b.into()).collect(),
            form: Form::lines(Rows::List, [cols, rows], 16, None),
        }
    }

    /// x as it is quantized.
    fn limited(&self) -> Vec<u16> {
        let Some(limit) = self.limit else { return self.x.clone() };
        let dtype = self.config.dtype;
        let clamp = |&bits: &u16| {
            let value = widen(dtype, bits).clamp(-limit, limit);
            narrow(dtype, value)
        };
        self.x.iter().map(clamp).collect()
    }

    /// The case as `check::layer` knows layers.
    fn as_moe(&self) -> MoeConfig {
        let c = &self.config;
        MoeConfig {
            quant: QuantConfig {
                checkpoint_format: CheckpointFormat::Fp8,
                weight_type: E4M3,
                dtype: c.dtype,
                input_dtype: Some(E4M3),
                group_size: GroupSize::Channel,
                desc_act: false,
                is_k_full: true,
                has_bias: false,
                tensor_parallel: None,
            },
            size_m: c.size_m,
            num_experts: c.num_experts,
            top_k: c.top_k,
            hidden_size: c.hidden_size,
            intermediate_size: c.intermediate_size,
            activation: c.activation,
            scoring_func: ScoringFunc::Softmax,
            renormalize: false,
            apply_router_weight_on_input: c.apply_router_weight_on_input,
            block_size_m: 16,
            ep_size: 1,
            ep_rank: 0,
            scale_factor_w13: None,
            scale_factor_w2: None,
            schedule_w13: None,
            schedule_w2: None,
        }
    }
}

impl Computation for Fp8Moe {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let x = self.limited();
        let execute =
            |which: usize, product: &method::Product<'_>| product.execute(&self.schedules[which]);
        let s = self.layer().forward(&x, self.routed(), execute)?;
        let mut all = Vec::new();
        all.extend(self.quantized(0, &self.quantize(0, &x)?));
        all.push(self.half("gate_up", c.w13_size_n(), &s.gate_up));
        all.push(self.half("activated", c.intermediate_size, &s.activated));
        all.extend(self.quantized(1, &self.quantize(1, &s.activated)?));
        all.push(self.half("down", c.hidden_size, &s.down));
        all.push(self.half("y", c.hidden_size, &s.y));
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "promotion-missing", "sums were not promoted to f32, or where the schedule does not" =>
                |c| c.schedules.iter_mut().for_each(other_promotion);
            "activation-scales-exchanged", "the static scales of both products are exchanged" =>
                |c| c.quantizers.reverse();
            "activation-scale-inverted", "x was multiplied by the static scale and not divided" =>
                |c| for quantizer in &mut c.quantizers {
                    if let Quantizer::Fp8Tensor(Some(scale)) = quantizer {
                        *scale = 1.0 / *scale;
                    }
                };
            "weight-scale-of-first-expert", "the first expert's scales were taken for all" => |c| {
                for stack in &mut c.weights {
                    let first = stack[0].scales.clone();
                    stack.iter_mut().for_each(|w| w.scales = first.clone());
                }
            };
            "gate-up-swapped", "gate and up halves of w13 are exchanged" => |c| {
                for weight in &mut c.weights[0] {
                    let n = weight.shape().size_n;
                    let columns: Vec<usize> = (0..n).map(|i| (i + n / 2) % n).collect();
                    if let Ok(swapped) = weight.gather_columns(&columns) {
                        *weight = swapped;
                    }
                }
            };
            "router-weight-missing", "router weights were not applied" =>
                |c| c.topk_weights.fill(1.0);
            "router-weight-on-the-other-side",
            "router weights multiply the other product than the config says" =>
                |c| c.config.apply_router_weight_on_input ^= true;
            "expert-map-ignored", "global expert ids were used as this rank's" => |c| {
                if c.map.take().is_some() {
                    let local = c.config.num_local_experts as i32;
                    c.config.num_experts = c.config.num_local_experts;
                    c.topk_ids.iter_mut().for_each(|id| *id = id.rem_euclid(local));
                }
            };
            "e4m3-saturates-early", "activations were limited to 240 scales, not to 448" =>
                |c| if let Quantizer::Fp8Tensor(Some(scale)) = c.quantizers[0] {
                    c.limit = Some(240.0 * scale);
                };
        }
    }
}

/// A judgement in progress.
struct Walk<'c> {
    case: &'c Case<'c>,
    layer: &'c Fp8Moe,
    declared: Declared,
    reports: Vec<OutputReport>,
}

impl Walk<'_> {
    /// A stage that is defined bit for bit by the one before it.
    fn exact(&mut self, expected: [Expected; 2]) {
        for expected in expected {
            let Some(found) = self.case.output(&expected.name) else { continue };
            let name = expected.name.clone();
            let candidates = Fp8Moe::mistakes().into_iter().map(|mistake| {
                let (name, layer) = (name.clone(), self.layer);
                let (id, text) = (mistake.id, mistake.text.to_owned());
                let make = move || {
                    let made = super::made(layer, &mistake)?;
                    Some(made.into_iter().find(|o| o.name == name)?.elements)
                };
                Candidate { id, text, make: Box::new(make) }
            });
            let candidates = candidates.collect();
            self.reports.push(expected.judge(found, candidates));
        }
    }

    /// The case's own quantized rows, or the expected ones.
    fn rows(&self, which: usize, mut rows: Activations) -> Activations {
        let [codes, scales] = QUANTIZED[which].map(|name| self.case.output(name));
        if let Some(codes) = codes {
            rows.codes = elements(codes);
        }
        if let Some(scales) = scales {
            rows.scales = row_scales(scales, rows.rows());
        }
        rows
    }

    /// One product of `rows`, one for each slot.
    fn product(&mut self, which: usize, rows: &Activations) -> Result<()> {
        let name = ["gate_up", "down"][which];
        let Some(found) = self.case.output(name) else { return Ok(()) };
        let (c, layer) = (&self.layer.config, self.layer);
        let choice = [&c.schedule_w13, &c.schedule_w2][which];
        let engine = layer.layer();
        let experts = engine.layer.local_experts(layer.routed())?;
        let product = engine.product(which, rows, &experts, layer.routed());
        let (weights, router_weights) = (product.weights, product.router_weights);
        let activation_scales = Some(scales(rows));
        let values = gemm::Rows::decode(E4M3, rows.size_k, rows.codes.iter().copied())?;
        let bounded = || {
            let part = |(e, weight)| {
                let mine = |row: &usize| experts[*row] == Some(e);
                let rows = (0..experts.len()).filter(mine).collect();
                Part { weight, rows, expert: Some(e), global: layer.global(e) }
            };
            let parts: Vec<Part<'_>> = weights.iter().enumerate().map(part).collect();
            let stage = Stage {
                name,
                found,
                rows: values,
                radius: None,
                parts: &parts,
                orders: None,
                extras: Extras { activation_scales, router_weights },
                dtype: c.dtype,
                input_dtype: Some(E4M3),
                declared: &self.declared,
                producer: &self.case.provenance,
                top_k: Some(c.top_k),
            };
            stage.judge()
        };
        let mut report = match choice {
            Some(choice) => {
                let product = Product {
                    x: &rows.codes,
                    input: E4M3,
                    dtype: c.dtype,
                    weights,
                    expert_of: Some(&experts),
                    orders: None,
                    activation_scales,
                    router_weights,
                };
                scheduled::judge(name, found, product, choice, || bounded().map(Some))?
            }
            None => bounded()?,
        };
        if report.verdict == Verdict::Fail {
            better_diagnosis(&mut report, &elements(found), layer)?;
        }
        self.reports.push(report);
        Ok(())
    }
}

impl Fp8Moe {
    /// K of w13 (`which` 0) or w2.
    fn size_k(&self, which: usize) -> usize {
        self.weights[which].first().map_or(1, |w| w.shape().size_k)
    }

    /// The global id of this rank's expert `e`.
    fn global(&self, e: usize) -> usize {
        let map = self.map.iter().flatten();
        map.clone().position(|&local| usize::try_from(local) == Ok(e)).unwrap_or(e)
    }
}

/// The scale of each row, as both quantizers give them.
fn scales(rows: &Activations) -> &[f32] {
    match &rows.scales {
        Scales::Row(values) => values,
        _ => &[],
    }
}

/// A case's scales, one for each of `count` rows or one for all of them, as scales of rows.
fn row_scales(scales: &Tensor<'_>, count: usize) -> Scales {
    Scales::Row(scales.elements::<f32>().iter().copied().cycle().take(count).collect())
}

/// Every stage that the case has.
pub(super) fn judge(
    case: &Case<'_>,
    layer: &Fp8Moe,
    given: &Declared,
) -> Result<Vec<OutputReport>> {
    let c = &layer.config;
    let (engine, routed) = (layer.layer(), layer.routed());
    let declared = scaled_mm::declared(given);
    let mut walk = Walk { case, layer, declared, reports: Vec::new() };
    let own = |name: &str| case.output(name).map(|t| t.elements::<u16>().into_owned());

    let expected = layer.quantize(0, &layer.x)?;
    walk.exact(layer.quantized(0, &expected));
    let a1q = walk.rows(0, expected).to_slots(c.top_k);
    walk.product(0, &a1q)?;

    let moe = layer.as_moe();
    // What an absent stage was is known only where its arithmetic is declared.
    let gate_up = match (own("gate_up"), &c.schedule_w13) {
        (None, Some(_)) => {
            let experts = engine.layer.local_experts(routed)?;
            let product = engine.product(0, &a1q, &experts, routed);
            Some(product.execute(&layer.schedules[0])?)
        }
        (own, _) => own,
    };
    if let (Some(gate_up), Some(found)) = (&gate_up, own("activated")) {
        walk.reports.push(activated::judge(case, &moe, gate_up, &found)?);
    }
    if let Some(activated) = own("activated") {
        let expected = layer.quantize(1, &activated)?;
        walk.exact(layer.quantized(1, &expected));
        walk.product(1, &walk.rows(1, expected))?;
    } else if let [Some(codes), Some(scales)] = QUANTIZED[1].map(|name| case.output(name)) {
        let rows = Activations {
            ty: E4M3,
            size_k: c.intermediate_size,
            codes: elements(codes),
            scales: row_scales(scales, c.rows()),
            globals: None,
        };
        walk.product(1, &rows)?;
    }
    if let (Some(down), Some(found)) = (own("down"), own("y")) {
        walk.reports.push(summed::judge(case, &moe, &down, &found)?);
    }
    for (name, before) in [
        ("activated", "`gate_up`, or `schedule_w13`"),
        ("a2q", "`activated`"),
        ("a2q_scale", "`activated`"),
        ("down", "`activated`, or `a2q` and `a2q_scale`"),
        ("y", "`down`"),
    ] {
        if let Some(found) = case.output(name)
            && !walk.reports.iter().any(|r| r.name == name)
        {
            let note = format!("`{name}` is judged from {before}, which the case lacks");
            walk.reports.push(OutputReport::unchecked(name, found.len(), &note));
        }
    }
    Ok(walk.reports)
}
