//! Products of single matrices with known mistakes: the check fails and names the cause.

use crate::product_model::*;
use marlinspike::case::Case;
use marlinspike::check::Verdict;
use marlinspike::num::scalar::{ScalarType, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};

const GROUPED: &str = "linear-f16_awq_u4_g64";
const BIASED: &str = "linear-f16_u4b8_g128_act0";
const ORDERED: &str = "linear-f16_u4b8_g32_act1";
const SCALED: &str = "linear-f16_nvfp4";

/// The model is a kernel of the class: without a planted mistake it passes.
#[test]
fn the_model_is_right() {
    for name in [GROUPED, BIASED, ORDERED, SCALED] {
        let report = planted(name, "y", |m| m.compute());
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:?}");
        assert!(report.diagnosis.is_none());
    }
}

#[test]
fn one_element_past_its_bound() {
    let (row, n) = (3, 77);
    let at = |m: &Model| row * m.n + n;
    // A known error gives the bound.
    let mut error = 0.0;
    let far = planted(GROUPED, "y", |m| {
        let mut y = m.compute();
        let exact = sum(m, row, n);
        let i = at(m);
        y[i] = m.round(exact + exact.signum() * exact.abs().max(1.0) * 0.3);
        error = (y[i] - exact).abs();
        y
    });
    assert_eq!((far.verdict, far.mismatches), (Verdict::Fail, 1));
    let bound = error / far.max_error_over_bound.expect("a ratio");
    let report = planted(GROUPED, "y", |m| {
        let mut y = m.compute();
        let (exact, i) = (sum(m, row, n), at(m));
        let wanted = exact + exact.signum() * 1.5 * bound;
        // The next number of the type away from the exact one.
        let rounded = m.round(wanted);
        let ulp = 2f64.powi(rounded.abs().log2().floor() as i32 - 10);
        y[i] = if rounded.abs() < wanted.abs() { rounded + exact.signum() * ulp } else { rounded };
        y
    });
    assert_eq!((report.verdict, report.mismatches), (Verdict::Fail, 1));
    assert_eq!(report.first_mismatch.clone().expect("a place").index, [row, n]);
    let diagnosis = report.diagnosis.clone().expect("a place");
    assert_eq!((diagnosis.id.as_str(), diagnosis.unexplained), ("confined", 1));
    assert!(diagnosis.text.contains("row 3, n 77"), "{}", diagnosis.text);
    let errors = report.picture.expect("a picture").errors.expect("errors");
    assert!(errors.largest.iter().filter(|r| **r > 1.0).count() == 1);
}

/// Σ a·w with weights rounded to the activation type.
fn sum(m: &Model, row: usize, n: usize) -> f64 {
    let w = &m.matrices[0];
    let term = |k: usize| {
        let at = w.group[k] * m.n + n;
        m.x[row * m.k + k] * m.round((w.q[k * m.n + n] - w.z[at]) * w.s[at])
    };
    (0..m.k).map(term).sum()
}

#[test]
fn a_group_off_by_one() {
    for (read, which) in [
        ((|g, _| g.saturating_sub(1)) as fn(usize, usize) -> usize, "before"),
        (|g, last| (g + 1).min(last), "after"),
        (|g, last| if g == last { 0 } else { g + 1 }, "after"),
    ] {
        let report = expect(GROUPED, "y", "group-off-by-one", |m| {
            let last = *m.matrices[0].group.iter().max().expect("groups");
            m.matrices[0].group.iter_mut().for_each(|g| *g = read(*g, last));
            m.compute()
        });
        assert!(text(&report).contains(which), "{}", text(&report));
    }
}

#[test]
fn columns() {
    let swapped = expect(GROUPED, "y", "columns-moved", |m| {
        let mut y = m.compute();
        y.chunks_mut(m.n).for_each(|row| row.swap(5, 99));
        y
    });
    assert!(text(&swapped).contains("5 and 99 are swapped"), "{}", text(&swapped));
    let ordered = expect(GROUPED, "y", "columns-moved", |m| {
        let y = m.compute();
        (0..y.len())
            .map(|i| {
                let n = i % m.n;
                y[i - n + n / 64 * 64 + n % 8 * 8 + n % 64 / 8]
            })
            .collect()
    });
    assert!(text(&ordered).contains("Marlin's grouped scales"), "{}", text(&ordered));
    let scale = expect(GROUPED, "y", "scale-of-another-column", |m| {
        let n = m.n;
        m.matrices[0].s.chunks_mut(n).for_each(|row| row.swap(11, 70));
        m.compute()
    });
    assert!(text(&scale).contains("columns 11 and 70 are swapped"), "{}", text(&scale));
    let bias = expect(BIASED, "y", "bias-of-another-column", |m| {
        let bias = m.matrices[0].bias.as_mut().expect("a bias");
        bias[8] = bias[100];
        m.compute()
    });
    assert!(text(&bias).contains("8 has that of 100"), "{}", text(&bias));
}

