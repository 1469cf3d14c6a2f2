//! W8A8-FP8 products and layers, and their bounds, compared with exact arithmetic on big integers.
//!
//! Nothing here uses the emulated unit: a number is an integer times a power of two, and every
//! truncation and rounding is a division of integers, by the rules of
//! docs/src/internals/tensor-cores.md and IEEE 754.

use marlinspike::case::Activation;
use marlinspike::method::{Activations, Arithmetic, MethodLayer, Promotion, Quantizer};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::{FloatView2, into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Fp8Kernel, Schedule};
use marlinspike::products::{self, Class, Convention, Judge, Recipe};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use num_bigint::BigInt;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const F32: ScalarType = ScalarType::FLOAT32;

/// `integer · 2^exponent`.
#[derive(Debug, Clone)]
struct Number(BigInt, i64);

/// Significant bits and the exponent of the least unit of a type.
const fn format(ty: ScalarType) -> (i64, i64) {
    match ty {
        ScalarType::FLOAT16 => (11, -24),
        ScalarType::BFLOAT16 => (8, -133),
        ScalarType::FLOAT8_E4M3FN => (4, -9),
        _ => (24, -149),
    }
}

impl Number {
    const fn zero() -> Self {
        Self(BigInt::ZERO, 0)
    }

    /// The exact value of a finite f64.
    fn of(x: f64) -> Self {
        let bits = x.to_bits();
        let field = (bits >> 52 & 0x7ff) as i64;
        let hidden = if field == 0 { 0 } else { 1 << 52 };
        let magnitude = BigInt::from((bits & ((1 << 52) - 1)) | hidden);
        Self(if x.is_sign_negative() { -magnitude } else { magnitude }, field.max(1) - 1075)
    }

    fn times(&self, other: &Self) -> Self {
        Self(&self.0 * &other.0, self.1 + other.1)
    }

    fn plus(&self, other: &Self) -> Self {
        let e = self.1.min(other.1);
        let shifted = |x: &Self| &x.0 << (x.1 - e);
        Self(shifted(self) + shifted(other), e)
    }

    fn is_zero(&self) -> bool {
        self.0 == BigInt::ZERO
    }

    /// ⌊log₂⌋ of the magnitude.
    fn exponent(&self) -> i64 {
        self.1 + self.0.bits() as i64 - 1
    }

    /// Rounded toward zero to a multiple of 2^unit.
    fn truncated(&self, unit: i64) -> Self {
        if unit <= self.1 {
            return self.clone();
        }
        Self(&self.0 / (BigInt::from(1) << (unit - self.1)), unit)
    }

    /// Rounded to the nearest number of `ty`, ties to even; must not overflow.
    fn rounded(&self, ty: ScalarType) -> Self {
        let (precision, least) = format(ty);
        if self.is_zero() {
            return Self::zero();
        }
        let unit = (self.exponent() + 1 - precision).max(least);
        let low = self.truncated(unit);
        if unit <= self.1 {
            return low;
        }
        let rest = self.plus(&Self(-&low.0, unit));
        let up = Self(if self.0 < BigInt::ZERO { (-1).into() } else { 1.into() }, unit);
        // Twice the remainder, compared with one unit.
        let twice = Self(BigInt::from(rest.0.magnitude().clone()) * 2, rest.1);
        let (a, b) = (
            &twice.0 << (twice.1 - twice.1.min(unit)),
            BigInt::from(1) << (unit - twice.1.min(unit)),
        );
        let odd = low.0.bit(0);
        if a > b || a == b && odd { low.plus(&up) } else { low }
    }

    /// The quotient rounded to f32.
    fn over(&self, other: &Self) -> Self {
        // Many more bits than f32 has, and a sticky bit for the remainder.
        let shift = 200;
        let (n, d) = (&self.0 << shift, &other.0);
        let (quotient, rest) = (&n / d, &n % d);
        let sticky = if rest == BigInt::ZERO { 0 } else { 1 };
        let negative = (self.0 < BigInt::ZERO) != (other.0 < BigInt::ZERO);
        let sticky = BigInt::from(if negative { -sticky } else { sticky });
        Self(quotient * 2 + sticky, self.1 - shift - 1 - other.1).rounded(F32)
    }

