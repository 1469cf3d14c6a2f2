//! The exact product compared with big integers: every number is a multiple of a power of two, so
//! sums of products are integers, and comparing integers decides their rounding.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f16_to_f64, f64_to_bf16_rne, f64_to_f16_rne};
use marlinspike::products::{Request, Rows, Rule, WeightColumns, Wide, product};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use num_bigint::{BigInt, BigUint, Sign};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;
const F32: ScalarType = ScalarType::FLOAT32;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Numbers are integers times 2^-UNIT.
const UNIT: i32 = 700;

/// `x` in units of 2^-UNIT; `x` is finite.
fn units(x: f64) -> BigInt {
    let bits = x.to_bits();
    let field = (bits >> 52) as i32 & 0x7ff;
    let mantissa = bits & ((1 << 52) - 1) | if field == 0 { 0 } else { 1 << 52 };
    let shift = field.max(1) - 1075 + UNIT;
    let magnitude = BigInt::from(mantissa);
    let value = if shift >= 0 {
        magnitude << shift
    } else {
        assert!((&magnitude % (BigInt::from(1) << -shift)) == BigInt::ZERO, "{x:e} is too fine");
        magnitude >> -shift
    };
    if x < 0.0 { -value } else { value }
}

/// The bits of `ty` nearest to `value` · 2^-2·UNIT, ties to even, found among all numbers of the
/// type by comparing distances.
fn nearest(ty: ScalarType, value: &BigInt) -> u32 {
    let magnitude = value.magnitude();
    let infinity: u32 = match ty {
        F16 => 0x7c00,
        BF16 => 0x7f80,
        _ => 0x7f80_0000,
    };
    let scaled = |code: u32| -> BigUint {
        let x = match code == infinity {
            // One unit past the largest finite number: where IEEE 754 rounds to infinity.
            true => ty.to_f64(code - 1) + (ty.to_f64(code - 1) - ty.to_f64(code - 2)),
            false => ty.to_f64(code),
        };
        (units(x) << UNIT).magnitude().clone()
    };
    // The last code not above.
    let (mut low, mut high) = (0u32, infinity);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if scaled(middle) <= *magnitude { low = middle } else { high = middle - 1 }
    }
    let code = if low == infinity {
        infinity
    } else {
        let (below, above) = (magnitude - scaled(low), scaled(low + 1) - magnitude);
        match below.cmp(&above) {
            std::cmp::Ordering::Less => low,
            std::cmp::Ordering::Greater => low + 1,
            std::cmp::Ordering::Equal => low + (low & 1),
        }
    };
    let sign_bit = ty.size_bits() - 1;
    if value.sign() == Sign::Minus { code | 1 << sign_bit } else { code }
}

/// A finite code of `ty`: any bits (`wild`), or numbers of about one.
fn code(random: &mut Rng, ty: ScalarType, wild: bool) -> u32 {
    loop {
        let bits = random.next_u32();
        let code = match ty.size_bits() {
            32 => bits,
            size => bits & ((1 << size) - 1),
        };
        let value = ty.to_f64(code);
        if value.is_finite()
            && (wild || ty == ScalarType::INT8 || (0.001..8.0).contains(&value.abs()))
        {
            return code;
        }
    }
}

struct Case {
    rows: Rows,
    x: Vec<f64>,
    weight: Weight<'static>,
}