/// The column at position p of a packed row.
fn single(p: usize) -> usize {
    p / 32 * 32 + 2 * (p % 32 / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8]
}

fn grouped(p: usize) -> usize {
    p / 64 * 64 + p % 8 * 8 + p % 64 / 8
}

/// Rows of columns packed in one order and read in another.
fn misread(
    values: &[f64],
    n: usize,
    packed: fn(usize) -> usize,
    read: fn(usize) -> usize,
) -> Vec<f64> {
    let mut out = values.to_vec();
    for (row, values) in out.chunks_mut(n).zip(values.chunks(n)) {
        (0..n).for_each(|p| row[read(p)] = values[packed(p)]);
    }
    out
}

#[test]
fn permutations_of_scales_and_bias() {
    let scales = |packed: fn(usize) -> usize| {
        move |m: &mut Model| {
            m.matrices[0].s = misread(&m.matrices[0].s, m.n, packed, grouped);
            m.compute()
        }
    };
    expect(GROUPED, "y", "scales-other-permutation", scales(single));
    expect(GROUPED, "y", "scales-not-permuted", scales(|p| p));
    let biases = |packed: fn(usize) -> usize| {
        move |m: &mut Model| {
            let bias = m.matrices[0].bias.clone().expect("a bias");
            m.matrices[0].bias = Some(misread(&bias, m.n, packed, single));
            m.compute()
        }
    };
    expect(BIASED, "y", "bias-not-permuted", biases(|p| p));
    expect(BIASED, "y", "bias-other-permutation", biases(grouped));
    let times = |times| {
        move |m: &mut Model| {
            m.biases = times;
            m.compute()
        }
    };
    expect(BIASED, "y", "bias-missing", times(0));
    expect(BIASED, "y", "bias-twice", times(2));
}

#[test]
fn codes_and_zero_points() {
    let step = |step: f64| {
        move |m: &mut Model| {
            // A zero point of 15 plus one is 0 again, as the bits are.
            let awq = m.matrices[0].z.iter().any(|z| *z != 0.0);
            let moved = |z: &f64| if awq { (z + step).rem_euclid(16.0) } else { z + step };
            m.matrices[0].z = m.matrices[0].z.iter().map(moved).collect();
            m.compute()
        }
    };
    let high = expect(GROUPED, "y", "zero-off-by-one", step(1.0));
    assert!(text(&high).contains("one too high"), "{}", text(&high));
    let low = expect(BIASED, "y", "zero-off-by-one", step(-1.0));
    assert!(text(&low).contains("one too low"), "{}", text(&low));
    let awq = |map: fn(usize) -> usize| {
        move |m: &mut Model| {
            let q = m.matrices[0].q.clone();
            m.matrices[0].q = (0..q.len()).map(|i| q[i / 8 * 8 + map(i % 8)]).collect();
            m.compute()
        }
    };
    expect(GROUPED, "y", "awq-interleave-inverted", awq(|c| AWQ[AWQ[c]]));
    expect(GROUPED, "y", "awq-interleave-not-undone", awq(|c| AWQ[c]));
    let zeros = |map: fn(usize) -> usize| {
        move |m: &mut Model| {
            let z = m.matrices[0].z.clone();
            m.matrices[0].z = (0..z.len()).map(|i| z[i / 8 * 8 + map(i % 8)]).collect();
            m.compute()
        }
    };
    let inverted = expect(GROUPED, "y", "awq-interleave-inverted", zeros(|c| AWQ[AWQ[c]]));
    assert!(text(&inverted).contains("of the zero points"), "{}", text(&inverted));
    expect(GROUPED, "y", "awq-interleave-not-undone", zeros(|c| AWQ[c]));
    expect(GROUPED, "y", "zeros-missing", |m| {
        m.matrices[0].z.fill(0.0);
        m.compute()
    });
    let within = |map: fn(usize) -> usize| {
        move |m: &mut Model| {
            let (q, n) = (m.matrices[0].q.clone(), m.n);
            m.matrices[0].q = (0..q.len()).map(|i| q[map(i / n) * n + i % n]).collect();
            m.compute()
        }
    };
    expect(SCALED, "y", "nibbles-swapped", within(|k| k ^ 1));
    expect(BIASED, "y", "words-reversed", within(|k| k ^ 7));
    expect(BIASED, "y", "interleave-not-undone", within(|k| k / 8 * 8 + AWQ[k % 8]));
}

