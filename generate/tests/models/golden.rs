//! Logits and greedy tokens of the golden models, which transformers and a float64 implementation
//! computed (`scripts/gen/generate_models.py`).

use crate::common::*;
use marlinspike_generate::{Decoder, Input, LogitsOf};
use marlinspike_model::model::{Model, ModelFiles};

/// Largest difference from float64, over the largest logit. Between an embedding and a logit the model
/// rounds to f32 about 30 times, and each sum of K terms has K/16 + 5 roundings of 2^-24. The limit is
/// four times the largest difference measured, 2.7e-7. A wrong constant changes more: see the second
/// test.
///
/// It holds for 8-bit activations, too, because in these prompts no activation lies so near the middle
/// of two codes that f32's rounding chooses the other one; that would change logits by about 1e-3.
const LIMIT: f64 = 1.1e-6;

#[test]
fn logits_of_float_weights_are_those_of_float64() {
    for name in NAMES {
        let expected = Expected::read(name);
        let folder = float_model(name);
        let found = with_decoder(folder.path(), |d| logits(d, &expected.input_ids));
        let difference = difference(&found, &expected.logits);
        println!("{name}: {difference:.2e}");
        assert!(difference < LIMIT, "{name}: {difference}");
    }
}

#[test]
fn a_changed_constant_changes_the_logits() {
    let expected = Expected::read("qwen3-moe-tiny");
    let changes = [
        ("rope_theta", serde_json::json!(9_000.0)),
        ("rms_norm_eps", serde_json::json!(1e-2)),
        ("norm_topk_prob", serde_json::json!(false)),
        ("num_experts_per_tok", serde_json::json!(1)),
        ("num_key_value_heads", serde_json::json!(2)),
    ];
    for (key, value) in changes {
        let source = golden("qwen3-moe-tiny");
        let mut config = config(&source);
        config.as_object_mut().unwrap().remove("quantization_config");
        let same = config[key] == value;
        config[key] = value;
        let folder = folder(&dequantized(&source), &config);
        let found = with_decoder(folder.path(), |d| logits(d, &expected.input_ids));
        let difference = difference(&found, &expected.logits);
        assert_eq!(difference < LIMIT, same, "{key}: {difference}");
    }
    let expected = Expected::read("mixtral-tiny");
    let source = golden("mixtral-tiny");
    let mut wide = config(&source);
    wide.as_object_mut().unwrap().remove("quantization_config");
    wide["sliding_window"] = serde_json::json!(11);
    let folder = folder(&dequantized(&source), &wide);
    let found = with_decoder(folder.path(), |d| logits(d, &expected.input_ids));
    assert!(difference(&found, &expected.logits) > 100.0 * LIMIT);
}

/// As the first test, with keys of the other architectures, some inside an object.
#[test]
fn a_changed_constant_of_deepseek_and_gpt_oss_changes_the_logits() {
    let number = |x: f64| serde_json::json!(x);
    let changes = [
        ("deepseek-v3-tiny", "rope_scaling/mscale_all_dim", number(0.8)),
        ("deepseek-v3-tiny", "rope_scaling/mscale", number(0.9)),
        ("deepseek-v3-tiny", "rope_scaling/factor", number(5.0)),
        ("deepseek-v3-tiny", "rope_interleave", serde_json::json!(false)),
        ("deepseek-v3-tiny", "routed_scaling_factor", number(2.4)),
        ("deepseek-v2-tiny", "rope_theta", number(9000.0)),
        ("deepseek-v2-tiny", "topk_method", serde_json::json!("greedy")),
        ("gpt-oss-tiny", "sliding_window", serde_json::json!(5)),
        ("gpt-oss-tiny", "rope_scaling/truncate", serde_json::json!(true)),
        ("gpt-oss-tiny", "rope_scaling/factor", number(9.0)),
        ("gpt-oss-tiny", "swiglu_limit", number(2.1)),
        ("gpt-oss-tiny", "layer_types", serde_json::json!(["full_attention", "full_attention"])),
    ];
    for (name, key, value) in changes {
        let expected = Expected::read(name);
        let source = golden(name);
        let mut changed = config(&source);
        changed.as_object_mut().unwrap().remove("quantization_config");
        match key.split_once('/') {
            Some((outer, inner)) => changed[outer][inner] = value,
            None => changed[key] = value,
        }
        let folder = folder(&dequantized(&source), &changed);
        let found = with_decoder(folder.path(), |d| logits(d, &expected.input_ids));
        let difference = difference(&found, &expected.logits);
        assert!(difference > 20.0 * LIMIT, "{name} {key}: {difference}");
    }
}

