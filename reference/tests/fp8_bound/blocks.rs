//! Products with a scale of both operands for each group of k: simulated kernels against schedules
//! and bounds.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{
    Extras as Operands, Fp8BlockKernel, GroupSum, MultiplyAdd, RowScale, Schedule,
};
use marlinspike::products::{Class, Convention, Extras, Judge, Recipe, Rows};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use ndarray::Array2;

use crate::data::{DATA, operands, values};
use crate::simulated::scales;
use crate::unit::{UNITS, Unit, reduced};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const BF16: ScalarType = ScalarType::BFLOAT16;
const F32: ScalarType = ScalarType::FLOAT32;
const GROUP: usize = 128;

/// Codes and scales of a product, `[M, K]` by `[N, K]`.
struct Product {
    sizes: [usize; 3],
    codes: [Vec<u32>; 2],
    /// `[M, groups]`.
    of_rows: Vec<f32>,
    /// `[N, groups]`.
    of_columns: Vec<f32>,
}

impl Product {
    fn new(random: &mut Rng, data: crate::data::Data, sizes: [usize; 3], powers: bool) -> Self {
        let [rows, cols, size_k] = sizes;
        let codes = operands(random, data, sizes);
        let groups = size_k / GROUP;
        let mut draw = |n: usize| -> Vec<f32> {
            let all = scales(random, n * groups);
            let power = |s: f32| f32::from_bits(s.to_bits() & 0x7f80_0000);
            all.into_iter().map(|s| if powers { power(s) } else { s }).collect()
        };
        let (of_rows, of_columns) = (draw(rows), draw(cols));
        Self { sizes, codes, of_rows, of_columns }
    }

    fn groups(&self) -> usize {
        self.sizes[2] / GROUP
    }

    fn weight(&self) -> Weight<'static> {
        let [_, cols, size_k] = self.sizes;
        let groups = self.groups();
        let bits =
            (0..groups * cols).map(|i| self.of_columns[i % cols * groups + i / cols].to_bits());
        let shape = Shape::new(size_k, cols);
        let code = |k: usize, n: usize| self.codes[1][n * size_k + k] as u8;
        Weight {
            name: "weight".to_owned(),
            ty: E4M3,
            codes: Codes::from_fn(8, shape, code).expect("codes"),
            scales: Table::new(F32, groups, cols, TableData::B32(bits.collect())).expect("scales"),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(GROUP)),
            global_scale: None,
            bias: None,
        }
    }

    /// The factors of (m, n), k ascending.
    fn terms(&self, m: usize, n: usize) -> Vec<(f64, f64)> {
        let [_, _, size_k] = self.sizes;
        let of = |side: usize, row: usize| values(&self.codes[side][row * size_k..][..size_k]);
        of(0, m).into_iter().zip(of(1, n)).collect()
    }

    fn scale(&self, m: usize, n: usize, g: usize) -> [f32; 2] {
        [self.of_rows[m * self.groups() + g], self.of_columns[n * self.groups() + g]]
    }

    /// Every output by `make` of the terms of each group and its scales.
    fn outputs(&self, mut make: impl FnMut(Vec<(Vec<(f64, f64)>, [f32; 2])>) -> f32) -> Vec<f64> {
        let [rows, cols, _] = self.sizes;
        let mut all = Vec::new();
        for (m, n) in (0..rows * cols).map(|i| (i / cols, i % cols)) {
            let terms = self.terms(m, n);
            let groups = terms.chunks(GROUP).enumerate();
            let sum = make(groups.map(|(g, t)| (t.to_vec(), self.scale(m, n, g))).collect());
            all.push(BF16.to_f64(BF16.encode_rne(sum.into())));
        }
        all
    }

    /// Whether the bounds of `class` hold all of `found`.
    fn holds(&self, class: &Class, found: &[f64]) -> f64 {
        let (weight, size_k) = (self.weight(), self.sizes[2]);
        let recipe = Recipe::new(Convention::W8a8, &weight, BF16, Extras::default());
        let recipe = recipe.expect("a recipe");
        let rows = Rows::new(size_k, values(&self.codes[0])).expect("rows");
        let rows = rows.scaled(GROUP, &self.of_rows).expect("scales");
        let extras = Extras::default();
        let judge = Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
        let bounds = judge.bounds(&rows, None).expect("bounds");
        bounds.iter().zip(found).map(|(b, &y)| b.ratio(y)).fold(0.0, f64::max)
    }
}

/// part · both scales + sum, in f32, as `rule` says. Products of f32 are exact in f64.
fn promoted(rule: RowScale, fused: bool, sum: f32, part: f32, [row, block]: [f32; 2]) -> f32 {
    let (part, scale) = match rule {
        RowScale::Product => (part, row * block),
        RowScale::First => (part * row, block),
    };
    if fused { part.mul_add(scale, sum) } else { sum + part * scale }
}

