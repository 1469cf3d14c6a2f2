//! Wrong shapes are verdicts; sizes that no tensor has are errors before any allocation.

use marlinspike::case::{
    AlignConfig, Case, CaseConfig, CaseError, CheckpointFormat, Limits, LinearConfig, QuantConfig,
    SwizzleConfig,
};
use marlinspike::check::{CaseReport, Declared, Verdict, check_case, check_case_within};
use marlinspike::formats::gptq;
use marlinspike::layouts::flashinfer::ScaleTile;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{Rng, case_of};

fn zeros(dtype: DType, shape: &[usize]) -> Tensor<'static> {
    let len = shape.iter().product::<usize>() * dtype.bytes();
    Tensor::new("", dtype, shape.to_vec(), vec![0; len]).unwrap()
}

fn linear(size_m: usize, size_n: usize, size_k: usize) -> LinearConfig {
    let quant = QuantConfig {
        checkpoint_format: CheckpointFormat::Int(&gptq::FORMAT),
        weight_type: ScalarType::UINT4B8,
        dtype: ScalarType::FLOAT16,
        input_dtype: None,
        group_size: GroupSize::Of(64),
        desc_act: false,
        is_k_full: true,
        has_bias: false,
        tensor_parallel: None,
        convention: None,
    };
    LinearConfig {
        quant,
        size_m,
        size_n,
        size_k,
        scale_factor: None,
        schedule: None,
        quantizer: None,
    }
}

fn golden(name: &str) -> Vec<u8> {
    let manifest = marlinspike_golden::Manifest::load().unwrap();
    let files = manifest.cases().iter().map(|case| manifest.path(&case.file().path));
    let path = files.into_iter().find(|p| p.file_stem().unwrap() == name).expect(name);
    std::fs::read(path).unwrap()
}

fn verdicts(report: &CaseReport) -> Vec<(&str, Verdict)> {
    report.outputs.iter().map(|o| (o.name.as_str(), o.verdict)).collect()
}

/// An act-order rank whose scales are sliced like its rows.
#[test]
fn sharded_scales_of_an_act_order_rank_fail_by_name() {
    let bytes = golden("linear-tp2_0_rank1");
    let right = Case::parse(&bytes).unwrap();
    let before = check_case(&right).unwrap();
    let scales = right.output("marlin_scales").unwrap();
    let &[groups, size_n] = scales.shape() else { panic!("{:?}", scales.shape()) };
    let CaseConfig::Linear(c) = &right.config else { panic!("a linear case") };
    let mine = c.size_k / c.quant.group_size.rows(marlinspike::num::dims::LogicalK(c.size_k));
    assert!(mine < groups, "{mine} of {groups} groups");

    let half = scales.bytes()[..mine * size_n * 2].to_vec();
    let cut = Tensor::new("", DType::F16, vec![mine, size_n], half).unwrap();
    let mut wrong = right.clone();
    wrong.add_output("marlin_scales", cut);
    // Like a file that a kernel's test writes.
    let bytes = wrong.to_bytes().unwrap();
    let report = check_case(&Case::parse(&bytes).unwrap()).unwrap();
    for (output, before) in report.outputs.iter().zip(&before.outputs) {
        assert_eq!(output.name, before.name);
        if output.name != "marlin_scales" {
            assert_eq!(output.verdict, before.verdict, "{}", output.name);
            continue;
        }
        assert_eq!((output.verdict, output.mismatches), (Verdict::Fail, mine * size_n));
        let diagnosis = output.diagnosis.as_ref().unwrap();
        assert_eq!((diagnosis.id.as_str(), diagnosis.unexplained), ("scales-sharded", 0));
        let shapes =
            format!("found F16 [{mine}, {size_n}], expected F16 [{groups}, {size_n}]; the scales");
        assert!(diagnosis.text.starts_with(&shapes), "{}", diagnosis.text);
    }
}

