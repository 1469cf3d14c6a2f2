//! Simulated kernels against the bounds of their classes.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{
    Class, Columns, Convention, Extras, Inputs, Judge, Recipe, Rows, columns::TILE, product,
};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_golden::Tier;

use crate::data::{DATA, Data, normal, operands, values};
use crate::unit::{UNITS, Unit, reduced};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const BF16: ScalarType = ScalarType::BFLOAT16;
const F32: ScalarType = ScalarType::FLOAT32;

/// Columns of arbitrary numbers.
pub(crate) struct Plain {
    pub(crate) size_k: usize,
    pub(crate) columns: Vec<Vec<f64>>,
}

impl Columns for Plain {
    fn size_k(&self) -> usize {
        self.size_k
    }

    fn size_n(&self) -> usize {
        self.columns.len()
    }

    fn tile(&self, n0: usize, out: &mut [[f64; TILE]]) {
        for (k, row) in out.iter_mut().enumerate() {
            for (j, x) in row.iter_mut().enumerate() {
                *x = self.columns.get(n0 + j).map_or(0.0, |column| column[k]);
            }
        }
    }
}

/// One kernel: which products form each part of the sum, in their order.
struct Kernel {
    unit: Unit,
    parts: Vec<Vec<usize>>,
}

impl Kernel {
    /// Any order, any parts of whole instructions; sometimes the worst order for truncation: large
    /// products first, those of one sign before the others.
    fn any(random: &mut Rng, terms: &[(f64, f64)]) -> Self {
        let mut order: Vec<usize> = (0..terms.len()).collect();
        match random.below(4) {
            0 => {}
            1 => {
                let p = |k: usize| terms[k].0 * terms[k].1;
                order.sort_by(|&i, &j| p(j).total_cmp(&p(i)));
                if random.chance(1, 2) {
                    order.reverse();
                }
            }
            _ => random.shuffle(&mut order),
        }
        let instructions: Vec<&[usize]> = order.chunks(32).collect();
        let count = if random.chance(1, 2) { 1 } else { 1 + random.below(instructions.len()) };
        let mut parts = vec![Vec::new(); count];
        for instruction in instructions {
            parts[random.below(count)].extend_from_slice(instruction);
        }
        Self { unit: random.pick(&UNITS), parts }
    }

    /// Ascending runs, cut anywhere at multiples of 32.
    fn contiguous(random: &mut Rng, size_k: usize) -> Self {
        let blocks = size_k / 32;
        let mut cuts: Vec<usize> = match random.below(4) {
            0 => Vec::new(),
            1 => (1..blocks).filter(|b| b % 4 == 0).collect(),
            _ => (0..random.below(8)).map(|_| random.below(blocks)).collect(),
        };
        cuts.extend([0, blocks]);
        cuts.sort_unstable();
        cuts.dedup();
        let parts = cuts.windows(2).map(|c| (c[0] * 32..c[1] * 32).collect()).collect();
        Self { unit: random.pick(&UNITS), parts }
    }

    /// As a Hopper kernel does: a unit, a promotion, parts.
    fn hopper(random: &mut Rng, size_k: usize) -> Self {
        let tile = random.pick(&[64, 128]);
        let count = if random.chance(1, 3) { 1 } else { 1 + random.below(16) };
        let length = size_k.div_ceil(tile).div_ceil(count) * tile;
        let unit = random.pick(&[Unit::Wgmma, Unit::Wgmma, Unit::Mma]);
        let promotion = random.pick(&[size_k, 128, 64, 32]);
        let mut parts = Vec::new();
        for start in (0..size_k).step_by(length) {
            let end = size_k.min(start + length);
            parts.extend(
                (start..end).step_by(promotion).map(|s| (s..end.min(s + promotion)).collect()),
            );
        }
        Self { unit, parts }
    }

    fn run(&self, random: &mut Rng, terms: &[(f64, f64)]) -> f64 {
        let part = |part: &Vec<usize>| {
            let terms: Vec<(f64, f64)> = part.iter().map(|&k| terms[k]).collect();
            self.unit.chain(&terms)
        };
        reduced(random, self.parts.iter().map(part).collect())
    }
}

