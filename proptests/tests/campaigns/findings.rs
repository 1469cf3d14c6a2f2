//! Campaigns over cases: findings, shrinking, kept cases.

use std::collections::BTreeMap;
use std::time::Duration;

use marlinspike::case::Op;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_proptests::campaign::{
    Campaign, CampaignError, Fault, Filter, Judgement, Limit, OutputSpec, Outputs, Summary, Trial,
    keep, kept,
};

/// Symmetric int4 GPTQ without act-order, in f16: the configuration of these tests' kernel.
const GPTQ: &str = "checkpoint_format=gptq,weight_type=uint4b8,dtype=float16,input_dtype=null,\
                    desc_act=false,tensor_parallel.size=null";

fn half_to_f64(bits: u16) -> f64 {
    let (sign, exponent, mantissa) = (bits >> 15, (bits >> 10) & 31, f64::from(bits & 0x3ff));
    let size = match exponent {
        0 => mantissa * 2f64.powi(-24),
        _ => (1024.0 + mantissa) * 2f64.powi(i32::from(exponent) - 25),
    };
    if sign == 1 { -size } else { size }
}

/// The nearest f16 of a number within its normal range, ties to even.
fn half(x: f64) -> u16 {
    let mut best = (f64::INFINITY, 0u16);
    let magnitude = x.abs();
    let sign = if x < 0.0 { 0x8000 } else { 0 };
    // Half of the distance beyond the largest number: the tie rounds to infinity.
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    let (mut low, mut high) = (0u16, 0x7bff);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if half_to_f64(middle) <= magnitude { low = middle } else { high = middle }
    }
    for bits in [low, high] {
        let distance = (half_to_f64(bits) - magnitude).abs();
        if distance < best.0 || distance == best.0 && bits % 2 == 0 {
            best = (distance, bits);
        }
    }
    best.1 | sign
}

/// A product by loops: `zero` is subtracted from codes, `nibble` maps k to the place of its code.
fn product(trial: &Trial, zero: i64, nibble: fn(usize) -> usize) -> Outputs {
    let case = &trial.case;
    let qweight = case.inputs["qweight"].elements::<u32>();
    let (scales, x) = (&case.inputs["scales"], &case.inputs["x"]);
    let [groups, size_n] = scales.dims2().unwrap();
    let [size_m, size_k] = x.dims2().unwrap();
    let (scales, values) = (scales.elements::<u16>(), x.elements::<u16>());
    let bias = case.inputs.get("bias").map(|bias| bias.elements::<u16>().into_owned());
    let mut y = Vec::new();
    for m in 0..size_m {
        for n in 0..size_n {
            let mut sum = bias.as_ref().map_or(0.0, |bias| half_to_f64(bias[n]));
            for k in 0..size_k {
                let code = qweight[k / 8 * size_n + n] >> (4 * nibble(k % 8)) & 15;
                let scale = half_to_f64(scales[k / (size_k / groups) * size_n + n]);
                let weight = (i64::from(code) - zero) as f64 * scale;
                sum += half_to_f64(values[m * size_k + k]) * weight;
            }
            y.push(half(sum));
        }
    }
    let y = Tensor::from_vec("y", DType::F16, vec![size_m, size_n], y).unwrap();
    Outputs::from([("y".to_owned(), y)])
}

fn run(kernel: impl FnMut(&Trial) -> Result<Outputs, Fault>, cases: u64) -> Summary {
    let mut kernel = kernel;
    let campaign = Campaign::new(Op::Linear, 3, Filter::parse(GPTQ).unwrap()).unwrap();
    campaign.run(&mut kernel, &Limit::cases(cases), &mut |_| ()).unwrap()
}

