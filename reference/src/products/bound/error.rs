//! Computes the error bound of one element from a class; [`super`] has the derivation.

use super::{Adder, Class, Inputs, Order, Reduction};
use crate::num::scalar::ScalarType;
use crate::products::exact::Element;

/// Room for the f64 arithmetic that bounds are computed in.
const SLACK: f64 = 1.0 + 1e-12;

/// Growth of partial sums by roundings: a relative factor and an absolute term.
#[derive(Debug, Clone, Copy)]
pub(in crate::products) struct Growth {
    factor: f64,
    tiny: f64,
}

/// Sums over an element's products, including the uncertainty of the activations.
#[derive(Debug, Clone, Copy)]
struct Sides {
    /// Upper bounds of the sums of the positive and of the negative products' magnitudes; infinite
    /// if the class does not track Σ|a·w|.
    sums: [f64; 2],
    /// Factor by which roundings to nearest may enlarge a partial sum.
    growth: f64,
    /// Absolute growth by roundings near zero.
    tiny: f64,
}

impl Sides {
    /// The largest magnitude of a computed partial sum in any order: truncation toward zero cannot
    /// leave the interval from −Σ negative to Σ positive products.
    fn most(&self) -> f64 {
        self.sums[0].max(self.sums[1]) * self.growth * SLACK + self.tiny
    }

    /// Limits on how far the computed sum can be below and above the exact one, independent of the
    /// errors of its additions.
    fn caps(&self) -> [f64; 2] {
        let [p, n] = self.sums;
        let cap = |own: f64, other: f64| (own + other * (self.growth - 1.0)) * SLACK + self.tiny;
        [cap(p, n), cap(n, p)]
    }
}

impl Class {
    /// How far the computed f32 sum of one element, `size_k` products long, may be below and above
    /// the exact one.
    ///
    /// This ignores the order of the members of [`Order::Ascending`];
    /// [`Judge`](crate::products::Judge) follows the order of a single member.
    pub fn bound(&self, element: &Element<'_>, size_k: usize, inputs: Inputs) -> [f64; 2] {
        self.bound_with(element, size_k, inputs, self.growth(size_k, inputs.output))
    }

    /// As [`Self::bound`], with the values that all elements share.
    pub(in crate::products) fn bound_with(
        &self,
        element: &Element<'_>,
        size_k: usize,
        inputs: Inputs,
        growth: Growth,
    ) -> [f64; 2] {
        if self.adder == Adder::Exact {
            return [element.carried; 2];
        }
        let sides = self.sides(element, growth);
        let errors = match self.order {
            Order::Any | Order::Ascending(_) => self.errors(sides.most(), element, size_k, inputs),
            Order::Striped { .. } => self.striped(&sides, element, size_k, inputs),
            Order::Contiguous { block } => self.contiguous(&sides, block, element, inputs),
        };
        let grouped = self.grouped(&sides, element, inputs);
        let errors = [0, 1].map(|side: usize| f64::min(errors[side], grouped[side]));
        let caps = sides.caps();
        // Above the largest f32 there is no bound, and the caps do not hold.
        std::array::from_fn(|side| match errors[side] {
            f64::INFINITY => f64::INFINITY,
            error => (error + element.carried).min(caps[side]),
        })
    }

    /// Growth of the partial sums of a product by roundings.
    pub(in crate::products) fn growth(&self, size_k: usize, output: ScalarType) -> Growth {
        let additions = self.additions(size_k) as f64;
        let half = match self.reduction {
            Reduction::Output { parts } => 2.0 * parts as f64 * power(-1 - mantissa(output).0),
            Reduction::F32 { .. } => 0.0,
        };
        // Per addition: at most one multiplication by a scale, one addition, and one addition of a
        // reduction.
        let factor = (4.0 * (additions + 1.0) * power(-24) * SLACK + half).exp();
        Growth { factor, tiny: 4.0 * (size_k as f64 + 1.0) * power(-149) }
    }

