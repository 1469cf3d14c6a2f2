//! The bounds are sound (no schedule of a class exceeds them), tight (correct results come close
//! to them), and reject errors that a tolerance on the mean accepts.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f16_to_f64, f32_to_f16_rne, f64_to_f32_rne};
use marlinspike::products::tensor_core::{
    Accumulator, Architecture, Instruction, Operand, UNITS, Unit,
};
use marlinspike::products::{
    Bounded, Class, Convention, Extras, Inputs, Judge, Recipe, Rows, Rule, WeightColumns, product,
};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

/// Approximately normal.
fn normal(random: &mut Rng) -> f64 {
    let sum: f64 = (0..12).map(|_| f64::from(random.next_u32()) / f64::from(u32::MAX)).sum();
    sum - 6.0
}

/// Distribution of a test's numbers.
#[derive(Clone, Copy, Debug)]
enum Data {
    /// Normal.
    Normal,
    /// All of one sign: truncation errors add up.
    Positive,
    /// Exponents spread over the type.
    Spread,
    /// Pairs that cancel except for the last bits.
    Cancelling,
    /// Subnormals and the smallest normals.
    Tiny,
}

const DATA: [Data; 5] = [Data::Normal, Data::Positive, Data::Spread, Data::Cancelling, Data::Tiny];

fn number(random: &mut Rng, data: Data, ty: ScalarType) -> u32 {
    let x = normal(random);
    let x = match data {
        Data::Normal | Data::Cancelling => x,
        Data::Positive => x.abs() + 0.5,
        Data::Spread => x * f64::exp2(random.below(12) as f64 - 8.0),
        Data::Tiny if ty == F16 => x * f64::exp2(-14.0),
        Data::Tiny => x * f64::exp2(-126.0),
    };
    let half = f32_to_f16_rne(x as f32);
    match ty {
        F16 => half.into(),
        _ => marlinspike::num::scalar::f64_to_bf16_rne(x).into(),
    }
}

/// Columns of arbitrary numbers.
struct Plain {
    size_k: usize,
    values: Vec<Vec<f64>>,
}

impl marlinspike::products::Columns for Plain {
    fn size_k(&self) -> usize {
        self.size_k
    }

    fn size_n(&self) -> usize {
        self.values.len()
    }

    fn tile(&self, n0: usize, out: &mut [[f64; marlinspike::products::columns::TILE]]) {
        for (k, row) in out.iter_mut().enumerate() {
            for (j, x) in row.iter_mut().enumerate() {
                *x = self.values.get(n0 + j).map_or(0.0, |column| column[k]);
            }
        }
    }
}

/// One way through K: the order of the products, cut into parts, and the order in which the parts
/// are added.
struct Schedule {
    parts: Vec<Vec<usize>>,
}

impl Schedule {
    /// Any order, any parts of whole steps.
    fn any(random: &mut Rng, size_k: usize, step: usize) -> Self {
        let mut order: Vec<usize> = (0..size_k).collect();
        if random.chance(2, 3) {
            random.shuffle(&mut order);
        }
        let mut steps: Vec<Vec<usize>> = order.chunks(step).map(<[usize]>::to_vec).collect();
        random.shuffle(&mut steps);
        let count = 1 + random.below(steps.len());
        let mut parts = vec![Vec::new(); count];
        for step in steps {
            parts[random.below(count)].extend(step);
        }
        Self { parts }
    }

    /// Marlin's: thread blocks take contiguous ranges of tiles, each shared by warps in runs of two
    /// steps.
    fn marlin(random: &mut Rng, size_k: usize, step: usize) -> Self {
        let blocks = size_k / step;
        let warps = [2, 4][random.below(2)];
        let (slices, tile) = (1 + random.below(4), 2 * warps);
        let mut cuts: Vec<usize> =
            (1..slices).map(|_| random.below(blocks / tile + 1) * tile).collect();
        cuts.extend([0, blocks]);
        cuts.sort_unstable();
        let mut parts = Vec::new();
        for cut in cuts.windows(2) {
            for warp in 0..warps {
                let mine = (cut[0]..cut[1]).filter(|b| b % tile / 2 == warp);
                parts.push(mine.flat_map(|b| b * step..(b + 1) * step).collect());
            }
        }
        Self { parts }
    }

