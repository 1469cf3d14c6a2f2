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
use crate::gemm::{Extras, Rows as Activations};
use crate::moe::Chain;
use crate::moe::activation::Definition;
use crate::moe::layer::fp8::{Fp8Activations, Fp8Layer, Fp8Rows};
use crate::moe::layer::{Arithmetic, Layer, Routed};
use crate::scalar::ScalarType;
use crate::tensor::DType;
use crate::weight::Weight;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// `fused_experts_fp8_w8a8`.
#[derive(Debug, Clone)]
pub(super) struct Fp8Moe {
    config: Fp8LayerConfig,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    map: Option<Vec<i32>>,
    weights: [Vec<Weight<'static>>; 2],
    activations: Fp8Activations,
    how: Arithmetic,
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
        let activations = match c.per_act_token_quant {
            true => Fp8Activations::PerToken,
            false => Fp8Activations::Static {
                w13: floats("w13_input_scale")?[0],
                w2: floats("w2_input_scale")?[0],
            },
        };
        let schedule =
            |choice: &Option<crate::case::ScheduleChoice>, weights: &[Weight<'_>]| match choice {
                Some(choice) => choice.resolve(weights, c.dtype, E4M3),
                None => Schedule::w8a8_fp8(Fp8Kernel::Triton, c.dtype, false),
            };
        let how = Arithmetic {
            w13: schedule(&c.schedule_w13, &weights[0])?,
            w2: schedule(&c.schedule_w2, &weights[1])?,
            chain: Chain::Canonical,
        };
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        Ok(Self {
            x: case.input("x")?.elements::<u16>().into_owned(),
            topk_ids: case.input("topk_ids")?.elements::<i32>().into_owned(),
            topk_weights: floats("topk_weights")?.into_owned(),
            map,
            weights,
            activations,
            how,
            limit: None,
            config: c.clone(),
        })
    }