#[test]
fn a_right_kernel_passes_and_covers_its_axes() {
    let mut rows = BTreeMap::<String, u64>::new();
    let summary = run(
        |trial| {
            *rows.entry(trial.case.inputs["x"].shape()[0].to_string()).or_default() += 1;
            Ok(product(trial, 8, |k| k))
        },
        24,
    );
    assert_eq!((summary.passed, summary.failed, summary.unchecked), (24, 0, 0));
    // The rows are drawn for each case.
    assert!(rows.len() > 3 && summary.coverage.axes["size_m"] == rows);
    let group_sizes = &summary.coverage.axes["group_size"];
    assert!(group_sizes.len() > 2 && group_sizes.values().all(|count| *count > 0));
}

/// Every K of the configurations is a multiple of 64, so only another one finds a loop without its remainder.
#[test]
fn sizes_that_no_configuration_has_can_be_set() {
    let keys = serde_json::json!({ "size_k": 80, "schedule": "canonical" });
    let filter = Filter::parse(&format!("{GPTQ},group_size=-1,has_bias=false")).unwrap();
    let campaign = Campaign::new(Op::Linear, 3, filter).unwrap();
    let mut set = campaign.clone().with_set(keys.as_object().unwrap().clone()).unwrap();
    assert_eq!(set.set.keys().collect::<Vec<_>>(), ["schedule"]);
    set.set.clear();
    let mut loops = |trial: &Trial| Ok(product(trial, 8, |k| k));
    let mut whole_tiles = |trial: &Trial| {
        let mut trial = trial.clone();
        let x = &trial.case.inputs["x"];
        let [size_m, size_k] = x.dims2().unwrap();
        let mut values = x.elements::<u16>().into_owned();
        values.chunks_mut(size_k).for_each(|row| row[size_k / 64 * 64..].fill(0));
        let x = Tensor::from_vec("x", DType::F16, vec![size_m, size_k], values).unwrap();
        trial.case.add_input("x", x);
        Ok(product(&trial, 8, |k| k))
    };
    let judge = |campaign: &Campaign, kernel: &mut dyn FnMut(&Trial) -> Result<Outputs, Fault>| {
        let mut kernel = |trial: &Trial| kernel(trial);
        campaign.run(&mut kernel, &Limit::cases(8), &mut |_| ()).unwrap()
    };
    assert_eq!(judge(&campaign, &mut whole_tiles).passed, 8);
    let right = judge(&set, &mut loops);
    assert_eq!((right.passed, right.coverage.axes["size_k"]["80"]), (8, 8));
    let wrong = judge(&set, &mut whole_tiles);
    assert!(wrong.failed > 0 && !wrong.findings.is_empty(), "{wrong:?}");
    // No configuration is left where the groups do not divide K.
    let none = serde_json::json!({ "size_k": 8 });
    let refused = campaign.with_set(none.as_object().unwrap().clone());
    assert!(matches!(refused, Err(CampaignError::Reference(_))), "{refused:?}");
}

