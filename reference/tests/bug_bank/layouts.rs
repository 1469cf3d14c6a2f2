//! Bugs that show in packed weights, scales, zero points and codes.

use marlinspike::check::OutputReport;
use serde_json::json;

use crate::tools::{case, changed, elements, generated, grouped, permuted, report, set, single};
use crate::{Run, run};

const GROUPED: &str = "linear-f16_awq_u4_g64";
const BIASED: &str = "linear-f16_u4b8_g128_act0";

pub(crate) fn runs() -> Vec<Run> {
    vec![
        run(
            "1",
            "w13 scale order chosen with the intermediate size",
            &["scales-other-permutation"],
            w13_order(),
        ),
        run("2", "scale order chosen with the packed K", &["scales-other-permutation"], {
            let mut case = case(GROUPED);
            let scales = case.input("scales").expect("scales").clone();
            let n = scales.shape()[1];
            set(
                &mut case,
                "marlin_scales",
                scales.shape().to_vec(),
                &permuted(&elements(&scales), n, single),
            );
            report(&case, "marlin_scales")
        }),
        run(
            "3",
            "act-order rank holds a slice of the scales instead of all",
            &["scales-sharded"],
            sharded(),
        ),
        run("6", "group_size -1 used as a stride", &["group-size-as-stride"], stride()),
        run(
            "7",
            "v2 zeros read as v1",
            &["zeros-plus-one"],
            changed(case(GROUPED), "marlin_zeros", |v, _| {
                let next = |w: u32, p: u32| (((w >> (4 * p)) + 1) & 15) << (4 * p);
                v.iter().map(|&w| (0..8).map(|p| next(w, p)).sum()).collect()
            }),
        ),
        run(
            "8",
            "gate and up halves of w13 swapped",
            &["gate-up-swapped"],
            changed(case("moe-top1_f16_u4"), "w13_marlin_qweight", halves),
        ),
        run(
            "8",
            "gate and up scales swapped",
            &["gate-up-swapped"],
            changed(case("moe-top1_f16_u4"), "w13_marlin_scales", halves),
        ),
        run(
            "11",
            "two shards of w13 for an activation without a gate",
            &["two-shards-not-gated"],
            two_shards(),
        ),
        run(
            "12",
            "even k stored in the high nibble",
            &["nibble-order"],
            changed(case(BIASED), "marlin_qweight", |v, _| {
                v.iter().map(|w| w.rotate_left(16)).collect()
            }),
        ),
        run(
            "20",
            "e4m3 saturates at 240",
            &["e4m3-saturates-early"],
            changed(case("fp8-requantize-cpu"), "w13_weight", |v, _| {
                let number = |b: u32| if b & 0x7f == 0x7f { 0 } else { b & 0x7f };
                v.iter().map(|&b| if number(b) > 0x77 { b & 0x80 | 0x77 } else { b }).collect()
            }),
        ),
        run("27", "bias not permuted", &["bias-not-permuted"], {
            let mut case = case(BIASED);
            let bias = case.input("bias").expect("a bias").clone();
            set(&mut case, "marlin_bias", bias.shape().to_vec(), &elements(&bias));
            report(&case, "marlin_bias")
        }),
        run("28", "weights not gathered by act-order", &["act-order-ignored"], not_gathered()),
    ]
}

/// Rows with their halves exchanged.
fn halves(v: Vec<u32>, shape: &[usize]) -> Vec<u32> {
    let cols = *shape.last().expect("an axis");
    v.chunks(cols).flat_map(|r| [&r[cols / 2..], &r[..cols / 2]].concat()).collect()
}

/// Group scales of w13 (K = 256, groups of 128) in the order for K = 128.
fn w13_order() -> OutputReport {
    let keys = json!({"intermediate_size": 128, "group_size": 128});
    let mut case = generated("moe-top1_f16_u4", keys, 1);
    let scales = case.input("w13_scales").expect("scales").clone();
    let shape = scales.shape().to_vec();
    let n = shape[2];
    set(&mut case, "w13_marlin_scales", shape, &permuted(&elements(&scales), n, single));
    report(&case, "w13_marlin_scales")
}

/// Rank 1's four of eight groups.
fn sharded() -> OutputReport {
    let mut case = case("linear-tp2_0_rank1");
    let scales = case.input("scales").expect("scales").clone();
    let n = scales.shape()[1];
    let own = &elements(&scales)[4 * n..8 * n];
    let packed = permuted(own, n, grouped);
    case.outputs.retain(|name, _| name == "marlin_qweight" || name == "marlin_scales");
    set(&mut case, "marlin_scales", vec![4, n], &packed);
    report(&case, "marlin_scales")
}

/// Column n has the scale of column n − 1.
fn stride() -> OutputReport {
    let mut case = generated(BIASED, json!({"group_size": -1, "has_bias": false}), 6);
    let scales = case.input("scales").expect("scales").clone();
    let n = scales.shape()[1];
    let own = elements(&scales);
    let shifted: Vec<u32> = (0..n).map(|i| own[(i + n - 1) % n]).collect();
    set(&mut case, "marlin_scales", vec![1, n], &permuted(&shifted, n, single));
    report(&case, "marlin_scales")
}

/// The packed words of the first 128 columns, also used for all others.
fn two_shards() -> OutputReport {
    let case = generated("moe-top1_f16_u4", json!({"activation": "relu2_no_mul"}), 11);
    changed(case, "w13_marlin_qweight", |v, shape| {
        let cols = shape[2];
        v.chunks(cols).flat_map(|r| [&r[..cols / 2], &r[..cols / 2]].concat()).collect()
    })
}

/// The stored rows packed as if g_idx were sorted, by Marlin's layout as it is published: tiles of 16
/// rows and 64 columns, 32 lanes of four words.
fn not_gathered() -> OutputReport {
    let mut case = case("linear-f16_u4b8_g32_act1");
    let weight = case.input("qweight").expect("qweight").clone();
    let n = weight.shape()[1];
    let words = elements(&weight);
    let code = |k: usize, n0: usize| words[k / 8 * n + n0] >> (k % 8 * 4) & 15;
    let packed = case.output("marlin_qweight").expect("packed").shape().to_vec();
    let [tiles_k, row] = packed[..] else { panic!("{packed:?}") };
    let mut out = vec![0u32; tiles_k * row];
    for (i, word) in out.iter_mut().enumerate() {
        let (tile_k, tile_n) = (i / row, i % row / 128);
        let (lane, j) = (i % row % 128 / 4, i % 4);
        let value = |v: usize| {
            let (block, r) = (v / 4, v % 4);
            let k = tile_k * 16 + 2 * (lane % 4) + [0, 1, 8, 9][r];
            code(k, tile_n * 64 + 16 * j + 8 * block + lane / 4)
        };
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        *word = (0..8).map(|p| value(order[p]) << (4 * p)).sum();
    }
    set(&mut case, "marlin_qweight", packed, &out);
    report(&case, "marlin_qweight")
}
