//! Small checkpoints of every format, made from known weights, and converted models read back.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod memory;
pub mod runs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use marlinspike::container::{Container, write_container};
use marlinspike::formats::global_scale::GlobalScale;
use marlinspike::formats::{awq, compressed_tensors, fp8, gptq, mxfp4, mxfp8, nvfp4};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use serde_json::{Value, json};

/// A small generator; the tests do not need good random numbers.
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: &str) -> Self {
        Self(
            seed.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
            }),
        )
    }

    pub fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Gptq4,
    Gptq8Channel,
    GptqActOrder,
    Awq,
    CtPack,
    CtActOrder,
    Mxint4,
    Fp8Channel,
    Fp8Block,
    Mxfp8,
    Mxfp4,
    Nvfp4,
}

impl Format {
    pub const ALL: [Self; 12] = [
        Self::Gptq4,
        Self::Gptq8Channel,
        Self::GptqActOrder,
        Self::Awq,
        Self::CtPack,
        Self::CtActOrder,
        Self::Mxint4,
        Self::Fp8Channel,
        Self::Fp8Block,
        Self::Mxfp8,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    pub fn ty(self) -> ScalarType {
        match self {
            Self::Gptq4 | Self::GptqActOrder | Self::CtPack | Self::CtActOrder | Self::Mxint4 => {
                ScalarType::UINT4B8
            }
            Self::Gptq8Channel => ScalarType::UINT8B128,
            Self::Awq => ScalarType::UINT4,
            Self::Fp8Channel | Self::Fp8Block | Self::Mxfp8 => ScalarType::FLOAT8_E4M3FN,
            Self::Mxfp4 | Self::Nvfp4 => ScalarType::FLOAT4_E2M1F,
        }
    }

    pub fn act_order(self) -> bool {
        matches!(self, Self::GptqActOrder | Self::CtActOrder)
    }

    pub fn group_size(self) -> GroupSize {
        match self {
            Self::Gptq8Channel | Self::Fp8Channel => GroupSize::Channel,
            Self::Gptq4 | Self::Awq | Self::Fp8Block => GroupSize::Of(128),
            Self::CtPack => GroupSize::Of(64),
            Self::Nvfp4 => GroupSize::Of(16),
            _ => GroupSize::Of(32),
        }
    }

    pub fn scale_type(self) -> ScalarType {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => ScalarType::FLOAT8_E8M0FNU,
            Self::Nvfp4 => ScalarType::FLOAT8_E4M3FN,
            Self::Fp8Block => ScalarType::FLOAT32,
            _ => ScalarType::BFLOAT16,
        }
    }

