//! KleidiAI's outputs of golden cases with mistakes made by plain arithmetic: the check must fail,
//! count the elements, and name the place and the cause.

use marlinspike::case::{ActivationRounding, Case, CaseConfig, DynQuantConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::Manifest;

fn golden(name: &str) -> Vec<u8> {
    let golden = Manifest::load().expect("the golden manifest");
    let file = format!("dyn_quant_linear-{name}.safetensors");
    let paths = golden.case_paths("dyn_quant_linear").into_iter();
    let path = paths.into_iter().find(|p| p.ends_with(&file)).expect("a golden case");
    std::fs::read(path).expect("a golden file")
}

fn config(case: &Case<'_>) -> DynQuantConfig {
    let CaseConfig::DynQuant(c) = &case.config else { panic!("another operation") };
    c.clone()
}

/// The report on output `output` of case `name` whose bytes were changed.
fn changed(
    name: &str,
    output: &str,
    change: impl FnOnce(&mut Vec<u8>, &Case<'_>, &DynQuantConfig),
) -> OutputReport {
    let file = golden(name);
    let mut case = Case::parse(&file).expect("a case");
    let tensor = case.output(output).expect("an output").clone();
    let mut bytes = tensor.bytes().to_vec();
    change(&mut bytes, &case, &config(&case));
    let shape = match tensor.shape().len() {
        1 => vec![bytes.len()],
        _ => tensor.shape().to_vec(),
    };
    case.add_output(output, Tensor::new(output, tensor.dtype(), shape, bytes).expect("a tensor"));
    let report = check_case(&case).expect("a report");
    assert_eq!(report.verdict, Verdict::Fail, "{name}");
    let found = report.outputs.into_iter().find(|o| o.name == output).expect("the output");
    assert_eq!(found.verdict, Verdict::Fail, "{name}");
    found
}

fn expect(
    name: &str,
    output: &str,
    id: &str,
    change: impl FnOnce(&mut Vec<u8>, &Case<'_>, &DynQuantConfig),
) -> OutputReport {
    let report = changed(name, output, change);
    let diagnosis = report.diagnosis.clone().unwrap_or_else(|| panic!("{id}: {report:#?}"));
    assert_eq!((diagnosis.id.as_str(), diagnosis.unexplained), (id, 0), "{diagnosis:?}");
    report
}

/// Another golden case with the same inputs follows the other rounding rule.
#[test]
fn the_other_rounding_rule_is_named() {
    for (name, twin, id) in [
        ("gw20", "gw20_half_even", "rounding-half-even"),
        ("gw20_half_even", "gw20", "rounding-half-away"),
        ("gw35", "gw35_half_even", "rounding-half-even"),
    ] {
        let (file, twin) = (golden(name), golden(twin));
        let (mut case, twin) = (Case::parse(&file).unwrap(), Case::parse(&twin).unwrap());
        assert_eq!(case.inputs, twin.inputs, "{name}");
        for output in ["lhs_packed", "y"] {
            case.add_output(output, twin.output(output).unwrap().clone());
        }
        let report = check_case(&case).unwrap();
        let of = |name: &str| report.outputs.iter().find(|o| o.name == name).unwrap();
        assert_eq!(of("lhs_packed").diagnosis.as_ref().unwrap().id, id, "{name}");
        // The product of those activations is correct.
        assert_eq!(of("y").verdict, Verdict::Pass, "{name}");
        // Without them, the product shows the mistake.
        case.outputs.remove("lhs_packed");
        let report = check_case(&case).unwrap();
        let y = report.outputs.iter().find(|o| o.name == "y").unwrap();
        assert_eq!(y.diagnosis.as_ref().map(|d| d.id.as_str()), Some(id), "{name}: {y:#?}");
    }
}

/// Bytes of a block of weight codes.
fn code_bytes(bytes: &mut [u8], c: &DynQuantConfig, change: impl Fn(u8) -> u8) {
    let marlinspike::num::dims::GroupSize::Of(g) = c.group_size else { panic!("channel-wise") };
    let (nr, groups) = (c.packing.nr, c.size_k / g);
    let block = groups * (g / 2 + 2) * nr + 8 * nr;
    for block in bytes.chunks_exact_mut(block) {
        for group in block[..groups * (g / 2 + 2) * nr].chunks_exact_mut((g / 2 + 2) * nr) {
            group[..g / 2 * nr].iter_mut().for_each(|b| *b = change(*b));
        }
    }
}

#[test]
fn wrong_weights_are_named() {
    let swap = |b: u8| b.rotate_left(4);
    expect("gw09", "rhs_packed", "nibbles-exchanged", |b, _, c| code_bytes(b, c, swap));
    expect("gv24", "rhs_packed", "nibbles-unsigned", |b, _, c| code_bytes(b, c, |b| b ^ 0x88));
    // Neighbouring k exchanged: bytes of odd and even k.
    expect("gw09", "rhs_packed", "k-pairs-exchanged", |b, _, c| {
        let (g, nr) = (32, c.packing.nr);
        let groups = c.size_k / g;
        let block = groups * (g / 2 + 2) * nr + 8 * nr;
        for block in b.chunks_exact_mut(block) {
            for group in block[..groups * (g / 2 + 2) * nr].chunks_exact_mut((g / 2 + 2) * nr) {
                group[..g / 2 * nr].chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
            }
        }
    });
    // A byte holds k and k + 1.
    expect("gw09", "rhs_packed", "k-interleave-adjacent", |b, case, c| {
        let (nr, k) = (c.packing.nr, c.size_k);
        let nibbles = case.input("weight_u4").unwrap().bytes().to_vec();
        let block = k / 32 * 18 * nr + 8 * nr;
        for n in 0..c.size_n {
            for byte in 0..k / 2 {
                // Byte i of a chunk: segment i / 8 holds k = 2i and 2i + 1.
                let (chunk, i) = (byte / 16, byte % 16);
                let at = n / nr * block + chunk * 18 * nr + (i / 8 * nr + n % nr) * 8 + i % 8;
                b[at] = nibbles[n * k / 2 + byte] ^ 0x88;
            }
        }
    });
    // N = 70 in blocks of 8: two columns repeat.
    expect("gw18", "rhs_packed", "padding-columns-zero", |b, _, c| {
        let nr = c.packing.nr;
        let block = c.size_k / 32 * 18 * nr + 8 * nr;
        let last = (c.size_n / nr) * block;
        for segment in 0..c.size_k / 16 {
            let at = last + segment / 2 * 18 * nr + segment % 2 * 8 * nr;
            b[at + 8 * (c.size_n % nr)..at + 8 * nr].fill(0);
        }
        for group in 0..c.size_k / 32 {
            let at = last + group * 18 * nr + 16 * nr;
            b[at + 2 * (c.size_n % nr)..at + 2 * nr].fill(0);
        }
        for tail in 0..2 {
            let at = last + c.size_k / 32 * 18 * nr + tail * 4 * nr;
            b[at + 4 * (c.size_n % nr)..at + 4 * nr].fill(0);
        }
    });
}

/// Changes the 32-bit words of part `part` after the codes of each block.
fn tail(bytes: &mut [u8], c: &DynQuantConfig, part: usize, change: impl Fn(u32) -> u32) {
    let nr = c.packing.nr;
    let (codes, parts) = match c.group_size {
        marlinspike::num::dims::GroupSize::Of(g) => (c.size_k / g * (g / 2 + 2) * nr, 2),
        marlinspike::num::dims::GroupSize::Channel => (c.size_k.div_ceil(32) * 16 * nr, 3),
    };
    for block in bytes.chunks_exact_mut(codes + parts * 4 * nr) {
        for word in block[codes + part * 4 * nr..][..4 * nr].chunks_exact_mut(4) {
            let bits = change(u32::from_le_bytes(word.try_into().unwrap()));
            word.copy_from_slice(&bits.to_le_bytes());
        }
    }
}

#[test]
fn wrong_scales_sums_and_biases_are_named() {
    let times_16 = |bits| (f32::from_bits(bits) * 16.0).to_bits();
    expect("cw15", "rhs_packed", "scale-not-divided", |b, _, c| tail(b, c, 1, times_16));
    expect("cw15", "rhs_packed", "sum-not-times-16", |b, _, c| {
        tail(b, c, 0, |sum| (sum as i32 / 16) as u32);
    });
    expect("cw15", "rhs_packed", "bias-missing", |b, _, c| tail(b, c, 2, |_| 0));
    expect("gw43", "rhs_packed", "bias-missing", |b, _, c| tail(b, c, 1, |_| 0));
    let report = expect("gw43", "rhs_packed", "sum-missing", |b, _, c| tail(b, c, 0, |_| 0));
    let first = report.first_mismatch.unwrap();
    assert_eq!((first.n, first.k, first.width), (Some(0), None, 32));
    assert_eq!(report.note.as_deref(), Some("first mismatch: sum of n 0, block 0"));
    // Sums as in a first attempt: per group, and of codes only.
    let sums = |weighted: bool| {
        move |b: &mut Vec<u8>, case: &Case<'_>, c: &DynQuantConfig| {
            let marlinspike::num::dims::GroupSize::Of(g) = c.group_size else { panic!() };
            let (nr, k) = (c.packing.nr, c.size_k);
            let nibbles = case.input("weight_u4").unwrap().bytes().to_vec();
            let scales = case.input("weight_scale").unwrap().elements::<u16>().into_owned();
            let block = k / g * (g / 2 + 2) * nr + 8 * nr;
            for slot in 0..c.size_n.div_ceil(nr) * nr {
                let n = slot.min(c.size_n - 1);
                let mut sum = 0f32;
                for group in 0..k / g {
                    let bytes = &nibbles[(n * k + group * g) / 2..][..g / 2];
                    let w: i32 =
                        bytes.iter().map(|b| i32::from(b & 15) + i32::from(b >> 4) - 16).sum();
                    let scale = bf16_to_f32(scales[n * (k / g) + group]);
                    sum += w as f32 * if weighted { scale } else { 1.0 };
                }
                let at = slot / nr * block + block - 8 * nr + 4 * (slot % nr);
                b[at..at + 4].copy_from_slice(&sum.to_le_bytes());
            }
        }
    };
    expect("gw43", "rhs_packed", "sum-per-group", sums(true));
    expect("gw43", "rhs_packed", "sum-without-scale", sums(false));
}

#[test]
fn wrong_activations_are_named() {
    // K = 44: codes 44 to 63 are padding, in pieces of 8 for each of four rows.
    let padded = |b: &mut Vec<u8>, c: &DynQuantConfig, fill: &dyn Fn(&[u8], usize) -> u8| {
        for m in 0..c.size_m {
            let value = fill(b, m);
            for k in c.size_k..64 {
                b[(k / 8 * 4 + m) * 8 + k % 8] = value;
            }
        }
    };
    let name = "cw22_half_even";
    expect(name, "lhs_packed", "padding-zero", |b, _, c| padded(b, c, &|_, _| 0));
    expect(name, "lhs_packed", "padding-zero-point", |b, _, c| {
        padded(b, c, &|b, m| {
            let word: [u8; 4] = b[64 * 4 + 4 * m..][..4].try_into().unwrap();
            -i32::from_le_bytes(word) as u8
        });
    });
    let words = |b: &mut Vec<u8>, c: &DynQuantConfig, part: usize, change: &dyn Fn(u32) -> u32| {
        let (mr, k) = (c.packing.mr, c.size_k.div_ceil(32) * 32);
        for m in 0..c.size_m {
            let at = m / mr * mr * (k + 8) + mr * k + 4 * (part * mr + m % mr);
            let bits = change(u32::from_le_bytes(b[at..at + 4].try_into().unwrap()));
            b[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        }
    };
    expect("gw29", "lhs_packed", "zero-point-not-negated", |b, _, c| {
        words(b, c, 0, &|z| (z as i32).wrapping_neg() as u32);
    });
    let report = expect("gw29", "lhs_packed", "scale-for-reciprocal", |b, _, c| {
        words(b, c, 1, &|r| (1.0 / f32::from_bits(r)).to_bits());
    });
    assert_eq!(report.note.as_deref(), Some("first mismatch: reciprocal scale of row 0, block 0"));
    // Pieces of 4 and of 16 k, and rows that follow each other.
    for (id, piece) in
        [("k-interleave-4", 4), ("k-interleave-16", 16), ("rows-not-interleaved", 512)]
    {
        expect("gw35", "lhs_packed", id, |b, _, c| {
            let (mr, k) = (c.packing.mr, c.size_k);
            for block in b.chunks_exact_mut(mr * (k + 8)) {
                let old = block.to_vec();
                for row in 0..mr {
                    for k in 0..k {
                        let to = (k / piece * mr + row) * piece + k % piece;
                        block[to] = old[(k / 8 * mr + row) * 8 + k % 8];
                    }
                }
            }
        });
    }
}

#[test]
fn a_single_wrong_bit_is_placed() {
    // Chunk 1, segment 1, column 2 of block 1, byte 3, high nibble: k = 32 + 8 + 3 + 16.
    let report = changed("gw09", "rhs_packed", |b, _, c| {
        let nr = c.packing.nr;
        let block = c.size_k / 32 * 18 * nr + 8 * nr;
        b[block + 18 * nr + (nr + 2) * 8 + 3] ^= 0x10;
    });
    let first = report.first_mismatch.unwrap();
    assert_eq!((report.mismatches, first.k, first.n, first.bit), (1, Some(59), Some(10), 4));
    assert_eq!(report.diagnosis.unwrap().id, "confined");
    // Row 5 is the second row of block 1.
    let report = changed("gw29", "lhs_packed", |b, _, c| {
        let block = 4 * (c.size_k + 8);
        b[block + (100 / 8 * 4 + 1) * 8 + 100 % 8] ^= 1;
    });
    assert_eq!(report.note.as_deref(), Some("first mismatch: code of (row 5, k 100), block 1"));
    let report = changed("gw29", "y", |b, _, c| b[4 * (7 * c.size_n + 11)] ^= 1);
    assert_eq!(report.first_mismatch.unwrap().index, [7, 11]);
    let place = report.diagnosis.expect("a place");
    assert_eq!(
        (report.mismatches, place.text.as_str()),
        (1, "the only wrong element is in row 7, column 11")
    );
    // A buffer of another length is a wrong output, not an error.
    let report = changed("gw29", "rhs_packed", |b, _, _| b.truncate(100));
    assert!(report.note.unwrap().starts_with("100 bytes, expected"));
}

/// Products computed here in other orders, from the packed buffers.
#[test]
fn wrong_products_are_named() {
    /// y from the parts: (Σqw and scale per group, Σ scale·Σw, −zero point, reciprocal, bias).
    type Product = fn(&[(f32, f32)], f32, f32, f32, f32) -> f32;
    let variants: [(&str, &str, Product); 7] = [
        ("gw31", "bias-fused", |groups, sum, z, r, bias| {
            let a = groups.iter().fold(0f32, |a, (q, d)| q.mul_add(*d, a));
            sum.mul_add(z, a).mul_add(r, bias)
        }),
        ("bg08", "output-truncated", |groups, sum, z, r, bias| {
            let a = groups.iter().fold(0f32, |a, (q, d)| q.mul_add(*d, a));
            sum.mul_add(z, a) * r + bias
        }),
        ("gw31", "accumulation-not-fused", |groups, sum, z, r, bias| {
            (groups.iter().fold(0.0, |a, (q, d)| a + q * d) + sum * z) * r + bias
        }),
        ("gw31", "groups-descending", |groups, sum, z, r, bias| {
            let a = groups.iter().rev().fold(0f32, |a, (q, d)| q.mul_add(*d, a));
            sum.mul_add(z, a) * r + bias
        }),
        ("gw31", "zero-point-first", |groups, sum, z, r, bias| {
            groups.iter().fold(sum * z, |a, (q, d)| q.mul_add(*d, a)) * r + bias
        }),
        ("gw31", "zero-point-missing", |groups, _, _, r, bias| {
            groups.iter().fold(0f32, |a, (q, d)| q.mul_add(*d, a)) * r + bias
        }),
        ("gw31", "bias-missing", |groups, sum, z, r, _| {
            sum.mul_add(z, groups.iter().fold(0f32, |a, (q, d)| q.mul_add(*d, a))) * r
        }),
    ];
    for (name, id, product) in variants {
        let report = expect(name, "y", id, |y, case, c| {
            let marlinspike::num::dims::GroupSize::Of(g) = c.group_size else { panic!() };
            let (k, mr, nr) = (c.size_k, c.packing.mr, c.packing.nr);
            let lhs = case.output("lhs_packed").unwrap().bytes();
            let rhs = case.output("rhs_packed").unwrap().bytes();
            let nibbles = case.input("weight_u4").unwrap().bytes();
            let scales = case.input("weight_scale").unwrap().elements::<u16>();
            let word = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
            let width = if c.dtype == ScalarType::FLOAT32 { 4 } else { 2 };
            for (i, y) in y.chunks_exact_mut(width).enumerate() {
                let (m, n) = (i / c.size_n, i % c.size_n);
                let row = &lhs[m / mr * mr * (k + 8)..][..mr * (k + 8)];
                let q = |k: usize| i32::from(row[(k / 8 * mr + m % mr) * 8 + k % 8] as i8);
                let w = |k: usize| {
                    let byte = nibbles[(n * c.size_k + k) / 2];
                    i32::from(byte >> (4 * (k % 2)) & 15) - 8
                };
                let groups: Vec<(f32, f32)> = (0..k / g)
                    .map(|i| {
                        let sum: i32 = (i * g..(i + 1) * g).map(|k| q(k) * w(k)).sum();
                        (sum as f32, bf16_to_f32(scales[n * (k / g) + i]))
                    })
                    .collect();
                let block = k / g * (g / 2 + 2) * nr + 8 * nr;
                let tail = n / nr * block + block - 8 * nr + 4 * (n % nr);
                let z = word(row, mr * k + 4 * (m % mr)) as i32 as f32;
                let r = f32::from_bits(word(row, mr * (k + 4) + 4 * (m % mr)));
                let (sum, bias) =
                    (f32::from_bits(word(rhs, tail)), f32::from_bits(word(rhs, tail + 4 * nr)));
                let value = product(&groups, sum, z, r, bias);
                let value = if value.is_infinite() { f32::MAX.copysign(value) } else { value };
                // The upper half of an f32 is a truncated bf16.
                y.copy_from_slice(&value.to_le_bytes()[4 - width..]);
            }
        });
        assert!(report.mismatches > 0, "{id}");
    }
}

/// Codes as x divided by the stored reciprocal, and reciprocals as range / 255: every golden case
/// that this changes.
#[test]
fn wrong_scales_of_activations_are_named() {
    let golden = Manifest::load().expect("the golden manifest");
    let mut seen = [0; 2];
    for path in golden.case_paths("dyn_quant_linear") {
        let file = std::fs::read(path).unwrap();
        let case = Case::parse(&file).unwrap();
        let c = config(&case);
        let (mr, width) = (c.packing.mr, c.size_k.div_ceil(32) * 32);
        if c.dtype != ScalarType::FLOAT32 || width != c.size_k {
            continue;
        }
        let x = case.input("x").unwrap().elements::<f32>().into_owned();
        let right = case.output("lhs_packed").unwrap().bytes().to_vec();
        let mut wrong = [right.clone(), right.clone()];
        for m in 0..c.size_m {
            let row = &x[m * c.size_k..][..c.size_k];
            let block = m / mr * mr * (width + 8);
            let zero = block + mr * width + 4 * (m % mr);
            let reciprocal = zero + 4 * mr;
            let word = |at: usize| <[u8; 4]>::try_from(&right[at..at + 4]).unwrap();
            let (z, r) = (-i32::from_le_bytes(word(zero)), f32::from_le_bytes(word(reciprocal)));
            for (k, x) in row.iter().enumerate() {
                let q = match c.activation_rounding {
                    ActivationRounding::HalfEven => (x / r).round_ties_even(),
                    _ => (x / r).round(),
                };
                let at = block + (k / 8 * mr + m % mr) * 8 + k % 8;
                let q = (q as i32).clamp(-32768, 32767) as i16;
                wrong[0][at] = q.wrapping_add(z as i16).clamp(-128, 127) as u8;
            }
            let high = row.iter().fold(0f32, |a, &b| a.max(b));
            let low = row.iter().fold(0f32, |a, &b| a.min(b));
            if low != high {
                wrong[1][reciprocal..][..4].copy_from_slice(&((high - low) / 255.0).to_le_bytes());
            }
        }
        let ids = ["quotient-by-reciprocal", "reciprocal-of-range"];
        for ((wrong, id), seen) in wrong.into_iter().zip(ids).zip(&mut seen) {
            if wrong == right {
                continue;
            }
            let mut case = Case::parse(&file).unwrap();
            let shape = vec![wrong.len()];
            case.add_output(
                "lhs_packed",
                Tensor::new("lhs_packed", DType::U8, shape, wrong).unwrap(),
            );
            let report = check_case(&case).unwrap();
            let report = report.outputs.iter().find(|o| o.name == "lhs_packed").unwrap();
            let diagnosis =
                report.diagnosis.as_ref().unwrap_or_else(|| panic!("{id}: {report:#?}"));
            assert_eq!(diagnosis.id, id, "{}: {report:#?}", case.name);
            *seen += 1;
        }
    }
    assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
}

/// Infinities that are not clamped, in a case whose scales make every product overflow: 64 times 1
/// · 7 or 1 · −8, times the largest number.
#[test]
fn a_missing_clamp_is_named() {
    let file = golden("cw00");
    let mut case = Case::parse(&file).unwrap();
    let (n, k) = (config(&case).size_n, config(&case).size_k);
    let codes = (0..n * k / 2).map(|i| if i / (k / 2) % 2 == 0 { 0xff } else { 0 }).collect();
    let inputs = [
        ("x", Tensor::from_vec("x", DType::F32, vec![1, k], vec![1f32; k])),
        ("weight_scale", Tensor::from_vec("scale", DType::F32, vec![n, 1], vec![f32::MAX; n])),
        ("weight_u4", Tensor::from_vec::<u8>("codes", DType::U8, vec![n, k / 2], codes)),
    ];
    for (name, input) in inputs {
        case.add_input(name, input.unwrap());
    }
    case.outputs.clear();
    let y = |limit: f32| {
        let values = (0..n).map(|n| if n % 2 == 0 { limit } else { -limit }).collect();
        Tensor::from_vec("y", DType::F32, vec![1, n], values).unwrap()
    };
    case.add_output("y", y(f32::MAX));
    let report = check_case(&case).unwrap();
    assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
    case.add_output("y", y(f32::INFINITY));
    let report = check_case(&case).unwrap();
    let y = report.outputs.iter().find(|o| o.name == "y").unwrap();
    assert_eq!(y.diagnosis.as_ref().map(|d| d.id.as_str()), Some("clamp-missing"), "{y:#?}");
}
