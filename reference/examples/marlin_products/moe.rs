//! Stages of MoE layers: the outputs of upstream's MoE operator against the bounds.

use marlinspike::Result;
use marlinspike::products::{Class, Convention, Extras, Judge, Recipe, Rows};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::inputs::{Format, Tag, mix};
use crate::{halves, sample, summary};

#[derive(Deserialize)]
pub(crate) struct Moe {
    index: u32,
    pub(crate) name: String,
    #[serde(flatten)]
    format: Format,
    hidden_size: usize,
    intermediate_size: usize,
    num_experts: u32,
    top_k: usize,
    sizes_m: Vec<usize>,
}

impl Moe {
    /// The experts of token `m`: two.
    fn experts(&self, m: usize) -> [u32; 2] {
        let seed = 1000 + 100 * self.index;
        let e = self.num_experts;
        let [a, b] = [0, 1].map(|i| mix(seed, Tag::Route, m * 2 + i));
        [a % e, (a % e + 1 + b % (e - 1)) % e]
    }

    /// Prints a line for each stage.
    pub(crate) fn check(&self, file: &SafeTensors<'_>) -> Result<()> {
        let seed = 1000 + 100 * self.index;
        let (hidden, inner, dtype) =
            (self.hidden_size, self.intermediate_size, self.format.dtype());
        let stages = [("gate_up", hidden, 2 * inner), ("down", inner, hidden)];
        for (&m, (stage, (name, k, n))) in
            self.sizes_m.iter().flat_map(|m| stages.iter().enumerate().map(move |s| (m, s)))
        {
            let (k, n) = (*k, *n);
            let title = format!("{}.m{m}.{name}", self.name);
            let found = halves(&file.tensor(&title).unwrap_or_else(|e| panic!("{title}: {e}")));
            let columns = sample(n);
            let mut ratios = [Vec::new(), Vec::new()];
            for e in 0..self.num_experts {
                let owner = |row: &usize| self.experts(row / self.top_k)[row % self.top_k] == e;
                let rows: Vec<usize> = (0..m * self.top_k).filter(owner).collect();
                if rows.is_empty() {
                    continue;
                }
                let seed_of = seed + 2 + stage as u32 * self.num_experts + e;
                let weight = self.format.weight(seed_of, k, n, &columns)?;
                let codes = rows.iter().flat_map(|&row| {
                    let (seed, row) =
                        if stage == 0 { (seed, row / self.top_k) } else { (seed + 1, row) };
                    (0..k).map(move |i| self.format.half(mix(seed, Tag::X, row * k + i)).into())
                });
                let x = Rows::decode(dtype, k, codes)?;
                let router: Vec<f32> = rows
                    .iter()
                    .map(|&r| f32::from_bits(126 << 23 | mix(seed, Tag::Router, r) & 0x7F_FFFF))
                    .collect();
                let router_weights = (stage == 1).then_some(router.as_slice());
                let extras = Extras { router_weights, ..Default::default() };
                let recipe = Recipe::new(Convention::Marlin, &weight, dtype, extras)?;
                let classes = [Class::marlin_hopper(), Class::any_order()];
                for (class, ratios) in classes.iter().zip(&mut ratios) {
                    let judge =
                        Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
                    for (i, b) in judge.bounds(&x, None)?.iter().enumerate() {
                        let (row, n0) = (rows[i / columns.len()], columns[i % columns.len()]);
                        ratios.push(b.ratio(dtype.to_f64(found[row * n + n0])));
                    }
                }
            }
            let [(h, hm), (a, am)] = ratios.map(summary);
            println!(
                "{title:40} {:24} {:9} {:>9} {h:9.4} {hm:8.5} {a:9.4} {am:8.5}",
                "",
                found.len(),
                ""
            );
        }
        Ok(())
    }
}
