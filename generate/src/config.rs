//! The decoder that a `config.json` describes.

mod keys;
mod latent;
mod scaling;

use serde_json::Value;

use crate::error::{GenerateError, Result};
use keys::Keys;
pub use latent::Latent;
pub use scaling::Yarn;

/// A supported decoder: the names of its tensors and what differs from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Architecture {
    /// The `model_type`.
    pub model_type: &'static str,
    /// The module of a layer that holds the router and the experts.
    pub block: &'static str,
    /// The router's module in the block.
    pub router: &'static str,
    /// Whether the router adds a bias to its logits.
    pub router_bias: bool,
    /// Whether keys and values are expanded from a latent that all heads share (MLA).
    pub latent: bool,
    /// Whether each query head has a sink: one more score, without a value.
    pub sinks: bool,
    /// Whether queries and keys are normalized, each head alone, before they are rotated.
    pub qk_norm: bool,
    /// The keys that state the sliding window: one that switches it on, if there is one, and its size.
    pub window: (Option<&'static str>, &'static str),
    /// Whether `layer_types` chooses the layers with a window; if absent, every other one from the
    /// first on has it.
    pub window_by_layer: bool,
    /// The keys that choose layers with one dense MLP instead of experts.
    pub dense_layers: DenseLayers,
    /// The key whose `true` gives the attention's projections biases, and its default.
    pub attention_bias: Option<(&'static str, bool)>,
    /// `head_dim` where the config states none; without it, `hidden_size` / `num_attention_heads`.
    pub head_dim: Option<usize>,
    /// θ where the config states none.
    pub rope_theta: f64,
    /// ε of the norms where the config states none.
    pub rms_norm_eps: f64,
}

/// The keys that choose the layers without experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseLayers {
    /// Every layer has experts.
    None,
    /// `mlp_only_layers` and `decoder_sparse_step`.
    Listed,
    /// The first `first_k_dense_replace`, and those that `moe_layer_freq` leaves out.
    First {
        /// `first_k_dense_replace` where the config states none.
        default: usize,
    },
}

/// What architectures have in common; each row states its differences.
const PLAIN: Architecture = Architecture {
    model_type: "",
    block: "mlp",
    router: "gate",
    router_bias: false,
    latent: false,
    sinks: false,
    qk_norm: false,
    window: (None, "sliding_window"),
    window_by_layer: false,
    dense_layers: DenseLayers::None,
    attention_bias: None,
    head_dim: None,
    rope_theta: 10_000.0,
    rms_norm_eps: 1e-6,
};