    fn layer(&self) -> Fp8Layer<'_> {
        let c = &self.config;
        let layer = Layer {
            w13: &self.weights[0],
            w2: &self.weights[1],
            orders: [None, None],
            num_experts: c.num_experts,
            expert_map: self.map.as_deref(),
            activation: Definition::new(c.activation),
            dtype: c.dtype,
            input_dtype: Some(E4M3),
            router_weight_on_input: c.apply_router_weight_on_input,
        };
        Fp8Layer { layer, activations: self.activations }
    }

    fn routed(&self) -> Routed<'_> {
        let (topk_ids, topk_weights) = (&self.topk_ids, &self.topk_weights);
        Routed { top_k: self.config.top_k, topk_ids, topk_weights }
    }

    fn quantized(&self, names: [&str; 2], rows: &Fp8Rows, cols: usize) -> [Expected; 2] {
        let size_m = rows.codes.len() / cols;
        let scales = match self.config.per_act_token_quant {
            true => Expected::floats(names[1], &[size_m, 1], &rows.scales),
            // A case's rows are at least one.
            false => Expected::floats(names[1], &[1], &rows.scales[..1]),
        };
        let codes = Expected {
            name: names[0].to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![size_m, cols],
            elements: rows.codes.iter().map(|&b| b.into()).collect(),
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
            let value = crate::moe::widen(dtype, bits).clamp(-limit, limit);
            crate::moe::narrow(dtype, value)
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
        let s = self.layer().forward(&self.limited(), self.routed(), &self.how)?;
        let mut all = Vec::new();
        all.extend(self.quantized(["a1q", "a1q_scale"], &s.a1q, c.hidden_size));
        all.push(self.half("gate_up", c.w13_size_n(), &s.gate_up));
        all.push(self.half("activated", c.intermediate_size, &s.activated));
        all.extend(self.quantized(["a2q", "a2q_scale"], &s.a2q, c.intermediate_size));
        all.push(self.half("down", c.hidden_size, &s.down));
        all.push(self.half("y", c.hidden_size, &s.y));
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "promotion-missing", "sums were not promoted to f32, or where the schedule does not" =>
                |c| {
                    other_promotion(&mut c.how.w13);
                    other_promotion(&mut c.how.w2);
                };
            "activation-scales-exchanged", "the static scales of both products are exchanged" =>
                |c| if let Fp8Activations::Static { w13, w2 } = &mut c.activations {
                    std::mem::swap(w13, w2);
                };
            "activation-scale-inverted", "x was multiplied by the static scale and not divided" =>
                |c| if let Fp8Activations::Static { w13, w2 } = &mut c.activations {
                    (*w13, *w2) = (1.0 / *w13, 1.0 / *w2);
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
                |c| if let Fp8Activations::Static { w13, .. } = c.activations {
                    c.limit = Some(240.0 * w13);
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
    fn rows(&self, names: [&str; 2], expected: Fp8Rows) -> Fp8Rows {
        let (codes, scales) = (self.case.output(names[0]), self.case.output(names[1]));
        let count = expected.scales.len();
        Fp8Rows {
            codes: codes.map_or(expected.codes, |t| t.bytes().to_vec()),
            scales: scales.map_or(expected.scales, |t| {
                t.elements::<f32>().iter().copied().cycle().take(count).collect()
            }),
        }
    }

    /// One product of `rows`, one for each output row.
    fn product(&mut self, which: usize, rows: &Fp8Rows, router: Option<&[f32]>) -> Result<()> {
        let name = ["gate_up", "down"][which];
        let Some(found) = self.case.output(name) else { return Ok(()) };
        let (c, layer) = (&self.layer.config, self.layer);
        let choice = [&c.schedule_w13, &c.schedule_w2][which];
        let weights = &layer.weights[which];
        let experts = layer.layer().layer.local_experts(layer.routed())?;
        let codes: Vec<u32> = rows.codes.iter().map(|&b| b.into()).collect();
        let values = Activations::decode(E4M3, layer.size_k(which), codes.iter().copied())?;
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
                extras: Extras { activation_scales: Some(&rows.scales), router_weights: router },
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
                    x: &codes,
                    input: E4M3,
                    dtype: c.dtype,
                    weights,
                    expert_of: Some(&experts),
                    orders: None,
                    activation_scales: Some(&rows.scales),
                    router_weights: router,
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

    let expected = engine.quantize_x(&layer.x)?;
    walk.exact(layer.quantized(["a1q", "a1q_scale"], &expected, c.hidden_size));
    let a1q = walk.rows(["a1q", "a1q_scale"], expected);
    let repeated = Fp8Rows {
        codes: a1q
            .codes
            .chunks(c.hidden_size)
            .flat_map(|row| std::iter::repeat_n(row, c.top_k).flatten().copied())
            .collect(),
        scales: a1q.scales.iter().flat_map(|&s| std::iter::repeat_n(s, c.top_k)).collect(),
    };
    let on_input = c.apply_router_weight_on_input;
    walk.product(0, &repeated, on_input.then_some(&layer.topk_weights[..]))?;

    let moe = layer.as_moe();
    // What an absent stage was is known only where its arithmetic is declared.
    let gate_up = match (own("gate_up"), &c.schedule_w13) {
        (None, Some(_)) => Some(engine.gate_up(&a1q, routed, &layer.how)?),
        (own, _) => own,
    };
    if let (Some(gate_up), Some(found)) = (&gate_up, own("activated")) {
        walk.reports.push(activated::judge(case, &moe, gate_up, &found)?);
    }
    if let Some(activated) = own("activated") {
        let expected = engine.quantize_activated(&activated)?;
        walk.exact(layer.quantized(["a2q", "a2q_scale"], &expected, c.intermediate_size));
    }
    // The second product's rows: the case's own, or those of its own stage before them.
    let a2q = match (case.output("a2q"), case.output("a2q_scale"), own("activated")) {
        (_, _, Some(activated)) => Some(engine.quantize_activated(&activated)?),
        (Some(codes), Some(scales), None) => Some(Fp8Rows {
            codes: codes.bytes().to_vec(),
            scales: scales.elements::<f32>().iter().copied().cycle().take(c.rows()).collect(),
        }),
        _ => None,
    };
    if let Some(expected) = a2q {
        let rows = walk.rows(["a2q", "a2q_scale"], expected);
        walk.product(1, &rows, (!on_input).then_some(&layer.topk_weights[..]))?;
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
