//! FP8, MXFP8 and MXFP4 layers in Marlin's format, with every shape of scale, compared with vLLM's
//! preparation of layers.
//!
//! `scripts/gen/moe_marlin.py` made `data/moe_marlin.json`; the inputs below follow its formulas,
//! and outputs are compared by the first half of their SHA-256.

use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::mxfp4::Mxfp4Tensors;
use marlinspike::formats::mxfp8::Mxfp8Tensors;
use marlinspike::layouts::marlin::{Options, Prepared, prepare};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::{Table, TableData, Weight};
use serde_json::Value;
use sha2::{Digest, Sha256};

const EXPERTS: usize = 2;
const HIDDEN: usize = 256;
const INTER: usize = 192;

fn codes(tag: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 167 + (i >> 8) * 59 + tag * 31 + 7) as u8).collect()
}

fn scales(tag: usize, len: usize) -> Vec<f32> {
    let part = |i: usize| (i * 37 % 101) as f32;
    (tag * 13..tag * 13 + len).map(|j| (1.0 + part(j) / 128.0) / 128.0).collect()
}

fn powers(tag: usize, len: usize) -> Vec<u8> {
    (0..len).map(|j| 118 + ((j * 7 + tag) % 13) as u8).collect()
}

fn biases(tag: usize, len: usize) -> Vec<u16> {
    (tag..tag + len).map(|j| f32_to_bf16_rne(((j % 17) as f32 - 8.0) / 8.0)).collect()
}

fn tensor<T: marlinspike::num::tensor::Element>(
    name: &str,
    dtype: DType,
    shape: &[usize],
    values: Vec<T>,
) -> Tensor<'static> {
    Tensor::from_vec(name, dtype, shape.to_vec(), values).unwrap()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..16].iter().map(|b| format!("{b:02x}")).collect()
}

fn words(words: &[u32]) -> String {
    digest(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>())
}

fn table(table: &Table) -> String {
    let bytes = match table.data() {
        TableData::B8(v) => v.clone(),
        TableData::B16(v) => v.iter().flat_map(|b| b.to_le_bytes()).collect(),
        TableData::B32(v) => v.iter().flat_map(|b| b.to_le_bytes()).collect(),
    };
    digest(&bytes)
}

/// Matrices of one name, `[n, k]` each, the scales of `tag`.
fn fp8(
    tag: usize,
    n: usize,
    k: usize,
    per_expert: &[usize],
    scheme: &Fp8Scales,
) -> Vec<Weight<'static>> {
    let len: usize = per_expert.iter().product();
    let weight = tensor("w", DType::F8E4M3, &[EXPERTS, n, k], codes(tag, EXPERTS * n * k));
    let shape = [&[EXPERTS], per_expert].concat();
    let scale = tensor("s", DType::F32, &shape, scales(tag, EXPERTS * len));
    (0..EXPERTS)
        .map(|e| {
            let (weight, weight_scale) = (weight.index0(e).unwrap(), scale.index0(e).unwrap());
            Fp8Tensors { weight, weight_scale, bias: None }.unpack("w", scheme).unwrap()
        })
        .collect()
}

/// MXFP8 with `rows` and `columns` of NaN bytes around the scales.
fn mxfp8(tag: usize, n: usize, k: usize, rows: usize, columns: usize) -> Vec<Weight<'static>> {
    let (all, bytes) = (codes(tag, EXPERTS * n * k), powers(tag, EXPERTS * n * k / 32));
    (0..EXPERTS)
        .map(|e| {
            let mut padded = vec![0xff; (n + rows) * (k / 32 + columns)];
            for i in 0..n {
                let from = (e * n + i) * (k / 32);
                padded[i * (k / 32 + columns)..][..k / 32]
                    .copy_from_slice(&bytes[from..from + k / 32]);
            }
            let shape = [n + rows, k / 32 + columns];
            let tensors = Mxfp8Tensors {
                weight: tensor(
                    "w",
                    DType::F8E4M3,
                    &[n, k],
                    all[e * n * k..(e + 1) * n * k].to_vec(),
                ),
                weight_scale: tensor("s", DType::U8, &shape, padded),
                bias: None,
            };
            tensors.without_padding().unwrap().unpack("w").unwrap()
        })
        .collect()
}