/// Checks that no sum of `kernels` exceeds its bound; returns the number of sums and the largest
/// error over bound.
fn sums(
    class: &Class,
    data: Data,
    size_k: usize,
    kernels: usize,
    kernel: impl Fn(&mut Rng, &[(f64, f64)]) -> Kernel,
) -> (usize, f64) {
    let mut random = Rng::new(size_k as u64 * 31 + data as u64);
    let (rows, cols) = (12, 16);
    let [a, w] = operands(&mut random, data, [rows, cols, size_k]).map(|codes| values(&codes));
    let columns = Plain { size_k, columns: w.chunks_exact(size_k).map(<[f64]>::to_vec).collect() };
    let activations = Rows::new(size_k, a.clone()).expect("rows");
    let inputs = Inputs { activations: E4M3, weights: E4M3, output: BF16, group_scales: None };
    let mut stripes = Vec::new();
    let request = class.request(&mut stripes);
    let bounds = product(&activations, &columns, request, |e| class.bound(e, size_k, inputs));
    let (mut count, mut largest) = (0, 0f64);
    for (i, bound) in bounds.expect("a product").into_iter().enumerate() {
        let (m, n) = (i / cols, i % cols);
        let terms: Vec<(f64, f64)> =
            (0..size_k).map(|k| (a[m * size_k + k], w[n * size_k + k])).collect();
        // Multiples of 2^-18 below 2^30: exact.
        let exact: f64 = terms.iter().map(|(a, w)| a * w).sum();
        for _ in 0..kernels {
            let found = kernel(&mut random, &terms).run(&mut random, &terms);
            let error = found - exact;
            let bound = bound[usize::from(error > 0.0)];
            assert!(error.abs() <= bound, "{data:?}, K {size_k} [{m}, {n}]: {error} of {bound}");
            largest = largest.max(if error == 0.0 { 0.0 } else { error.abs() / bound });
            count += 1;
        }
    }
    (count, largest)
}

/// Over a million simulated sums: orders, splits, promotions, units, lengths, distributions.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_simulated_sum_leaves_its_bound() {
    let (mut count, fewer) = (0, Tier::current().pick(4, 1, 1));
    for data in DATA {
        for (size_k, kernels) in [(32, 150), (64, 150), (160, 120), (512, 60), (1024, 12)] {
            let kernels = kernels / fewer;
            let class = Class::fp8_any_order();
            let any = sums(&class, data, size_k, kernels, Kernel::any);
            let class = Class::fp8_contiguous();
            let kernel = |random: &mut Rng, _: &[(f64, f64)]| Kernel::contiguous(random, size_k);
            let contiguous = sums(&class, data, size_k, kernels, kernel);
            println!("{data:?}, K {size_k}: {any:?}, contiguous {contiguous:?}");
            count += any.0 + contiguous.0;
        }
    }
    assert!(count >= 1_000_000 / fewer, "{count}");
}

pub(crate) fn scales(random: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (0.002 * (1.0 + normal(random).abs())) as f32).collect()
}

pub(crate) fn weight(
    codes: &[u32],
    [size_k, size_n]: [usize; 2],
    scales: &[f32],
) -> Weight<'static> {
    let shape = Shape::new(size_k, size_n);
    let bits = scales.iter().map(|s| s.to_bits()).collect();
    Weight {
        name: "weight".to_owned(),
        ty: E4M3,
        codes: Codes::from_fn(8, shape, |k, n| codes[n * size_k + k] as u8).expect("codes"),
        scales: Table::new(F32, 1, size_n, TableData::B32(bits)).expect("scales"),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    }
}

/// Outputs of Hopper kernels, one kernel for each: some member of the class holds every element.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_simulated_output_leaves_every_member() {
    let mut random = Rng::new(5);
    let mut count = 0;
    for data in DATA {
        for size_k in [128, 512, 832, 2048] {
            let (rows, cols) = (6, 20);
            let codes = operands(&mut random, data, [rows, cols, size_k]);
            let [a, w] = codes.each_ref().map(|codes| values(codes));
            let [row_scales, column_scales] = [rows, cols].map(|n| scales(&mut random, n));
            let weight = weight(&codes[1], [size_k, cols], &column_scales);
            let extras = Extras { activation_scales: Some(&row_scales), router_weights: None };
            let recipe = Recipe::new(Convention::W8a8, &weight, BF16, extras).expect("recipe");
            let rows_of = Rows::new(size_k, a.clone()).expect("rows");
            let members = Class::fp8_hopper().members(size_k);
            let bounds: Vec<_> = members
                .iter()
                .map(|class| {
                    let judge =
                        Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
                    judge.bounds(&rows_of, None).expect("bounds")
                })
                .collect();
            for _ in 0..12 {
                let kernel = Kernel::hopper(&mut random, size_k);
                let by_row = random.chance(1, 2);
                let found: Vec<f64> = (0..rows * cols)
                    .map(|i| {
                        let (m, n) = (i / cols, i % cols);
                        let terms: Vec<(f64, f64)> =
                            (0..size_k).map(|k| (a[m * size_k + k], w[n * size_k + k])).collect();
                        let sum = kernel.run(&mut random, &terms) as f32;
                        let (s, t) = (row_scales[m], column_scales[n]);
                        let y = if by_row { sum * s * t } else { sum * t * s };
                        BF16.to_f64(BF16.encode_rne(y.into()))
                    })
                    .collect();
                let fits = |bounds: &Vec<marlinspike::products::Bounded>| {
                    bounds.iter().zip(&found).all(|(b, &y)| b.ratio(y) <= 1.0)
                };
                let parts = kernel.parts.len();
                assert!(
                    bounds.iter().any(fits),
                    "{data:?}, K {size_k}: {:?}, {parts}",
                    kernel.unit
                );
                count += found.len();
            }
        }
    }
    println!("{count} outputs");
}