    pub fn quant_config(self) -> Value {
        let gptq = |bits, group: i64, desc_act| {
            json!({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": true,
                "desc_act": desc_act, "checkpoint_format": "gptq"})
        };
        let ct = |format: &str, weights: Value| {
            json!({"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                    "input_activations": null}}})
        };
        let int = |group: i64, act: Value| {
            ct(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "symmetric": true,
                "strategy": "group", "group_size": group, "actorder": act, "dynamic": false}),
            )
        };
        let float = |bits, group: Value, strategy: &str, format: &str| {
            ct(
                format,
                json!({"num_bits": bits, "type": "float", "symmetric": true,
                "strategy": strategy, "group_size": group, "dynamic": false,
                "scale_dtype": if format == "nvfp4-pack-quantized" { "torch.float8_e4m3fn" } else { "torch.uint8" }}),
            )
        };
        match self {
            Self::Gptq4 => gptq(4, 128, false),
            Self::Gptq8Channel => gptq(8, -1, false),
            Self::GptqActOrder => gptq(4, 32, true),
            Self::Awq => json!({"quant_method": "awq", "bits": 4, "group_size": 128,
                "zero_point": true, "version": "gemm"}),
            Self::CtPack => int(64, Value::Null),
            Self::CtActOrder => int(32, json!("group")),
            Self::Mxint4 => int(32, Value::Null),
            Self::Fp8Channel => json!({"quant_method": "compressed-tensors",
                "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "symmetric": true,
                        "strategy": "channel", "dynamic": false},
                    "input_activations": {"num_bits": 8, "type": "float", "symmetric": true,
                        "strategy": "token", "dynamic": true}}}}),
            Self::Fp8Block => json!({"quant_method": "fp8", "activation_scheme": "dynamic",
                "fmt": "e4m3", "weight_block_size": [128, 128]}),
            Self::Mxfp8 => float(8, json!(32), "group", "mxfp8-quantized"),
            Self::Mxfp4 => float(4, json!(32), "group", "mxfp4-pack-quantized"),
            Self::Nvfp4 => float(4, json!(16), "tensor_group", "nvfp4-pack-quantized"),
        }
    }

    /// A random weight. Gate and up have the same `family` and share what must agree.
    pub fn weight(self, name: &str, family: &str, shape: Shape) -> Weight<'static> {
        let mut noise = Noise::new(name);
        let ty = self.ty();
        let bits = if ty.size_bits() == 4 { 4 } else { 8 };
        let nan = |c: u8| bits == 8 && ty.is_floating_point() && c & 0x7f == 0x7f;
        let codes = Codes::from_fn(bits, shape, |_, _| {
            let c = (noise.next() >> 5) as u8 & (0xff >> (8 - bits));
            if nan(c) { 0x11 } else { c }
        });
        let groups = self.group_size().groups(shape.k()).unwrap();
        let len = groups * shape.size_n;
        let data = match self.scale_type() {
            ScalarType::FLOAT8_E8M0FNU => {
                TableData::B8((0..len).map(|_| 110 + (noise.next() % 20) as u8).collect())
            }
            // Normal numbers that the kernel's format does not flush.
            ScalarType::FLOAT8_E4M3FN => {
                TableData::B8((0..len).map(|_| 0x20 + (noise.next() % 0x50) as u8).collect())
            }
            ScalarType::FLOAT32 => {
                // One scale for each 128 x 128 block, of bf16's precision.
                let blocks = shape.size_n / 128;
                let block: Vec<u32> =
                    (0..groups * blocks).map(|_| (0x3c00 + noise.next() % 0x100) << 16).collect();
                TableData::B32(
                    (0..len)
                        .map(|i| block[i / shape.size_n * blocks + i % shape.size_n / 128])
                        .collect(),
                )
            }
            _ => TableData::B16((0..len).map(|_| 0x3c00 + (noise.next() % 0x100) as u16).collect()),
        };
        let scales = Table::new(self.scale_type(), groups, shape.size_n, data).unwrap();
        let zeros = (self == Self::Awq).then(|| {
            let codes = (0..len).map(|_| noise.next() as u8 & 15).collect();
            Table::new(ty, groups, shape.size_n, TableData::B8(codes)).unwrap()
        });
        let map = if self.act_order() {
            let mut noise = Noise::new(family);
            let mut g_idx: Vec<u32> = (0..shape.size_k as u32).map(|k| k / 32).collect();
            for i in (1..g_idx.len()).rev() {
                g_idx.swap(i, noise.next() as usize % (i + 1));
            }
            Groups::Indexed { g_idx, group_size: self.group_size() }
        } else {
            Groups::Uniform(self.group_size())
        };
        Weight {
            name: name.to_owned(),
            ty,
            codes: codes.unwrap(),
            scales,
            zeros,
            groups: map,
            global_scale: (self == Self::Nvfp4).then_some(1.0 / 64.0),
            bias: None,
        }
    }

    /// The weight's tensors in the form of the format's checkpoints.
    pub fn tensors(self, w: &Weight<'static>) -> Vec<Tensor<'static>> {
        let float = |weight: Tensor<'static>, scale: Tensor<'static>| vec![weight, scale];
        let packed = |t: Tensor<'static>| {
            let name = format!("{}_packed", t.name());
            t.renamed(name)
        };
        match self {
            Self::Gptq4 | Self::Gptq8Channel | Self::GptqActOrder => {
                let t = gptq::GptqTensors::pack(w, gptq::ZeroPoints::V1).unwrap();
                [Some(t.qweight), Some(t.scales), t.qzeros, t.g_idx].into_iter().flatten().collect()
            }
            Self::Awq => {
                let t = awq::AwqTensors::pack(w).unwrap();
                vec![t.qweight, t.scales, t.qzeros]
            }
            Self::CtPack | Self::CtActOrder | Self::Mxint4 => {
                let t = compressed_tensors::PackedTensors::pack(w).unwrap();
                let list =
                    [Some(t.weight_packed), Some(t.weight_scale), t.weight_shape, t.weight_g_idx];
                list.into_iter().flatten().collect()
            }
            Self::Fp8Channel => {
                let t = fp8::Fp8Tensors::pack(w, &fp8::Fp8Scales::Channel).unwrap();
                float(t.weight, t.weight_scale)
            }
            Self::Fp8Block => {
                let scheme = fp8::Fp8Scales::Block { block_n: 128, block_k: 128 };
                let t = fp8::Fp8Tensors::pack(w, &scheme).unwrap();
                float(t.weight, t.weight_scale)
            }
            Self::Mxfp8 => {
                let t = mxfp8::Mxfp8Tensors::pack(w).unwrap();
                float(t.weight, t.weight_scale)
            }
            Self::Mxfp4 => {
                let t = mxfp4::Mxfp4Tensors::pack(w).unwrap();
                float(packed(t.weight), t.weight_scale)
            }
            Self::Nvfp4 => {
                let t = nvfp4::Nvfp4Tensors::pack(w, GlobalScale::Divisor).unwrap();
                vec![packed(t.weight), t.weight_scale, t.weight_global_scale]
            }
        }
    }
}

