//! Golden cases with outputs that plain index arithmetic makes wrong in known ways: the check must
//! fail, count the elements, and name the place and the cause.

use marlinspike::case::Case;
use marlinspike::check::{CaseReport, OutputReport, Verdict, check_case};
use marlinspike::num::tensor::Tensor;
use marlinspike_golden::Manifest;

/// A golden case file by the end of its path.
fn golden(name: &str) -> Vec<u8> {
    let golden = Manifest::load().expect("the golden manifest");
    let file = format!("{name}.safetensors");
    let entry = golden
        .cases()
        .iter()
        .find(|c| c.path.rsplit('/').next() == Some(file.as_str()))
        .unwrap_or_else(|| panic!("no golden case {name}"));
    std::fs::read(golden.path(&entry.path)).expect("a golden file")
}

/// `case` with output `name` replaced by `change` of its 16 or 32-bit elements.
fn with_output(
    case: &mut Case<'_>,
    name: &str,
    change: impl FnOnce(Vec<u32>, &[usize]) -> Vec<u32>,
) {
    let tensor = case.output(name).expect("an output").clone();
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let values: Vec<u32> = match dtype.bytes() {
        1 => tensor.elements::<u8>().iter().map(|&x| x.into()).collect(),
        2 => tensor.elements::<u16>().iter().map(|&x| x.into()).collect(),
        _ => tensor.elements::<u32>().into_owned(),
    };
    let changed = change(values, &shape);
    let bytes: Vec<u8> =
        changed.iter().flat_map(|x| x.to_le_bytes()[..dtype.bytes()].to_vec()).collect();
    case.add_output(name, Tensor::new(name, dtype, shape, bytes).expect("a tensor"));
}

fn report<'r>(report: &'r CaseReport, name: &str) -> &'r OutputReport {
    report.outputs.iter().find(|o| o.name == name).expect("a report of the output")
}

/// Fails unless the changed output `name` is diagnosed as `id`, which explains every element.
fn expect_diagnosis(
    case_name: &str,
    name: &str,
    id: &str,
    change: impl FnOnce(Vec<u32>, &[usize]) -> Vec<u32>,
) -> OutputReport {
    let bytes = golden(case_name);
    let mut case = Case::parse(&bytes).expect("a case");
    with_output(&mut case, name, change);
    let result = check_case(&case).expect("a report");
    assert_eq!(result.verdict, Verdict::Fail);
    let output = report(&result, name).clone();
    assert_eq!(output.verdict, Verdict::Fail, "{case_name} {name}");
    let diagnosis = output.diagnosis.clone().unwrap_or_else(|| panic!("{id}: no diagnosis"));
    assert_eq!(diagnosis.id, id, "{diagnosis:?}");
    assert_eq!(diagnosis.unexplained, 0, "{diagnosis:?}");
    // There must be no other diagnosis.
    for other in result.outputs.iter().filter(|o| o.name != name) {
        assert_ne!(other.verdict, Verdict::Fail, "{} with a wrong {name}", other.name);
    }
    output
}

/// Permutes columns inside runs: position p gets position `order(p)`.
fn columns(
    run: usize,
    order: impl Fn(usize) -> usize,
) -> impl FnOnce(Vec<u32>, &[usize]) -> Vec<u32> {
    move |v, _| {
        v.chunks(run).flat_map(|c| (0..run).map(|p| c[order(p)]).collect::<Vec<_>>()).collect()
    }
}

/// Permutes the nibbles of each word: position p gets position `order[p]`.
fn nibbles(order: [u32; 8]) -> impl FnOnce(Vec<u32>, &[usize]) -> Vec<u32> {
    move |v, _| {
        v.iter()
            .map(|w| (0..8).map(|p| (w >> (4 * order[p as usize]) & 15) << (4 * p)).sum())
            .collect()
    }
}

fn grouped(p: usize) -> usize {
    p % 8 * 8 + p / 8
}

fn single(p: usize) -> usize {
    2 * (p / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8]
}

fn inverse(perm: impl Fn(usize) -> usize, len: usize) -> Vec<usize> {
    let mut inverse = vec![0; len];
    for p in 0..len {
        inverse[perm(p)] = p;
    }
    inverse
}