/// DeepGEMM's, CUTLASS's and Triton's promotion, with a whole group in the unit or a part of it.
#[test]
fn schedules_promote_as_the_naive_loop() {
    let mut random = Rng::new(31);
    for data in DATA {
        let product = Product::new(&mut random, data, [3, 20, 512], false);
        let [rows, cols, size_k] = product.sizes;
        let weight = product.weight();
        let x = Array2::from_shape_vec((rows, size_k), product.codes[0].clone()).expect("x");
        for (kernel, rule) in [
            (Fp8BlockKernel::DeepGemm, RowScale::Product),
            (Fp8BlockKernel::Triton, RowScale::First),
        ] {
            let base = Schedule::w8a8_fp8_blocks(kernel, BF16).expect("a schedule");
            for (every, fused) in [(None, true), (Some(64), true), (Some(32), false), (None, false)]
            {
                let multiply_add = if fused { MultiplyAdd::Fused } else { MultiplyAdd::Separate };
                let sum = base.group_sum.expect("a group sum");
                let group_sum = Some(GroupSum { every, multiply_add, ..sum });
                let schedule = Schedule { group_sum, ..base.clone() };
                let again = Schedule::from_json(&schedule.to_json()).expect("JSON");
                assert_eq!(again, schedule);
                let extras =
                    Operands { activation_scales: Some(&product.of_rows), ..Operands::default() };
                let made = schedule.execute(x.view(), &weight, extras).expect("outputs");
                let naive = product.outputs(|groups| {
                    let mut sum = 0f32;
                    for (terms, scales) in groups {
                        for part in terms.chunks(every.unwrap_or(GROUP)) {
                            let part = Unit::Wgmma.chain(part) as f32;
                            sum = promoted(rule, fused, sum, part, scales);
                        }
                    }
                    sum
                });
                let made: Vec<f64> = made.iter().map(|&b| BF16.to_f64(b)).collect();
                assert_eq!(made.len(), rows * cols);
                assert_eq!(made, naive, "{data:?} {kernel:?} every {every:?} fused {fused}");
            }
        }
    }
}

/// Any order of k in a group, parts of any number of instructions, scales in either order, and f32
/// additions in any order: no kernel leaves its bound.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_simulated_block_kernel_leaves_its_bound() {
    let mut random = Rng::new(32);
    let (mut count, mut largest) = (0, 0f64);
    for data in DATA {
        for size_k in [256, 1024] {
            let product = Product::new(&mut random, data, [4, 16, size_k], false);
            for unit in UNITS {
                for _ in 0..3 {
                    let found = product.outputs(|groups| {
                        let mut parts = Vec::new();
                        for (mut terms, scales) in groups {
                            random.shuffle(&mut terms);
                            let length = 32 * random.pick(&[1, 2, 4]);
                            let rule = random.pick(&[RowScale::Product, RowScale::First]);
                            for part in terms.chunks(length) {
                                let part = unit.chain(part) as f32;
                                parts.push(f64::from(promoted(rule, false, 0.0, part, scales)));
                            }
                        }
                        reduced(&mut random, parts) as f32
                    });
                    let ratio = product.holds(&Class::fp8_any_order(), &found);
                    assert!(ratio <= 1.0, "{data:?} {unit:?} K {size_k}: {ratio}");
                    (count, largest) = (count + found.len(), largest.max(ratio));
                }
            }
        }
    }
    println!("{count} outputs, largest error / bound {largest:.3}");
    assert!(largest > 0.02, "{largest}: a bound so wide says nothing");
}

/// Ascending k on Hopper: a member of the class holds each kernel, within a few units of f32.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn a_member_of_hoppers_class_holds_each_block_kernel() {
    let mut random = Rng::new(33);
    for data in DATA {
        let product = Product::new(&mut random, data, [3, 16, 640], false);
        let members = Class::fp8_hopper().members(640);
        for (unit, every) in [(Unit::Wgmma, 128), (Unit::Wgmma, 64), (Unit::Mma, 32)] {
            for rule in [RowScale::Product, RowScale::First] {
                let fused = random.chance(1, 2);
                let found = product.outputs(|groups| {
                    let parts =
                        groups.iter().flat_map(|(t, s)| t.chunks(every).map(move |t| (t, s)));
                    parts.fold(0f32, |sum, (terms, scales)| {
                        promoted(rule, fused, sum, unit.chain(terms) as f32, *scales)
                    })
                });
                let held = members.iter().filter(|c| product.holds(c, &found) <= 1.0).count();
                assert!(held > 0, "{data:?} {unit:?} every {every} {rule:?}");
            }
        }
    }
}