#[test]
fn logits_of_the_int4_path_are_those_of_float64_with_8_bit_activations() {
    for name in NAMES {
        let expected = Expected::read(name);
        let found = with_decoder(&golden(name), |d| logits(d, &expected.input_ids));
        let eight_bits = difference(&found, &expected.logits_int8);
        let floats = difference(&found, &expected.logits);
        println!("{name}: {eight_bits:.2e}, without quantized activations {floats:.2e}");
        let (close, far) = match name == CONVERTED_MXFP4 {
            true => (floats, eight_bits),
            false => (eight_bits, floats),
        };
        assert!(close < LIMIT && far > 1000.0 * LIMIT, "{name}: {close} {far}");
    }
}

#[test]
fn converted_mxfp4_experts_are_those_of_float64_with_8_bit_activations() {
    let expected = Expected::read(CONVERTED_MXFP4);
    let folder = converted(CONVERTED_MXFP4);
    let packed = folder.path().join("packed");
    let found = with_decoder(&packed, |d| logits(d, &expected.input_ids));
    let close = difference(&found, &expected.logits_int8);
    let far = difference(&found, &expected.logits);
    println!("{close:.2e}, without quantized activations {far:.2e}");
    assert!(close < LIMIT && far > 1000.0 * LIMIT, "{close} {far}");
    let count = expected.new_tokens.len();
    let tokens = with_decoder(&packed, |d| greedy(d, &expected.input_ids, count));
    assert_eq!(tokens, expected.new_tokens);
}

/// The folder's own config must not contradict its packed experts.
#[test]
fn converted_mxfp4_experts_keep_their_activation() {
    let folder = converted(CONVERTED_MXFP4);
    let packed = folder.path().join("packed");
    let mut changed = config(&packed);
    changed["swiglu_limit"] = serde_json::json!(2.5);
    std::fs::write(packed.join("config.json"), changed.to_string()).unwrap();
    let files = ModelFiles::open(&packed).unwrap();
    let model = Model::new(&files).unwrap();
    let error = Decoder::load(&model, u64::MAX).unwrap_err().to_string();
    assert!(error.contains("2.5") || error.contains("packed experts"), "{error}");
}

#[test]
fn a_converted_folder_has_the_checkpoints_bits() {
    for name in CONVERTED {
        let ids = Expected::read(name).input_ids;
        let packed = with_decoder(&golden(name), |d| logits(d, &ids));
        let folder = converted(name);
        let mapped = with_decoder(&folder.path().join("packed"), |d| logits(d, &ids));
        assert_eq!(bits(&packed), bits(&mapped), "{name}");
    }
}

/// Greedy tokens, one call each after the prompt.
fn greedy(decoder: &Decoder<'_>, prompt: &[u32], new: usize) -> Vec<u32> {
    let mut cache = cache(decoder);
    let mut tokens = prompt.to_vec();
    let mut made = Vec::new();
    while made.len() < new {
        let mut inputs = [Input { tokens: &tokens, cache: &mut cache }];
        let logits = decoder.forward(&mut inputs, LogitsOf::Last).unwrap();
        tokens = vec![best(&logits)];
        made.extend_from_slice(&tokens);
    }
    made
}

#[test]
fn greedy_tokens_are_those_of_float64() {
    for name in NAMES {
        let expected = Expected::read(name);
        let count = expected.new_tokens.len();
        let found = with_decoder(&golden(name), |d| greedy(d, &expected.input_ids, count));
        assert_eq!(found, expected.new_tokens, "{name}");
    }
}

/// FNV-1a over the bits of all logits.
fn digest(logits: &[f32]) -> u64 {
    let bytes = logits.iter().flat_map(|x| x.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The same numbers on every CPU: `scripts/test` runs this on aarch64, too.
#[test]
fn digests_are_those_of_every_cpu() {
    for (name, expected) in [
        ("qwen3-moe-tiny", 0xc007_8037_bf7e_d131u64),
        ("mixtral-tiny", 0x881f_05fe_f4d2_bf5c),
        ("deepseek-v3-tiny", 0x86ba_a135_57b4_a59c),
        ("deepseek-v2-tiny", 0xcf2e_17f7_0696_d484),
        ("gpt-oss-tiny", 0xfe73_e305_7027_13df),
    ] {
        let ids = Expected::read(name).input_ids;
        let found = digest(&with_decoder(&golden(name), |d| logits(d, &ids)));
        assert_eq!(found, expected, "{name}: {found:#018x}");
    }
}