#[test]
fn parts_of_k() {
    // Group 2 of four: every term of it `factor` times.
    let group = |factor: f64| {
        move |m: &mut Model| {
            let (w, n) = (&mut m.matrices[0], m.n);
            for (i, q) in w.q.iter_mut().enumerate().filter(|(i, _)| w.group[i / n] == 2) {
                // In f16, twice a weight is exact.
                let z = w.z[2 * n + i % n];
                *q = (*q - z) * factor + z;
            }
            m.compute()
        }
    };
    let dropped = expect(GROUPED, "y", "group-dropped", group(0.0));
    assert!(text(&dropped).contains("group 2 of k is missing"), "{}", text(&dropped));
    let cause = dropped.picture.and_then(|p| p.errors?.cause).expect("a cause");
    assert_eq!((cause.size_k, cause.group_size), (256, 64));
    let [range] = &cause.ranges[..] else { panic!("{:?}", cause.ranges) };
    assert_eq!((range.start, range.end), (128, 192));
    expect(GROUPED, "y", "group-twice", group(2.0));
    let range = |from: usize, to: usize, factor: f64| {
        move |m: &mut Model| {
            let k = m.k;
            let in_range = |i: &usize| (from..to).contains(&(i % k));
            m.x.iter_mut().enumerate().filter(|(i, _)| in_range(i)).for_each(|(_, x)| *x *= factor);
            m.compute()
        }
    };
    let tile = expect(GROUPED, "y", "k-range-dropped", range(48, 64, 0.0));
    assert!(text(&tile).contains("k 48 to 63 (k16 tile 3)"), "{}", text(&tile));
    let chunk = expect(SCALED, "y", "k-range-twice", range(160, 256, 2.0));
    assert!(text(&chunk).contains("a last chunk of k"), "{}", text(&chunk));
    let one = expect(GROUPED, "y", "k-dropped", range(201, 202, 0.0));
    assert!(text(&one).contains("k 201 is missing"), "{}", text(&one));
    let other = expect(GROUPED, "y", "group-scales-of-another-group", |m| {
        let (w, n) = (&mut m.matrices[0], m.n);
        w.s.copy_within(3 * n..4 * n, n);
        m.compute()
    });
    assert!(text(&other).contains("group 1 of k was given the scales of group 3"));
    let scale = expect(GROUPED, "y", "group-scale-off", |m| {
        let i = 2 * m.n + 30;
        m.matrices[0].s[i] = m.round(m.matrices[0].s[i] * 1.25);
        m.compute()
    });
    assert!(text(&scale).contains("group 2, n 30 is off by +2"), "{}", text(&scale));
    let code = expect(GROUPED, "y", "wrong-code", |m| {
        let q = &mut m.matrices[0].q[90 * m.n + 17];
        *q = if *q < 8.0 { *q + 6.0 } else { *q - 6.0 };
        m.compute()
    });
    assert!(text(&code).contains("k 90, n 17"), "{}", text(&code));
}

#[test]
fn act_order() {
    // The stable sort of g_idx.
    let sorted = |m: &Model| {
        let mut perm: Vec<usize> = (0..m.k).collect();
        perm.sort_by_key(|&k| m.matrices[0].group[k]);
        perm
    };
    let inverse = |perm: &[usize]| {
        let mut inverse = vec![0; perm.len()];
        perm.iter().enumerate().for_each(|(p, &k)| inverse[k] = p);
        inverse
    };
    // Rows of the product: the rows of the matrix, the activations and g_idx that it uses.
    let walk = |weights: u8, activations: u8, groups: u8| {
        move |m: &mut Model| {
            let perm = sorted(m);
            let of = |what: u8| match what {
                0 => (0..m.k).collect(),
                1 => perm.clone(),
                _ => inverse(&perm),
            };
            let (w, a, g): (Vec<usize>, Vec<usize>, Vec<usize>) =
                (of(weights), of(activations), of(groups));
            let (n, k) = (m.n, m.k);
            let matrix = &mut m.matrices[0];
            matrix.q = (0..k * n).map(|i| matrix.q[w[i / n] * n + i % n]).collect();
            matrix.group = g.iter().map(|&k| matrix.group[k]).collect();
            m.x = (0..m.x.len()).map(|i| m.x[i / k * k + a[i % k]]).collect();
            m.compute()
        }
    };
    let right = planted(ORDERED, "y", walk(1, 1, 1));
    assert_eq!(right.verdict, Verdict::Pass);
    for (id, weights, activations, groups) in [
        ("act-order-activations-not-permuted", 1, 0, 1),
        ("act-order-weights-not-permuted", 0, 1, 1),
        ("act-order-activations-inverted", 1, 2, 1),
        ("act-order-weights-inverted", 2, 1, 1),
        ("act-order-scales-stored", 1, 1, 0),
        // Groups of a whole matrix, sorted, are k / group_size.
        ("act-order-ignored", 0, 0, 1),
    ] {
        expect(ORDERED, "y", id, walk(weights, activations, groups));
    }
    // Those of a slice are not.
    expect("linear-tp2_0_rank0", "y", "act-order-scales-sorted", walk(0, 0, 1));
    expect("linear-tp2_0_rank0", "y", "act-order-ignored", |m| {
        m.matrices[0].group = (0..m.k).map(|k| k / 64).collect();
        m.compute()
    });
}

