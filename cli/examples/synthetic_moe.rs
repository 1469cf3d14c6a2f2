//! Writes a GPTQ MoE checkpoint of random codes, for `scripts/bench-convert`.
//!
//! `synthetic_moe DIR [LAYERS [EXPERTS [HIDDEN [INTERMEDIATE]]]]`

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use marlinspike::container::{ContainerWriter, TensorSpec};
use marlinspike::num::tensor::DType;
use serde_json::json;

const GROUP: usize = 128;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().context("synthetic_moe DIR [LAYERS ...]")?);
    let mut number = |default: usize| match args.next() {
        Some(text) => text.parse().with_context(|| format!("{text:?} is not a number")),
        None => Ok(default),
    };
    let (layers, experts) = (number(2)?, number(128)?);
    let (hidden, intermediate) = (number(2048)?, number(768)?);
    fs::create_dir_all(&dir)?;
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "num_experts": experts,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": false,
            "sym": true, "checkpoint_format": "gptq",
        },
    });
    fs::write(dir.join("config.json"), config.to_string())?;
    let mut map = BTreeMap::new();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for layer in 0..layers {
        let file = format!("model-{:05}-of-{layers:05}.safetensors", layer + 1);
        let mut specs = Vec::new();
        for e in 0..experts {
            for (name, k, n) in [
                ("gate_proj", hidden, intermediate),
                ("up_proj", hidden, intermediate),
                ("down_proj", intermediate, hidden),
            ] {
                let prefix = format!("model.layers.{layer}.mlp.experts.{e}.{name}");
                for (part, dtype, shape) in [
                    ("qweight", DType::I32, vec![k / 8, n]),
                    ("qzeros", DType::I32, vec![k / GROUP, n / 8]),
                    ("g_idx", DType::I32, vec![k]),
                    ("scales", DType::F16, vec![k / GROUP, n]),
                ] {
                    specs.push(TensorSpec { name: format!("{prefix}.{part}"), dtype, shape });
                }
            }
        }
        specs.sort_by(|a, b| b.dtype.bits().cmp(&a.dtype.bits()).then(a.name.cmp(&b.name)));
        let sink = BufWriter::new(File::create(dir.join(&file))?);
        let mut writer = ContainerWriter::new(sink, &specs, &BTreeMap::new())?;
        for spec in &specs {
            map.insert(spec.name.clone(), file.clone());
            let len = spec.byte_len().context("too large")? as usize;
            let mut bytes = Vec::with_capacity(len + 8);
            if spec.dtype == DType::F16 {
                // 2^-7 and thereabouts.
                bytes.resize(len, 0x20);
            }
            while bytes.len() < len {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                bytes.extend(random.to_le_bytes());
            }
            bytes.truncate(len);
            writer.write_tensor(&spec.name, &bytes)?;
        }
        writer.finish()?.flush()?;
    }
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string())?;
    Ok(())
}