fn case(
    random: &mut Rng,
    activations: ScalarType,
    ty: ScalarType,
    scale: ScalarType,
    wild: bool,
) -> Case {
    let (size_m, size_k, size_n) =
        (1 + random.below(5), 8 * (1 + random.below(20)), 1 + random.below(11));
    let shape = Shape::new(size_k, size_n);
    let x: Vec<u32> = (0..size_m * size_k)
        .map(|_| if random.chance(1, 9) { 0 } else { code(random, activations, wild) })
        .collect();
    let bits = if ty.size_bits() <= 4 { 4 } else { 8 };
    let codes = Codes::from_fn(bits, shape, |_, _| code(random, ty, true) as u8).expect("codes");
    let groups = if random.chance(1, 3) { 1 } else { size_k / 8 };
    let group_size = if groups == 1 { GroupSize::Channel } else { GroupSize::Of(8) };
    let scales: Vec<u32> = (0..groups * size_n).map(|_| code(random, scale, wild)).collect();
    let data = match scale.storage_bits() {
        8 => TableData::B8(scales.iter().map(|&s| s as u8).collect()),
        16 => TableData::B16(scales.iter().map(|&s| s as u16).collect()),
        _ => TableData::B32(scales),
    };
    let zeros = matches!(ty, ScalarType::UINT4 | ScalarType::UINT8).then(|| {
        let zeros = (0..groups * size_n).map(|_| code(random, ty, true) as u8).collect();
        Table::new(ty, groups, size_n, TableData::B8(zeros)).expect("zeros")
    });
    let weight = Weight {
        name: "weight".to_owned(),
        ty,
        codes,
        scales: Table::new(scale, groups, size_n, data).expect("scales"),
        zeros,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias: None,
    };
    let rows = Rows::decode(activations, size_k, x.iter().copied()).expect("rows");
    Case { rows, x: x.iter().map(|&b| activations.to_f64(b)).collect(), weight }
}

/// Every pair of types, both rules, tame and wild numbers, rounded to every output type.
#[test]
fn sums_are_those_of_integers() {
    let mut random = Rng::new(20);
    let kinds = [
        (ScalarType::UINT4B8, F16),
        (ScalarType::UINT4B8, BF16),
        (ScalarType::UINT8B128, F16),
        (ScalarType::UINT4, BF16),
        (ScalarType::UINT8, F32),
        (ScalarType::INT8, F32),
        (E4M3, BF16),
        (E4M3, F32),
        (E4M3, ScalarType::FLOAT8_E8M0FNU),
        (ScalarType::FLOAT4_E2M1F, E4M3),
        (ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E8M0FNU),
    ];
    let mut checked = 0;
    for activations in [F16, BF16, ScalarType::INT8, E4M3] {
        for (ty, scale) in kinds {
            for rule in [Rule::Exact, Rule::Unscaled, Rule::Rounded(F16), Rule::Rounded(BF16)] {
                for wild in [false, true, true] {
                    checked += compare(&case(&mut random, activations, ty, scale, wild), rule);
                }
            }
        }
    }
    assert!(checked > 5000, "{checked}");
}

fn compare(case: &Case, rule: Rule) -> usize {
    let shape = case.weight.shape();
    let columns = WeightColumns::new(&case.weight, rule, None).expect("columns");
    let found = product(&case.rows, &columns, Request::default(), |e| {
        let sum = e.sum();
        [F16, BF16, F32].map(|ty| sum.round(ty))
    })
    .expect("a product");
    let mut overflowed = 0;
    for m in 0..case.rows.rows() {
        for n in 0..shape.size_n {
            let mut sum = BigInt::ZERO;
            let mut finite = true;
            for k in 0..shape.size_k {
                let w = &case.weight;
                let group = w.groups.group_of(k);
                let q = w.ty.to_f64(w.codes.get(k, n).into());
                let z = w.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
                let exact = (q - z) * w.scales.value(group, n);
                let value = match rule {
                    Rule::Exact => exact,
                    Rule::Unscaled => q - z,
                    Rule::Rounded(F16) => f16_to_f64(f64_to_f16_rne(exact)),
                    Rule::Rounded(_) => BF16.to_f64(f64_to_bf16_rne(exact).into()),
                };
                finite &= value.is_finite();
                if value.is_finite() {
                    sum += units(case.x[m * shape.size_k + k]) * units(value);
                }
            }
            if !finite {
                overflowed += 1;
                continue;
            }
            let expected = [F16, BF16, F32].map(|ty| nearest(ty, &sum));
            assert_eq!(found[m * shape.size_n + n], expected, "[{m}, {n}] {rule:?}");
        }
    }
    found.len() - overflowed
}

