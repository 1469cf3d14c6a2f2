//! Schedules: their JSON, and the parameters that do not change a result.

use marlinspike::Error;
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, ScheduleError, Stack};
use marlinspike::products::tensor_core::{Decoded, LANES, Panel, Row, UNITS, Unit};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use proptest::prelude::*;
use serde_json::{Value, json};

const F16: ScalarType = ScalarType::FLOAT16;

fn base() -> Value {
    json!({
        "unit": {
            "architecture": "hopper", "instruction": "mma", "a": "float16", "b": "float16",
            "accumulator": "float32", "size_k": 16,
        },
        "weights": {"form": "rounded"},
        "epilogue": [{"op": "round", "type": "float16"}],
    })
}

/// int4 in groups of 64, with a bias.
pub(crate) fn weight(size_k: usize, size_n: usize, seed: usize) -> Weight<'static> {
    let shape = Shape::new(size_k, size_n);
    let codes = Codes::from_fn(4, shape, |k, n| ((k * 7 + n * 13 + k * n + seed) % 16) as u8);
    let halves = |rows: usize, base: f64| {
        let value = |i: usize| F16.encode_rne(base + (i * 37 % 101) as f64 / 997.0) as u16;
        let data = TableData::B16((0..rows * size_n).map(value).collect());
        Table::new(F16, rows, size_n, data).expect("a table")
    };
    Weight {
        name: "weight".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: codes.expect("codes"),
        scales: halves(size_k / 64, 0.01),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(64)),
        global_scale: None,
        bias: Some(halves(1, -0.05)),
    }
}

pub(crate) fn x(rows: usize, size_k: usize) -> Vec<u32> {
    let value = |i: usize| ((i * 7919 + i / 5) % 2003) as f64 / 500.0 - 2.0;
    (0..rows * size_k).map(|i| F16.encode_rne(value(i))).collect()
}

fn refused(value: Value) -> ScheduleError {
    Schedule::from_json(&value).expect_err("a refusal")
}

#[test]
fn json_comes_back() {
    let w = weight(512, 64, 0);
    let mut all = vec![Schedule::from_json(&base()).expect("a schedule")];
    let canonical = Schedule::canonical(&w, F16, F16).expect("a schedule");
    all.push(Schedule::canonical(&w, F16, ScalarType::INT8).expect("a schedule"));
    all.extend(canonical.related(512).into_iter().map(|r| r.schedule));
    all.extend(Schedule::upstream(&w, F16, F16).into_iter().map(|r| r.schedule));
    all.push(canonical);
    assert!(all.len() >= 30, "{} schedules", all.len());
    for schedule in all {
        schedule.validate().expect("valid");
        let value = schedule.to_json();
        assert_eq!(Schedule::from_json(&value).expect("its JSON"), schedule);
        assert_eq!(Schedule::parse(&value.to_string()).expect("its JSON"), schedule);
    }
}

