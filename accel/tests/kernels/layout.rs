//! Operations that move or recode elements, on a GPU, against the reference.

use crate::common;

use crate::common::{Law, Random};
use marlinspike::formats::awq;
use marlinspike::layouts::marlin::{
    Activations, ScalePermutation, WeightLayout, int4_to_fp8_asymmetric, int4_to_fp8_symmetric,
};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::Shape;
use marlinspike::weight::Codes;
use marlinspike_accel::ops::{
    awq_marlin_repack, marlin_int4_fp8_preprocess, marlin_permute_scales,
};

#[test]
fn awq_repack_equals_the_layout_of_its_codes() {
    let Some(device) = common::device_or_skip("awq_repack_equals_the_layout_of_its_codes") else {
        return;
    };
    let mut law = Law::new("awq_marlin_repack");
    let mut random = Random(0xA5A5_0001_2345_6789);
    for (size_k, size_n) in [(32, 64), (128, 192), (512, 1024)] {
        for bits in [4usize, 8] {
            let (pack, shape) = (32 / bits, Shape::new(size_k, size_n));
            let order = awq::column_order(bits as u32);
            let qweight = random.words(size_k * size_n / pack);
            let codes = Codes::from_fn(bits as u32, shape, |k, n| {
                let p = order.iter().position(|&column| column == n % pack).unwrap();
                let word = qweight[k * (size_n / pack) + n / pack];
                (word >> (p * bits)) as u8 & (0xff >> (8 - bits))
            })
            .unwrap();
            for activations in [Activations::Bits16, Activations::Bits8] {
                let layout = WeightLayout::new(shape, bits as u32, activations).unwrap();
                let wanted = into_vec(layout.pack(&codes, None).unwrap());
                let eight = activations == Activations::Bits8;
                let found =
                    awq_marlin_repack(&device, &qweight, size_k, size_n, bits as u32, eight);
                law.equal(
                    &format!("{shape}, {bits} bits, {activations:?}"),
                    &found.unwrap(),
                    &wanted,
                );
            }
        }
    }
    law.held();
}

#[test]
fn scales_are_permuted_as_the_layout_says() {
    let Some(device) = common::device_or_skip("scales_are_permuted_as_the_layout_says") else {
        return;
    };
    let mut law = Law::new("marlin_permute_scales");
    let mut random = Random(0xA5A5_0002_2345_6789);
    for (rows, size_n) in [(1, 64), (3, 192), (32, 4096)] {
        let scales: Vec<u16> = (0..rows * size_n).map(|_| random.next() as u16).collect();
        for permutation in [ScalePermutation::Grouped, ScalePermutation::Single] {
            let columns = permutation.columns();
            let run = columns.len();
            let wanted: Vec<u16> =
                (0..scales.len()).map(|i| scales[i / run * run + columns[i % run]]).collect();
            let found = marlin_permute_scales(&device, &scales, size_n, permutation).unwrap();
            law.equal(&format!("[{rows}, {size_n}], {permutation:?}"), &found, &wanted);
        }
    }
    law.held();
}

#[test]
fn int4_codes_are_rewritten_for_fp8() {
    let Some(device) = common::device_or_skip("int4_codes_are_rewritten_for_fp8") else { return };
    let mut law = Law::new("marlin_int4_fp8_preprocess");
    let mut random = Random(0xA5A5_0003_2345_6789);
    for (rows, groups, words) in [(16, 1, 8), (128, 4, 24), (1024, 8, 513)] {
        let qweight = random.words(rows * words);
        let qzeros = random.words(groups * words);
        let found = marlin_int4_fp8_preprocess(&device, &qweight, None, words).unwrap();
        law.equal("without zero points", &found, &int4_to_fp8_symmetric(&qweight));
        let found = marlin_int4_fp8_preprocess(&device, &qweight, Some(&qzeros), words).unwrap();
        let rows = |name, v| rows_of(name, v, words).unwrap();
        let wanted = int4_to_fp8_asymmetric(rows("q", &qweight[..]), rows("z", &qzeros[..]));
        let wanted = into_vec(wanted.unwrap());
        law.equal("with zero points", &found, &wanted);
    }
    law.held();
}