#[test]
fn types_and_shapes_that_do_not_fit_are_said() {
    let case = case_of(CaseConfig::Linear(linear(1, 64, 128)), &mut Rng::new(3)).unwrap();
    let rows = case.output("y").unwrap().shape()[0];
    for (dtype, shape, id) in [
        (DType::BF16, vec![rows, 64], "wrong-dtype"),
        (DType::F16, vec![64, rows + 64], "wrong-shape"),
        (DType::F16, vec![rows * 64], "wrong-shape"),
        (DType::F32, vec![0, 64], "wrong-shape"),
    ] {
        let mut wrong = case.clone();
        wrong.add_output("y", zeros(dtype, &shape));
        let report = check_case(&wrong).unwrap();
        assert_eq!(report.verdict, Verdict::Fail);
        let y = report.outputs.iter().find(|o| o.name == "y").unwrap();
        let diagnosis = y.diagnosis.as_ref().unwrap();
        assert_eq!((y.verdict, diagnosis.id.as_str()), (Verdict::Fail, id));
        let text = format!("found {dtype} {shape:?}, expected F16 [{rows}, 64]");
        assert_eq!(diagnosis.text, text);
        assert!(y.mismatches > 0 && y.mismatches == y.elements);
        let others = verdicts(&report).into_iter().filter(|(name, _)| *name != "y");
        assert!(others.clone().count() >= 2);
        assert!(others.clone().all(|(_, verdict)| verdict == Verdict::Pass), "{report:#?}");
    }
}

#[track_caller]
fn too_large(case: &Case<'_>, limits: Limits) -> String {
    match check_case_within(case, &Declared::default(), &limits) {
        Err(e) if matches!(e.downcast_ref(), Some(CaseError::TooLarge { .. })) => e.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn experts_and_blocks_that_no_tensor_backs_are_errors() {
    let align = |num_experts, block_size| {
        let config = AlignConfig { block_size, num_experts, top_k: 6, ep_size: 1, ep_rank: 0 };
        let mut case = Case::new("", CaseConfig::Align(config), "");
        case.add_input("topk_ids", zeros(DType::I32, &[64, 6]));
        case.add_output("sorted_token_ids", zeros(DType::I32, &[3072]));
        case
    };
    let text = too_large(&align((1 << 31) - 1, 48), Limits::default());
    assert!(text.contains("num_experts 2147483647 takes 68.7 GB of memory"), "{text}");
    assert!(text.contains("the limit is 7"), "{text}");
    let text = too_large(&align(1024, 1 << 24), Limits::default());
    assert!(text.contains("blocks of 16777216"), "{text}");
    let report = check_case(&align(1024, 48)).unwrap();
    assert_eq!(verdicts(&report), [("sorted_token_ids", Verdict::Fail)]);

    // A scale of one byte for each of a million experts, padded to tiles of 512.
    let swizzle = |experts| {
        let config = SwizzleConfig {
            scale_type: ScalarType::FLOAT8_E4M3FN,
            tile: ScaleTile::Rows128,
            num_experts: Some(experts),
            size_n: 1,
            groups: 1,
        };
        let mut case = Case::new("", config.into(), "");
        case.add_input("scale", zeros(DType::F8E4M3, &[experts, 1, 1]));
        case
    };
    let text = too_large(&swizzle(1 << 20), Limits::default());
    assert!(text.contains("`swizzle_blockscale` with their padding"), "{text}");
    assert_eq!(check_case(&swizzle(64)).unwrap().outputs.len(), 0);
}

#[test]
fn the_work_of_products_has_a_limit() {
    let case = case_of(CaseConfig::Linear(linear(1, 64, 128)), &mut Rng::new(3)).unwrap();
    let rows = case.output("y").unwrap().shape()[0];
    let work = (rows * 64 * 128) as u64;
    let text = too_large(&case, Limits { work: work - 1 });
    let sizes = format!("size_m {rows}, size_n 64, size_k 128 takes {work} multiply-adds");
    assert!(text.contains(&sizes) && text.contains("--max-work"), "{text}");
    let within = check_case_within(&case, &Declared::default(), &Limits { work });
    assert_eq!(within.unwrap().verdict, Verdict::Pass);
    // Without the product, its size needs no memory.
    let mut layouts = case;
    layouts.outputs.remove("y");
    assert!(check_case_within(&layouts, &Declared::default(), &Limits { work: 0 }).is_ok());
}

/// A projection of Mixtral and its layer, at their real sizes.
#[test]
fn real_sizes_are_within_the_limits() {
    let (m, n, k) = (64, 28672, 4096);
    let mut case = Case::new("", CaseConfig::Linear(linear(m, n, k)), "");
    case.add_input("qweight", zeros(DType::I32, &[k / 8, n]));
    case.add_output("y", zeros(DType::F16, &[m, n]));
    assert_eq!(Limits::default().check(&case), Ok(()));
    assert_eq!(Limits::memory(0), 64 << 20);
    assert_eq!(Limits::memory(u64::MAX), u64::MAX);
}
