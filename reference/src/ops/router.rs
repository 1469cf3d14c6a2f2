//! Scores to expert ids and weights.

use ndarray::ArrayView2;
use serde_json::{Map, Value, json};

use crate::judge::{Declared, OutputReport};
use crate::moe::ScoringFunc;
use crate::moe::block::Block;
use crate::moe::families::{RouterTensors, RoutingRule};
use crate::moe::router::{Groups, Router};
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::draw::{ROWS, Rng};
use crate::ops::quant::keys::{at_most, contradiction, extend, insert_some};
use crate::ops::quant::tensors::topk;
use crate::ops::routing::tokens::{self, TokenInputs};
use crate::ops::routing::{
    TopkOrder, block, entries, families as family, stated, topk_in, widened,
};
use crate::ops::schema::{CaseError, Demand, Dim, Inputs, Reader, TensorRule, rule};
use crate::ops::tensors::{F32, FLAGS, I32, name_of};
use crate::{Error, Result};

/// Config of `router`.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Present for grouped top-k.
    pub grouped: Option<GroupedTopk>,
    /// The rule of a family, or a stated rule; then the keys above are unused.
    pub rule: Option<RoutingRule>,
    /// The block around the router, with [`RouterConfig::rule`]: then the case also has hidden
    /// states, the router's weight and the experts, and may have the block's output.
    pub block: Option<Block>,
    /// The order of a token's entries.
    pub topk_order: TopkOrder,
}

impl RouterConfig {
    /// The router of this config, for logits of `logits_type` and the correction `bias`.
    pub fn router<'a>(&self, logits_type: ScalarType, bias: Option<&'a [f32]>) -> Router<'a> {
        let groups = self
            .grouped
            .map(|g| Groups { num_expert_group: g.num_expert_group, topk_group: g.topk_group });
        let routed_scaling_factor = self.grouped.map_or(1.0, |g| g.routed_scaling_factor as f32);
        let plain = Router::new(self.scoring_func, self.top_k, self.renormalize);
        Router { groups, routed_scaling_factor, bias, logits_type, ..plain }
    }
}

/// Grouped top-k: groups are chosen first, then experts in them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedTopk {
    /// Number of groups; divides the number of experts.
    pub num_expert_group: usize,
    /// Groups chosen.
    pub topk_group: usize,
    /// Factor on the weights.
    pub routed_scaling_factor: f64,
}

/// Keys of grouped top-k, which require `use_grouped_topk`.
const GROUPED_TOPK: &[&str] = &["num_expert_group", "topk_group", "routed_scaling_factor"];