    fn sides(&self, element: &Element<'_>, growth: Growth) -> Sides {
        let sum = element.value();
        let sums = match self.tracks_absolute() {
            true => [sum, -sum]
                .map(|s| (element.absolute * SLACK + s).max(0.0) / 2.0 * SLACK + element.carried),
            false => [f64::INFINITY; 2],
        };
        let none = sums == [0.0; 2];
        Sides { sums, growth: growth.factor, tiny: if none { 0.0 } else { growth.tiny } }
    }

    /// Number of additions of the adder.
    fn additions(&self, size_k: usize) -> usize {
        match self.adder {
            Adder::MatrixUnit { products, .. } => size_k.div_ceil(products),
            Adder::FusedF32 | Adder::SeparateF32 => size_k,
            Adder::IntegerGroups { group_size } => size_k.div_ceil(group_size.max(1)),
            Adder::Exact => 0,
        }
    }

    /// Sums of ranges of k. Their reach is known without rounding errors, so errors are computed at
    /// a larger reach that includes them.
    fn striped(
        &self,
        sides: &Sides,
        element: &Element<'_>,
        size_k: usize,
        inputs: Inputs,
    ) -> [f64; 2] {
        // The bound is never below the sum itself.
        let partial = (element.reach.max(element.value().abs()) + element.carried) * SLACK;
        if partial == 0.0 {
            return [0.0; 2];
        }
        let errors = |reach| self.errors(reach, element, size_k, inputs);
        let worst = |errors: [f64; 2]| errors[0].max(errors[1]);
        let most = sides.most();
        let mut reach = partial.min(most);
        let once = worst(errors(reach));
        if once < partial / 4.0 {
            // C + 2·once is at most one binade higher, where errors at most double, so the reach
            // includes its own errors.
            return errors((reach + 2.0 * once).min(most));
        }
        // Sums as small as their errors.
        for _ in 0..300 {
            let needed = partial + worst(errors(reach));
            if needed <= reach || reach == most {
                break;
            }
            reach = needed.max(2.0 * reach).min(most);
        }
        errors(reach)
    }

    /// Largest losses and gains of the additions if partial sums are at most `reach`.
    fn errors(&self, reach: f64, element: &Element<'_>, size_k: usize, inputs: Inputs) -> [f64; 2] {
        if reach == 0.0 {
            return [0.0; 2];
        }
        if reach >= f64::from(f32::MAX) {
            return [f64::INFINITY; 2];
        }
        let nearest = nearest(reach);
        let additions = self.additions(size_k);
        let (each, signs) = match self.adder {
            Adder::MatrixUnit { fraction_bits, kept_bits, .. } => {
                let top = inputs.top(reach);
                let largest = inputs.largest_product(element) + element.carried;
                let unit = top.max(largest) * power(-(fraction_bits as i32));
                // The accumulator's truncation, and the sum's.
                let each = unit + top * power(1 - kept_bits as i32);
                (each, self.lost(unit, element, size_k))
            }
            Adder::FusedF32 | Adder::SeparateF32 => (nearest, [0.0; 2]),
            Adder::IntegerGroups { .. } => (power(-24) * reach, [0.0; 2]),
            Adder::Exact => (0.0, [0.0; 2]),
        };
        let products = match self.adder {
            Adder::SeparateF32 => power(-24) * element.absolute + size_k as f64 * power(-150),
            // The factor covers the effect of earlier roundings on later ones.
            Adder::IntegerGroups { .. } => {
                (3.0 + power(-20)) * power(-24) * element.absolute + size_k as f64 * power(-150)
            }
            _ => 0.0,
        };
        let reductions = match self.reduction {
            Reduction::F32 { steps } => additions.div_ceil(steps.max(1)) as f64 * nearest,
            Reduction::Output { parts } => {
                let (mantissa, least, overflow) = mantissa(inputs.output);
                if reach >= overflow {
                    return [f64::INFINITY; 2];
                }
                // Each part is rounded, and each sum of parts.
                let e = exponent(reach).max(least);
                2.0 * parts as f64 * power(e - mantissa - 1) + additions as f64 * nearest
            }
        };
        signs.map(|lost| lost + additions as f64 * each + products + reductions)
    }