/// Every supported decoder.
pub static ARCHITECTURES: &[Architecture] = &[
    Architecture {
        model_type: "qwen3_moe",
        qk_norm: true,
        window: (Some("use_sliding_window"), "sliding_window"),
        dense_layers: DenseLayers::Listed,
        attention_bias: Some(("attention_bias", false)),
        ..PLAIN
    },
    Architecture {
        model_type: "mixtral",
        block: "block_sparse_moe",
        rope_theta: 1_000_000.0,
        rms_norm_eps: 1e-5,
        ..PLAIN
    },
    Architecture {
        model_type: "deepseek_v3",
        latent: true,
        dense_layers: DenseLayers::First { default: 3 },
        attention_bias: Some(("attention_bias", false)),
        ..PLAIN
    },
    Architecture {
        model_type: "deepseek_v2",
        latent: true,
        dense_layers: DenseLayers::First { default: 0 },
        attention_bias: Some(("attention_bias", false)),
        ..PLAIN
    },
    Architecture {
        model_type: "gpt_oss",
        router: "router",
        router_bias: true,
        sinks: true,
        window_by_layer: true,
        attention_bias: Some(("attention_bias", true)),
        head_dim: Some(64),
        rope_theta: 150_000.0,
        rms_norm_eps: 1e-5,
        ..PLAIN
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
    /// Scaling of the rotary frequencies.
    pub yarn: Option<Yarn>,
    /// Keys that a query sees, its own included; absent: all earlier ones.
    pub sliding_window: Option<usize>,
    /// Whether each layer has the window.
    pub windowed: Vec<bool>,
    /// Sizes of latent attention; absent: grouped queries.
    pub latent: Option<Latent>,
    /// Width of the shared experts that every token uses.
    pub shared_size: Option<usize>,
    /// Layers after the last that predict further tokens and are not computed.
    pub next_layers: usize,
    /// Whether the output product uses the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether each layer has experts; otherwise it has one dense MLP.
    pub sparse: Vec<bool>,
    /// Width of dense MLPs.
    pub intermediate_size: usize,
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
        if let Some(act) = keys.get("hidden_act").filter(|act| *act != "silu") {
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
        let latent = architecture.latent.then(|| Latent::read(&keys)).transpose()?;
        let head_dim = match &latent {
            Some(latent) => latent.rope_dim,
            None => {
                let default = architecture.head_dim.unwrap_or(hidden_size / num_heads);
                keys.size("head_dim", 1 << 14)?.unwrap_or(default)
            }
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            let key = if architecture.latent { "qk_rope_head_dim" } else { "head_dim" };
            return Err(GenerateError::config(key, head_dim, "an even number"));
        }
        let (switch, window) = architecture.window;
        let has_window = switch.map_or(Ok(!architecture.latent), |key| keys.flag(key, false))?;
        let sliding_window = if has_window { keys.size(window, usize::MAX)? } else { None };
        let windowed = match architecture.window_by_layer {
            true => keys.windowed(num_layers)?,
            false => vec![true; num_layers],
        };
        let attention_bias = architecture.attention_bias;
        let attention_bias =
            attention_bias.map_or(Ok(false), |(key, default)| keys.flag(key, default))?;
        let max_positions = keys.need("max_position_embeddings", 1 << 30)?;
        let (rope_theta, yarn) = scaling::read(&keys, architecture.rope_theta, max_positions)?;
        Ok(Self {
            architecture,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: keys.need("vocab_size", 1 << 24)?,
            max_positions,
            rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(architecture.rms_norm_eps)
                as f32,
            rope_theta,
            yarn,
            sliding_window,
            windowed,
            shared_size: latent::shared_size(&keys, architecture)?,
            next_layers: match architecture.latent {
                true => keys.count("num_nextn_predict_layers", 1 << 10)?.unwrap_or(0),
                false => 0,
            },
            latent,
            tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
            attention_bias,
            sparse: keys.sparse(architecture.dense_layers, num_layers)?,
            intermediate_size: keys.need("intermediate_size", 1 << 24)?,
        })
    }

    /// Keys that a query of layer `i` sees, its own included; absent: all earlier ones.
    pub fn window(&self, i: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.windowed[i])
    }

    /// Values of all query heads.
    pub fn query_size(&self) -> usize {
        match &self.latent {
            Some(latent) => self.num_heads * latent.query_dim(),
            None => self.num_heads * self.head_dim,
        }
    }

    /// Values of all key heads; for latent attention, values of a token's latent.
    pub fn kv_size(&self) -> usize {
        match &self.latent {
            Some(latent) => latent.cached(),
            None => self.num_kv_heads * self.head_dim,
        }
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
        // The list is a set: neither its order nor repeated or unknown layers matter.
        config["decoder_sparse_step"] = json!(1);
        for list in [json!([2, 0]), json!([0, 2]), json!([2, 0, 2, 0]), json!([9, 2, 0])] {
            config["mlp_only_layers"] = list;
            assert_eq!(Config::read(&config).unwrap().sparse, [false, true, false, true]);
        }
        config["mlp_only_layers"] = json!([]);
        assert_eq!(Config::read(&config).unwrap().sparse, [true; 4]);
        for list in [json!([-1]), json!([1.5]), json!(["1"]), json!(1), json!({"1": true})] {
            config["mlp_only_layers"] = list;
            let error = Config::read(&config).unwrap_err().to_string();
            assert!(error.contains("mlp_only_layers"), "{error}");
        }
    }

    #[test]
    fn what_is_not_computed_is_refused_by_key() {
        for (key, value) in [
            ("model_type", json!("llama")),
            ("hidden_act", json!("gelu")),
            ("hidden_act", json!(1)),
            ("rope_scaling", json!("yarn")),
            ("rope_scaling", json!([])),
            ("rope_parameters", json!(-1)),
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
