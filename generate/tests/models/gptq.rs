//! GPTQ checkpoints: the golden model's codes in GPTQ's tensors give the same bits.

use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_generate::Decoder;
use marlinspike_model::model::{Model, ModelFiles};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::*;

/// compressed-tensors packs codes along K in rows of N; GPTQ packs them along K in columns.
fn transposed<T: Copy>(values: &[T], rows: usize) -> Vec<T> {
    let cols = values.len() / rows;
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}

/// The golden model as GPTQ stores it, with zeros of `stored_zero` (7 is symmetric).
fn gptq(name: &str, stored_zero: u32, change: impl FnOnce(&mut Value)) -> TempDir {
    let source = golden(name);
    let all = tensors(&source);
    let mut stored = Vec::new();
    for tensor in &all {
        let (name, shape) = (tensor.name(), tensor.shape());
        if let Some(module) = name.strip_suffix(".weight_packed") {
            let words = transposed(&tensor.elements::<i32>(), shape[0]);
            let shape = vec![shape[1], shape[0]];
            let name = format!("{module}.qweight");
            stored.push(Tensor::from_vec(name, DType::I32, shape, words).unwrap());
        } else if let Some(module) = name.strip_suffix(".weight_scale") {
            let (size_n, groups) = (shape[0], shape[1]);
            let scales = transposed(&tensor.elements::<u16>(), size_n);
            let name = format!("{module}.scales");
            let shape = vec![groups, size_n];
            stored.push(Tensor::from_vec(name, DType::BF16, shape, scales).unwrap());
            let zeros = vec![(0x1111_1111 * stored_zero) as i32; groups * size_n / 8];
            let name = format!("{module}.qzeros");
            let shape = vec![groups, size_n / 8];
            stored.push(Tensor::from_vec(name, DType::I32, shape, zeros).unwrap());
        } else if !name.ends_with(".weight_shape") {
            stored.push(tensor.clone());
        }
    }
    let mut config = config(&source);
    config["quantization_config"] = json!({
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false, "sym": true,
        "checkpoint_format": "gptq",
    });
    change(&mut config["quantization_config"]);
    folder(&stored, &config)
}

#[test]
fn a_gptq_checkpoint_has_the_bits_of_the_same_codes() {
    for name in ["qwen3-moe-tiny", "mixtral-tiny", "deepseek-v2-tiny"] {
        let ids = Expected::read(name).input_ids;
        let expected = with_decoder(&golden(name), |d| logits(d, &ids));
        let folder = gptq(name, 7, |_| {});
        let found = with_decoder(folder.path(), |d| logits(d, &ids));
        assert_eq!(bits(&found), bits(&expected), "{name}");
    }
}

#[test]
fn other_gptq_checkpoints_are_refused_by_the_name_of_a_layer() {
    let wide = gptq("qwen3-moe-tiny", 7, |config| config["bits"] = json!(8));
    let files = ModelFiles::open(wide.path()).unwrap();
    let model = Model::new(&files);
    let error = model.map(|model| Decoder::load(&model, u64::MAX).unwrap_err().to_string());
    let message = error.unwrap_or_else(|e| e.to_string());
    assert!(message.contains("model.layers.0."), "{message}");
}
