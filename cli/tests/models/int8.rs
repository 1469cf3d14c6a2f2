//! Checkpoints of W8A8-int8 and W4A8-FP8 through `inspect` and `run`.
//!
//! Expected outputs are computed here from the checkpoint's tensors: integers in 64 bits, f32 steps in
//! the order of the kernels' source.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::Noise;
use crate::support::{run, stderr, stdout};
use marlinspike::container::{Container, write_container};
use marlinspike::layouts::CPU_INT8;
use marlinspike::num::scalar::f32_to_bf16_rne;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::{experts, linears};
use serde_json::{Value, json};

const LINEAR: &str = "model.layers.0.self_attn.o_proj";
const EXPERTS: &str = "model.layers.0.mlp.experts";
const SIZE_K: usize = 128;
const SIZE_N: usize = 32;
const TOKENS: usize = 5;

/// Random int8 codes.
fn codes(name: &str, len: usize) -> Vec<i8> {
    let mut noise = Noise::new(name);
    (0..len).map(|_| (noise.next() >> 5) as i8).collect()
}

fn floats(name: &str, len: usize, scale: f32) -> Vec<f32> {
    let mut noise = Noise::new(name);
    (0..len).map(|_| scale * (1.0 + (noise.next() & 0xffff) as f32 / 65536.0)).collect()
}

/// Activations as bf16 values, away from zero so that zero points matter.
fn activations() -> Vec<f32> {
    let mut noise = Noise::new("x");
    let value = |_| (noise.next() & 0xffff) as f32 / 16384.0 - 1.0;
    (0..TOKENS * SIZE_K).map(value).map(|v| widen(f32_to_bf16_rne(v))).collect()
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn ints(name: &str, shape: &[usize], values: Vec<i8>) -> Tensor<'static> {
    Tensor::from_vec(name, DType::I8, shape.to_vec(), values).unwrap()
}

fn singles(name: &str, shape: &[usize], values: Vec<f32>) -> Tensor<'static> {
    Tensor::from_vec(name, DType::F32, shape.to_vec(), values).unwrap()
}

fn write(path: &Path, tensors: &[Tensor<'_>]) {
    fs::write(path, write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap()).unwrap();
}

/// A model with these tensors and quantization arguments.
fn model(dir: &Path, tensors: &[Tensor<'_>], format: &str, weights: Value, inputs: Value) {
    fs::create_dir_all(dir).unwrap();
    let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
    let config = json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": SIZE_K, "moe_intermediate_size": SIZE_N, "num_experts": 2,
        "num_experts_per_tok": 1, "norm_topk_prob": true, "num_hidden_layers": 1,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "compressed-tensors", "format": format,
            "ignore": ["re:.*gate$"], "config_groups": {"group_0": group}}});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write(&dir.join("model.safetensors"), tensors);
}

fn int8_weights(strategy: &str) -> Value {
    json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": strategy, "dynamic": false})
}

fn int8_inputs(dynamic: bool, symmetric: bool) -> Value {
    let strategy = if dynamic { "token" } else { "tensor" };
    json!({"num_bits": 8, "type": "int", "symmetric": symmetric, "dynamic": dynamic,
        "strategy": strategy})
}

/// The output `y` of `run --check` on [`activations`].
fn output(dir: &Path, layer: &str, arguments: &[&str]) -> (Vec<u16>, Value) {
    let (input, output) = (dir.join("in"), dir.join("out"));
    let bits = activations().iter().map(|v| (v.to_bits() >> 16) as u16).collect();
    let mut tensors = vec![Tensor::from_vec("x", DType::BF16, vec![TOKENS, SIZE_K], bits).unwrap()];
    if layer == EXPERTS {
        let ids = (0..TOKENS as i32).map(|t| t % 2).collect();
        tensors.push(Tensor::from_vec("topk_ids", DType::I32, vec![TOKENS, 1], ids).unwrap());
        tensors.push(singles("topk_weights", &[TOKENS, 1], vec![0.75; TOKENS]));
    }
    write(&input, &tensors);
    let files = [input.to_str().unwrap(), output.to_str().unwrap()];
    let mut all = vec!["run", "--json", dir.to_str().unwrap(), "--layer", layer, "--check"];
    all.extend(["--stages", "--input", files[0], "--output", files[1]]);
    all.extend(arguments);
    let made = run(all);
    assert_eq!((made.status.code(), stderr(&made)), (Some(0), ""), "{arguments:?}");
    let report: Value = serde_json::from_str(stdout(&made)).unwrap();
    assert_eq!(report["check"]["mismatches"], 0, "{report}");
    let bytes = fs::read(&output).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let stage = if layer == EXPERTS { "gate_up" } else { "y" };
    (file.tensor(stage).unwrap().elements::<u16>().to_vec(), report)
}