impl Operation for RouterConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "scoring_func",
            "top_k",
            "renormalize",
            "use_grouped_topk",
            "num_expert_group",
            "topk_group",
            "routed_scaling_factor",
            "topk_order",
        ]
    }

    fn key_meanings() -> &'static [(&'static str, &'static str)] {
        &[("topk_order", "order of a token's entries: by falling score (default), or any")]
    }

    /// A config with a `model_type` may be the complete config.json of a model, whose keys
    /// [`crate::moe::families`] reads; a config with a `routing` object has no other key than `block`.
    fn keys_in(map: &Map<String, Value>) -> Option<&'static [&'static str]> {
        match (map.contains_key("routing"), map.contains_key("model_type")) {
            (true, _) => Some(&["routing", "block", "topk_order"]),
            (false, true) => None,
            (false, false) => Some(Self::keys()),
        }
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let topk_order = r.optional_name("topk_order", TopkOrder::NAMED)?.unwrap_or_default();
        if let Some(rule) = stated::rule(r.map)? {
            let block = stated::block(r.map, &rule)?;
            return Ok(RouterConfig { block, topk_order, ..from_rule(rule) });
        }
        let grouped = if r.flag("use_grouped_topk", false)? {
            Some(GroupedTopk {
                num_expert_group: r.size("num_expert_group")?,
                topk_group: r.size("topk_group")?,
                routed_scaling_factor: r.number("routed_scaling_factor")?.unwrap_or(1.0),
            })
        } else {
            let given =
                GROUPED_TOPK.iter().find(|&&key| r.map.get(key).is_some_and(|v| !v.is_null()));
            if let Some(key) = given {
                return Err(contradiction(
                    key,
                    &r.map[*key],
                    "use_grouped_topk false, which never reads it",
                ));
            }
            None
        };
        if let Some(g) = grouped {
            at_most("topk_group", g.topk_group, "num_expert_group", g.num_expert_group)?;
        }
        Ok(RouterConfig {
            scoring_func: r.name("scoring_func", ScoringFunc::NAMED)?,
            top_k: r.size("top_k")?,
            renormalize: r.flag("renormalize", false)?,
            grouped,
            rule: None,
            block: None,
            topk_order,
        })
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut configs = Vec::new();
        for (_, scoring_func) in ScoringFunc::NAMED {
            for renormalize in FLAGS {
                for top_k in [1, 2, 3, 4, 8] {
                    let grouped = [(1, 1, 1.0), (4, 2, 1.0), (8, 4, 2.5)];
                    let grouped =
                        grouped.map(|(num_expert_group, topk_group, routed_scaling_factor)| {
                            Some(GroupedTopk {
                                num_expert_group,
                                topk_group,
                                routed_scaling_factor,
                            })
                        });
                    configs.extend([None].into_iter().chain(grouped).map(|grouped| {
                        let scoring_func = *scoring_func;
                        let (rule, block, topk_order) = (None, None, TopkOrder::Sorted);
                        RouterConfig {
                            scoring_func,
                            top_k,
                            renormalize,
                            grouped,
                            rule,
                            block,
                            topk_order,
                        }
                    }));
                }
            }
        }
        Ok(configs)
    }

    fn json(&self) -> Value {
        let order = (self.topk_order != TopkOrder::Sorted)
            .then(|| name_of(TopkOrder::NAMED, &self.topk_order));
        if let Some(rule) = &self.rule {
            let mut v = json!({ "routing": rule.to_json() });
            if let Some(block) = &self.block {
                extend(&mut v, json!({ "block": block }));
            }
            insert_some(&mut v, "topk_order", order);
            return v;
        }
        let mut v = json!({
            "scoring_func": self.scoring_func.name(), "top_k": self.top_k,
            "renormalize": self.renormalize, "use_grouped_topk": self.grouped.is_some(),
        });
        if let Some(g) = self.grouped {
            extend(
                &mut v,
                json!({
                    "num_expert_group": g.num_expert_group, "topk_group": g.topk_group,
                    "routed_scaling_factor": g.routed_scaling_factor,
                }),
            );
        }
        insert_some(&mut v, "topk_order", order);
        v
    }

    fn describe(&self) -> String {
        format!("{} top{}", self.scoring_func, self.top_k)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let logits = [DType::F32, DType::F16, DType::BF16];
        let mut rules = vec![
            rule("in.router_logits", &logits, &[Dim::Any, Dim::Some]).required(true),
            rule("in.e_score_correction_bias", F32, &[Dim::Some]),
            rule("in.expert_scale", F32, &[Dim::Some]),
            rule("out.token_expert_indices", I32, &[Dim::Any, Dim::Is(self.top_k)]),
        ];
        rules.extend(topk(Dim::Any, self.top_k));
        rules.extend(self.rule.iter().flat_map(tokens::tensors));
        if let (Some(block), Some(routing)) = (&self.block, &self.rule) {
            rules.extend(block::tensors(block, routing)?);
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        let Some(logits) = inputs.get("router_logits") else { return Ok(()) };
        let [_, experts] = logits.dims2()?;
        if let Some(rule) = &self.rule {
            block::check_inputs(inputs, self.block.as_ref())?;
            let floats = |name: &str| inputs.get(name).map(|t| t.elements::<f32>());
            let (bias, scale) = (floats("e_score_correction_bias"), floats("expert_scale"));
            let (correction_bias, expert_scale) = (bias.as_deref(), scale.as_deref());
            let tensors = RouterTensors { correction_bias, expert_scale };
            let none = ArrayView2::from_shape((0, experts), &[]).expect("no rows");
            rule.validate(none, tensors)?;
            return TokenInputs::read(inputs, rule, self.block.as_ref()).map(|_| ());
        }
        router_sizes(self, experts)?;
        match inputs.get("e_score_correction_bias") {
            Some(bias) => bias.expect_shape(&[experts]).map(|_| ()),
            None => Ok(()),
        }
    }

    fn output_rows(&self, inputs: &Inputs<'_>) -> Option<usize> {
        inputs.get("router_logits")?.shape().first().copied()
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let shape = case.inputs.get("router_logits").map(|t| t.shape());
        let Some(&[tokens, experts]) = shape else { return Ok(Vec::new()) };
        let groups = self.grouped.map_or(1, |g| g.num_expert_group);
        let mut demands = vec![Demand::choice(tokens, experts, self.top_k, groups)];
        if let Some(block) = &self.block {
            demands.extend(block::demands(block, tokens, self.top_k));
        }
        Ok(demands)
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let logits = case.input("router_logits")?;
        let (values, ty) = widened(logits)?;
        if let Some(rule) = &self.rule {
            let mut reports =
                family::judge(case, rule, &values, (self.block.as_ref(), self.topk_order))?;
            reports.extend(entries(case, logits, self.top_k)?);
            if let Some(block) = &self.block {
                reports.extend(block::judge(case, block, rule)?);
            }
            return Ok(reports);
        }
        let bias = case.inputs.get("e_score_correction_bias").map(|b| b.elements::<f32>());
        let router = self.router(ty, bias.as_deref());
        let mut reports = topk_in(case, router, &values, logits, self.topk_order)?;
        reports.extend(entries(case, logits, self.top_k)?);
        Ok(reports)
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        if self.rule.is_some() {
            let reason = "only `scoring_func` and its keys are computed";
            return Err(Error::unsupported("outputs of a stated `routing`", reason));
        }
        let logits = case.input("router_logits")?;
        let [_, experts] = logits.dims2()?;
        let (values, ty) = widened(logits)?;
        let bias = case.inputs.get("e_score_correction_bias").map(|b| b.elements::<f32>());
        let values = rows_of("router_logits", &values, experts)?;
        let routing = self.router(ty, bias.as_deref()).route(values)?;
        let ids = Tensor::from_array("", routing.topk_ids)?;
        let indices = Tensor::from_array("", routing.token_expert_indices)?;
        let weights = Tensor::from_array("", routing.topk_weights)?;
        drop(bias);
        case.add_output("topk_weights", weights);
        case.add_output("topk_ids", ids);
        case.add_output("token_expert_indices", indices);
        Ok(())
    }

    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let rows = rng.pick(&ROWS);
        let experts = rng.pick(&[8, 16, 64, 128, 256]);
        let dtype = rng.pick(&[DType::F32, DType::F16, DType::BF16]);
        let mut c = self.clone();
        // With a bias, a group's score is the sum of its two best experts.
        let pairs = c.grouped.is_some_and(|g| experts / g.num_expert_group > 1);
        let with_bias = c.grouped.is_some() && rng.chance(1, 2) && pairs;
        if let Some(g) = c.grouped {
            // At most as many experts as the chosen groups hold.
            c.top_k = c.top_k.min(g.topk_group * (experts / g.num_expert_group));
        }
        case.config = c.into();
        case.add_input("router_logits", logits(rng, dtype, rows, experts)?);
        if with_bias {
            let bias = logits(rng, DType::F32, 1, experts)?.into_bytes().into_owned();
            case.add_input(
                "e_score_correction_bias",
                Tensor::new("", DType::F32, vec![experts], bias)?,
            );
        }
        Ok(())
    }
}