    fn run(&self, unit: &Unit, a: &[Operand], b: &[Operand]) -> f32 {
        let mut total = 0f32;
        let (mut x, mut w) = (Vec::new(), Vec::new());
        for part in &self.parts {
            x.clear();
            w.clear();
            x.extend(part.iter().map(|&k| a[k]));
            w.extend(part.iter().map(|&k| b[k]));
            total += f32::from_bits(unit.dot(&x, &w, 0));
        }
        total
    }
}

/// Largest and median error over bound of f32 sums.
fn ratios(
    unit: &Unit,
    class: &Class,
    data: Data,
    size_k: usize,
    shuffles: usize,
    schedule: impl Fn(&mut Rng) -> Schedule,
) -> (f64, f64, usize) {
    let ty = unit.inputs.0;
    let mut random = Rng::new(size_k as u64 + shuffles as u64);
    let (rows, cols) = (32, 40);
    let a: Vec<u32> = (0..rows * size_k).map(|_| number(&mut random, data, ty)).collect();
    let mut b: Vec<u32> = (0..cols * size_k).map(|_| number(&mut random, data, ty)).collect();
    let mut a = a;
    if matches!(data, Data::Cancelling) {
        // x·w + x·(−w'), w' a neighbour of w.
        for row in a.chunks_exact_mut(2) {
            row[1] = row[0];
        }
        let sign = 1 << (ty.size_bits() - 1);
        for column in b.chunks_exact_mut(2) {
            column[1] = (column[0] ^ sign) ^ (random.next_u32() & 1);
        }
    }
    let decode = |codes: &[u32]| -> Vec<Operand> {
        codes.iter().map(|&c| Operand::decode(ty, c, unit.through_f16)).collect()
    };
    let (oa, ob) = (decode(&a), decode(&b));
    let activations = Rows::decode(ty, size_k, a.iter().copied()).expect("rows");
    let values = b.chunks_exact(size_k).map(|c| c.iter().map(|&x| ty.to_f64(x)).collect());
    let columns = Plain { size_k, values: values.collect() };
    let inputs = Inputs { activations: ty, weights: ty, output: ty, group_scales: None };
    let mut stripes = Vec::new();
    let request = class.request(&mut stripes);
    let bounds =
        product(&activations, &columns, request, |e| (e.sum(), class.bound(e, size_k, inputs)))
            .expect("a product");
    let mut all = Vec::new();
    for _ in 0..shuffles {
        let schedule = schedule(&mut random);
        for m in 0..rows {
            for n in 0..cols {
                let found =
                    schedule.run(unit, &oa[m * size_k..][..size_k], &ob[n * size_k..][..size_k]);
                let (exact, bound) = &bounds[m * cols + n];
                let mut error = exact.clone();
                error.add(-f64::from(found));
                let error = -error.to_f64();
                let bound = bound[usize::from(error > 0.0)];
                assert!(error.abs() <= bound, "{data:?} [{m}, {n}]: {error:e} of {bound:e}");
                all.push(if error == 0.0 { 0.0 } else { error.abs() / bound });
            }
        }
    }
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all[all.len() - 1], all.len())
}

fn unit(architecture: Architecture, ty: ScalarType) -> &'static Unit {
    let found = UNITS.iter().find(|u| {
        u.architecture == architecture
            && u.instruction == Instruction::Mma
            && u.inputs.0 == ty
            && matches!(u.accumulator, Accumulator::F32 { .. })
    });
    found.expect("a unit")
}

/// Over a million sums in random orders on the units of three generations: none exceeds its bound.
#[test]
fn no_schedule_leaves_its_bound() {
    let units = [
        unit(Architecture::Hopper, F16),
        unit(Architecture::Hopper, BF16),
        unit(Architecture::Ampere, F16),
        unit(Architecture::Turing, F16),
    ];
    let mut elements = 0;
    for unit in units {
        let any = Class::of_unit(unit);
        for data in DATA {
            for (size_k, shuffles) in [(16, 6), (48, 16), (128, 14)] {
                let step = unit.size_k;
                let schedule = |random: &mut Rng| Schedule::any(random, size_k, step);
                elements += ratios(unit, &any, data, size_k, shuffles, schedule).2;
                if unit.architecture == Architecture::Hopper && size_k % 64 == 0 {
                    let class = Class::marlin_hopper();
                    let schedule = |random: &mut Rng| Schedule::marlin(random, size_k, 16);
                    elements += ratios(unit, &class, data, size_k, shuffles, schedule).2;
                }
            }
        }
    }
    assert!(elements >= 1_000_000, "{elements}");
}