/// vLLM 0.21.0's kernel is wrong for act-ordered slices: the check names the fault and rejects it
/// from every producer.
#[test]
fn upstreams_own_fault() {
    for name in
        ["linear-tp2_0_rank0", "linear-tp2_0_rank1", "linear-tp2_1_rank0", "linear-tp2_1_rank1"]
    {
        let bytes = golden(name);
        let mut case = Case::parse(&bytes).expect("a case");
        assert!(case.provenance.starts_with("vllm 0.21.0"));
        for provenance in [case.provenance.clone(), "another kernel".to_owned()] {
            case.provenance = provenance;
            let report = judged(&mut case, "y");
            assert_eq!(report.verdict, Verdict::Fail, "{name}: {report:?}");
            let diagnosis = report.diagnosis.expect("named");
            assert_eq!(diagnosis.id, "upstream-k-slice-scales");
            assert!(diagnosis.text.contains("a fault of vLLM 0.21.0's kernel"), "{diagnosis:?}");
        }
        // The correct product passes from every producer.
        let right = planted(name, "y", |m| m.compute());
        assert_eq!((right.verdict, right.diagnosis), (Verdict::Pass, None), "{name}");
    }
}

#[test]
fn numbers() {
    expect(GROUPED, "y", "all-zeros", |m| vec![0.0; m.rows() * m.n]);
    let zeros = expect(GROUPED, "y", "zeros", |m| {
        let mut y = m.compute();
        y[2 * m.n..3 * m.n].fill(0.0);
        y
    });
    assert!(text(&zeros).contains("are in row 2"), "{}", text(&zeros));
    let special = expect(GROUPED, "y", "not-finite", |m| {
        let mut y = m.compute();
        (y[17], y[200]) = (f64::NAN, f64::INFINITY);
        y
    });
    assert!(text(&special).contains("(1 NaN, 1 infinite)"), "{}", text(&special));
    expect(GROUPED, "y", "constant-factor", |m| m.compute().iter().map(|y| y * 0.5).collect());
}

#[test]
fn global_scales() {
    // A scale near one, so that the wrong products are finite, too.
    let plant = |id: &str, change: fn(f64) -> f64| {
        let bytes = golden(SCALED);
        let mut case = Case::parse(&bytes).expect("a case");
        let scale = Tensor::from_vec("weight_global_scale", DType::F32, vec![1], vec![0.02f32]);
        case.add_input("weight_global_scale", scale.expect("a tensor"));
        let x = case.input("x").expect("x");
        let (shape, ty) = (x.shape().to_vec(), ScalarType::FLOAT16);
        let values = x.elements::<u16>();
        let small = values.iter().map(|&b| f64_to_f16_rne(ty.to_f64(b.into()) / 1024.0)).collect();
        case.add_input("x", Tensor::from_vec::<u16>("x", DType::F16, shape, small).expect("x"));
        let mut model = Model::new(&case, "y");
        model.matrices[0].global = model.matrices[0].global.map(change);
        let y = model.compute();
        assert!(y.iter().all(|y| y.is_finite()));
        put(&mut case, "y", &y);
        let report = judged(&mut case, "y");
        assert_eq!(report.verdict, Verdict::Fail, "{id}");
        let diagnosis = report.diagnosis.unwrap_or_else(|| panic!("{id}: none"));
        assert_eq!((diagnosis.id.as_str(), diagnosis.unexplained), (id, 0), "{diagnosis:?}");
    };
    plant("global-scale-missing", |_| 1.0);
    plant("global-scale-inverted", |g| 1.0 / g);
    plant("global-scale-twice", |g| g * g);
}
