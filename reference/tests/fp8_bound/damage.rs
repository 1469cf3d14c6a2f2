//! The damage that a verdict on an e4m3 product excludes, by class and K.

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{Bounded, Class, Convention, Extras, Judge, Recipe, Rows};
use marlinspike::vectors::Rng;

use crate::data::{Data, operands, values};
use crate::simulated::{scales, weight};
use crate::unit::Unit;

const BF16: ScalarType = ScalarType::BFLOAT16;
const SHAPE: [usize; 2] = [4, 16];

/// A product, and Hopper's wgmma result for it.
struct Product {
    size_k: usize,
    codes: [Vec<u32>; 2],
    row_scales: Vec<f32>,
    column_scales: Vec<f32>,
}

impl Product {
    fn new(size_k: usize) -> Self {
        let mut random = Rng::new(size_k as u64);
        let [rows, cols] = SHAPE;
        let codes = operands(&mut random, Data::Normal, [rows, cols, size_k]);
        let [row_scales, column_scales] = SHAPE.map(|n| scales(&mut random, n));
        Self { size_k, codes, row_scales, column_scales }
    }

    /// wgmma in ascending order without the products of `missing`, and with another column's scale
    /// for column 5 where `misread`.
    fn made(&self, missing: std::ops::Range<usize>, misread: bool) -> Vec<f64> {
        let [a, w] = self.codes.each_ref().map(|codes| values(codes));
        let k = self.size_k;
        let one = |i: usize| {
            let (m, n) = (i / SHAPE[1], i % SHAPE[1]);
            let term = |j: usize| match missing.contains(&j) {
                true => (0.0, 0.0),
                false => (a[m * k + j], w[n * k + j]),
            };
            let terms: Vec<(f64, f64)> = (0..k).map(term).collect();
            let column = if misread && n == 5 { 6 } else { n };
            let sum = Unit::Wgmma.chain(&terms) as f32;
            rounded((sum * self.column_scales[column] * self.row_scales[m]).into())
        };
        (0..SHAPE[0] * SHAPE[1]).map(one).collect()
    }

    fn bounds(&self, class: &Class) -> Vec<Bounded> {
        let weight = weight(&self.codes[1], [self.size_k, SHAPE[1]], &self.column_scales);
        let extras = Extras { activation_scales: Some(&self.row_scales), router_weights: None };
        let recipe = Recipe::new(Convention::W8a8, &weight, BF16, extras).expect("a recipe");
        let rows = Rows::new(self.size_k, values(&self.codes[0])).expect("rows");
        let judge = Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
        judge.bounds(&rows, None).expect("bounds")
    }
}

fn rounded(x: f64) -> f64 {
    BF16.to_f64(BF16.encode_rne(x))
}

/// The largest error over bound, for the closest member of the class.
fn ratio(members: &[Vec<Bounded>], found: &[f64]) -> f64 {
    let of = |bounds: &Vec<Bounded>| {
        bounds.iter().zip(found).map(|(b, &y)| b.ratio(y)).fold(0.0, f64::max)
    };
    members.iter().map(of).fold(f64::INFINITY, f64::min)
}

const DAMAGES: [&str; 7] =
    ["zeros", "-y", "y / 2", "x 1.05", "x 1.005", "one column's scale", "32 k missing"];

/// Prints the table of docs/src/internals/numerics.md.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn what_each_class_rejects() {
    println!("| K | class | honest | {} |", DAMAGES.join(" | "));
    println!("{}", "| --- ".repeat(10) + "|");
    for size_k in [512, 2048, 7168, 16384] {
        let product = Product::new(size_k);
        let honest = product.made(0..0, false);
        let times = |factor: f64| honest.iter().map(|y| rounded(y * factor)).collect::<Vec<f64>>();
        let mut outputs: Vec<Vec<f64>> = [0.0, -1.0, 0.5, 1.05, 1.005].map(times).into();
        outputs.push(product.made(0..0, true));
        outputs.push(product.made(256..288, false));
        for class in [Class::fp8_any_order(), Class::fp8_contiguous(), Class::fp8_hopper()] {
            let members: Vec<Vec<Bounded>> =
                class.members(size_k).iter().map(|member| product.bounds(member)).collect();
            let right = ratio(&members, &honest);
            assert!(right <= 1.0, "{}, K {size_k}: {right}", class.name);
            let ratios: Vec<f64> = outputs.iter().map(|y| ratio(&members, y)).collect();
            let cells: Vec<String> = ratios.iter().map(|r| format!("{r:.3}")).collect();
            println!("| {size_k} | {} | {right:.3} | {} |", class.name, cells.join(" | "));
            if class.name == "fp8-hopper" {
                for (damage, ratio) in DAMAGES.iter().zip(&ratios) {
                    assert!(*ratio > 1.0, "{damage} at K {size_k}: {ratio}");
                }
            }
        }
    }
}