fn mxfp4(tag: usize, n: usize, k: usize) -> Vec<Weight<'static>> {
    let (all, bytes) = (codes(tag, EXPERTS * n * k / 2), powers(tag, EXPERTS * n * k / 32));
    let bias = biases(tag, EXPERTS * n);
    let part = |e: usize, len: usize| e * len..(e + 1) * len;
    (0..EXPERTS)
        .map(|e| {
            let weight = all[part(e, n * k / 2)].to_vec();
            let scale = bytes[part(e, n * k / 32)].to_vec();
            Mxfp4Tensors {
                weight: tensor("w", DType::U8, &[n, k / 2], weight),
                weight_scale: tensor("s", DType::U8, &[n, k / 32], scale),
                bias: Some(tensor("b", DType::BF16, &[n], bias[part(e, n)].to_vec())),
            }
            .unpack("w")
            .unwrap()
        })
        .collect()
}

fn linear(kind: &str) -> Prepared {
    let (n, k) = (192, 256);
    let (shape, scheme) = match kind {
        "tensor" => (vec![], Fp8Scales::Tensor { widths: vec![n] }),
        "shard" => (vec![3], Fp8Scales::Tensor { widths: vec![96, 32, 64] }),
        "channel" => (vec![n, 1], Fp8Scales::Channel),
        _ => (vec![2, 2], Fp8Scales::Block { block_n: 128, block_k: 128 }),
    };
    let len = shape.iter().product();
    let weight = Fp8Tensors {
        weight: tensor("w", DType::F8E4M3, &[n, k], codes(3, n * k)),
        weight_scale: tensor("s", DType::F32, &shape, scales(3, len)),
        bias: Some(tensor("b", DType::BF16, &[n], biases(3, n))),
    };
    prepare(&[weight.unpack("w", &scheme).unwrap()], Options::new(ScalarType::BFLOAT16)).unwrap()
}

fn experts(format: &str, kind: &str, dtype: ScalarType) -> [Prepared; 2] {
    let n13 = 2 * INTER;
    let [w13, w2] = match (format, kind) {
        ("fp8", "tensor") => [
            fp8(1, n13, HIDDEN, &[], &Fp8Scales::Tensor { widths: vec![n13] }),
            fp8(2, HIDDEN, INTER, &[], &Fp8Scales::Tensor { widths: vec![HIDDEN] }),
        ],
        ("fp8", "shard") => [
            fp8(1, n13, HIDDEN, &[2], &Fp8Scales::Tensor { widths: vec![INTER, INTER] }),
            fp8(2, HIDDEN, INTER, &[], &Fp8Scales::Tensor { widths: vec![HIDDEN] }),
        ],
        ("fp8", "channel") => [
            fp8(1, n13, HIDDEN, &[n13, 1], &Fp8Scales::Channel),
            fp8(2, HIDDEN, INTER, &[HIDDEN, 1], &Fp8Scales::Channel),
        ],
        ("fp8", _) => {
            let scheme = Fp8Scales::Block { block_n: 96, block_k: 64 };
            [fp8(1, n13, HIDDEN, &[4, 4], &scheme), fp8(2, HIDDEN, INTER, &[3, 3], &scheme)]
        }
        ("mxfp8", _) => [mxfp8(1, n13, HIDDEN, 128, 2), mxfp8(2, HIDDEN, INTER, 0, 2)],
        _ => [mxfp4(1, n13, HIDDEN), mxfp4(2, HIDDEN, INTER)],
    };
    [w13, w2].map(|matrices| prepare(&matrices, Options::new(dtype)).unwrap())
}

#[test]
fn every_shape_of_scale() {
    let upstream: Value = serde_json::from_str(include_str!("../data/moe_marlin.json")).unwrap();
    let cases = upstream["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let text = |key| case[key].as_str().unwrap();
        let (format, kind) = (text("format"), text("scales"));
        let dtype = if text("dtype") == "F16" { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 };
        let mut found = Vec::new();
        if format == "fp8-linear" {
            let layer = linear(kind);
            found.extend([words(&layer.qweight_words()), table(&layer.scales)]);
            found.push(table(&layer.bias.unwrap()));
        } else {
            let [w13, w2] = experts(format, kind, dtype);
            found.extend([words(&w13.qweight_words()), words(&w2.qweight_words())]);
            found.extend([table(&w13.scales), table(&w2.scales)]);
            found.extend([&w13, &w2].into_iter().filter_map(|p| p.bias.as_ref()).map(table));
        }
        let expected: Vec<_> =
            case["out"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
        assert_eq!(found, expected, "{format} {kind} {dtype}");
    }
}

#[test]
fn scales_that_are_too_few_are_refused() {
    let tensors = Mxfp8Tensors {
        weight: tensor("w", DType::F8E4M3, &[4, 64], vec![0u8; 256]),
        weight_scale: tensor("s", DType::U8, &[4, 1], vec![0u8; 4]),
        bias: None,
    };
    let error = tensors.without_padding().unwrap_err().to_string();
    assert_eq!(error, "tensor `s`: found shape [4, 1], expected at least [4, 2]");
}