/// A quantized row: codes, scale, zero point.
type Row = (Vec<i64>, f32, i64);

/// `dynamic_scaled_int8_quant`.
fn dynamic(row: &[f32], symmetric: bool) -> Row {
    let code = |v: f32, zero: f32| (v.round_ties_even() + zero).clamp(-128.0, 127.0) as i64;
    if symmetric {
        let max = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let factor = 127.0 / max;
        return (row.iter().map(|v| code(v * factor, 0.0)).collect(), max / 127.0, 0);
    }
    let (low, high) = row.iter().fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
    let scale = (high - low) / 255.0;
    let zero = (-128.0 - low / scale).round_ties_even();
    let inverse = 1.0 / scale;
    (row.iter().map(|v| code(v * inverse, zero)).collect(), scale, zero as i64)
}

/// The outputs of CUTLASS's epilogue for quantized rows.
fn cutlass(rows: &[Row], weight: &[i8], scales: &[f32], bias: Option<&[f32]>) -> Vec<u16> {
    let size_n = scales.len();
    let mut out = Vec::new();
    for (codes, scale, zero) in rows {
        for n in 0..size_n {
            let column = &weight[n * SIZE_K..][..SIZE_K];
            let sum: i64 = codes.iter().zip(column).map(|(a, &w)| (a - zero) * i64::from(w)).sum();
            let bias = bias.map_or(0.0, |b| b[n]);
            out.push(f32_to_bf16_rne((sum as f32 * scales[n]).mul_add(*scale, bias)));
        }
    }
    out
}

/// The exact result rounded once; the sums here have at most 53 bits.
fn exact(rows: &[Row], weight: &[i8], scales: &[f32]) -> Vec<u16> {
    let each = |(codes, scale, zero): &Row| -> Vec<u16> {
        let one = |n: usize| {
            let column = &weight[n * SIZE_K..][..SIZE_K];
            let sum: i64 = codes.iter().zip(column).map(|(a, &w)| (a - zero) * i64::from(w)).sum();
            // 24 by 24 bits of scales and 24 of the sum exceed f64; the rounding to 8 bits does not care
            // unless the value is within 2^-40 of a tie, which these are not.
            let value = sum as f64 * (f64::from(*scale) * f64::from(scales[n]));
            let bits = value.to_bits();
            let rest = bits & ((1 << 45) - 1);
            assert!(rest.abs_diff(1 << 44) > 1 << 12, "near a tie");
            let up = u64::from(rest > 1 << 44);
            f32_to_bf16_rne(f64::from_bits((bits - rest) + (up << 45)) as f32)
        };
        (0..scales.len()).map(one).collect()
    };
    rows.iter().flat_map(each).collect()
}

/// The outputs of rows by a weight and its scales.
type Compute = fn(&[Row], &[i8], &[f32]) -> Vec<u16>;

fn without_bias(rows: &[Row], weight: &[i8], scales: &[f32]) -> Vec<u16> {
    cutlass(rows, weight, scales, None)
}