    /// Losses of positive and negative products that are truncated to a multiple of `unit`: each is
    /// less than the unit and at most the product itself.
    fn lost(&self, unit: f64, element: &Element<'_>, size_k: usize) -> [f64; 2] {
        let by_count = element.signs.map(|count| count as f64 * unit);
        let uncertain = element.carried.min(size_k as f64 * unit);
        let known = self.tracks_absolute();
        // If the unit is small compared with the products, their number suffices.
        let eight_bits = matches!(self.adder, Adder::MatrixUnit { fraction_bits: ..20, .. });
        let small = 8.0 * (by_count[0] + by_count[1]) > element.absolute;
        let coarse = known && (eight_bits || small);
        let lost = if coarse { capped(unit, element) } else { by_count };
        std::array::from_fn(|side| lost[side].min(by_count[side]) + uncertain)
    }

    /// Ascending runs of k, cut at multiples of `block`. A run's sum before block j is the
    /// difference of two prefix sums, so each block has its own unit.
    fn contiguous(
        &self,
        sides: &Sides,
        block: usize,
        element: &Element<'_>,
        inputs: Inputs,
    ) -> [f64; 2] {
        let (mut prefix, mut least, mut greatest) = (0.0f64, 0.0f64, 0.0f64);
        self.by_block(sides, block, element, inputs, |run, errors| {
            let span = (prefix - least).max(greatest - prefix);
            prefix += run.sums[0] - run.sums[1];
            (least, greatest) = (least.min(prefix), greatest.max(prefix));
            span + run.sums[0].max(run.sums[1]) + errors[0].max(errors[1])
        })
    }

    /// Error of sums that end with each group, in any order within a group; infinite without group
    /// scales.
    fn grouped(&self, sides: &Sides, element: &Element<'_>, inputs: Inputs) -> [f64; 2] {
        let Some(group) = inputs.group_scales.filter(|_| !self.scales_in_unit) else {
            return [f64::INFINITY; 2];
        };
        self.by_block(sides, group, element, inputs, |run, _| run.sums[0].max(run.sums[1]))
    }

    /// Losses of all additions if each block of k has its own reach; `reach` computes it from the
    /// block and the errors before it. Infinite for a class without blocks.
    fn by_block(
        &self,
        sides: &Sides,
        block: usize,
        element: &Element<'_>,
        inputs: Inputs,
        mut reach: impl FnMut(&Run, [f64; 2]) -> f64,
    ) -> [f64; 2] {
        let most = sides.most();
        let Adder::MatrixUnit { products, fraction_bits, kept_bits } = self.adder else {
            return [f64::INFINITY; 2];
        };
        let in_f32 = matches!(self.reduction, Reduction::F32 { .. });
        let finite = most < f64::from(f32::MAX);
        if !finite || !in_f32 || !self.tracks_absolute() {
            return [f64::INFINITY; 2];
        }
        let per_block = block.div_ceil(products);
        let (mut errors, mut blocks) = ([0.0f64; 2], 0);
        let mut factors = element.products().peekable();
        let slack = element.absolute * power(-40) + element.carried + sides.tiny;
        let mut run = Run::default();
        while factors.peek().is_some() {
            run.fill(factors.by_ref().take(block), inputs);
            let reach = ((reach(&run, errors) + slack) * sides.growth).min(most);
            blocks += 1;
            if reach <= 0.0 {
                continue;
            }
            let top = inputs.top(reach);
            let unit = top.max(run.largest + element.carried) * power(-(fraction_bits as i32));
            let each = per_block as f64 * (unit + top * power(1 - kept_bits as i32));
            for p in &run.products {
                errors[usize::from(*p < 0.0)] += p.abs().min(unit);
            }
            let uncertain = element.carried.min(run.products.len() as f64 * unit);
            errors = errors.map(|e| e + each + uncertain);
        }
        // At its end, a sum is scaled and added in f32.
        let rounded = 3.0 * (blocks * per_block) as f64 * nearest(most);
        errors.map(|e| (e + rounded) * SLACK)
    }
}

/// The products of one block of k.
#[derive(Default)]
struct Run {
    products: Vec<f64>,
    /// Sums of the positive products and of the magnitudes of the negative ones.
    sums: [f64; 2],
    /// 2^exponent of the largest product, as the unit computes exponents.
    largest: f64,
}