/// The class of all generations contains each of them.
#[test]
fn the_general_class_holds_every_generation() {
    for unit in [unit(Architecture::Hopper, F16), unit(Architecture::Turing, F16)] {
        let class = Class::any_order();
        for data in DATA {
            ratios(unit, &class, data, 96, 3, |r| Schedule::any(r, 96, unit.size_k));
        }
    }
}

/// Errors of one sign come close to the bound; random errors are a measurable part of it.
#[test]
fn bounds_are_sharp() {
    let unit = unit(Architecture::Hopper, F16);
    let ascending = |_: &mut Rng| Schedule { parts: vec![(0..512).collect()] };
    let (median, largest, _) = ratios(unit, &Class::of_unit(unit), Data::Normal, 512, 1, ascending);
    println!("any order, normal: median {median:.4}, largest {largest:.4}");
    assert!(median > 0.001 && largest > 0.005, "{median} {largest}");
    let (median, largest, _) =
        ratios(unit, &Class::marlin_hopper(), Data::Normal, 512, 1, ascending);
    println!("Marlin's order, normal: median {median:.4}, largest {largest:.4}");
    assert!(median > 0.02 && largest > 0.1, "{median} {largest}");
    let (median, largest, _) =
        ratios(unit, &Class::of_unit(unit), Data::Positive, 512, 1, ascending);
    println!("any order, positive: median {median:.4}, largest {largest:.4}");
    assert!(median > 0.1 && largest > 0.2, "{median} {largest}");
}

/// A matrix and activations of a model's size.
fn model(random: &mut Rng, size_m: usize) -> (Weight<'static>, Vec<u32>, Rows) {
    let shape = Shape::new(4096, 64);
    let (groups, group) = (32, 128);
    let scales: Vec<u16> = (0..groups * shape.size_n)
        .map(|_| f32_to_f16_rne((0.01 * (1.0 + 0.2 * normal(random).abs())) as f32))
        .collect();
    // Codes as round-to-nearest of a normal weight gives them.
    let codes =
        Codes::from_fn(4, shape, |_, _| (8.0 + 2.3 * normal(random)).clamp(0.0, 15.0) as u8);
    let weight = Weight {
        name: "weight".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: codes.expect("codes"),
        scales: Table::new(F16, groups, shape.size_n, TableData::B16(scales)).expect("scales"),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(group)),
        global_scale: None,
        bias: None,
    };
    let x: Vec<u32> = (0..size_m * 4096).map(|_| number(random, Data::Normal, F16)).collect();
    let rows = Rows::decode(F16, 4096, x.iter().copied()).expect("rows");
    (weight, x, rows)
}

fn bounds(weight: &Weight<'_>, rows: &Rows, class: &Class) -> Vec<Bounded> {
    let extras = Extras::default();
    let recipe = Recipe::new(Convention::Marlin, weight, F16, extras).expect("a recipe");
    let judge = Judge { weight, order: None, recipe: &recipe, class, extras };
    judge.bounds(rows, None).expect("bounds")
}

/// The result of an otherwise correct kernel with `weight`: f32 sums along K.
fn computed(weight: &Weight<'_>, rows: &Rows) -> Vec<f64> {
    let columns = WeightColumns::new(weight, Rule::Rounded(F16), None).expect("columns");
    let sum = |e: &marlinspike::products::Element<'_>| {
        f16_to_f64(f32_to_f16_rne(f64_to_f32_rne(e.value())))
    };
    product(rows, &columns, Default::default(), sum).expect("a product")
}

/// The customary check: the mean of the relative difference, below 0.04.
fn customary(found: &[f64], right: &[Bounded]) -> f64 {
    let difference: f64 = found.iter().zip(right).map(|(f, r)| (f - r.exact).abs()).sum();
    difference / right.iter().map(|r| r.exact.abs()).sum::<f64>()
}

