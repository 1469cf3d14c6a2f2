//! DeepGEMM's scales and FlashInfer's experts of FP8 blocks, against plain loops and numpy.

use marlinspike::Error;
use marlinspike::layouts::Layout;
use marlinspike::layouts::deepgemm::{MnMajorScales, ScaleForm, repeat_blocks};
use marlinspike::layouts::flashinfer::{Fp8BlockBackend, Fp8BlockExpert, Projection};
use marlinspike::num::dims::Shape;
use marlinspike::num::element::E4m3fn;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{ceil_to_ue8m0, per_block_fp8, requantize_ue8m0};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Table, TableData};
use ndarray::Array2;

const F32: ScalarType = ScalarType::FLOAT32;

fn table(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Table {
    let bits = (0..rows * cols).map(|i| value(i / cols, i % cols).to_bits()).collect();
    Table::new(F32, rows, cols, TableData::B32(bits)).unwrap()
}

/// 2^-20 to 2^20.
fn power(group: usize, row: usize) -> f32 {
    f32::from_bits((107 + (group * 7 + row * 3) as u32 % 41) << 23)
}

#[test]
fn scales_are_mn_major_and_aligned() {
    for (groups, mn) in [(1, 1), (3, 4), (4, 5), (5, 7), (9, 130)] {
        let scales = table(groups, mn, power);
        let padded = mn.div_ceil(4) * 4;
        // By hand: `[groups, padded]`, and bytes `[⌈groups / 4⌉, padded, 4]`.
        let mut plain = vec![0u32; groups * padded];
        let mut bytes = vec![0u8; groups.div_ceil(4) * padded * 4];
        for group in 0..groups {
            for row in 0..mn {
                let bits = power(group, row).to_bits();
                plain[group * padded + row] = bits;
                bytes[(group / 4 * padded + row) * 4 + group % 4] = (bits >> 23) as u8;
            }
        }
        let words = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap());
        let packed: Vec<u32> = bytes.chunks_exact(4).map(words).collect();
        for (form, expected) in [(ScaleForm::Float32, plain), (ScaleForm::PackedUe8m0, packed)] {
            let layout = MnMajorScales::new(groups, mn, form).unwrap();
            assert_eq!(layout.pack(&scales).unwrap(), expected, "{form:?} {groups} {mn}");
            assert_eq!(layout.unpack(&expected).unwrap(), scales, "{form:?} {groups} {mn}");
            let width = layout.offset(0, 0).width;
            for element in 0..layout.packed_len() {
                for bit in (0..32).step_by(width as usize) {
                    let place = layout.locate(element, bit);
                    if place.row < groups && place.col < mn {
                        let slot = layout.offset(place.row, place.col);
                        assert_eq!((slot.element, slot.bit), (element, bit));
                    }
                }
            }
        }
    }
}

#[test]
fn what_ue8m0_cannot_hold_is_refused() {
    let layout = MnMajorScales::new(2, 3, ScaleForm::PackedUe8m0).unwrap();
    for bad in [0.0, 3.0, -2.0, f32::INFINITY, f32::NAN, f32::from_bits(1 << 22)] {
        let scales = table(2, 3, |g, r| if (g, r) == (1, 2) { bad } else { 1.0 });
        let error = layout.pack(&scales).unwrap_err();
        assert!(matches!(error, Error::Value { .. }), "{bad}: {error}");
        assert!(error.to_string().contains("[1, 2]"), "{error}");
    }
    assert!(matches!(layout.unpack(&[0; 4]), Err(Error::Value { .. })));
    assert!(matches!(layout.unpack(&[0; 5]), Err(Error::Shape { .. })));
    assert!(matches!(MnMajorScales::new(0, 3, ScaleForm::Float32), Err(Error::Size { .. })));
    let huge = MnMajorScales::new(usize::MAX / 8, 8, ScaleForm::Float32);
    assert!(matches!(huge, Err(Error::Size { .. })));
}

#[test]
fn a_blocks_scale_is_repeated_for_its_rows() {
    let blocks = table(2, 2, |g, b| (1 + 2 * g + b) as f32);
    let rows = repeat_blocks(&blocks, 130, 128).unwrap();
    for (group, n, expected) in [(0, 0, 1.0), (0, 127, 1.0), (0, 128, 2.0), (1, 129, 4.0)] {
        assert_eq!(rows.value(group, n), expected, "{group} {n}");
    }
    assert!(matches!(repeat_blocks(&blocks, 128, 128), Err(Error::Shape { .. })));
    assert!(matches!(repeat_blocks(&blocks, 128, 0), Err(Error::Size { .. })));
}

