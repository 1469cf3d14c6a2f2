//! Experts in every form in which checkpoints store them give the same stacks.

use std::collections::BTreeMap;

use marlinspike::moe::families::{BlockTensors, ExpertsRule, block_rule};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

const E: usize = 3;
const H: usize = 4;
const I: usize = 2;

/// Number of gate (0), up (1) or down (2) of expert `e` between feature `i` and feature `h`.
fn number(part: usize, e: usize, i: usize, h: usize) -> f32 {
    (part * 1000 + e * 100 + i * 10 + h) as f32
}

type Files = BTreeMap<String, Tensor<'static>>;

fn add(files: &mut Files, name: &str, shape: &[usize], at: impl Fn(&[usize]) -> f32) {
    let len: usize = shape.iter().product();
    let values = (0..len).map(|flat| {
        let (mut rest, mut index) = (flat, vec![0; shape.len()]);
        for d in (0..shape.len()).rev() {
            index[d] = rest % shape[d];
            rest /= shape[d];
        }
        at(&index)
    });
    let values: Vec<f32> = values.collect();
    let tensor = Tensor::from_vec(name, DType::F32, shape.to_vec(), values).unwrap();
    files.insert(name.to_owned(), tensor);
}

fn plain() -> ExpertsRule {
    block_rule(&json!({"model_type": "mixtral"}), "model.layers.0.mlp.experts").unwrap().0
}

fn read(files: &Files, rule: ExpertsRule) -> marlinspike::Result<BlockTensors> {
    BlockTensors::read(&|name| files.get(name).cloned(), H, Some(E), rule)
}

/// Gate rows over up rows, and down, as `[E, N, K]`.
#[track_caller]
fn expect_stacks(files: &Files) {
    let found = read(files, plain()).unwrap();
    let (w13, w2) =
        (found.w13.elements::<f32>().into_owned(), found.w2.elements::<f32>().into_owned());
    assert_eq!((found.w13.shape(), found.w2.shape()), (&[E, 2 * I, H][..], &[E, H, I][..]));
    for e in 0..E {
        for i in 0..I {
            for h in 0..H {
                assert_eq!(w13[(e * 2 * I + i) * H + h], number(0, e, i, h));
                assert_eq!(w13[(e * 2 * I + I + i) * H + h], number(1, e, i, h));
                assert_eq!(w2[(e * H + h) * I + i], number(2, e, i, h));
            }
        }
    }
}

#[test]
fn one_by_one() {
    for (parent, names) in
        [("mlp", ["gate_proj", "up_proj", "down_proj"]), ("block_sparse_moe", ["w1", "w3", "w2"])]
    {
        let mut files = Files::new();
        for e in 0..E {
            let name = |p: usize| format!("{parent}.experts.{e}.{}.weight", names[p]);
            for part in 0..2 {
                add(&mut files, &name(part), &[I, H], |at| number(part, e, at[0], at[1]));
            }
            add(&mut files, &name(2), &[H, I], |at| number(2, e, at[1], at[0]));
        }
        expect_stacks(&files);
        files.remove(&format!("{parent}.experts.1.{}.weight", names[1]));
        let error = read(&files, plain()).unwrap_err().to_string();
        assert!(error.contains(&format!("experts.1.{}.weight", names[1])), "{error}");
    }
}

#[test]
fn fused_and_transposed() {
    let gate_up = |e: usize, n: usize, h: usize| number(n / I, e, n % I, h);
    for (first, second) in [
        ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),
        ("mlp.experts.w13_weight", "mlp.experts.w2_weight"),
    ] {
        let mut files = Files::new();
        add(&mut files, first, &[E, 2 * I, H], |at| gate_up(at[0], at[1], at[2]));
        add(&mut files, second, &[E, H, I], |at| number(2, at[0], at[2], at[1]));
        expect_stacks(&files);
        add(&mut files, first, &[E, H, 2 * I], |at| gate_up(at[0], at[2], at[1]));
        add(&mut files, second, &[E, I, H], |at| number(2, at[0], at[1], at[2]));
        expect_stacks(&files);
        add(&mut files, second, &[E, I, H + 1], |_| 0.0);
        let error = read(&files, plain()).unwrap_err().to_string();
        assert!(error.contains("hidden_size 4"), "{error}");
    }
}

#[test]
fn separate_stacks_and_rows_of_matrices() {
    let mut files = Files::new();
    for (part, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
        let name = format!("moe.{name}.weight");
        add(&mut files, &name, &[E, I, H], |at| number(part, at[0], at[1], at[2]));
    }
    add(&mut files, "moe.down_proj.weight", &[E, H, I], |at| number(2, at[0], at[2], at[1]));
    expect_stacks(&files);

    let mut files = Files::new();
    for (part, name) in ["w1", "v1", "w2"].into_iter().enumerate() {
        let name = format!("ffn.experts.mlp.{name}");
        add(&mut files, &name, &[E * I, H], |at| number(part, at[0] / I, at[0] % I, at[1]));
    }
    expect_stacks(&files);
    add(&mut files, "ffn.experts.mlp.w2", &[E * I + 1, H], |_| 0.0);
    let error = read(&files, plain()).unwrap_err().to_string();
    assert!(error.contains("experts.mlp.w2") && error.contains("[3 · I, H]"), "{error}");
}