fn router_sizes(c: &RouterConfig, experts: usize) -> Result<()> {
    let contradiction = |key: &str, found: usize, with: String| {
        let (key, found) = (key.to_owned(), found.to_string());
        Error::from(CaseError::Contradiction { key, found, with })
    };
    if c.top_k > experts {
        let with = format!("the {experts} experts of `in.router_logits`");
        return Err(contradiction("top_k", c.top_k, with));
    }
    if let Some(g) = c.grouped {
        if !experts.is_multiple_of(g.num_expert_group) {
            let with = format!("the {experts} experts of `in.router_logits`, which it must divide");
            return Err(contradiction("num_expert_group", g.num_expert_group, with));
        }
        let reachable = g.topk_group * (experts / g.num_expert_group);
        if c.top_k > reachable {
            let with = format!("topk_group {}, which leaves {reachable} experts", g.topk_group);
            return Err(contradiction("top_k", c.top_k, with));
        }
    }
    Ok(())
}

/// Router logits `[rows, experts]`, finite; with exact ties in some rows.
pub(super) fn logits(
    rng: &mut Rng,
    dtype: DType,
    rows: usize,
    experts: usize,
) -> Result<Tensor<'static>> {
    let mut bytes = Vec::new();
    for _ in 0..rows {
        let levels = rng.pick(&[1, 2, 3, usize::MAX, usize::MAX, usize::MAX]);
        let palette: Vec<u32> = (0..experts.min(levels)).map(|_| rng.next_u32()).collect();
        for e in 0..experts {
            let bits = if levels == usize::MAX { palette[e] } else { rng.pick(&palette) };
            // Sign, an exponent from 2^-6 to 2^3, and all fraction bits of the type.
            let (sign, exponent, fraction) = (bits >> 31, bits >> 23 & 0xff, bits & 0x7f_ffff);
            match dtype {
                DType::F16 => {
                    let bits = sign << 15 | (9 + exponent % 10) << 10 | fraction >> 13;
                    bytes.extend((bits as u16).to_le_bytes());
                }
                DType::BF16 => {
                    let bits = sign << 15 | (121 + exponent % 10) << 7 | fraction >> 16;
                    bytes.extend((bits as u16).to_le_bytes());
                }
                _ => bytes
                    .extend((sign << 31 | (121 + exponent % 10) << 23 | fraction).to_le_bytes()),
            }
        }
    }
    Tensor::new("in.router_logits", dtype, vec![rows, experts], bytes)
}

/// The config of a case with this rule.
pub(crate) fn from_rule(rule: RoutingRule) -> RouterConfig {
    RouterConfig {
        scoring_func: ScoringFunc::Softmax,
        top_k: rule.top_k,
        renormalize: false,
        grouped: None,
        rule: Some(rule),
        block: None,
        topk_order: TopkOrder::Sorted,
    }
}