#[test]
fn flashinfers_experts_are_swapped_shuffled_and_cut() {
    let mut rng = Rng::new(9);
    let shape = Shape::new(256, 512);
    let codes = Codes::from_fn(8, shape, |_, _| rng.next_u32() as u8).unwrap();
    let scales = table(2, 4, |g, b| if (g, b) == (1, 3) { 1e-23 } else { power(g, b) });
    let kept = table(2, 4, |g, b| if (g, b) == (1, 3) { 1e-10 } else { power(g, b) });
    for backend in [Fp8BlockBackend::TrtLlm, Fp8BlockBackend::Cutlass] {
        for (projection, gated) in
            [(Projection::W13, true), (Projection::W13, false), (Projection::W2, true)]
        {
            let layout = Fp8BlockExpert::new(backend, projection, shape, gated).unwrap();
            let (bytes, packed) = layout.pack(&codes, &scales).unwrap();
            let swap = projection == Projection::W13 && gated;
            // By hand from the functions of FlashInfer and vLLM.
            let swapped =
                |row: usize, rows: usize| if swap { (row + rows / 2) % rows } else { row };
            let mut expected = vec![0u8; 256 * 512];
            for n in 0..512 {
                let row = swapped(n, 512);
                for k in 0..256 {
                    let at = match backend {
                        Fp8BlockBackend::Cutlass => row * 256 + k,
                        Fp8BlockBackend::TrtLlm => {
                            let place = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
                            (k / 128 * 512 + place) * 128 + k % 128
                        }
                    };
                    expected[at] = codes.get(k, n);
                }
            }
            assert_eq!(bytes, expected, "{backend:?} {projection:?} {gated}");
            for block in 0..4 {
                for group in 0..2 {
                    let found = packed[swapped(block, 4) * 2 + group];
                    assert_eq!(f64::from(found), kept.value(group, block));
                }
            }
            let (back, back_scales) = layout.unpack(&bytes, &packed).unwrap();
            assert_eq!((back, back_scales), (codes.clone(), kept.clone()));
            assert!(matches!(layout.unpack(&bytes, &packed[1..]), Err(Error::Shape { .. })));
        }
    }
    for (shape, projection) in [
        (Shape::new(192, 256), Projection::W2),
        (Shape::new(256, 192), Projection::W2),
        (Shape::new(256, 384), Projection::W13),
    ] {
        let refused = Fp8BlockExpert::new(Fp8BlockBackend::TrtLlm, projection, shape, true);
        assert!(matches!(refused, Err(Error::Size { .. })), "{shape} {projection:?}");
    }
}

/// `scripts/gen/fp8_blocks.py`: the same formula in numpy's float32 with ml_dtypes' casts.
#[derive(serde::Deserialize)]
struct Requantized {
    shape: [usize; 2],
    block: [usize; 2],
    codes: Vec<u8>,
    scales: Vec<u32>,
    new_codes: Vec<u8>,
    new_scales: Vec<u32>,
}

#[test]
fn requantized_blocks_equal_numpys() {
    let text = include_str!("../data/fp8_requantize_ue8m0.json");
    let record: Requantized = serde_json::from_str(text).unwrap();
    let [n, k] = record.shape;
    let [rows, cols] = [n.div_ceil(record.block[0]), k.div_ceil(record.block[1])];
    let of_codes = |codes: &[u8]| -> Array2<E4m3fn> {
        let codes = codes.iter().map(|&c| E4m3fn::from_bits(c)).collect();
        Array2::from_shape_vec((n, k), codes).unwrap()
    };
    let of_scales = |bits: &[u32]| -> Array2<f32> {
        let scales = bits.iter().map(|&b| f32::from_bits(b)).collect();
        Array2::from_shape_vec((rows, cols), scales).unwrap()
    };
    let (codes, scales) = (of_codes(&record.codes), of_scales(&record.scales));
    let made = requantize_ue8m0(&codes, &scales, record.block).unwrap();
    assert_eq!(made.codes, of_codes(&record.new_codes));
    assert_eq!(made.scales, of_scales(&record.new_scales));
    // Powers of two may be halved where the largest code is 224, and no value changes.
    let again = requantize_ue8m0(&made.codes, &made.scales, record.block).unwrap();
    let value = |codes: &Array2<E4m3fn>, scales: &Array2<f32>, [i, j]: [usize; 2]| {
        codes[[i, j]].to_f32() * scales[[i / record.block[0], j / record.block[1]]]
    };
    for at in (0..n * k).map(|i| [i / k, i % k]) {
        let values = [&made, &again].map(|q| value(&q.codes, &q.scales, at));
        assert_eq!(values[0], values[1], "{at:?}");
    }
    let wrong = scales.slice(ndarray::s![.., 1..]).to_owned();
    assert!(matches!(requantize_ue8m0(&codes, &wrong, record.block), Err(Error::Shape { .. })));
    let zeros = per_block_fp8(Array2::<f32>::zeros((3, 5)).view(), [2, 4], true).unwrap();
    assert_eq!(zeros.scales, Array2::from_elem((2, 2), 2f32.powi(-22)));
}

#[test]
fn scales_round_up_to_powers_of_two() {
    for (scale, expected) in [
        (1.0, 1.0),
        (1.0f32.next_up(), 2.0),
        (1.0f32.next_down(), 1.0),
        (0.0, f32::MIN_POSITIVE),
        (1e-42, f32::MIN_POSITIVE),
        (1.5 * f32::MIN_POSITIVE, 2.0 * f32::MIN_POSITIVE),
        (f32::MAX, 2f32.powi(127)),
    ] {
        assert_eq!(ceil_to_ue8m0(scale), expected, "{scale}");
    }
}