#[test]
fn int8_linear_layers() {
    let temp = tempfile::tempdir().unwrap();
    let x = activations();
    let weight = codes("w", SIZE_N * SIZE_K);
    for (name, strategy, is_dynamic, symmetric) in [
        ("token", "channel", true, true),
        ("token-azp", "channel", true, false),
        ("tensor", "tensor", false, true),
        ("tensor-azp", "channel", false, false),
    ] {
        let dir = temp.path().join(name);
        let count = if strategy == "tensor" { 1 } else { SIZE_N };
        let scales = floats(name, count, 1.0 / 512.0);
        let bias: Vec<f32> = (0..SIZE_N).map(|n| n as f32 / 8.0 - 2.0).collect();
        let half: Vec<u16> = bias.iter().map(|b| f32_to_bf16_rne(*b)).collect();
        let (scale, zero) = (0.0117f32, -77i8);
        let of = |suffix: &str| format!("{LINEAR}.{suffix}");
        let mut tensors = vec![
            ints(&of("weight"), &[SIZE_N, SIZE_K], weight.clone()),
            singles(
                &of("weight_scale"),
                if count == 1 { &[1] } else { &[SIZE_N, 1] },
                scales.clone(),
            ),
            Tensor::from_vec(of("bias"), DType::BF16, vec![SIZE_N], half).unwrap(),
        ];
        if !is_dynamic {
            tensors.push(singles(&of("input_scale"), &[1], vec![scale]));
        }
        if !is_dynamic && !symmetric {
            tensors.push(ints(&of("input_zero_point"), &[1], vec![zero]));
        }
        let inputs = int8_inputs(is_dynamic, symmetric);
        model(&dir, &tensors, "int-quantized", int8_weights(strategy), inputs);
        let row = |row: &[f32]| -> Row {
            if is_dynamic {
                return dynamic(row, symmetric);
            }
            if symmetric {
                let code = |v: &f32| (v / scale).round_ties_even().clamp(-128.0, 127.0) as i64;
                return (row.iter().map(code).collect(), scale, 0);
            }
            // Upstream computes both again from the range of values.
            let ends =
                [scale * (127 - i32::from(zero)) as f32, scale * (-128 - i32::from(zero)) as f32];
            let scale = (ends[0] - ends[1]) / 255.0;
            let zero = (-128.0 - ends[1] / scale).trunc();
            let inverse = 1.0 / scale;
            let code =
                |v: &f32| ((v * inverse).round_ties_even() + zero).clamp(-128.0, 127.0) as i64;
            (row.iter().map(code).collect(), scale, zero as i64)
        };
        let rows: Vec<Row> = x.chunks_exact(SIZE_K).map(row).collect();
        assert_eq!(symmetric, rows.iter().all(|r| r.2 == 0), "{name}");
        let all: Vec<f32> = scales.iter().copied().cycle().take(SIZE_N).collect();
        let (found, report) = output(&dir, LINEAR, &["--arithmetic", "cutlass"]);
        assert_eq!(found, cutlass(&rows, &weight, &all, Some(&bias)), "{name}");
        assert!(report["sizes"]["activations"].as_str().unwrap().starts_with("int8 "), "{report}");
        // The zero point left out is another output.
        let wrong: Vec<Row> = rows.iter().map(|r| (r.0.clone(), r.1, 0)).collect();
        assert_eq!(found == cutlass(&wrong, &weight, &all, Some(&bias)), symmetric, "{name}");
        let (_, report) = output(&dir, LINEAR, &[]);
        assert_eq!(report["sizes"]["arithmetic"], "exact");
        let refused =
            run(["run", dir.to_str().unwrap(), "--layer", LINEAR, "--arithmetic", "wgmma"]);
        assert!(stderr(&refused).contains("found int8 by int8"), "{}", stderr(&refused));
    }
}

/// Codes and scales of a matrix.
type Matrix = (Vec<i8>, Vec<f32>);

/// A model of two experts, with a scale for each channel and each token: its tensors, and gate, up and down
/// of each expert.
fn int8_expert_model(dir: &Path) -> (Vec<Tensor<'static>>, Vec<Matrix>) {
    let mut tensors = Vec::new();
    let mut gates = Vec::new();
    for e in 0..2 {
        let shapes = [("gate_proj", [SIZE_N, SIZE_K]), ("up_proj", [SIZE_N, SIZE_K])];
        for (matrix, [n, k]) in shapes.into_iter().chain([("down_proj", [SIZE_K, SIZE_N])]) {
            let name = format!("{EXPERTS}.{e}.{matrix}");
            let (weight, scales) = (codes(&name, n * k), floats(&name, n, 1.0 / 512.0));
            tensors.push(ints(&format!("{name}.weight"), &[n, k], weight.clone()));
            tensors.push(singles(&format!("{name}.weight_scale"), &[n, 1], scales.clone()));
            gates.push((weight, scales));
        }
    }
    let router = vec![0u16; 2 * SIZE_K];
    let name = "model.layers.0.mlp.gate.weight";
    tensors.push(Tensor::from_vec(name, DType::BF16, vec![2, SIZE_K], router).unwrap());
    let weights = int8_weights("channel");
    model(dir, &tensors, "int-quantized", weights, int8_inputs(true, true));
    (tensors, gates)
}