#[test]
fn shared_experts_inside_and_beside_the_block() {
    let mut files = Files::new();
    add(&mut files, "mlp.experts.gate_up_proj", &[E, 2 * I, H], |_| 0.0);
    add(&mut files, "mlp.experts.down_proj", &[E, H, I], |_| 0.0);
    let routed = files.clone();
    assert!(read(&files, plain()).unwrap().shared.is_none());
    for (prefix, place) in
        [("mlp.shared_experts", "proj"), ("mlp.shared_mlp", "proj"), ("share_expert", "proj")]
    {
        let mut files = routed.clone();
        for (part, name) in ["gate", "up"].into_iter().enumerate() {
            let name = format!("{prefix}.{name}_{place}.weight");
            add(&mut files, &name, &[I, H], |at| number(part, 0, at[0], at[1]));
        }
        add(&mut files, &format!("{prefix}.down_{place}.weight"), &[H, I], |at| {
            number(2, 0, at[1], at[0])
        });
        let [w13, w2] = read(&files, plain()).unwrap().shared.unwrap();
        assert_eq!((w13.shape(), w2.shape()), (&[2 * I, H][..], &[H, I][..]), "{prefix}");
        assert_eq!(w13.elements::<f32>()[I * H], number(1, 0, 0, 0));
    }
    add(&mut files, "shared_mlp.input_linear.weight", &[2 * I, H], |at| at[0] as f32);
    add(&mut files, "shared_mlp.output_linear.weight", &[H, I], |at| at[1] as f32);
    assert!(read(&files, plain()).unwrap().shared.is_some());
}

#[test]
fn unknown_forms_and_blocks_are_refused() {
    let error = read(&Files::new(), plain()).unwrap_err().to_string();
    assert!(error.contains("no known tensor names"), "{error}");
    // A block without a tensor of its stages.
    let config = json!({"model_type": "gemma4", "top_k_experts": 1});
    let (rule, _) = block_rule(&config, "model.layers.0.experts").unwrap();
    let mut files = Files::new();
    add(&mut files, "experts.gate_up_proj", &[E, 2 * I, H], |_| 0.0);
    add(&mut files, "experts.down_proj", &[E, H, I], |_| 0.0);
    let error = read(&files, rule).unwrap_err().to_string();
    assert!(error.contains("router.scale"), "{error}");
    add(&mut files, "router.scale", &[H + 1], |_| 0.0);
    let error = read(&files, rule).unwrap_err().to_string();
    assert!(error.contains("router.scale") && error.contains("[4]"), "{error}");
    let mut files = Files::new();
    add(&mut files, "mlp.experts.gate_up_proj", &[E, 2 * I, H], |_| 0.0);
    let ints = Tensor::from_vec("x", DType::I32, vec![E, H, I], vec![0i32; E * H * I]).unwrap();
    files.insert("mlp.experts.down_proj".to_owned(), ints);
    let error = read(&files, plain()).unwrap_err().to_string();
    assert!(error.contains("I32"), "{error}");
}

/// Experts of two groups: those of the second have one feature less, which zeros replace.
#[test]
fn groups_of_experts_of_two_widths() {
    let config = json!({"model_type": "ernie4_5_vl_moe"});
    let (rule, _) = block_rule(&config, "model.layers.0.mlp.experts").unwrap();
    let mut files = Files::new();
    for e in 0..4 {
        let size_i = if e < 2 { I } else { I - 1 };
        let name = |part: &str| format!("mlp.experts.{e}.{part}_proj.weight");
        add(&mut files, &name("gate"), &[size_i, H], |at| number(0, e, at[0], at[1]));
        add(&mut files, &name("up"), &[size_i, H], |at| number(1, e, at[0], at[1]));
        add(&mut files, &name("down"), &[H, size_i], |at| number(2, e, at[1], at[0]));
    }
    // One router as [E, H], one as [H, E].
    add(&mut files, "mlp.gate.weight", &[2, H], |at| number(3, at[0], 0, at[1]));
    add(&mut files, "mlp.gate.weight_1", &[H, 2], |at| number(4, at[1], 0, at[0]));
    let found = BlockTensors::read(&|n| files.get(n).cloned(), H, Some(2), rule).unwrap();
    let (w13, w2) = (found.w13.elements::<f32>(), found.w2.elements::<f32>());
    assert_eq!((found.w13.shape(), found.w2.shape()), (&[4, 2 * I, H][..], &[4, H, I][..]));
    for e in 0..4 {
        for (i, h) in (0..I).flat_map(|i| (0..H).map(move |h| (i, h))) {
            let of = |part| if e < 2 || i + 1 < I { number(part, e, i, h) } else { 0.0 };
            assert_eq!(w13[(e * 2 * I + i) * H + h], of(0));
            assert_eq!(w13[(e * 2 * I + I + i) * H + h], of(1));
            assert_eq!(w2[(e * H + h) * I + i], of(2));
        }
    }
    let router = found.router_weight.unwrap();
    assert_eq!(router.shape(), [4, H]);
    for (row, h) in (0..4).flat_map(|r| (0..H).map(move |h| (r, h))) {
        let expected = number(3 + row / 2, row % 2, 0, h);
        assert_eq!(router.elements::<f32>()[row * H + h], expected);
    }
}

/// A cap of 0 means none, as in laguna's class.
#[test]
fn soft_caps_of_logits() {
    let cap = |value: serde_json::Value| {
        let mut config = json!({"model_type": "laguna", "moe_routed_scaling_factor": 1.0});
        config["moe_router_logit_softcapping"] = value;
        block_rule(&config, "model.layers.0.mlp.experts").map(|(_, numbers)| numbers.logit_softcap)
    };
    assert_eq!(cap(json!(30.0)).unwrap(), Some(30.0));
    assert_eq!(cap(json!(0.0)).unwrap(), None);
    assert_eq!(cap(json!(null)).unwrap(), None);
    let error = cap(json!(-1.0)).unwrap_err().to_string();
    assert!(error.contains("moe_router_logit_softcapping"), "{error}");
}