impl Run {
    fn fill(&mut self, factors: impl Iterator<Item = (f64, f64)>, inputs: Inputs) {
        (self.sums, self.largest) = ([0.0; 2], 0.0);
        self.products.clear();
        for (a, w) in factors {
            let p = a * w;
            if p != 0.0 {
                self.largest = self.largest.max(inputs.product_exponent(a, w));
            }
            self.sums[usize::from(p < 0.0)] += p.abs();
            self.products.push(p);
        }
    }
}

/// Σ min(|p|, unit) over the positive products p, and over the negative ones.
fn capped(unit: f64, element: &Element<'_>) -> [f64; 2] {
    let mut lost = [0.0; 2];
    // Computes both sides without a branch, since random signs are mispredicted.
    for (a, w) in element.products() {
        let p = a * w;
        lost[0] += p.max(0.0).min(unit);
        lost[1] += (-p).max(0.0).min(unit);
    }
    lost.map(|l| l * SLACK)
}

impl Inputs {
    /// The value at which a partial sum of at most `reach` enters the alignment: the power of two
    /// at or below it or, with group scales that the unit does not see, up to the sum itself.
    fn top(self, reach: f64) -> f64 {
        // Alignment ends at 2^-133: f32 subnormals share one unit.
        if self.group_scales.is_some() { reach } else { power(exponent(reach).max(-126)) }
    }

    /// 2^exponent of a product as the unit computes it: a subnormal factor has the least exponent
    /// of its type.
    fn product_exponent(self, a: f64, w: f64) -> f64 {
        let of = |x: f64, ty| power(exponent(x).max(least_exponent(ty)));
        if self.group_scales.is_some() {
            // The weight is code times scale: 2^exponent of the code is at most the code, or for a
            // subnormal e4m3 code eight times that. So are scaled activations, which are e4m3.
            let lift = if self.weights == ScalarType::FLOAT8_E4M3FN { 8.0 } else { 1.0 };
            let a = if self.scales_rows() { a.abs() * 8.0 } else { of(a, self.activations) };
            return a * w.abs() * lift;
        }
        (of(a, self.activations) * of(w, self.weights)).max(power(-133))
    }

    /// Upper bound of [`Self::product_exponent`] for the products of the element.
    fn largest_product(self, element: &Element<'_>) -> f64 {
        let (a, w) = (element.row.magnitude(), element.column.magnitude());
        if a == 0.0 || w == 0.0 {
            return 0.0;
        }
        // Both are powers of two above the largest value.
        let a = if self.scales_rows() { a } else { a / 2.0 };
        self.product_exponent(a, if self.group_scales.is_some() { w } else { w / 2.0 })
    }

    /// Whether activations are codes times scales of their groups.
    fn scales_rows(self) -> bool {
        self.group_scales.is_some() && self.activations == ScalarType::FLOAT32
    }
}

/// The least exponent of a type, that of its subnormals.
fn least_exponent(ty: ScalarType) -> i32 {
    match ty {
        ScalarType::FLOAT16 | ScalarType::FLOAT8_E5M2 => -14,
        ScalarType::FLOAT8_E4M3FN => -6,
        _ => -126,
    }
}

/// Mantissa bits and least exponent of a 16-bit type, and the least value that rounds to infinity.
fn mantissa(ty: ScalarType) -> (i32, i32, f64) {
    match ty {
        ScalarType::FLOAT16 => (10, -14, 65504.0),
        _ => (7, -126, f64::from(f32::MAX)),
    }
}

/// Error of one rounding to nearest of a partial sum.
fn nearest(reach: f64) -> f64 {
    power(exponent(reach).max(-126) - 24)
}

/// ⌊log₂ x⌋ of a positive normal number; for zero, less than any other.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) as i32 & 0x7ff) - 1023
}

/// 2^e, zero where e is below f64's normal range.
fn power(e: i32) -> f64 {
    if e < -1022 { 0.0 } else { f64::from_bits(((e + 1023) as u64) << 52) }
}