#[test]
fn one_nibble_is_found_and_placed() {
    let bytes = golden("linear-f16_u4b8_g128_act0");
    let mut case = Case::parse(&bytes).expect("a case");
    // Row 3 of the packed tensor (tile row 3), word 200, nibble 5.
    with_output(&mut case, "marlin_qweight", |mut v, shape| {
        assert_eq!(shape, [16, 384]);
        v[3 * 384 + 200] ^= 1 << 20;
        v
    });
    let result = check_case(&case).expect("a report");
    let output = report(&result, "marlin_qweight");
    assert_eq!((output.verdict, output.mismatches), (Verdict::Fail, 1));
    assert_eq!(output.elements, 256 * 192);
    let first = output.first_mismatch.as_ref().expect("a place");
    assert_eq!(first.index, [3, 200]);
    assert_eq!((first.bit, first.width), (20, 4));
    // Word 200 is word 72 of tile 1: lane 18, 16-column step 0; nibble 5 holds value 3 of the
    // order 0,2,4,6,1,3,5,7: block 0, row 9 of lane 18's rows 2·(18 mod 4) + {0, 1, 8, 9}.
    let fragment = first.fragment.expect("a fragment");
    assert_eq!((fragment.tile_k, fragment.tile_n, fragment.lane), (3, 1, 18));
    assert_eq!((fragment.mma_n, fragment.register, fragment.part), (0, 1, 1));
    assert_eq!((first.k, first.n), (Some(3 * 16 + 2 * 2 + 9), Some(64 + 18 / 4)));
    let diagnosis = output.diagnosis.as_ref().expect("a diagnosis");
    assert_eq!(diagnosis.id, "confined");
    assert!(diagnosis.text.contains("k 61, n 68"), "{}", diagnosis.text);
    let picture = output.picture.as_ref().expect("a picture");
    assert_eq!(picture.planes[0].1.counts.iter().sum::<u32>(), 1);
    assert_eq!(picture.buffer.counts.iter().sum::<u32>(), 1);
}

#[test]
fn swapped_scale_columns_are_named() {
    // Columns 5 and 70 of [2, 192] grouped scales, at their packed places.
    let place = |n: usize| n / 64 * 64 + (0..64).find(|&p| grouped(p) == n % 64).unwrap();
    let output = expect_diagnosis(
        "linear-f16_u4b8_g128_act0",
        "marlin_scales",
        "columns-moved",
        |mut v, shape| {
            assert_eq!(shape, [2, 192]);
            for g in 0..2 {
                v.swap(g * 192 + place(5), g * 192 + place(70));
            }
            v
        },
    );
    let text = output.diagnosis.expect("a diagnosis").text;
    assert!(text.contains("5 and 70 are swapped"), "{text}");
}

#[test]
fn swapped_experts_are_named() {
    let name = "moe-top1_f16_u4";
    let output = expect_diagnosis(name, "w2_marlin_scales", "experts-moved", |v, shape| {
        let per = shape[1] * shape[2];
        [&v[per..2 * per], &v[..per], &v[2 * per..]].concat()
    });
    let text = output.diagnosis.expect("a diagnosis").text;
    assert!(text.contains("0 and 1 are swapped"), "{text}");
}

#[test]
fn scale_permutations_are_told_apart() {
    let (case, name) = ("linear-f16_u4b8_g128_act0", "marlin_scales");
    let undo = inverse(grouped, 64);
    expect_diagnosis(case, name, "scales-not-permuted", columns(64, |p| undo[p]));
    let undo = inverse(grouped, 64);
    let other = columns(64, move |p| undo[p / 32 * 32 + single(p % 32)]);
    expect_diagnosis(case, name, "scales-other-permutation", other);

    let case = "linear-f16_u4b8_int8act_g-1";
    let undo = inverse(single, 32);
    expect_diagnosis(case, name, "scales-not-permuted", columns(32, |p| undo[p]));

    // 8-bit scales: the reordering in fours makes the order differ from its inverse.
    let case = "linear-f16_nvfp4";
    let quads = |p: usize| grouped(p / 4 * 4 + [0, 2, 1, 3][p % 4]);
    let undo = inverse(quads, 64);
    expect_diagnosis(case, name, "scales-not-permuted", columns(64, |p| undo[p]));
    expect_diagnosis(case, name, "scales-permuted-twice", columns(64, quads));
    let undo = inverse(quads, 64);
    expect_diagnosis(case, name, "scales-inverse-permutation", columns(64, |p| undo[undo[p]]));
    let in_fours = columns(4, |p| [0, 2, 1, 3][p]);
    expect_diagnosis(case, name, "scales-quads", in_fours);
}

#[test]
fn word_order_and_nibble_order_are_told_apart() {
    let (case, name) = ("linear-f16_u4b8_g128_act0", "marlin_qweight");
    expect_diagnosis(case, name, "word-order-plain", nibbles([0, 4, 1, 5, 2, 6, 3, 7]));
    expect_diagnosis(case, name, "word-order-inverse", nibbles([0, 2, 4, 6, 1, 3, 5, 7]));
    // Even k in the high nibble: k and k ^ 1 exchanged, which inside a lane's eight values
    // exchanges positions 0..4 with 4..8 of the packed word.
    let swapped = nibbles([4, 5, 6, 7, 0, 1, 2, 3]);
    expect_diagnosis(case, name, "nibble-order", swapped);
    let flip: fn(Vec<u32>, &[usize]) -> Vec<u32> =
        |v, _| v.iter().map(|x| x ^ 0x8888_8888).collect();
    expect_diagnosis(case, name, "sign-bit", flip);
}