/// Experts with a scale for each channel and each token, which upstream's Triton kernel multiplies.
#[test]
fn int8_experts() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("experts");
    let (tensors, gates) = int8_expert_model(&dir);
    // `per_token_quant_int8`: halves away from zero.
    let row = |row: &[f32]| -> Row {
        let max = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let factor = 127.0 / max;
        (row.iter().map(|v| (v * factor).round() as i64).collect(), max / 127.0, 0)
    };
    let x = activations();
    let rows: Vec<Row> = x.chunks_exact(SIZE_K).map(row).collect();
    let computed: [(&str, Compute); 2] = [("cutlass", without_bias), ("exact", exact)];
    for (arithmetic, compute) in computed {
        let (found, report) = output(&dir, EXPERTS, &["--arithmetic", arithmetic]);
        assert_eq!(report["sizes"]["activations"], "int8 dynamic per token");
        for (t, row) in rows.iter().enumerate() {
            let expert = &gates[t % 2 * 3..][..2];
            let own = std::slice::from_ref(row);
            let expected: Vec<u16> = expert.iter().flat_map(|(w, s)| compute(own, w, s)).collect();
            assert_eq!(found[t * 2 * SIZE_N..][..2 * SIZE_N], expected, "{arithmetic} {t}");
        }
    }
    let inspected = run(["inspect", "--json", dir.to_str().unwrap()]);
    assert!(stdout(&inspected).contains("w8a8 int8"), "{}", stdout(&inspected));
    // Upstream refuses experts with static activations.
    let refused = temp.path().join("static");
    model(&refused, &tensors, "int-quantized", int8_weights("channel"), int8_inputs(false, true));
    let output = run(["run", refused.to_str().unwrap(), "--layer", EXPERTS]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for part in ["input_scale", EXPERTS] {
        assert!(text.contains(part), "{text}");
    }
}

/// The linear layer of a model with these activations, and its output for [`activations`].
fn dense(dir: &Path, dynamic_inputs: bool, symmetric: bool) -> Vec<u16> {
    let weight = codes("dense", SIZE_N * SIZE_K);
    let scales = floats("dense", SIZE_N, 1.0 / 512.0);
    let bias: Vec<f32> = (0..SIZE_N).map(|n| n as f32 / 8.0 - 2.0).collect();
    let half = bias.iter().map(|b| f32_to_bf16_rne(*b)).collect();
    let of = |suffix: &str| format!("{LINEAR}.{suffix}");
    let tensors = [
        ints(&of("weight"), &[SIZE_N, SIZE_K], weight.clone()),
        singles(&of("weight_scale"), &[SIZE_N, 1], scales.clone()),
        Tensor::from_vec(of("bias"), DType::BF16, vec![SIZE_N], half).unwrap(),
        singles(&of("input_scale"), &[1], vec![0.01]),
    ];
    let inputs = int8_inputs(dynamic_inputs, symmetric);
    let used = if dynamic_inputs { &tensors[..3] } else { &tensors[..] };
    model(dir, used, "int-quantized", int8_weights("channel"), inputs);
    let x = activations();
    let rows: Vec<Row> = x.chunks_exact(SIZE_K).map(|row| dynamic(row, true)).collect();
    cutlass(&rows, &weight, &scales, Some(&bias))
}