/// Sizes of the small models.
pub const HIDDEN: usize = 256;
pub const INTER: usize = 512;
pub const EXPERTS: usize = 3;

/// The modules of a small model: name, family, K, N.
pub fn modules() -> Vec<(String, String, Shape)> {
    let mut list = Vec::new();
    let mut add =
        |name: String, family: &str, k, n| list.push((name, family.to_owned(), Shape::new(k, n)));
    for (name, k, n) in [("q_proj", HIDDEN, 512), ("k_proj", HIDDEN, 256), ("o_proj", 512, HIDDEN)]
    {
        add(format!("model.layers.0.self_attn.{name}"), name, k, n);
    }
    for e in 0..EXPERTS {
        let prefix = format!("model.layers.0.mlp.experts.{e}");
        let family = format!("{prefix}.in");
        add(format!("{prefix}.gate_proj"), &family, HIDDEN, INTER);
        add(format!("{prefix}.up_proj"), &family, HIDDEN, INTER);
        add(format!("{prefix}.down_proj"), &format!("{prefix}.out"), INTER, HIDDEN);
    }
    list
}

/// Writes a model of two shards to `dir`. Returns the weights by module.
pub fn write_model(format: Format, dir: &Path) -> BTreeMap<String, Weight<'static>> {
    let mut weights = BTreeMap::new();
    let mut tensors = Vec::new();
    for (name, family, shape) in modules() {
        let w = format.weight(&name, &family, shape);
        tensors.extend(format.tensors(&w));
        weights.insert(name, w);
    }
    let config = json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "num_key_value_heads": 4, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "quantization_config": format.quant_config()});
    write_folder(dir, HIDDEN, tensors, &config, b"{}");
    weights
}

/// Writes a model of `layers` small dense layers in two shards to `dir`.
pub fn write_tiny(format: Format, dir: &Path, layers: usize) {
    let mut tensors = Vec::new();
    for layer in 0..layers {
        let name = format!("model.layers.{layer}.self_attn.q_proj");
        tensors.extend(format.tensors(&format.weight(&name, &name, Shape::new(128, 64))));
    }
    let config = json!({"dtype": "bfloat16", "quantization_config": format.quant_config()});
    write_folder(dir, 128, tensors, &config, b"{\"tokens\": []}");
}

/// Writes `tensors` and a norm of `hidden` values in two shards, an index, config and tokenizer.
fn write_folder(
    dir: &Path,
    hidden: usize,
    mut tensors: Vec<Tensor<'static>>,
    config: &Value,
    tokenizer: &[u8],
) {
    fs::create_dir_all(dir).unwrap();
    let norm = vec![0x3c00u16; hidden];
    tensors.push(Tensor::from_vec("model.norm.weight", DType::BF16, vec![hidden], norm).unwrap());
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
    let mut map = BTreeMap::new();
    let half = tensors.len() / 2;
    for (i, part) in tensors.chunks(half + 1).enumerate() {
        let file = format!("model-{:05}-of-00002.safetensors", i + 1);
        let bytes = write_container(part, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(dir.join(&file), bytes).unwrap();
        map.extend(part.iter().map(|t| (t.name().to_owned(), file.clone())));
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A converted model: config and all tensors.
pub struct Converted {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor<'static>>,
}

impl Converted {
    pub fn read(dir: &Path) -> Self {
        let config = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        let mut tensors = BTreeMap::new();
        for path in files(dir) {
            if path.extension().is_some_and(|e| e == "safetensors") {
                let bytes = fs::read(&path).unwrap();
                for t in Container::parse(&bytes).unwrap().tensors() {
                    let t = t.unwrap().into_owned();
                    assert!(tensors.insert(t.name().to_owned(), t).is_none());
                }
            }
        }
        Self { config, tensors }
    }

    pub fn layer(&self, name: &str) -> &Value {
        let layer = &self.config["marlinspike"]["layers"][name];
        assert!(layer.is_object(), "no layer {name}");
        layer
    }

    /// A tensor of a layer by its role, or of expert `e` of a layer with experts.
    pub fn tensor(
        &self,
        layer: &str,
        role: &str,
        expert: Option<usize>,
    ) -> Option<Tensor<'static>> {
        let name = self.layer(layer)["tensors"].get(role)?.as_str().unwrap();
        let t = &self.tensors[name];
        Some(match expert {
            Some(e) if role != "input_global_scale" => t.index0(e).unwrap().into_owned(),
            _ => t.clone(),
        })
    }
}

pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut list: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    list.sort();
    list
}
