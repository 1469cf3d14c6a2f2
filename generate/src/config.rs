//! The decoder that a `config.json` describes.

use serde_json::Value;

use crate::error::{GenerateError, Result};

/// A supported decoder: the names of its tensors and what differs from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Architecture {
    /// The `model_type`.
    pub model_type: &'static str,
    /// The module of a layer that holds the router and the experts.
    pub block: &'static str,
    /// Whether queries and keys are normalized, each head alone, before they are rotated.
    pub qk_norm: bool,
    /// The keys that state the sliding window: one that switches it on, if there is one, and its size.
    pub window: (Option<&'static str>, &'static str),
    /// The keys that choose layers with one dense MLP instead of experts.
    pub has_dense_layers: bool,
    /// The key whose `true` gives the attention's projections biases.
    pub attention_bias: Option<&'static str>,
    /// `head_dim` where the config states none; without it, `hidden_size` / `num_attention_heads`.
    pub head_dim: Option<usize>,
    /// θ where the config states none.
    pub rope_theta: f64,
}

/// Every supported decoder.
pub static ARCHITECTURES: &[Architecture] = &[
    Architecture {
        model_type: "qwen3_moe",
        block: "mlp",
        qk_norm: true,
        window: (Some("use_sliding_window"), "sliding_window"),
        has_dense_layers: true,
        attention_bias: Some("attention_bias"),
        head_dim: None,
        rope_theta: 10_000.0,
    },
    Architecture {
        model_type: "mixtral",
        block: "block_sparse_moe",
        qk_norm: false,
        window: (None, "sliding_window"),
        has_dense_layers: false,
        attention_bias: None,
        head_dim: None,
        rope_theta: 1_000_000.0,
    },
];

/// Sizes and constants of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The row of [`ARCHITECTURES`].
    pub architecture: Architecture,
    /// Values of a hidden state.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Keys that a query sees, its own included; absent: all earlier ones.
    pub sliding_window: Option<usize>,
    /// Whether the output product uses the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether each layer has experts; otherwise it has one dense MLP.
    pub sparse: Vec<bool>,
    /// Width of dense MLPs.
    pub intermediate_size: usize,
}

/// Reads keys; null counts as absent.
struct Keys<'c>(&'c Value);

impl<'c> Keys<'c> {
    fn get(&self, key: &str) -> Option<&'c Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn size(&self, key: &'static str, limit: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        let size = size.filter(|n| (1..=limit).contains(n));
        size.map(Some)
            .ok_or_else(|| GenerateError::config(key, value, format!("a number from 1 to {limit}")))
    }

    fn need(&self, key: &'static str, limit: usize) -> Result<usize> {
        let expected = || GenerateError::config(key, "none", format!("a number from 1 to {limit}"));
        self.size(key, limit)?.ok_or_else(expected)
    }

    fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(GenerateError::config(key, other, "true or false")),
        }
    }

    fn positive(&self, key: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        number.map(Some).ok_or_else(|| GenerateError::config(key, value, "a positive number"))
    }

    /// θ, from `rope_theta` or, as transformers 5 writes it, `rope_parameters`.
    fn rope_theta(&self, default: f64) -> Result<f64> {
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(scaling) = self.get(key) else { continue };
            let kind = ["rope_type", "type"].into_iter().find_map(|k| scaling.get(k));
            if kind.is_some_and(|kind| kind.as_str() != Some("default")) {
                let expected =
                    "none, or the rope_type \"default\": other rotary embeddings do not run";
                return Err(GenerateError::config(key, scaling, expected));
            }
        }
        let inside = self.get("rope_parameters").map(Keys);
        let theta = match &inside {
            Some(inside) => inside.positive("rope_theta")?,
            None => None,
        };
        Ok(theta.or(self.positive("rope_theta")?).unwrap_or(default))
    }

    /// Which layers have experts.
    fn sparse(&self, num_layers: usize) -> Result<Vec<bool>> {
        let step = self.size("decoder_sparse_step", 1 << 20)?.unwrap_or(1);
        let dense: Vec<u64> = match self.get("mlp_only_layers") {
            None => Vec::new(),
            Some(list) => {
                let numbers = list.as_array().map(|l| l.iter().map(Value::as_u64).collect());
                let expected =
                    || GenerateError::config("mlp_only_layers", list, "a list of layers");
                numbers.flatten().ok_or_else(expected)?
            }
        };
        let is_sparse = |i: usize| !dense.contains(&(i as u64)) && (i + 1).is_multiple_of(step);
        Ok((0..num_layers).map(is_sparse).collect())
    }
}