/// Converted layers: the linear one gives the bits of CUTLASS's epilogue with every kernel.
#[test]
fn converted_int8_layers_run_with_every_kernel() {
    let temp = tempfile::tempdir().unwrap();
    let to = |name: &str| temp.path().join(name);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let convert =
        |from: &Path, out: &Path| run(["convert", &text(from), &text(out), "--to", "kleidiai"]);
    let expected = dense(&to("dense"), true, true);
    let made = convert(&to("dense"), &to("packed"));
    assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
    let bits = activations().iter().map(|v| (v.to_bits() >> 16) as u16).collect();
    let x = Tensor::from_vec("x", DType::BF16, vec![TOKENS, SIZE_K], bits).unwrap();
    write(&to("x"), &[x]);
    for kernel in linears::kernel_names(&CPU_INT8) {
        let (packed, input, output) = (text(&to("packed")), text(&to("x")), text(&to("y")));
        let made = run([
            "run",
            "--json",
            &packed,
            "--check",
            "--input",
            &input,
            "--output",
            &output,
            "--kernel",
            kernel,
            "--threads",
            "3",
        ]);
        assert_eq!((made.status.code(), stderr(&made)), (Some(0), ""), "{kernel}");
        let report: Value = serde_json::from_str(stdout(&made)).unwrap();
        assert_eq!(
            (&report["check"]["mismatches"], &report["source"]),
            (&json!(0), &json!("packed"))
        );
        assert_eq!(report["arithmetic"], "int8 activations, quantized per token");
        let bytes = fs::read(to("y")).unwrap();
        let y = Container::parse(&bytes).unwrap().tensor("y").unwrap().elements::<u16>().to_vec();
        assert_eq!(y, expected, "{kernel}");
    }
    let made = run(["run", &text(&to("packed")), "--kernel", "portable"]);
    assert!(stderr(&made).contains("portable") && stderr(&made).contains("scalar"));
    // Experts, on the whole and on two ranks.
    int8_expert_model(&to("experts"));
    for (name, more) in [("all", &[][..]), ("rank", &["--tp-size", "2", "--tp-rank", "1"][..])] {
        let (from, out) = (text(&to("experts")), text(&to(name)));
        let mut arguments = vec!["convert", &from, &out, "--to", "kleidiai"];
        arguments.extend(more);
        let made = run(arguments);
        assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
        let mut digests = Vec::new();
        for kernel in experts::kernel_names(&CPU_INT8) {
            let made =
                run(["run", "--json", &out, "--check", "--tokens", "21", "--kernel", kernel]);
            assert_eq!((made.status.code(), stderr(&made)), (Some(0), ""), "{kernel}");
            let report: Value = serde_json::from_str(stdout(&made)).unwrap();
            assert_eq!(
                (&report["layer"], &report["check"]["mismatches"]),
                (&json!(EXPERTS), &json!(0))
            );
            digests.push(report["sha256"].clone());
        }
        digests.dedup();
        assert_eq!(digests.len(), 1, "{name}");
    }
    let found: Value =
        serde_json::from_str(stdout(&run(["inspect", "--json", &text(&to("experts"))]))).unwrap();
    let cpu = found["targets"].as_array().unwrap().iter().find(|t| t["target"] == "kleidiai");
    assert_eq!((&cpu.unwrap()["takes"], &cpu.unwrap()["refused"]), (&json!(2), &json!([])));
    // Activations that the path does not quantize so.
    for (dynamic_inputs, symmetric, words) in
        [(true, false, "dynamic asymmetric"), (false, true, "static symmetric")]
    {
        dense(&to(words), dynamic_inputs, symmetric);
        let made = convert(&to(words), &to("refused"));
        assert_eq!(made.status.code(), Some(2), "{words}");
        let error = stderr(&made);
        assert!(error.contains(LINEAR) && error.contains(words), "{error}");
        assert!(!to("refused").exists());
    }
}