/// A unit that multiplies by UE8M0 scales itself adds across groups; its results are in the bounds of its
/// own class, which is far narrower than that of Hopper's units.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn a_unit_with_block_scales_keeps_its_bound() {
    let mut random = Rng::new(34);
    for data in DATA {
        let product = Product::new(&mut random, data, [4, 16, 1024], true);
        let found = product.outputs(|groups| {
            // F = 25, 24 bits, 32 products at a time, as `Unit::Mma` without its two halves.
            let mut sum = 0.0f64;
            for (terms, [row, block]) in groups {
                for terms in terms.chunks(32) {
                    let scale = f64::from(row) * f64::from(block);
                    let terms = terms.iter().map(|(a, w)| a * w * scale);
                    sum = block_scaled(sum, &terms.collect::<Vec<_>>());
                }
            }
            sum as f32
        });
        let ratio = product.holds(&Class::fp8_block_scaled(), &found);
        assert!(ratio <= 1.0, "{data:?}: {ratio}");
    }
}

/// One fused sum: terms and c truncated to 25 fraction bits below the largest, the sum to 24 bits.
fn block_scaled(c: f64, terms: &[f64]) -> f64 {
    let exponent = |x: f64| x.abs().log2().floor() as i32;
    let largest = terms.iter().chain([&c]).filter(|x| **x != 0.0).map(|x| exponent(*x)).max();
    let Some(largest) = largest else { return 0.0 };
    // A product's exponent may be one above that of its significand.
    let cut = |x: f64, unit: i32| (x * f64::from(-unit).exp2()).trunc() * f64::from(unit).exp2();
    let sum: f64 = terms.iter().chain([&c]).map(|x| cut(*x, largest + 1 - 25)).sum();
    if sum == 0.0 { 0.0 } else { cut(sum, exponent(sum) - 23) }
}

/// The pairs of a group and its two scales.
type Group = (Vec<(f64, f64)>, [f32; 2]);

/// The bound rejects what tolerances accept: one group's scale off by 2 % in each column.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn the_bounds_reject_wrong_scales() {
    let mut random = Rng::new(35);
    let sizes = [4, 16, 2048];
    let product = Product::new(&mut random, crate::data::Data::Normal, sizes, false);
    let exact = |groups: Vec<Group>, wrong: usize, factor: f64| -> f32 {
        let part = |(g, (terms, [row, block])): (usize, Group)| {
            let sum: f64 = terms.iter().map(|(a, w)| a * w).sum();
            let own = if g == wrong { factor } else { 1.0 };
            sum * f64::from(row) * f64::from(block) * own
        };
        groups.into_iter().enumerate().map(part).sum::<f64>() as f32
    };
    // Units that keep f32's bits: two percent of one group are too many.
    for (wrong, factor) in [(99, 1.0), (5, 1.02), (5, 1.5), (5, 0.0)] {
        let found = product.outputs(|groups| exact(groups, wrong, factor));
        let ratio = product.holds(&Class::any_order(), &found);
        assert_eq!(ratio > 1.0, factor != 1.0, "factor {factor}: {ratio}");
    }
    // Units of 13 bits in any order: zeros and the other sign.
    let right = product.outputs(|groups| exact(groups, 99, 1.0));
    for factor in [0.0, -1.0] {
        let found: Vec<f64> = right.iter().map(|y| y * factor).collect();
        let ratio = product.holds(&Class::fp8_any_order(), &found);
        assert!(ratio > 1.0, "factor {factor}: {ratio}");
    }
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let rows = || Rows::new(256, vec![1.0; 512]).expect("rows");
    for (group, scales) in
        [(100, vec![1.0; 4]), (128, vec![1.0; 3]), (128, vec![1.0, 0.0, 1.0, 1.0]), (0, Vec::new())]
    {
        assert!(rows().scaled(group, &scales).is_err(), "{group} {scales:?}");
    }
    let mut random = Rng::new(36);
    let product = Product::new(&mut random, crate::data::Data::Normal, [2, 16, 256], false);
    let schedule = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, BF16).expect("a schedule");
    let x = Array2::from_shape_vec((2, 256), product.codes[0].clone()).expect("x");
    let execute = |scales: Option<&[f32]>| {
        let extras = Operands { activation_scales: scales, ..Operands::default() };
        schedule.execute(x.view(), &product.weight(), extras)
    };
    assert!(execute(Some(&product.of_rows)).is_ok());
    let error = execute(Some(&product.of_rows[..2])).expect_err("one for each row").to_string();
    assert!(error.contains("[2, 2]"), "{error}");
    let error = execute(None).expect_err("no scales").to_string();
    assert!(error.contains("row_scale"), "{error}");
    // Groups of another size than the weight's.
    let weight = product.weight();
    let recipe = Recipe::new(Convention::W8a8, &weight, BF16, Extras::default()).expect("recipe");
    let rows = rows().scaled(64, &[1.0; 8]).expect("scales");
    let (class, extras) = (Class::fp8_any_order(), Extras::default());
    let judge = Judge { weight: &weight, order: None, recipe: &recipe, class: &class, extras };
    assert!(judge.bounds(&rows, None).is_err());
}