    fn equals(&self, x: f64) -> bool {
        self.plus(&Self::of(-x)).is_zero()
    }
}

/// Significand in eighths and exponent of an e4m3 code: a subnormal has the least exponent.
fn parts(code: u8) -> (i64, i64) {
    let field = i64::from(code >> 3 & 15);
    let significand = i64::from(code & 7) + if field == 0 { 0 } else { 8 };
    (if code & 0x80 == 0 { significand } else { -significand }, field.max(1) - 7)
}

/// One `wgmma` of 32 k: F = 13, the sum truncated to 14 significant bits.
fn wgmma(a: &[u8], b: &[u8], c: &Number) -> Number {
    let products = || {
        a.iter().zip(b).map(|(&a, &b)| {
            let ((ma, ea), (mb, eb)) = (parts(a), parts(b));
            (Number((ma * mb).into(), ea + eb - 6), ea + eb)
        })
    };
    let nonzero = products().filter(|(p, _)| !p.is_zero()).map(|(_, e)| e);
    let of_c = (!c.is_zero()).then(|| c.exponent().max(-126));
    let Some(largest) = nonzero.chain(of_c).max() else { return Number::zero() };
    let unit = largest - 13;
    let sum = products().fold(c.truncated(unit), |sum, (p, _)| sum.plus(&p.truncated(unit)));
    if sum.is_zero() { sum } else { sum.truncated(sum.exponent() - 13) }
}

/// The f32 sum of a row and a column.
fn sum(a: &[u8], b: &[u8], promoted: bool) -> Number {
    let chunk = if promoted { 128 } else { a.len() };
    let mut total: Option<Number> = None;
    for (a, b) in a.chunks(chunk).zip(b.chunks(chunk)) {
        let instructions = a.chunks(32).zip(b.chunks(32));
        let part = instructions.fold(Number::zero(), |c, (a, b)| wgmma(a, b, &c));
        total = Some(match total {
            None => part,
            Some(total) => total.plus(&part).rounded(F32),
        });
    }
    total.unwrap_or_else(Number::zero)
}

/// Everything after the sum.
struct Epilogue {
    kernel: Fp8Kernel,
    row: f32,
    column: f32,
    bias: Option<f64>,
    router: Option<f32>,
    dtype: ScalarType,
}

impl Epilogue {
    fn run(&self, sum: &Number) -> Number {
        let [row, column] = [self.row, self.column].map(|s| Number::of(s.into()));
        let bias = self.bias.map(Number::of);
        let value = match self.kernel {
            Fp8Kernel::Cutlass => {
                let scaled = sum.times(&column).rounded(F32).times(&row);
                bias.map_or(scaled.clone(), |b| scaled.plus(&b)).rounded(F32)
            }
            Fp8Kernel::Triton => {
                let scaled = sum.times(&row).rounded(F32).times(&column).rounded(F32);
                let value = bias.map_or(scaled.clone(), |b| scaled.plus(&b).rounded(F32));
                let router = self.router.map(|r| Number::of(r.into()));
                router.map_or(value.clone(), |r| value.times(&r).rounded(F32))
            }
        };
        value.rounded(self.dtype)
    }
}

fn code(rng: &mut Rng) -> u8 {
    match rng.below(8) {
        // Zeros, subnormals, the largest.
        0 => rng.pick(&[0x00, 0x80, 0x01, 0x87, 0x7e, 0xfe]),
        _ => {
            let code = rng.next_u32() as u8;
            if code & 0x7f == 0x7f { code ^ 1 } else { code }
        }
    }
}

fn scale(rng: &mut Rng) -> f32 {
    f32::from_bits(rng.between(104, 113) << 23 | rng.next_u32() >> 9)
}