/// Damage that the customary check misses and both bounds detect.
#[test]
fn damage_within_the_customary_tolerance_is_rejected() {
    let mut random = Rng::new(11);
    let (weight, _, rows) = model(&mut random, 64);
    let two_columns_swapped = {
        let mut scales: Vec<u16> = weight.scales.iter_bits().map(|b| b as u16).collect();
        for row in scales.chunks_exact_mut(64) {
            row.swap(3, 4);
        }
        with_scales(&weight, scales)
    };
    let one_group_two_percent = {
        let mut scales: Vec<u16> = weight.scales.iter_bits().map(|b| b as u16).collect();
        let at = 17 * 64 + 5;
        scales[at] = f32_to_f16_rne((f16_to_f64(scales[at]) * 1.02) as f32);
        with_scales(&weight, scales)
    };
    let one_nibble = {
        let shape = weight.shape();
        let flip =
            |k: usize, n: usize| weight.codes.get(k, n) ^ if (k, n) == (1234, 7) { 4 } else { 0 };
        Weight { codes: Codes::from_fn(4, shape, flip).expect("codes"), ..weight.clone() }
    };
    let hopper = Class::of_unit(unit(Architecture::Hopper, F16));
    for class in [Class::any_order(), hopper, Class::marlin_hopper()] {
        let right = bounds(&weight, &rows, &class);
        let wrong = |w: &Weight<'_>| {
            let found = computed(w, &rows);
            let ratio = right.iter().zip(&found).map(|(r, &f)| r.ratio(f)).fold(0.0, f64::max);
            (customary(&found, &right), ratio)
        };
        let (mean, ratio) = wrong(&weight);
        println!("{}: undamaged: mean {mean:.5}, error/bound {ratio:.3}", class.name);
        assert!(ratio <= 1.0);
        for (what, damaged) in [
            ("two scale columns swapped", &two_columns_swapped),
            ("one group's scale off by 2 %", &one_group_two_percent),
            ("one nibble of 4096", &one_nibble),
        ] {
            let (mean, ratio) = wrong(damaged);
            println!("{}: {what}: mean {mean:.5}, error/bound {ratio:.3}", class.name);
            assert!(mean < 0.04, "{what}: the customary check sees it: {mean}");
            assert!(ratio > 1.0, "{what} under {}: {ratio}", class.name);
        }
        let mut median: Vec<f64> =
            right.iter().zip(computed(&weight, &rows)).map(|(r, f)| r.ratio(f)).collect();
        median.sort_by(f64::total_cmp);
        let (median, largest) = (median[median.len() / 2], median[median.len() - 1]);
        println!("{}: outputs: median {median:.3}, largest {largest:.3}", class.name);
        assert!(median > 0.02 && largest > 0.1, "{median} {largest}");
    }
}

/// One infinity makes a sum infinite; large other terms may overflow to the opposite one, and the
/// two meet in NaN. An infinity that nothing can meet, and infinities that do meet, leave one
/// result each.
#[test]
fn infinities_that_may_meet() {
    let mut random = Rng::new(9);
    let (weight, ..) = model(&mut random, 1);
    let size_k = weight.shape().size_k;
    let large = f64::from(f32::MAX) / 4.0;
    let row = |others: f64| {
        let mut x = vec![others; size_k];
        x[0] = f64::INFINITY;
        x
    };
    let values: Vec<f64> = [row(1.0), row(-large), row(large)].concat();
    let codes = values.iter().map(|&x| marlinspike::num::scalar::f64_to_bf16_rne(x).into());
    let rows = Rows::decode(BF16, size_k, codes).unwrap();
    let class = Class::any_order();
    let size_n = weight.shape().size_n;
    for (i, bound) in bounds(&weight, &rows, &class).into_iter().enumerate() {
        assert!(!bound.exact.is_finite(), "{i}: {bound:?}");
        let [nan, same, other] =
            [f64::NAN, bound.exact, -bound.exact].map(|found| bound.ratio(found) <= 1.0);
        match (bound.exact.is_nan(), i / size_n) {
            (true, _) => assert!(nan && same && other, "{i}: {bound:?}"),
            (false, 0) => assert!(!nan && same && !other, "{i}: {bound:?}"),
            (false, _) => assert!(nan && same, "{i}: {bound:?}"),
        }
    }
}

fn with_scales(weight: &Weight<'static>, scales: Vec<u16>) -> Weight<'static> {
    let (rows, cols) = (weight.scales.rows(), weight.scales.cols());
    let scales = Table::new(F16, rows, cols, TableData::B16(scales)).expect("scales");
    Weight { scales, ..weight.clone() }
}