#[test]
fn wrong_zero_points_are_named_and_shrunk() {
    let summary = run(|trial| Ok(product(trial, 7, |k| k)), 12);
    let found: Vec<_> = summary.findings.iter().map(|f| f.signature.as_str()).collect();
    assert_eq!(found, ["y: zero-off-by-one"]);
    let finding = &summary.findings[0];
    assert_eq!(finding.cause.as_ref().unwrap().id, "zero-off-by-one");
    let x = &finding.failure.case.inputs["x"];
    assert_eq!(x.shape()[0], 1, "{:?}", finding.minimal);
    let smallest = run(|trial| Ok(product(trial, 8, |k| k)), 1);
    assert_eq!(smallest.failed, 0);
    let size = |key: &str| {
        let prefix = format!("{key}=");
        finding
            .minimal
            .iter()
            .find_map(|p| p.strip_prefix(&prefix))
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    assert!(size("size_k") <= 128 && size("size_n") <= 64, "{:?}", finding.minimal);
    // One row of simple values: all of them ones.
    assert!(x.elements::<u16>().iter().all(|bits| *bits == 0x3c00));
    // The weights, too: every code is the zero point, every scale is one.
    let inputs = &finding.failure.case.inputs;
    assert!(inputs["qweight"].elements::<u32>().iter().all(|word| *word == 0x8888_8888));
    assert!(inputs["scales"].elements::<u16>().iter().all(|bits| *bits == 0x3c00));
}

/// A kernel that reads packed weights fails on shrunk cases for the same reason: they belong to the
/// shrunk inputs.
#[test]
fn reference_outputs_follow_shrunk_inputs() {
    let packed = |trial: &Trial| {
        let mut case = trial.case.clone();
        marlinspike::check::add_outputs(&mut case).unwrap();
        for (name, tensor) in &trial.reference {
            assert_eq!(case.outputs[name], *tensor, "{name}");
        }
        assert!(trial.reference.contains_key("marlin_qweight"));
        Ok(product(trial, 7, |k| k))
    };
    let summary = run(packed, 2);
    assert_eq!(summary.findings[0].signature, "y: zero-off-by-one");
}

/// 8-bit activations are quantized again when x is edited.
#[test]
fn quantized_activations_follow_shrunk_inputs() {
    let filter = Filter::parse("input_dtype=int8,checkpoint_format=gptq").unwrap();
    let campaign = Campaign::new(Op::Linear, 3, filter).unwrap();
    let mut edited = 0;
    let mut zeros = |trial: &Trial| {
        let x = trial.case.inputs["x"].elements::<u16>();
        if x.iter().all(|bits| *bits == x[0]) {
            let codes = trial.case.inputs["a_q"].elements::<i8>();
            assert!(codes.iter().all(|code| *code == 127));
            edited += 1;
        }
        let (wanted, shape) = (&trial.wanted[0], trial.wanted[0].shape.clone().unwrap());
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        let dtype = DType::from_name(&wanted.dtype).unwrap();
        Ok(Outputs::from([("y".to_owned(), Tensor::new("y", dtype, shape, bytes).unwrap())]))
    };
    let summary = campaign.run(&mut zeros, &Limit::cases(1), &mut |_| ()).unwrap();
    assert_eq!(summary.findings.len(), 1);
    assert!(edited > 0);
}

#[test]
fn a_mistake_that_needs_many_rows_keeps_them() {
    let wrong = |trial: &Trial| {
        let rows = trial.case.inputs["x"].shape()[0];
        Ok(product(trial, if rows > 8 { 7 } else { 8 }, |k| k))
    };
    let summary = run(wrong, 40);
    let rows = summary.findings[0].failure.case.inputs["x"].shape()[0];
    assert_eq!(rows, 16);
}

#[test]
fn nibbles_in_the_wrong_order_are_named() {
    let summary = run(|trial| Ok(product(trial, 8, |k| k ^ 1)), 4);
    assert_eq!(summary.findings[0].cause.as_ref().unwrap().id, "nibbles-swapped");
}

#[test]
fn faults_are_findings_and_the_run_goes_on() {
    let mut calls = 0;
    let kernel = |trial: &Trial| {
        calls += 1;
        match trial.case.inputs["x"].shape()[0] {
            1 => Err(Fault::Crashed { detail: "exit code 3".to_owned() }),
            2 => Err(Fault::TimedOut { limit: Duration::from_secs(1) }),
            3 => Err(Fault::Unsupported { reason: "three rows".to_owned() }),
            _ => Ok(product(trial, 8, |k| k)),
        }
    };
    let summary = run(kernel, 40);
    let mut kinds: Vec<_> = summary.findings.iter().map(|f| f.signature.as_str()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["crash", "timeout"]);
    assert!(summary.passed > 0 && summary.skipped > 0 && summary.failed > 1);
}

#[test]
fn absent_and_unknown_outputs_are_findings() {
    let summary = run(|_| Ok(Outputs::new()), 1);
    assert_eq!(summary.findings[0].signature, "unreadable outputs");
    let renamed = |trial: &Trial| {
        let y = product(trial, 8, |k| k).remove("y").unwrap();
        Ok(Outputs::from([("z".to_owned(), y)]))
    };
    assert_eq!(run(renamed, 1).findings[0].signature, "unreadable outputs");
    // A y of the wrong shape is judged and fails.
    let flat = |trial: &Trial| {
        let y = product(trial, 8, |k| k).remove("y").unwrap();
        let y = Tensor::new("y", DType::F16, vec![y.len()], y.bytes().to_vec()).unwrap();
        Ok(Outputs::from([("y".to_owned(), y)]))
    };
    assert!(run(flat, 1).findings[0].failure.report.is_some());
}

/// The judge refuses ids that no expert has; the kernel gave them, so the run goes on.
#[test]
fn outputs_that_cannot_be_judged_are_findings() {
    let mut campaign = Campaign::new(Op::Moe, 1, Filter::default()).unwrap();
    campaign.outputs = ["topk_ids", "topk_weights", "expert_ids", "sorted_token_ids", "y"]
        .map(str::to_owned)
        .into();
    let mut wrong = |trial: &Trial| {
        let tensor = |wanted: &OutputSpec| {
            let shape = wanted.shape.clone().unwrap_or(vec![3]);
            let dtype = DType::from_name(&wanted.dtype).unwrap();
            let bytes = vec![0x7f; shape.iter().product::<usize>() * dtype.bytes()];
            (wanted.name.clone(), Tensor::new(&wanted.name, dtype, shape, bytes).unwrap())
        };
        Ok(trial.wanted.iter().map(tensor).collect())
    };
    let summary = campaign.run(&mut wrong, &Limit::cases(4), &mut |_| ()).unwrap();
    assert_eq!((summary.failed, summary.passed), (4, 0));
    let refused = summary.findings.iter().find(|f| f.signature == "unreadable outputs").unwrap();
    let fault = refused.failure.fault.as_ref().unwrap().to_string();
    assert!(fault.contains("`topk_ids` at [0, 0]: found 2139062143"), "{fault}");
}

#[test]
fn kept_cases_fail_again_until_the_kernel_is_mended() {
    let folder = std::env::temp_dir().join(format!("marlinspike-kept-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let campaign = Campaign::new(Op::Linear, 3, Filter::parse(GPTQ).unwrap()).unwrap();
    assert!(kept(&campaign, &folder).unwrap().is_empty());
    let mut wrong = |trial: &Trial| Ok(product(trial, 7, |k| k));
    let summary = campaign.run(&mut wrong, &Limit::cases(1), &mut |_| ()).unwrap();
    let path = keep(&folder, &summary.findings[0]).unwrap();
    let trials = kept(&campaign, &folder).unwrap();
    assert_eq!(trials.len(), 1);
    assert_eq!(trials[0].0, path);
    let again = campaign.judge(&mut wrong, &trials[0].1).unwrap();
    assert!(matches!(again, Judgement::Wrong(_)));
    let mut right = |trial: &Trial| Ok(product(trial, 8, |k| k));
    let mended = campaign.judge(&mut right, &trials[0].1).unwrap();
    assert!(matches!(mended, Judgement::Pass));
    std::fs::write(folder.join("torn.safetensors"), b"not a case").unwrap();
    assert!(kept(&campaign, &folder).is_err());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn filters_name_what_exists() {
    let refused = |text: &str| match Filter::parse(text)
        .and_then(|filter| Campaign::new(Op::Linear, 1, filter))
    {
        Err(CampaignError::Filter { problem }) => problem,
        _ => panic!("{text} was taken"),
    };
    assert!(refused("colour=red").contains("weight_type"));
    assert!(refused("weight_type=uint5").contains("uint4b8"));
    assert!(refused("weight_type").contains("key=value"));
    let both = "checkpoint_format=awq,weight_type=uint4b8";
    assert!(refused(both).contains("no configuration"));
}

#[test]
fn the_same_seed_draws_the_same_cases() {
    let campaign = |seed| Campaign::new(Op::Moe, seed, Filter::default()).unwrap();
    let bytes = |seed, index| campaign(seed).trial(index).unwrap().to_bytes().unwrap();
    assert_eq!(bytes(5, 3), bytes(5, 3));
    assert_ne!(bytes(5, 3), bytes(6, 3));
    assert_ne!(bytes(5, 3), bytes(5, 4));
}