fn matrix(
    rng: &mut Rng,
    size_k: usize,
    size_n: usize,
    bias: Option<ScalarType>,
) -> Weight<'static> {
    let scales = (0..size_n).map(|_| scale(rng).to_bits()).collect();
    let bias = bias.map(|dtype| {
        let one = |_| dtype.encode_rne(f64::from(rng.below(2001) as i32 - 1000) / 512.0) as u16;
        Table::new(dtype, 1, size_n, TableData::B16((0..size_n).map(one).collect())).unwrap()
    });
    Weight {
        name: "w".to_owned(),
        ty: E4M3,
        codes: Codes::from_fn(8, Shape::new(size_k, size_n), |_, _| code(rng)).unwrap(),
        scales: Table::new(F32, 1, size_n, TableData::B32(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias,
    }
}

fn column(weight: &Weight<'_>, n: usize) -> Vec<u8> {
    (0..weight.shape().size_k).map(|k| weight.codes.get(k, n)).collect()
}

/// Every kernel, with and without promotion, bias and router weights: each bit, and within its bound.
#[test]
fn products_are_exact_arithmetic() {
    let mut rng = Rng::new(0xf8);
    let mut promotions = 0;
    for (m, n, k, dtype) in [
        (2, 3, 32, ScalarType::FLOAT16),
        (3, 17, 160, ScalarType::BFLOAT16),
        (2, 16, 384, ScalarType::FLOAT16),
    ] {
        for biased in [false, true] {
            let weight = matrix(&mut rng, k, n, biased.then_some(dtype));
            let a: Vec<u8> = (0..m * k).map(|_| code(&mut rng)).collect();
            let rows: Vec<f32> = (0..m).map(|_| scale(&mut rng) * 256.0).collect();
            let routers: Vec<f32> = (0..m).map(|_| scale(&mut rng) * 8192.0).collect();
            let x: Vec<u32> = a.iter().map(|&c| c.into()).collect();
            let mut unpromoted = Vec::new();
            for (kernel, promoted) in [
                (Fp8Kernel::Cutlass, false),
                (Fp8Kernel::Cutlass, true),
                (Fp8Kernel::Triton, false),
                (Fp8Kernel::Triton, true),
            ] {
                let routed = (kernel == Fp8Kernel::Triton).then_some(&routers[..]);
                let extras =
                    Extras { activation_scales: Some(&rows), router_weights: routed, order: None };
                let schedule = Schedule::w8a8_fp8(kernel, dtype, promoted).unwrap();
                assert_eq!(Schedule::from_json(&schedule.to_json()).unwrap(), schedule);
                let found = schedule.execute(rows_of("x", &x, k).unwrap(), &weight, extras);
                let found = into_vec(found.unwrap());
                for (i, &bits) in found.iter().enumerate() {
                    let (row, col) = (i / n, i % n);
                    let epilogue = Epilogue {
                        kernel,
                        row: rows[row],
                        column: weight.scales.value(0, col) as f32,
                        bias: weight.bias.as_ref().map(|b| b.value(0, col)),
                        router: routed.map(|r| r[row]),
                        dtype,
                    };
                    let exact = sum(&a[row * k..][..k], &column(&weight, col), promoted);
                    let expected = epilogue.run(&exact);
                    let value = dtype.to_f64(bits);
                    assert!(expected.equals(value), "{kernel:?} {promoted} k {k} at {row}, {col}");
                }
                let extras =
                    products::Extras { activation_scales: Some(&rows), router_weights: routed };
                let recipe = Recipe::new(Convention::W8a8, &weight, dtype, extras).unwrap();
                let class = Class::fp8_any_order();
                let judge =
                    Judge { weight: &weight, order: None, recipe: &recipe, class: &class, extras };
                let values = products::Rows::decode(E4M3, k, x.iter().copied()).unwrap();
                for (b, &bits) in judge.bounds(&values, None).unwrap().iter().zip(&found) {
                    assert!(b.ratio(dtype.to_f64(bits)) <= 1.0, "{kernel:?} {promoted}: {b:?}");
                }
                match promoted {
                    false => unpromoted = found,
                    true => promotions += usize::from(found != unpromoted),
                }
            }
        }
    }
    // Over several promotions, the result without them differs.
    assert!(promotions >= 3, "{promotions}");
}

/// The tight part of the bound: a scale that is off by one half exceeds it.
#[test]
fn a_wrong_scale_is_outside_its_bound() {
    let mut rng = Rng::new(3);
    let (m, n, k, dtype) = (8, 8, 256, ScalarType::FLOAT16);
    let weight = matrix(&mut rng, k, n, None);
    let x: Vec<u32> = (0..m * k).map(|_| code(&mut rng).into()).collect();
    let rows: Vec<f32> = (0..m).map(|_| scale(&mut rng) * 256.0).collect();
    let halved: Vec<f32> = rows.iter().map(|s| s / 2.0).collect();
    let extras = Extras { activation_scales: Some(&halved), ..Extras::default() };
    let schedule = Schedule::w8a8_fp8(Fp8Kernel::Triton, dtype, true).unwrap();
    let found = schedule.execute(rows_of("x", &x, k).unwrap(), &weight, extras).unwrap();
    let extras = products::Extras { activation_scales: Some(&rows), router_weights: None };
    let recipe = Recipe::new(Convention::W8a8, &weight, dtype, extras).unwrap();
    let class = Class::fp8_any_order();
    let judge = Judge { weight: &weight, order: None, recipe: &recipe, class: &class, extras };
    let values = products::Rows::decode(E4M3, k, x.iter().copied()).unwrap();
    let bounds = judge.bounds(&values, None).unwrap();
    let outside = bounds.iter().zip(&found).filter(|(b, f)| b.ratio(dtype.to_f64(**f)) > 1.0);
    assert!(outside.count() * 2 > m * n);
}

/// f32 to e4m3: to nearest even, clamped to ±448; zeros keep their sign.
fn expect_e4m3(value: &Number, found: u8, what: &str) {
    let limit = 448.0;
    let rounded = value.rounded(E4M3);
    let over = |x: &Number| x.plus(&Number::of(-limit)).0 > BigInt::ZERO;
    let negated = Number(-&rounded.0, rounded.1);
    let expected = match (over(&rounded), over(&negated)) {
        (true, _) => Number::of(limit),
        (_, true) => Number::of(-limit),
        _ => rounded,
    };
    assert!(expected.equals(E4M3.to_f64(found.into())), "{what}: {found:#x}");
}

/// Rows of 16-bit activations, quantized.
fn expect_quantized(x: &[u16], dtype: ScalarType, given: Option<f32>, found: &Activations) {
    let number = |bits: u16| Number::of(dtype.to_f64(bits.into()));
    for (row, x) in x.chunks(found.size_k).enumerate() {
        let scale = match given {
            Some(scale) => Number::of(scale.into()),
            None => {
                let largest = x.iter().map(|&b| dtype.to_f64(b.into()).abs()).fold(0.0, f64::max);
                let scale = Number::of(largest).over(&Number::of(448.0));
                let least = Number::of(1.0).over(&Number::of(448.0 * 512.0));
                let below = scale.plus(&Number(-&least.0, least.1)).0 < BigInt::ZERO;
                if below { least } else { scale }
            }
        };
        assert!(scale.equals(found.scale(row, 0).into()), "scale of row {row}");
        for (col, (&bits, &code)) in x.iter().zip(found.row(row)).enumerate() {
            let scaled = match given {
                // A product with the rounded reciprocal.
                Some(_) => number(bits).times(&Number::of(1.0).over(&scale)).rounded(F32),
                None => number(bits).over(&scale),
            };
            expect_e4m3(&scaled, code as u8, &format!("row {row} column {col}"));
        }
    }
}

/// Static and dynamic scales, router weights on either side, experts of another rank: every stage but the
/// activation, which has its own tests.
#[test]
fn layers_are_exact_arithmetic() {
    let mut rng = Rng::new(0x1a7e);
    let (experts, local, top_k, h, i, m) = (4, 3, 2, 160, 32, 3);
    for (dtype, on_input, given, promoted) in [
        (ScalarType::FLOAT16, false, [None, None], false),
        (ScalarType::BFLOAT16, true, [None, None], true),
        (ScalarType::FLOAT16, true, [Some(0.0021), Some(0.011)], true),
        (ScalarType::BFLOAT16, false, [Some(0.0057), Some(0.3)], false),
    ] {
        let mut stack = |k: usize, n: usize| -> Vec<Weight<'static>> {
            (0..local).map(|_| matrix(&mut rng, k, n, None)).collect()
        };
        let (w13, w2) = (stack(h, 2 * i), stack(i, h));
        let map = [1, -1, 0, 2];
        let layer = Layer {
            w13: &w13,
            w2: &w2,
            orders: [None, None],
            num_experts: experts,
            expert_map: Some(&map),
            activation: Definition::new(Activation::Silu),
            dtype,
            input_dtype: None,
            router_weight_on_input: on_input,
        };
        let layer = MethodLayer {
            layer,
            quantizers: given.map(|scale| match scale {
                None => Quantizer::Fp8Token,
                some => Quantizer::Fp8Tensor(some),
            }),
            w13_multipliers: None,
        };
        let x: Vec<u16> = (0..m * h)
            .map(|_| dtype.encode_rne(f64::from(rng.below(4001) as i32 - 2000) / 700.0) as u16)
            .collect();
        let ids = [0, 1, 2, 3, 1, 2];
        let weights: Vec<f32> = (0..m * top_k).map(|_| scale(&mut rng) * 8192.0).collect();
        let routed = Routed::from_rows(top_k, &ids, &weights).unwrap();
        let schedule = Schedule::w8a8_fp8(Fp8Kernel::Triton, dtype, promoted).unwrap();
        let rows = FloatView2::from_rows("x", dtype, h, &x).unwrap();
        let stages = layer.forward(rows, routed, |_, product| product.execute(&schedule)).unwrap();
        // The schedule by its name, and by its definition.
        let promotion = if promoted { Promotion::Every128 } else { Promotion::Never };
        let wgmma = Arithmetic::Wgmma(promotion);
        let named = layer.forward(rows, routed, |_, product| product.compute(wgmma)).unwrap();
        let defined = layer.forward(rows, routed, |_, product| product.define(wgmma)).unwrap();
        assert_eq!((&named, &defined), (&stages, &stages));

        let quantized = |which: usize, x: &[u16], size_k: usize| {
            let none = vec![None; x.len() / size_k];
            let view = FloatView2::from_rows("x", dtype, size_k, x).unwrap();
            let rows = layer.quantizers[which].quantize(view, &none).unwrap();
            expect_quantized(x, dtype, given[which], &rows);
            rows
        };
        let (a1q, a2q) = (quantized(0, &x, h), quantized(1, stages.activated.bits(), i));

        let product = |row: usize, n: usize, which: usize| {
            let expert = usize::try_from(map[ids[row] as usize]).ok()?;
            let (weight, rows, at) = match which {
                0 => (&w13[expert], &a1q, row / top_k),
                _ => (&w2[expert], &a2q, row),
            };
            let epilogue = Epilogue {
                kernel: Fp8Kernel::Triton,
                row: rows.scale(at, 0),
                column: weight.scales.value(0, n) as f32,
                bias: None,
                router: (on_input == (which == 0)).then(|| weights[row]),
                dtype,
            };
            let codes: Vec<u8> = rows.row(at).iter().map(|&c| c as u8).collect();
            let exact = sum(&codes, &column(weight, n), promoted);
            Some(epilogue.run(&exact))
        };
        for (which, (found, n)) in
            [(stages.gate_up.bits(), 2 * i), (stages.down.bits(), h)].into_iter().enumerate()
        {
            for (at, &bits) in found.iter().enumerate() {
                let expected = product(at / n, at % n, which).unwrap_or_else(Number::zero);
                assert!(expected.equals(dtype.to_f64(bits.into())), "{which} {dtype} at {at}");
            }
        }
        for (at, &bits) in stages.y.bits().iter().enumerate() {
            let (token, n) = (at / h, at % h);
            let term = |slot: usize| {
                let bits = stages.down.bits()[(token * top_k + slot) * h + n];
                Number::of(dtype.to_f64(bits.into()))
            };
            let expected = term(0).plus(&term(1)).rounded(F32).rounded(dtype);
            assert!(expected.equals(dtype.to_f64(bits.into())), "y at {at}");
        }
    }
}
