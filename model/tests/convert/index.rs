//! Hostile `model.safetensors.index.json` files.

use std::fs;

use crate::common::{Format, write_model};
use marlinspike::container::IndexError;
use marlinspike_model::model::{Model, ModelError, ModelFiles};

#[test]
fn hostile_indexes_give_their_named_error() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::Gptq4, &model);
    let index = model.join("model.safetensors.index.json");
    let open = |text: &str| {
        fs::write(&index, text).unwrap();
        let files = ModelFiles::open(&model)?;
        Model::new(&files).map(|_| ())
    };
    let one = "model-00001-of-00002.safetensors";
    for file in [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "C:x.safetensors",
        ".x.safetensors",
    ] {
        let e = open(&serde_json::json!({"weight_map": {"a": file}}).to_string()).unwrap_err();
        assert!(matches!(e, ModelError::Index { source: IndexError::FileName { .. }, .. }), "{e}");
    }
    let e = open(r#"{"weight_map": {"a": "none.safetensors"}}"#).unwrap_err();
    assert!(matches!(e, ModelError::NoShard { .. }), "{e}");
    let e = open(&serde_json::json!({"weight_map": {"a": one}}).to_string()).unwrap_err();
    assert!(matches!(e, ModelError::NotInShard { ref tensor, .. } if tensor == "a"), "{e}");
    let e = open(&format!(r#"{{"weight_map": {{"a": "{one}", "a": "{one}"}}}}"#)).unwrap_err();
    assert!(
        matches!(e, ModelError::Index { source: IndexError::DuplicateTensor { .. }, .. }),
        "{e}"
    );
    let e = open("[").unwrap_err();
    assert!(matches!(e, ModelError::Index { source: IndexError::Json { .. }, .. }), "{e}");
    // The same tensors under a second name.
    fs::copy(model.join(one), model.join("copy.safetensors")).unwrap();
    let map = serde_json::json!({"weight_map": {
        "model.layers.0.self_attn.q_proj.qweight": one,
        "model.layers.0.self_attn.q_proj.scales": "copy.safetensors",
    }});
    // The index says which shard holds a tensor; those that it does not name are not there.
    open(&map.to_string()).unwrap();
}