/// Large terms cancel and leave a sum that is 2^200 times smaller.
#[test]
fn cancellation_leaves_the_small_term() {
    let mut sum = Wide::new();
    for x in [1e38, 3.0, -1e38, f64::from(f32::from_bits(1)), -3.0] {
        sum.add(x);
    }
    assert_eq!(sum.round(F32), 1);
    sum.add(-f64::from(f32::from_bits(1)));
    assert!(sum.is_zero());
    assert_eq!(sum.round(F32), 0);
    let mut scaled = Wide::new();
    sum.add_product(1e30, 1e-30);
    sum.add_scaled_to(-3.5, &mut scaled);
    // 1e30 · 1e-30 of the two f64 is not 1; to f16 it is.
    assert_eq!(scaled.round(F16), 0xc300);
}

/// A rounding boundary that is decided 64 bits below the leading bit.
#[test]
fn a_distant_bit_decides_a_tie() {
    for (tail, expected) in [(0.0, 0x3c00), (1e-300, 0x3c01), (-1e-300, 0x3c00)] {
        let mut sum = Wide::new();
        sum.add(1.0);
        sum.add(f64::exp2(-11.0));
        sum.add(tail);
        assert_eq!(sum.round(F16), expected, "{tail:e}");
    }
    for (x, expected) in [(65519.9, 0x7bff), (65520.0, 0x7c00), (1e300, 0x7c00), (-1e300, 0xfc00)] {
        let mut sum = Wide::new();
        sum.add(x);
        assert_eq!(sum.round(F16), expected, "{x}");
    }
}

/// Infinity and NaN follow IEEE 754 in every operand.
#[test]
fn what_is_not_finite() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let shape = Shape::new(8, 1);
    let weight = |scale: f32, codes: u8| Weight {
        name: "weight".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_fn(4, shape, |k, _| if k == 7 { codes } else { 9 }).expect("codes"),
        scales: Table::new(F32, 1, 1, TableData::B32(vec![scale.to_bits()])).expect("scales"),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    };
    let one = |x: [f64; 8], w: Weight<'_>| {
        let columns = WeightColumns::new(&w, Rule::Exact, None).expect("columns");
        let rows = Rows::new(8, x.to_vec()).expect("rows");
        product(&rows, &columns, Request::default(), |e| e.sum().to_f64()).expect("a product")[0]
    };
    let with = |v: f64, u: f64| [1.0, v, 2.0, u, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(one(with(inf, 1.0), weight(1.0, 9)), inf);
    assert_eq!(one(with(inf, 1.0), weight(-1.0, 9)), -inf);
    assert!(one(with(inf, -inf), weight(1.0, 9)).is_nan());
    assert!(one(with(1.0, nan), weight(1.0, 9)).is_nan());
    // Infinity times a zero weight.
    assert!(one([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, inf], weight(1.0, 8)).is_nan());
    // A zero activation times a NaN weight.
    assert!(one([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], weight(f32::NAN, 9)).is_nan());
    assert_eq!(one([-0.0; 8], weight(1.0, 9)).to_bits(), 0);
}

/// Shapes that do not match are errors that name the tensor.
#[test]
fn wrong_shapes_are_errors() {
    let mut random = Rng::new(4);
    let case = case(&mut random, F16, ScalarType::UINT4B8, F16, false);
    let columns = WeightColumns::new(&case.weight, Rule::Exact, None).expect("columns");
    let short = Rows::new(3, vec![0.0; 3]).expect("rows");
    let error = product(&short, &columns, Request::default(), |_| ()).expect_err("refused");
    assert!(error.to_string().contains("size_k"), "{error}");
    let error = Rows::new(3, vec![0.0; 4]).expect_err("refused");
    assert!(error.to_string().contains("activations"), "{error}");
    let order: Vec<u32> = vec![0; case.weight.shape().size_k + 1];
    assert!(WeightColumns::new(&case.weight, Rule::Exact, Some(&order)).is_err());
}