#[test]
fn halves_and_gate_up_are_told_apart() {
    let swap = |v: Vec<u32>, shape: &[usize]| {
        let cols = *shape.last().unwrap();
        v.chunks(cols).flat_map(|r| [&r[cols / 2..], &r[..cols / 2]].concat()).collect::<Vec<_>>()
    };
    let moe = "moe-top1_f16_u4";
    expect_diagnosis(moe, "w13_marlin_qweight", "gate-up-swapped", swap);
    expect_diagnosis(moe, "w13_marlin_scales", "gate-up-swapped", swap);
    expect_diagnosis(moe, "w2_marlin_scales", "halves-swapped", swap);
}

#[test]
fn zero_points_off_by_one_are_told_apart() {
    let (case, name) = ("linear-f16_awq_u4_g64", "marlin_zeros");
    let add = |by: u32| {
        move |v: Vec<u32>, _: &[usize]| {
            v.iter()
                .map(|w| (0..8).map(|p| (((w >> (4 * p)) + by) & 15) << (4 * p)).sum())
                .collect()
        }
    };
    expect_diagnosis(case, name, "zeros-plus-one", add(1));
    expect_diagnosis(case, name, "zeros-minus-one", add(15));
    expect_diagnosis(case, name, "word-order-plain", nibbles([0, 4, 1, 5, 2, 6, 3, 7]));
}

#[test]
fn bias_and_sort_and_globals_are_told_apart() {
    let undo = inverse(single, 32);
    expect_diagnosis("linear-f16_u4b8_g128_act0", "marlin_bias", "bias-not-permuted", {
        columns(32, |p| undo[p])
    });
    let case = "linear-f16_u4b8_g32_act1";
    expect_diagnosis(case, "sorted_g_idx", "g-idx-unsorted", |_, _| {
        let bytes = golden(case);
        let case = Case::parse(&bytes).expect("a case");
        case.input("g_idx").expect("g_idx").elements::<u32>().into_owned()
    });
    expect_diagnosis("linear-f16_nvfp4", "marlin_global_scale", "global-scale-raw", |v, _| {
        v.iter().map(|&x| (f32::from_bits(x) / 128.0).to_bits()).collect()
    });
    let case = "linear-bf16_u4b8_int8act_g64";
    expect_diagnosis(case, "input_global_scale", "input-global-scale-max", |v, _| {
        v.iter().map(|&x| (f32::from_bits(x) * 4096.0).to_bits()).collect()
    });
}

#[test]
fn a_wrong_sort_is_one_error_not_three() {
    let bytes = golden("linear-f16_u4b8_g32_act1");
    let mut case = Case::parse(&bytes).expect("a case");
    with_output(&mut case, "g_idx_sort_indices", |v, _| {
        let mut inverse = vec![0; v.len()];
        v.iter().enumerate().for_each(|(i, &p)| inverse[p as usize] = i as u32);
        inverse
    });
    let result = check_case(&case).expect("a report");
    let sort = report(&result, "g_idx_sort_indices");
    assert_eq!(sort.verdict, Verdict::Fail);
    assert!(sort.diagnosis.is_some());
    assert_eq!(report(&result, "sorted_g_idx").verdict, Verdict::Pass);
}

#[test]
fn another_valid_sort_is_followed() {
    let bytes = golden("linear-f16_u4b8_g32_act1");
    let mut case = Case::parse(&bytes).expect("a case");
    let g_idx = case.input("g_idx").expect("g_idx").elements::<u32>().into_owned();
    // Ties in descending row order: valid, and not the stable order.
    with_output(&mut case, "g_idx_sort_indices", |v, _| {
        let mut perm: Vec<u32> = (0..v.len() as u32).rev().collect();
        perm.sort_by_key(|&k| g_idx[k as usize]);
        perm
    });
    let result = check_case(&case).expect("a report");
    assert_eq!(report(&result, "g_idx_sort_indices").verdict, Verdict::Pass);
    assert!(report(&result, "g_idx_sort_indices").note.is_some());
    // The weight was packed by the stable order, so it no longer fits the stated one.
    let weight = report(&result, "marlin_qweight");
    assert_eq!(weight.verdict, Verdict::Fail);
    assert_eq!(
        weight.diagnosis.as_ref().map(|d| (d.id.as_str(), d.unexplained)),
        Some(("act-order-stable", 0))
    );
}

#[test]
fn outputs_without_a_recomputation_keep_a_case_from_passing() {
    let bytes = golden("linear-f16_u4b8_g128_act0");
    let mut case = Case::parse(&bytes).expect("a case");
    case.outputs.retain(|name, _| name.starts_with("marlin_"));
    assert_eq!(check_case(&case).expect("a report").verdict, Verdict::Pass);
    case.outputs.clear();
    assert_eq!(check_case(&case).expect("a report").verdict, Verdict::Unchecked);
}