/// Group scales that multiply sums of codes: 4-bit weights, and e4m3 weights.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_simulated_group_sum_leaves_its_bound() {
    let mut random = Rng::new(6);
    let (rows, cols, size_k) = (6, 16, 512);
    let (mut count, mut largest) = (0, 0f64);
    for data in DATA {
        for (group, fp8) in [(32, false), (128, false), (128, true)] {
            let groups = size_k / group;
            let [a, w] = operands(&mut random, data, [rows, cols, size_k]);
            let ty = if fp8 { E4M3 } else { ScalarType::UINT4B8 };
            let code = |k: usize, n: usize| w[n * size_k + k] as u8 & if fp8 { 0xff } else { 15 };
            let column_scales = scales(&mut random, groups * cols);
            let bits = column_scales.iter().map(|s| s.to_bits()).collect();
            let weight = Weight {
                ty,
                codes: Codes::from_fn(if fp8 { 8 } else { 4 }, Shape::new(size_k, cols), code)
                    .expect("codes"),
                scales: Table::new(F32, groups, cols, TableData::B32(bits)).expect("scales"),
                groups: Groups::Uniform(GroupSize::Of(group)),
                ..weight(&w, [size_k, cols], &column_scales[..cols])
            };
            let row_scales = scales(&mut random, rows);
            let extras = Extras { activation_scales: Some(&row_scales), router_weights: None };
            let recipe = Recipe::new(Convention::Canonical, &weight, BF16, extras).expect("recipe");
            let activations = values(&a);
            let rows_of = Rows::new(size_k, activations.clone()).expect("rows");
            let members = Class::fp8_hopper().members(size_k);
            let classes = [Class::fp8_any_order(), Class::fp8_contiguous(), members[0].clone()];
            let bounds = classes.each_ref().map(|class| {
                let judge = Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
                judge.bounds(&rows_of, None).expect("bounds")
            });
            for i in 0..rows * cols {
                let (m, n) = (i / cols, i % cols);
                let value = |k: usize| {
                    let code = code(k, n);
                    if fp8 { E4M3.to_f64(code.into()) } else { f64::from(code) - 8.0 }
                };
                let terms: Vec<(f64, f64)> =
                    (0..size_k).map(|k| (activations[m * size_k + k], value(k))).collect();
                for unit in UNITS {
                    let mut sum = 0f32;
                    for (g, terms) in terms.chunks(group).enumerate() {
                        let (part, scale) = (unit.chain(terms), column_scales[g * cols + n]);
                        let fused = f64::from(sum) + part * f64::from(scale);
                        let apart = sum + part as f32 * scale;
                        sum = if random.chance(1, 2) { fused as f32 } else { apart };
                    }
                    let y = BF16.to_f64(BF16.encode_rne((sum * row_scales[m]).into()));
                    let known = if unit == Unit::Wgmma { 3 } else { 2 };
                    for (class, bounds) in classes.iter().zip(&bounds).take(known) {
                        let ratio = bounds[i].ratio(y);
                        assert!(
                            ratio <= 1.0,
                            "{}, {data:?}, {group}, {unit:?}: {ratio}",
                            class.name
                        );
                        largest = largest.max(ratio);
                    }
                    count += 1;
                }
            }
        }
    }
    println!("{count} sums, largest error over bound {largest}");
}
