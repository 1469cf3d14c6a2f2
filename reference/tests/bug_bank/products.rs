//! Bugs that show in the product of one matrix.

use marlinspike::case::{ActivationRounding, Case, CaseConfig, ScheduleChoice};
use marlinspike::check::OutputReport;
use marlinspike::num::scalar::{ScalarType, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

use crate::product_model::{AWQ, Model, judged, planted, put};
use crate::tools::{case, generated, grouped, misread, ordinary, report, set, single};
use crate::{Run, run};

const GROUPED: &str = "linear-f16_awq_u4_g64";
const BIASED: &str = "linear-f16_u4b8_g128_act0";
const ORDERED: &str = "linear-f16_u4b8_g32_act1";
const SCALED: &str = "linear-f16_nvfp4";

pub(crate) fn runs() -> Vec<Run> {
    vec![
        run(
            "2",
            "scale order chosen with the packed K",
            &["scales-other-permutation"],
            planted(GROUPED, "y", |m| {
                m.matrices[0].s = misread(&m.matrices[0].s, m.n, single, grouped);
                m.compute()
            }),
        ),
        run(
            "3",
            "act-order rank holds a slice of the scales instead of all",
            &["scales-sharded"],
            planted("linear-tp2_0_rank1", "y", |m| {
                // Four of eight groups, those of rank 1; other groups are read modulo.
                m.matrices[0].group.iter_mut().for_each(|g| *g = 4 + *g % 4);
                m.compute()
            }),
        ),
        run("4", "group scales not sharded along K", &["scales-not-sharded"], not_sharded()),
        run(
            "5",
            "group size inferred wrongly",
            &["wrong-group-size"],
            planted(GROUPED, "y", |m| {
                m.matrices[0].group = (0..m.k).map(|k| k / 128).collect();
                m.compute()
            }),
        ),
        run(
            "5",
            "act-order treated as static groups",
            &["act-order-ignored"],
            planted(ORDERED, "y", |m| {
                m.matrices[0].group = (0..m.k).map(|k| k / 32).collect();
                m.compute()
            }),
        ),
        run(
            "5",
            "static groups treated as act-order",
            &["act-order-static-as-group"],
            static_order(),
        ),
        run("6", "group_size -1 used as a stride", &["group-size-as-stride"], stride()),
        run(
            "7",
            "GPTQ v2 zeros read as v1",
            &["zero-off-by-one"],
            planted(BIASED, "y", |m| {
                m.matrices[0].z.iter_mut().for_each(|z| *z += 1.0);
                m.compute()
            }),
        ),
        run(
            "7",
            "GPTQ v1 zeros read as v2",
            &["zero-off-by-one"],
            planted(BIASED, "y", |m| {
                m.matrices[0].z.iter_mut().for_each(|z| *z -= 1.0);
                m.compute()
            }),
        ),
        run(
            "10",
            "global scale multiplied where the format divides",
            &["global-scale-inverted"],
            inverted(),
        ),
        run(
            "12",
            "even k stored in the high nibble",
            &["nibbles-swapped"],
            planted(SCALED, "y", |m| {
                let (q, n) = (m.matrices[0].q.clone(), m.n);
                m.matrices[0].q = (0..q.len()).map(|i| q[((i / n) ^ 1) * n + i % n]).collect();
                m.compute()
            }),
        ),
        run(
            "13",
            "AWQ interleave applied instead of undone",
            &["awq-interleave-inverted"],
            planted(GROUPED, "y", |m| {
                let q = m.matrices[0].q.clone();
                m.matrices[0].q = (0..q.len()).map(|i| q[i / 8 * 8 + AWQ[AWQ[i % 8]]]).collect();
                m.compute()
            }),
        ),
        run("16", "padded e8m0 bytes of 2^-127", &["padded-scale-bytes"], padded(0.0)),
        run("16", "padded e8m0 bytes of 1", &["padded-scale-bytes"], padded(1.0)),
        run("17", "a pipeline stage is read before it is written", &["stale-k-tile"], stale()),
        run("18", "partial sums added by atomics", &["rows-differ"], atomics()),
        run("21", "ties to even instead of away from zero", &["rounding-half-even"], ties()),
        run("22", "int8 products overflow 16 bits", &["int8-accumulation-overflow"], overflow()),
        run(
            "23",
            "all zeros",
            &["all-zeros"],
            planted(GROUPED, "y", |m| vec![0.0; m.rows() * m.n]),
        ),
        run(
            "23",
            "all NaN",
            &["not-finite"],
            planted(GROUPED, "y", |m| vec![f64::NAN; m.rows() * m.n]),
        ),
        run(
            "27",
            "bias not permuted",
            &["bias-not-permuted"],
            planted(BIASED, "y", |m| {
                let bias = m.matrices[0].bias.clone().expect("a bias");
                m.matrices[0].bias = Some(misread(&bias, m.n, |p| p, single));
                m.compute()
            }),
        ),
        run(
            "28",
            "act-order applied to activations, not to weights",
            &["act-order-weights-not-permuted"],
            planted(ORDERED, "y", |m| walk(m, [0, 1, 1])),
        ),
        run(
            "28",
            "act-order applied to weights, not to activations",
            &["act-order-activations-not-permuted"],
            planted(ORDERED, "y", |m| walk(m, [1, 0, 1])),
        ),
        run(
            "28",
            "inverse of act-order applied to activations",
            &["act-order-activations-inverted"],
            planted(ORDERED, "y", |m| walk(m, [1, 2, 1])),
        ),
        run("29", "a row's result depends on the batch", &["rows-differ"], batch()),
        run("30", "a row of zeros gives NaN", &["constant-row-nan"], zero_row()),
        run("30", "a constant row gives NaN (int4 on Arm)", &["constant-row-nan"], constant_row()),
    ]
}

/// Rows of the product: as stored (0), sorted (1) or by the inverse (2), of weights, activations and
/// groups.
fn walk(m: &mut Model, which: [u8; 3]) -> Vec<f64> {
    let mut perm: Vec<usize> = (0..m.k).collect();
    perm.sort_by_key(|&k| m.matrices[0].group[k]);
    let mut inverse = vec![0; m.k];
    perm.iter().enumerate().for_each(|(p, &k)| inverse[k] = p);
    let of = |what: u8| match what {
        0 => (0..m.k).collect::<Vec<usize>>(),
        1 => perm.clone(),
        _ => inverse.clone(),
    };
    let [w, a, g] = which.map(of);
    let (n, k) = (m.n, m.k);
    let matrix = &mut m.matrices[0];
    matrix.q = (0..k * n).map(|i| matrix.q[w[i / n] * n + i % n]).collect();
    matrix.group = g.iter().map(|&k| matrix.group[k]).collect();
    m.x = (0..m.x.len()).map(|i| m.x[i / k * k + a[i % k]]).collect();
    m.compute()
}

/// The scales of rank 1 of two with the groups of both.
fn not_sharded() -> OutputReport {
    let tp = json!({"size": 2, "rank": 1, "style": "row"});
    let mut case = generated(BIASED, json!({"group_size": 64, "tensor_parallel": tp}), 4);
    let scales = case.input("scales").expect("scales");
    let own: Vec<u32> = scales.elements::<u16>().iter().map(|&s| s.into()).collect();
    let (rows, n) = (scales.shape()[0], scales.shape()[1]);
    // Rank 0's scales; arbitrary.
    let mut all: Vec<u32> = own.iter().map(|s| s ^ 0x15).collect();
    all.extend(&own);
    let packed = crate::tools::permuted(&all, n, grouped);
    case.outputs.retain(|name, _| name == "marlin_scales");
    set(&mut case, "marlin_scales", vec![2 * rows, n], &packed);
    report(&case, "marlin_scales")
}

/// A matrix with groups in order, whose scales are selected by the g_idx that its file also holds.
fn static_order() -> OutputReport {
    let mut case = case(BIASED);
    let CaseConfig::Linear(c) = &case.config else { panic!("a linear case") };
    let size_k = c.size_k;
    let g_idx: Vec<i32> = (0..size_k).map(|k| (k * 7 % 3 % 2) as i32).collect();
    let mut model = Model::new(&case, "y");
    model.matrices[0].group = g_idx.iter().map(|&g| g as usize).collect();
    let y = model.compute();
    let tensor = Tensor::from_vec("g_idx", DType::I32, vec![size_k], g_idx).expect("g_idx");
    case.add_input("g_idx", tensor);
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

/// Rank 1's scales of whole columns, read from rank · K / |-1| on.
fn stride() -> OutputReport {
    let tp = json!({"size": 2, "rank": 1, "style": "row"});
    let keys = json!({"group_size": -1, "has_bias": false, "tensor_parallel": tp});
    let mut case = ordinary(generated(BIASED, keys, 6));
    let CaseConfig::Linear(c) = &mut case.config else { panic!("a linear case") };
    c.schedule = None;
    let start = c.size_k;
    let mut model = Model::new(&case, "y");
    let s = model.matrices[0].s.clone();
    model.matrices[0].s = (0..s.len()).map(|n| s[(start + n) % s.len()]).collect();
    let y = model.compute();
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

fn inverted() -> OutputReport {
    let mut case = case(SCALED);
    let scale = Tensor::from_vec("weight_global_scale", DType::F32, vec![1], vec![0.02f32]);
    case.add_input("weight_global_scale", scale.expect("a tensor"));
    let x = case.input("x").expect("x");
    let (shape, ty) = (x.shape().to_vec(), ScalarType::FLOAT16);
    let values = x.elements::<u16>();
    let small = values.iter().map(|&b| f64_to_f16_rne(ty.to_f64(b.into()) / 1024.0)).collect();
    case.add_input("x", Tensor::from_vec::<u16>("x", DType::F16, shape, small).expect("x"));
    let mut model = Model::new(&case, "y");
    model.matrices[0].global = model.matrices[0].global.map(|g| 1.0 / g);
    let y = model.compute();
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

/// The last two groups with one value as scale.
fn padded(value: f64) -> OutputReport {
    planted("linear-bf16_mxfp8", "y", |m| {
        let (n, groups) = (m.n, m.k / 32);
        m.matrices[0].s[(groups - 2) * n..].fill(value);
        m.compute()
    })
}

/// One tile of 64 rows and 64 columns took k 64 to 127 of x for k 128 to 191.
pub(crate) fn stale_tile(m: &mut Model) -> Vec<f64> {
    let right = m.compute();
    let (n, k) = (m.n, m.k);
    m.x.chunks_mut(k).for_each(|row| row.copy_within(64..128, 128));
    let wrong = m.compute();
    let inside = |i: usize| (64..128).contains(&(i / n)) && (128..192).contains(&(i % n));
    (0..right.len()).map(|i| if inside(i) { wrong[i] } else { right[i] }).collect()
}

fn stale() -> OutputReport {
    planted("linear-odd_f16_u4_257", "y", stale_tile)
}

/// A product of equal rows, and f32 sums of four partial sums for each element, added in an order of
/// `order`(row, column).
fn partial_sums(size_m: usize, order: impl Fn(usize, usize) -> [usize; 4]) -> OutputReport {
    let keys = json!({"size_n": 1024, "size_k": 1024, "has_bias": false});
    let mut case = generated(BIASED, keys, 18);
    let CaseConfig::Linear(c) = &mut case.config else { panic!("a linear case") };
    c.size_m = size_m;
    c.schedule = Some(ScheduleChoice::Canonical);
    let (n, k) = (c.size_n, c.size_k);
    // Every row is row 0.
    let row = case.input("x").expect("x").elements::<u16>()[..k].to_vec();
    let rows: Vec<u16> = (0..size_m).flat_map(|_| row.clone()).collect();
    case.add_input("x", Tensor::from_vec("x", DType::F16, vec![size_m, k], rows).expect("x"));
    let blank = vec![0u16; size_m * n];
    case.add_output("y", Tensor::from_vec("y", DType::F16, vec![size_m, n], blank).expect("y"));
    let model = Model::new(&case, "y");
    let m = &model.matrices[0];
    let mut y = vec![0.0; size_m * n];
    for col in 0..n {
        let weight = |i: usize| {
            let at = m.group[i] * n + col;
            model.round((m.q[i * n + col] - m.z[at]) * m.s[at])
        };
        let part = |p: usize| -> f32 {
            (p * k / 4..(p + 1) * k / 4).fold(0f32, |sum, i| sum + (model.x[i] * weight(i)) as f32)
        };
        let parts: Vec<f32> = (0..4).map(part).collect();
        for row in 0..size_m {
            let sum = order(row, col).iter().fold(0f32, |sum, &p| sum + parts[p]);
            y[row * n + col] = f64::from(sum);
        }
    }
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

const ORDERS: [[usize; 4]; 4] = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0], [1, 0, 3, 2]];

/// Whatever part comes first.
fn atomics() -> OutputReport {
    partial_sums(8, |row, col| ORDERS[(row * 7 + col * 3) % 4])
}

/// Rows after the first eight belong to another tile and are added in another order.
fn batch() -> OutputReport {
    partial_sums(16, |row, _| ORDERS[row / 8])
}

/// Recorded outputs of a kernel that rounds ties to even, in a case that declares away from zero.
fn ties() -> OutputReport {
    let names = ["dyn_quant_linear-cw10_half_even", "dyn_quant_linear-cw22_half_even"];
    let reports = names.iter().map(|name| {
        let mut case = case(name);
        let CaseConfig::DynQuant(c) = &mut case.config else { panic!("an int4 case") };
        c.activation_rounding = ActivationRounding::HalfAway;
        report(&case, "lhs_packed")
    });
    let reports: Vec<OutputReport> = reports.collect();
    // Not every case has a tie; a case with one must fail.
    let shown = reports.iter().position(|r| r.diagnosis.is_some()).unwrap_or(0);
    reports.into_iter().nth(shown).expect("a case")
}

/// Row 3 is -128 throughout, and four columns are -8: 32 of their products are 2^15.
pub(crate) fn overflowing() -> (Case<'static>, Vec<f64>) {
    let mut case = case("linear-f16_u4b8_int8act_g-1");
    let CaseConfig::Linear(c) = &case.config else { panic!("a linear case") };
    let (m, n, k) = (c.size_m, c.size_n, c.size_k);
    let mut a: Vec<i8> = case.input("a_q").expect("a_q").elements::<i8>().into_owned();
    a[3 * k..4 * k].fill(-128);
    let mut words = case.input("qweight").expect("qweight").elements::<u32>().into_owned();
    for row in words.chunks_mut(n) {
        [5, 40, 41, 100].into_iter().for_each(|col| row[col] = 0);
    }
    let code = |i: usize, col: usize| (words[i / 8 * n + col] >> (i % 8 * 4) & 15) as i32 - 8;
    let scales = case.input("a_scales").expect("a_scales").elements::<f32>().into_owned();
    let weights = case.input("scales").expect("scales").elements::<u16>().into_owned();
    let ty = ScalarType::FLOAT16;
    let mut y = vec![0.0; m * n];
    for row in 0..m {
        for col in 0..n {
            let sum: i32 = (0..k / 32)
                .map(|run| {
                    let add = |sum: i16, i: usize| {
                        sum.wrapping_add((i32::from(a[row * k + i]) * code(i, col)) as i16)
                    };
                    i32::from((run * 32..(run + 1) * 32).fold(0i16, add))
                })
                .sum();
            let scale = f64::from(scales[row]) * ty.to_f64(weights[col].into());
            y[row * n + col] = f64::from(sum) * scale;
        }
    }
    let a = Tensor::from_vec("a_q", DType::I8, vec![m, k], a).expect("a_q");
    case.add_input("a_q", a);
    let words: Vec<i32> = words.into_iter().map(|w| w as i32).collect();
    let words = Tensor::from_vec("qweight", DType::I32, vec![k / 8, n], words);
    case.add_input("qweight", words.expect("qweight"));
    (case, y)
}

fn overflow() -> OutputReport {
    let (mut case, y) = overflowing();
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

fn zero_row() -> OutputReport {
    let mut case = case(GROUPED);
    let x = case.input("x").expect("x");
    let (shape, mut values) = (x.shape().to_vec(), x.elements::<u16>().into_owned());
    values[2 * shape[1]..3 * shape[1]].fill(0);
    case.add_input("x", Tensor::from_vec("x", DType::F16, shape, values).expect("x"));
    let model = Model::new(&case, "y");
    let mut y = model.compute();
    y[2 * model.n..3 * model.n].fill(f64::NAN);
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

fn constant_row() -> OutputReport {
    let mut case = generated("dyn_quant_linear-cw11", json!({}), 30);
    let CaseConfig::DynQuant(c) = &case.config else { panic!("an int4 case") };
    let (m, n, k) = (c.size_m, c.size_n, c.size_k);
    let mut x = case.input("x").expect("x").elements::<f32>().into_owned();
    x[k..2 * k].fill(0.0);
    case.add_input("x", Tensor::from_vec("x", DType::F32, vec![m, k], x).expect("x"));
    // The other rows are unchanged: rows do not depend on each other.
    let mut y = case.output("y").expect("y").elements::<f32>().into_owned();
    y[n..2 * n].fill(f32::NAN);
    case.outputs.retain(|name, _| name == "y");
    case.add_output("y", Tensor::from_vec("y", DType::F32, vec![m, n], y).expect("y"));
    report(&case, "y")
}
