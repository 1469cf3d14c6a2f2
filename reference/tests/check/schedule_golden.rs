//! Products that an H200 computed with vLLM's Marlin kernel, bit for bit.
//!
//! The kernel's schedule is stated here as data, by one rule for all cases: tiles of 128 k × 64
//! columns, shared by four warps along k; with int8 activations 64 k × 128 columns and two warps;
//! tiles distributed over 132 multiprocessors in equal runs. The tiles, the warps and the place of
//! the int8 scale were chosen to reproduce these outputs; `docs/src/internals/tensor-cores.md`
//! states the evidence.

use marlinspike::case::{
    Case, CaseConfig, CaseError, CheckpointFormat, LinearConfig, ScheduleChoice,
};
use marlinspike::check::{OutputReport, Strength, Verdict, check_case};
use marlinspike::formats::nvfp4;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::schedule::{Launches, Schedule, ScheduleError};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_golden::Manifest;
use serde_json::{Value, json};

const MULTIPROCESSORS: usize = 132;

/// The kernel's schedule for the product of `c`.
fn marlin(c: &LinearConfig) -> Value {
    let dtype = c.quant.dtype.name();
    let int8 = c.quant.input_dtype == Some(ScalarType::INT8);
    let (ty, accumulator, size_k) =
        if int8 { ("int8", "int32", 32) } else { (dtype, "float32", 16) };
    let (tile, columns, warps) = if int8 { (64, 128, 2) } else { (128, 64, 4) };
    let tiles = c.size_k / tile * (c.size_n / columns) * c.size_m.div_ceil(64);
    let channel_wise = c.quant.group_size == GroupSize::Channel;
    let mut epilogue = vec![
        json!({"op": "global_scale", "type": "float32"}),
        json!({"op": "round", "type": dtype}),
    ];
    if channel_wise && !int8 {
        epilogue.push(json!({"op": "channel_scale", "type": dtype}));
    }
    epilogue.push(json!({"op": "bias", "type": dtype}));
    let mut schedule = json!({
        "unit": {
            "architecture": "hopper", "instruction": "mma", "a": ty, "b": ty,
            "accumulator": accumulator, "size_k": size_k,
        },
        "weights": {"form": if int8 { "unscaled" } else { "rounded" }},
        "rows": "by_group",
        "chunks": {"striped": {
            "tile": tile, "columns": columns, "run": tiles.div_ceil(MULTIPROCESSORS), "rows": 64,
        }},
        "stripes": {"tile": tile, "warps": warps, "sum": {"order": "halving"}},
        "chunk_sum": {"order": "descending"},
        "epilogue": epilogue,
    });
    if int8 {
        let scale = if channel_wise { "one" } else { "int16" };
        let mut steps = vec![json!({"op": "activation_scale", "type": "float32"})];
        if channel_wise {
            steps.push(json!({"op": "channel_scale", "type": "float32"}));
        }
        schedule["chunk_steps"] = steps.into();
        schedule["group_sum"] = json!({"scale": scale, "multiply_add": "fused"});
    }
    schedule
}

fn linear<'c>(case: &'c mut Case<'_>) -> &'c mut LinearConfig {
    match &mut case.config {
        CaseConfig::Linear(c) => c,
        other => panic!("{:?}", other.op()),
    }
}

fn declare(case: &mut Case<'_>, schedule: &Value) {
    let schedule = Schedule::from_json(schedule).expect("a schedule");
    linear(case).schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
}

fn judged(case: &Case<'_>) -> OutputReport {
    let report = check_case(case).expect("inputs that can be used");
    report.outputs.into_iter().find(|o| o.name == "y").expect("y")
}

/// Calls `with` for every case of upstream's operator whose rank holds the whole matrix.
fn each_case(mut with: impl FnMut(&str, Case<'_>)) {
    let golden = Manifest::load().expect("the golden manifest");
    for entry in golden.cases().iter().filter(|entry| entry.producer == "vllm") {
        let bytes = std::fs::read(golden.path(&entry.path)).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        let CaseConfig::Linear(c) = &case.config else { continue };
        if c.quant.tensor_parallel.is_none() && case.output("y").is_some() {
            with(&entry.path, case);
        }
    }
}

#[test]
fn every_product_of_the_gpu_is_reproduced() {
    let (mut cases, mut outputs) = (0, 0);
    each_case(|path, mut case| {
        let schedule = marlin(linear(&mut case));
        declare(&mut case, &schedule);
        let y = judged(&case);
        assert_eq!(y.verdict, Verdict::Pass, "{path}: {y:?}");
        assert_eq!((y.mismatches, y.equal_bits, y.max_ulp), (0, Some(1.0), Some(0.0)), "{path}");
        cases += 1;
        outputs += y.elements;
    });
    assert!(cases >= 18 && outputs > 120_000, "{cases} cases, {outputs} outputs");
}

/// A weight of the case's shape, types and groups with zero codes; the choice of tiles reads no
/// codes.
fn stand_in(c: &LinearConfig) -> Weight<'static> {
    let shape = Shape::new(c.size_k, c.size_n);
    let groups = match c.quant.group_size {
        GroupSize::Channel => 1,
        GroupSize::Of(g) => c.size_k / g,
    };
    let nvfp4 = c.quant.checkpoint_format == CheckpointFormat::Block(&nvfp4::FORMAT);
    let ty = c.quant.weight_type;
    let ones = TableData::B16(vec![0x3c00; groups * c.size_n]);
    Weight {
        name: "stand-in".to_owned(),
        ty,
        codes: Codes::from_fn(ty.size_bits(), shape, |_, _| 0).expect("codes"),
        scales: Table::new(ScalarType::FLOAT16, groups, c.size_n, ones).expect("scales"),
        zeros: None,
        groups: Groups::Uniform(c.quant.group_size),
        global_scale: nvfp4.then_some(1.0),
        bias: None,
    }
}