#[test]
fn json_that_is_no_schedule_is_refused_by_key() {
    type Change = fn(&mut Value);
    let malformed: [(&str, Change); 7] = [
        ("unit.architecture", |v| v["unit"]["architecture"] = "hoper".into()),
        ("unit.a", |v| v["unit"]["a"] = "float17".into()),
        ("unit.size_k", |v| v["unit"]["size_k"] = json!(-16)),
        ("epilogue[0].op", |v| v["epilogue"][0]["op"] = "relu".into()),
        ("chunks", |v| v["chunks"] = json!({"sise": 16})),
        ("weights.exponent", |v| v["weights"]["exponent"] = json!(1e99)),
        ("chunks.boundaries[1]", |v| v["chunks"] = json!({"boundaries": [16, null]})),
    ];
    for (expected, change) in malformed {
        let mut value = base();
        change(&mut value);
        match refused(value) {
            ScheduleError::Json { key, .. } => assert!(key.starts_with(expected), "{key}"),
            other => panic!("{expected}: {other}"),
        }
    }
    let values: [(&str, Change); 16] = [
        ("group_sum.multiply_add", |v| {
            v["weights"]["form"] = "unscaled".into();
            v["group_sum"] = json!({"scale": "int16", "multiply_add": "integer"});
        }),
        ("warp_steps[1].type", |v| {
            v["warp_steps"] = json!([{"op": "activation_scale", "type": "float32"},
                                     {"op": "round", "type": "float16"}]);
        }),
        ("unit", |v| v["unit"]["size_k"] = 32.into()),
        ("weights.exponent", |v| v["weights"]["exponent"] = json!(1000)),
        ("weights.exponent", |v| v["weights"]["exponent"] = json!(-7)),
        ("chunks.size", |v| v["chunks"] = json!({"size": 0})),
        ("chunks.size", |v| v["chunks"] = json!({"size": 24})),
        ("chunks.size", |v| v["chunks"] = json!({"size": u64::MAX - 15})),
        ("chunks.boundaries[1]", |v| v["chunks"] = json!({"boundaries": [32, 32]})),
        ("chunks.boundaries", |v| v["chunks"] = json!({"boundaries": vec![16; 1 << 17]})),
        ("chunks.striped.columns", |v| {
            v["chunks"] = json!({"striped": {"tile": 16, "columns": 8, "run": 1}});
        }),
        ("stripes.warps", |v| {
            v["stripes"] = json!({"tile": 64, "warps": 8, "sum": {"order": "ascending"}});
        }),
        ("stripes.warps", |v| {
            v["stripes"] = json!({"tile": 48, "warps": 3, "sum": {"order": "halving"}});
        }),
        ("epilogue", |v| v["epilogue"] = json!([])),
        ("epilogue[0].op", |v| v["epilogue"][0]["op"] = "bias".into()),
        ("epilogue[1].type", |v| {
            v["epilogue"] = json!([{"op": "round", "type": "float16"},
                                   {"op": "bias", "type": "float32"}]);
        }),
    ];
    for (expected, change) in values {
        let mut value = base();
        change(&mut value);
        match refused(value) {
            ScheduleError::Value { key, .. } => assert_eq!(key, expected),
            other => panic!("{expected}: {other}"),
        }
    }
    // Unknown and repeated keys, at every level.
    let text = base().to_string();
    for (from, to) in [
        ("\"weights\":", "\"wheels\":1,\"weights\":"),
        ("\"form\":", "\"from\":1,\"form\":"),
        ("\"form\":", "\"form\":\"exact\",\"form\":"),
        ("\"op\":", "\"oper\":1,\"op\":"),
    ] {
        assert!(text.contains(from), "{text}");
        let e = Schedule::parse(&text.replacen(from, to, 1)).expect_err("a refusal");
        assert!(matches!(e, ScheduleError::Json { .. }), "{e}");
    }
    let deep = "[".repeat(100_000);
    assert!(matches!(Schedule::parse(&deep), Err(ScheduleError::Json { .. })));
}

proptest! {
    /// Every text gives a schedule or an error.
    #[test]
    fn mutated_json_never_panics(at in 0usize..400, byte in 0u8..128, cut in 0usize..400) {
        let mut text = base().to_string().into_bytes();
        let len = text.len();
        text[at % len] = byte;
        text.truncate(len - cut % 3 * (cut % len) / 2);
        if let Ok(text) = String::from_utf8(text) {
            let _ = Schedule::parse(&text);
        }
    }
}

/// The outputs, row-major.
pub(crate) fn execute(schedule: &Schedule, x: &[u32], w: &Weight<'_>) -> Result<Vec<u32>, Error> {
    let x = rows_of("x", x, w.shape().size_k)?;
    schedule.execute(x, w, Extras::default()).map(into_vec)
}