impl Config {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`GenerateError::Architecture`]; [`GenerateError::Config`] naming the key.
    pub fn read(config: &Value) -> Result<Self> {
        let keys = Keys(config);
        let found = keys.get("model_type").and_then(Value::as_str);
        let Some(architecture) =
            ARCHITECTURES.iter().copied().find(|a| Some(a.model_type) == found)
        else {
            let found = found.map_or("none".to_owned(), |f| f.chars().take(60).collect());
            let supported = ARCHITECTURES.iter().map(|a| a.model_type).collect();
            return Err(GenerateError::Architecture { found, supported });
        };
        let act = keys.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        if act != "silu" {
            return Err(GenerateError::config("hidden_act", act, "silu"));
        }
        let hidden_size = keys.need("hidden_size", 1 << 20)?;
        let num_layers = keys.need("num_hidden_layers", 1 << 12)?;
        let num_heads = keys.need("num_attention_heads", 1 << 14)?;
        let num_kv_heads = keys.size("num_key_value_heads", num_heads)?.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {num_heads}");
            return Err(GenerateError::config("num_key_value_heads", num_kv_heads, expected));
        }
        let default = architecture.head_dim.unwrap_or(hidden_size / num_heads);
        let head_dim = keys.size("head_dim", 1 << 14)?.unwrap_or(default);
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(GenerateError::config("head_dim", head_dim, "an even number"));
        }
        let (switch, window) = architecture.window;
        let windowed = switch.map_or(Ok(true), |key| keys.flag(key, false))?;
        let sliding_window = if windowed { keys.size(window, usize::MAX)? } else { None };
        let attention_bias =
            architecture.attention_bias.map_or(Ok(false), |key| keys.flag(key, false))?;
        let sparse = match architecture.has_dense_layers {
            true => keys.sparse(num_layers)?,
            false => vec![true; num_layers],
        };
        Ok(Self {
            architecture,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: keys.need("vocab_size", 1 << 24)?,
            max_positions: keys.need("max_position_embeddings", 1 << 30)?,
            rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta: keys.rope_theta(architecture.rope_theta)?,
            sliding_window,
            tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
            attention_bias,
            sparse,
            intermediate_size: keys.need("intermediate_size", 1 << 24)?,
        })
    }

    /// Values of all query heads.
    pub fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Values of all key heads.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn qwen() -> Value {
        json!({
            "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
            "max_position_embeddings": 512, "intermediate_size": 96, "sliding_window": 7,
        })
    }

    #[test]
    fn defaults_are_those_of_the_architecture() {
        let config = Config::read(&qwen()).unwrap();
        assert_eq!((config.head_dim, config.rope_theta), (16, 10_000.0));
        assert_eq!((config.sliding_window, config.tie_word_embeddings), (None, false));
        assert_eq!(config.sparse, [true; 4]);
        let mut mixtral = qwen();
        mixtral["model_type"] = json!("mixtral");
        mixtral["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 500.0});
        let config = Config::read(&mixtral).unwrap();
        assert_eq!((config.sliding_window, config.rope_theta), (Some(7), 500.0));
    }

    #[test]
    fn dense_layers_are_those_that_the_config_lists_or_skips() {
        let mut config = qwen();
        config["mlp_only_layers"] = json!([3]);
        config["decoder_sparse_step"] = json!(2);
        assert_eq!(Config::read(&config).unwrap().sparse, [false, true, false, false]);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_key() {
        for (key, value) in [
            ("model_type", json!("gpt_oss")),
            ("hidden_act", json!("gelu")),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
            ("num_key_value_heads", json!(3)),
            ("head_dim", json!(15)),
            ("vocab_size", json!(0)),
            ("num_hidden_layers", json!(-1)),
            ("attention_bias", json!("yes")),
        ] {
            let mut config = qwen();
            config[key] = value;
            let message = Config::read(&config).unwrap_err().to_string();
            assert!(message.contains(key), "{key}: {message}");
        }
    }
}