/// The rule of upstream's host code and the schedule of its kernel, from the library.
#[test]
fn the_library_picks_the_launch() {
    let mut cases = 0;
    each_case(|path, mut case| {
        let c = linear(&mut case);
        let input = c.quant.input_dtype.unwrap_or(c.quant.dtype);
        let weight = stand_in(c);
        let launches =
            Launches::new(&weight, c.quant.dtype, input, c.size_m, MULTIPROCESSORS).expect(path);
        // A case declares one schedule for all rows.
        let [launch] = launches.all() else { return };
        declare(&mut case, &launch.schedule.to_json());
        let y = judged(&case);
        assert_eq!((y.verdict, y.mismatches), (Verdict::Pass, 0), "{path}: {y:?}");
        cases += 1;
    });
    assert!(cases >= 17, "{cases} cases");
}

/// The output with some of its bits changed.
fn with_y(case: &mut Case<'_>, change: impl FnOnce(&mut [u16])) {
    let y = case.output("y").expect("y");
    let (dtype, shape) = (y.dtype(), y.shape().to_vec());
    let mut bits = y.elements::<u16>().into_owned();
    change(&mut bits);
    case.add_output("y", Tensor::from_vec("y", dtype, shape, bits).expect("the same shape"));
}

#[test]
fn one_changed_bit_is_found() {
    let mut cases = 0;
    each_case(|path, mut case| {
        let schedule = marlin(linear(&mut case));
        declare(&mut case, &schedule);
        let size_n = linear(&mut case).size_n;
        let (m, n) = (linear(&mut case).size_m - 1, 65);
        with_y(&mut case, |bits| bits[m * size_n + n] ^= 1);
        let y = judged(&case);
        assert_eq!((y.verdict, y.mismatches, y.max_ulp), (Verdict::Fail, 1, Some(1.0)), "{path}");
        assert_eq!(y.first_mismatch.expect("a place").index, [m, n], "{path}");
        // One element may have many causes; all are in its column, or in the order of sums.
        let known = y.diagnosis.filter(|d| d.id != "within-bound" || d.strength != Strength::Place);
        assert!(known.as_ref().is_none_or(|d| d.text.contains("n 65")), "{path}: {known:?}");
        cases += 1;
    });
    assert!(cases >= 18, "{cases} cases");
}

#[test]
fn another_schedule_differs_and_is_named() {
    let mut named = std::collections::BTreeMap::<String, usize>::new();
    each_case(|path, mut case| {
        let mut schedule = marlin(linear(&mut case));
        // A wrong declaration: warps and blocks are added in ascending order.
        schedule["stripes"]["sum"]["order"] = "ascending".into();
        declare(&mut case, &schedule);
        let y = judged(&case);
        if y.verdict == Verdict::Fail {
            let diagnosis = y.diagnosis.unwrap_or_else(|| panic!("{path}: no diagnosis"));
            assert_eq!(diagnosis.unexplained, 0, "{path}");
            *named.entry(diagnosis.id).or_default() += 1;
        }
    });
    // With two warps, both orders are the same; with four warps, few sums differ.
    assert!(named["schedule-warp-order"] >= 3, "{named:?}");
}

#[test]
fn a_case_keeps_its_schedule() {
    each_case(|path, mut case| {
        let schedule = marlin(linear(&mut case));
        for text in [schedule.to_string(), "\"canonical\"".to_owned()] {
            let value: Value = serde_json::from_str(&text).expect("JSON");
            let mut config = case.config.to_json();
            config.insert("schedule".to_owned(), value);
            case.config = CaseConfig::from_json(case.op, &config).expect("a config");
            let bytes = case.to_bytes().expect("a file");
            assert_eq!(Case::parse(&bytes).expect("a case").config, case.config, "{path}");
        }
        let refuse = |schedule: Value| {
            let mut config = case.config.to_json();
            config.insert("schedule".to_owned(), schedule);
            CaseConfig::from_json(case.op, &config).expect_err("a refusal")
        };
        let mut wrong = schedule.clone();
        wrong["chunk_sum"]["order"] = "sideways".into();
        let key = |e: CaseError| match e {
            CaseError::Schedule { key, error } => match *error {
                ScheduleError::Json { key: inner, .. } => (key, inner),
                other => panic!("{other}"),
            },
            other => panic!("{other}"),
        };
        let expected = ("schedule".to_owned(), "chunk_sum.order".to_owned());
        assert_eq!(key(refuse(wrong)), expected, "{path}");
        for other in ["canonic".into(), json!(1), json!([])] {
            assert!(matches!(refuse(other), CaseError::ConfigValue { .. }), "{path}");
        }
    });
}

/// A kernel that follows the canonical schedule passes; the GPU's outputs, which follow another,
/// are distinguished wherever a bit differs.
#[test]
fn canonical_by_name() {
    let (mut same, mut differ) = (0, 0);
    each_case(|path, mut case| {
        linear(&mut case).schedule = Some(ScheduleChoice::Canonical);
        let y = judged(&case);
        match y.verdict {
            Verdict::Pass => same += 1,
            _ => {
                differ += 1;
                let diagnosis = y.diagnosis.unwrap_or_else(|| panic!("{path}: no diagnosis"));
                assert_eq!(diagnosis.unexplained, 0, "{path}: {diagnosis:?}");
            }
        }
    });
    assert!(same >= 8 && differ >= 8, "{same} equal, {differ} not");
}