#[test]
fn a_schedule_that_does_not_fit_its_weight_is_refused() {
    let w = weight(256, 64, 0);
    let run = |value: Value, w: &Weight<'_>| {
        let schedule = Schedule::from_json(&value).expect("a schedule");
        execute(&schedule, &x(1, 256), w).expect_err("a refusal")
    };
    let key = |e: Error| match e.downcast_ref() {
        Some(ScheduleError::Value { key, .. }) => key.clone(),
        other => panic!("{other:?}"),
    };
    let mut value = base();
    value["chunks"] = json!({"boundaries": [128, 256]});
    assert_eq!(key(run(value, &w)), "chunks.boundaries[1]");
    let mut value = base();
    value["weights"] = json!({"form": "unscaled"});
    assert_eq!(key(run(value, &w)), "weights.form");
    let mut value = base();
    value["epilogue"] = json!([{"op": "channel_scale", "type": "float32"},
                               {"op": "round", "type": "float16"}]);
    assert_eq!(key(run(value, &w)), "epilogue");
    let mut value = base();
    value["chunks"] = json!({"striped": {"tile": 96, "columns": 64, "run": 1}});
    assert_eq!(key(run(value, &w)), "chunks.striped.tile");
    let mut value = base();
    value["epilogue"] = json!([{"op": "activation_scale", "type": "float32"},
                               {"op": "round", "type": "float16"}]);
    assert!(matches!(run(value, &w), Error::Missing { .. }));
    // A product of 3 and 11 bits needs rounding: `exact` says which weight.
    let mut value = base();
    value["weights"] = json!({"form": "exact"});
    assert!(matches!(run(value, &w), Error::Value { tensor, .. } if tensor == "weight"));
    let schedule = Schedule::from_json(&base()).expect("a schedule");
    let x = x(1, 255);
    let narrow = schedule.execute(rows_of("x", &x, 255).unwrap(), &w, Extras::default());
    let Err(Error::Shape { tensor, found, expected }) = narrow else { panic!("{narrow:?}") };
    assert_eq!((&*tensor, &found[..], &*expected), ("x", &[1, 255][..], "[1, 256]"));
    let stack = Stack { weights: &[w], expert_of: &[Some(0)], orders: None, places: None };
    let narrow = schedule.execute_stack(rows_of("x", &x, 255).unwrap(), stack, Extras::default());
    assert!(matches!(narrow, Err(Error::Shape { .. })));
    let none = Stack { weights: &[], ..stack };
    let none = schedule.execute_stack(rows_of("x", &x, 255).unwrap(), none, Extras::default());
    assert!(matches!(none, Err(Error::Size { .. })));
}

/// One thread on a single row gives the same bits as several threads on any batch.
#[test]
fn rows_do_not_know_each_other() {
    let (size_k, size_n, rows) = (512, 80, 9);
    let w = weight(size_k, size_n, 3);
    let x = x(rows, size_k);
    let schedule = Schedule::canonical(&w, F16, F16).expect("a schedule");
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool");
    let run = |x: &[u32]| execute(&schedule, x, &w).expect("a product");
    let all = pool(1).install(|| run(&x));
    assert_eq!(pool(5).install(|| run(&x)), all);
    for m in 0..rows {
        let alone = run(&x[m * size_k..][..size_k]);
        assert_eq!(alone, all[m * size_n..][..size_n], "row {m}");
    }
    let turned: Vec<u32> =
        (0..rows).rev().flat_map(|m| &x[m * size_k..][..size_k]).copied().collect();
    let made = run(&turned);
    for m in 0..rows {
        assert_eq!(made[(rows - 1 - m) * size_n..][..size_n], all[m * size_n..][..size_n]);
    }
    // In a stack of experts, each row uses its own matrix.
    let stack = [weight(size_k, size_n, 3), weight(size_k, size_n, 11)];
    let expert_of: Vec<Option<usize>> =
        (0..rows).map(|m| [Some(1), None, Some(0)][m % 3]).collect();
    let stacked = Stack { weights: &stack, expert_of: &expert_of, orders: None, places: None };
    let rows = rows_of("x", &x, size_k).expect("whole rows");
    let made = schedule.execute_stack(rows, stacked, Extras::default()).expect("a product");
    assert_eq!(made.dim(), (expert_of.len(), size_n));
    let other = execute(&schedule, &x, &stack[1]).expect("a product");
    for (m, row) in made.rows().into_iter().enumerate() {
        match expert_of[m] {
            None => assert!(row.iter().all(|&b| b == 0)),
            Some(e) => {
                assert_eq!(row.to_vec(), [&all, &other][e][m * size_n..][..size_n], "row {m}")
            }
        }
    }
}

