//! What a model says of how tokens find their experts, and of the activation between the products.

use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::router::{Groups, Router};
use marlinspike::tensor::DType;
use serde_json::Value;

use super::{Model, ModelError};

/// Routing and activation of a layer of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeRouting {
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Present for grouped top-k.
    pub groups: Option<Groups>,
    /// Factor on the weights.
    pub routed_scaling_factor: f32,
    /// `e_score_correction_bias`.
    pub bias: Option<Vec<f32>>,
    /// Between the products.
    pub activation: Definition,
    /// Whether router weights multiply the first product.
    pub weight_on_input: bool,
}

/// A config's keys, and the module that asks.
struct Keys<'m> {
    model: &'m Model<'m>,
    module: &'m str,
}

impl Keys<'_> {
    fn any(&self, keys: &[&'static str]) -> Option<(&'static str, &Value)> {
        keys.iter().find_map(|key| self.model.config_value(key).map(|v| (*key, v)))
    }

    fn bad(&self, key: &str, found: &Value, expected: &str) -> ModelError {
        let reason = format!("config.json: {key}: found {found}, expected {expected}");
        ModelError::module(self.module, reason)
    }

    /// A size of 1 or more.
    fn size(&self, keys: &[&'static str]) -> Result<Option<usize>, ModelError> {
        let Some((key, value)) = self.any(keys) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        size.map(Some).ok_or_else(|| self.bad(key, value, "1 or more"))
    }

    fn number(&self, key: &'static str) -> Result<Option<f32>, ModelError> {
        let Some((key, value)) = self.any(&[key]) else { return Ok(None) };
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
        number.map(Some).ok_or_else(|| self.bad(key, value, "a positive number"))
    }
}

impl MoeRouting {
    /// Reads the keys that Mixtral, Qwen, DeepSeek and gpt-oss share; `module` is the layer's, and
    /// DeepSeek's `e_score_correction_bias` stands beside its router.
    ///
    /// # Errors
    /// [`ModelError::Module`] naming the key, what was found and what is known.
    pub fn read(model: &Model<'_>, module: &str, num_experts: usize) -> Result<Self, ModelError> {
        let keys = Keys { model, module };
        let known = ["num_experts_per_tok", "num_experts_per_token", "experts_per_token"];
        let Some(top_k) = keys.size(&known)? else {
            let reason = "config.json: num_experts_per_tok: found none, expected experts per token";
            return Err(ModelError::module(module, reason));
        };
        if top_k > num_experts {
            let found = Value::from(top_k);
            let expected = format!("at most {num_experts} experts");
            return Err(keys.bad("num_experts_per_tok", &found, &expected));
        }
        let renormalize = match keys.any(&["norm_topk_prob"]) {
            // Upstream's own default.
            None => true,
            Some((_, Value::Bool(b))) => *b,
            Some((key, v)) => return Err(keys.bad(key, v, "true or false")),
        };
        let scoring_func = match keys.any(&["scoring_func"]).map(|(k, v)| (k, v, v.as_str())) {
            None | Some((_, _, Some("softmax"))) => ScoringFunc::Softmax,
            Some((_, _, Some("sigmoid"))) => ScoringFunc::Sigmoid,
            Some((key, v, _)) => return Err(keys.bad(key, v, "\"softmax\" or \"sigmoid\"")),
        };
        let groups = match (keys.size(&["n_group"])?, keys.size(&["topk_group"])?) {
            (Some(num_expert_group), Some(topk_group)) if num_expert_group > 1 => {
                Some(Groups { num_expert_group, topk_group })
            }
            (Some(n), None) if n > 1 => {
                let reason =
                    format!("config.json: topk_group: found none, expected it with n_group {n}");
                return Err(ModelError::module(module, reason));
            }
            _ => None,
        };
        let model_type = keys.any(&["model_type"]).and_then(|(_, v)| v.as_str()).unwrap_or("");
        Ok(Self {
            scoring_func,
            top_k,
            renormalize,
            groups,
            routed_scaling_factor: keys.number("routed_scaling_factor")?.unwrap_or(1.0),
            bias: correction_bias(model, module, num_experts)?,
            activation: activation(&keys, model_type)?,
            weight_on_input: model_type.starts_with("llama4"),
        })
    }

    /// The router of f32 logits.
    pub fn router(&self) -> Router<'_> {
        Router {
            groups: self.groups,
            routed_scaling_factor: self.routed_scaling_factor,
            bias: self.bias.as_deref(),
            ..Router::new(self.scoring_func, self.top_k, self.renormalize)
        }
    }
}

fn activation(keys: &Keys<'_>, model_type: &str) -> Result<Definition, ModelError> {
    let limit = keys.number("swiglu_limit")?;
    if model_type.starts_with("gpt_oss") {
        // The file's "silu" is not what its layers compute.
        let plain = Definition::new(Activation::SwigluOai);
        return Ok(limit.map_or(plain, |limit| plain.with_limit(limit)));
    }
    let plain =
        match keys.any(&["hidden_act", "hidden_activation"]).map(|(k, v)| (k, v, v.as_str())) {
            None | Some((_, _, Some("silu" | "swish"))) => Activation::Silu,
            Some((_, _, Some("gelu"))) => Activation::Gelu,
            Some((_, _, Some("gelu_pytorch_tanh" | "gelu_tanh"))) => Activation::GeluTanh,
            Some((key, v, _)) => return Err(keys.bad(key, v, "silu, gelu or gelu_pytorch_tanh")),
        };
    let plain = Definition::new(plain);
    Ok(match (plain.function, limit) {
        (marlinspike::moe::activation::Function::Silu, Some(limit)) => plain.with_limit(limit),
        _ => plain,
    })
}

/// `<mlp>.gate.e_score_correction_bias` of the layer `<mlp>.experts`, as f32.
fn correction_bias(
    model: &Model<'_>,
    module: &str,
    num_experts: usize,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(parent) = module.strip_suffix(".experts") else { return Ok(None) };
    let name = format!("{parent}.gate.e_score_correction_bias");
    if model.entry(&name).is_none() {
        return Ok(None);
    }
    let tensor = model.tensor(&name)?;
    let wrong = |e: marlinspike::Error| ModelError::module(module, e);
    tensor
        .expect_dtype(&[DType::F32, DType::BF16, DType::F16])
        .and_then(|t| t.expect_shape(&[num_experts]))
        .map_err(wrong)?;
    crate::convert::load::floats(&tensor).map(Some).map_err(wrong)
}