/// The value of an e4m3fn code, by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        e => (1.0 + mantissa / 8.0) * 2f64.powi(e - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The e4m3fn number nearest to `x`, the even code at halves, saturating.
fn nearest(x: f64) -> f64 {
    let distance = |code: &u8| (e4m3(*code) - x.abs()).abs();
    let best =
        (0..0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    e4m3(best.unwrap()).copysign(x)
}

/// Groups of int4 become e4m3 numbers under one scale for each channel; activations are e4m3 per token.
#[test]
fn int4_weights_with_fp8_activations() {
    const K: usize = 256;
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("w4a8");
    let mut noise = Noise::new("int4");
    let q: Vec<i32> = (0..SIZE_N * K).map(|_| (noise.next() >> 5 & 15) as i32 - 8).collect();
    let word = |eight: &[i32]| {
        let nibbles = eight.iter().enumerate();
        nibbles.fold(0u32, |w, (i, q)| w | ((q + 8) as u32) << (4 * i)) as i32
    };
    let packed: Vec<i32> = q.chunks_exact(8).map(word).collect();
    let scales: Vec<f32> = floats("scales", SIZE_N * K / 128, 1.0 / 256.0)
        .into_iter()
        .map(|s| widen(f32_to_bf16_rne(s)))
        .collect();
    let bits = scales.iter().map(|s| (s.to_bits() >> 16) as u16).collect();
    let of = |suffix: &str| format!("{LINEAR}.{suffix}");
    let tensors = [
        Tensor::from_vec(of("weight_packed"), DType::I32, vec![SIZE_N, K / 8], packed).unwrap(),
        Tensor::from_vec(of("weight_scale"), DType::BF16, vec![SIZE_N, K / 128], bits).unwrap(),
        Tensor::from_vec(of("weight_shape"), DType::I64, vec![2], vec![SIZE_N as i64, K as i64])
            .unwrap(),
    ];
    let weights = |group: usize| {
        json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
            "group_size": group, "dynamic": false})
    };
    let inputs = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": true,
        "strategy": "token"});
    model(&dir, &tensors, "pack-quantized", weights(128), inputs.clone());
    let x: Vec<f32> = activations()[..2 * K].to_vec();
    let input = dir.join("in");
    let half = x.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
    write(&input, &[Tensor::from_vec("x", DType::BF16, vec![2, K], half).unwrap()]);
    let made = dir.join("out");
    let arguments = ["run", "--json", dir.to_str().unwrap(), "--layer", LINEAR, "--check"];
    let files = ["--input", input.to_str().unwrap(), "--output", made.to_str().unwrap()];
    let report = run(arguments.iter().chain(&files));
    assert_eq!((report.status.code(), stderr(&report)), (Some(0), ""));
    let report: Value = serde_json::from_str(stdout(&report)).unwrap();
    assert_eq!(report["check"]["mismatches"], 0, "{report}");
    assert_eq!(report["sizes"]["activations"], "fp8 dynamic per token");
    let bytes = fs::read(&made).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let found = file.tensor("y").unwrap();
    let found = found.elements::<u16>();
    for (m, row) in x.chunks_exact(K).enumerate() {
        let of_row = (row.iter().fold(0f32, |a, v| a.max(v.abs())) / 448.0).max(1.0 / 229_376.0);
        for n in 0..SIZE_N {
            let own = &scales[n * 2..][..2];
            let of_column = (own[0].max(own[1]) / 448.0).max(1.0 / 229_376.0);
            let eighth = [own[0], own[1]].map(|s| nearest(nearest(f64::from(s / of_column)) / 8.0));
            let product = |(k, v): (usize, &f32)| {
                nearest(f64::from(v / of_row)) * nearest(f64::from(q[n * K + k]) * eighth[k / 128])
            };
            let sum: f64 = row.iter().enumerate().map(product).sum();
            let value = sum * f64::from(of_row) * (f64::from(of_column) * 8.0);
            let y = f64::from(widen(found[m * SIZE_N + n]));
            // bf16 rounds by at most 2^-9 of the value; a group's scale without its e4m3 rounding
            // would be off by up to 2^-4.
            assert!((y - value).abs() <= value.abs() * 2f64.powi(-8), "{m} {n}: {y}, {value}");
        }
    }
    let mut digests = Vec::new();
    for arithmetic in ["exact", "canonical", "wgmma", "wgmma-promoted"] {
        let text = run(arguments.iter().chain(&["--arithmetic", arithmetic]));
        let report: Value = serde_json::from_str(stdout(&text)).unwrap();
        assert_eq!(report["check"]["mismatches"], 0, "{arithmetic}: {report}");
        digests.push(report["sha256"].clone());
    }
    assert_ne!(digests[0], digests[2], "14 bits must show");
    // Kernels have groups of 128 only.
    let other = temp.path().join("other");
    model(&other, &tensors, "pack-quantized", weights(64), inputs);
    let refused = run(["run", other.to_str().unwrap(), "--layer", LINEAR]);
    assert_eq!(refused.status.code(), Some(2));
}