/// The canonical schedule by its definition, without the executor: dequantize, one chain of
/// instructions per chunk, f32 additions in ascending order, bias, one rounding.
#[test]
fn canonical_is_what_it_says() {
    let (size_k, size_n) = (640, 24);
    let w = weight(size_k, size_n, 5);
    let x = x(3, size_k);
    let schedule = Schedule::canonical(&w, F16, F16).expect("a schedule");
    let made = execute(&schedule, &x, &w).expect("a product");
    // Other strides, the same values.
    let columns =
        rows_of("x", &x, size_k).expect("whole rows").t().as_standard_layout().into_owned();
    let strided = schedule.execute(columns.t(), &w, Extras::default()).expect("a product");
    assert_eq!(into_vec(strided), made);
    let unit = schedule.unit.find().expect("a unit");
    let a = Decoded::new(unit, F16, &x, size_k);
    for (i, &found) in made.iter().enumerate() {
        let (m, n) = (i / size_n, i % size_n);
        let column: Vec<u32> = (0..size_k).map(|k| F16.encode_rne(w.dequantize(k, n))).collect();
        let b = Decoded::new(unit, F16, &column, size_k);
        let mut sum: Option<f32> = None;
        for start in (0..size_k).step_by(256) {
            let range = start..(start + 256).min(size_k);
            let part = f32::from_bits(unit.dot(&a.row(m)[range.clone()], &b.row(0)[range], 0));
            sum = Some(sum.map_or(part, |s| s + part));
        }
        let bias = w.bias.as_ref().expect("a bias").value(0, n) as f32;
        let expected = F16.encode_rne(f64::from(sum.expect("chunks") + bias));
        assert_eq!(found, expected, "({m}, {n})");
    }
}

/// Codes of `unit`'s type that cover its edge cases: all exponents, zeros, subnormals, specials.
fn codes(ty: ScalarType, seed: u32, len: usize, spread: u32, special: bool) -> Vec<u32> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let mask = u32::MAX >> (32 - ty.size_bits());
            let code = match (state >> 3) % 16 {
                0 => 0,
                _ if spread == 0 => state.rotate_left(9) & mask,
                _ => {
                    let e = (state >> 8) % spread;
                    let value =
                        (f64::from(state >> 12 & 0xfff) / 2048.0 - 1.0) * 2f64.powi(-(e as i32));
                    ty.encode_rne(value) & mask
                }
            };
            if special || ty.to_f64(code).is_finite() { code } else { 0 }
        })
        .collect()
}

fn panel_equals_definition(unit: &Unit, spread: u32, special: bool, c: u32, seed: u32) {
    let size_k = unit.size_k * 3;
    let (a_type, b_type) = unit.inputs;
    let a = codes(a_type, seed, size_k, spread, special);
    let b = codes(b_type, seed ^ 0x5bd1_e995, size_k * LANES, spread, special);
    let row = Row::new(unit, &a).expect("whole instructions");
    let panel = Panel::new(unit, size_k, |k, l| b[l * size_k + k]).expect("whole instructions");
    let mut found = [c; LANES];
    unit.accumulate_panel(&row, &panel, 0..size_k, &mut found);
    let a = Decoded::new(unit, a_type, &a, size_k);
    let b = Decoded::new(unit, b_type, &b, size_k);
    for (l, found) in found.iter().enumerate() {
        let expected = unit.dot(a.row(0), b.row(l), c);
        assert_eq!(*found, expected, "{unit:?}, column {l}, c {c:#x}, seed {seed}");
    }
}

/// Sixteen outputs at once equal the outputs one by one, for every unit of the table.
#[test]
fn panels_are_the_definition() {
    for unit in UNITS {
        for seed in 1..40u32 {
            for spread in [0, 3, 12, 40] {
                let c = [0, 0x8000_0000, 0x3fc0_0001, 0x0000_0123, 0xc47a_0000, 0x7f80_0000];
                let c = c[seed as usize % c.len()];
                panel_equals_definition(unit, spread, seed % 7 == 0, c, seed * 977);
            }
        }
    }
}
