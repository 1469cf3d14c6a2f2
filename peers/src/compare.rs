//! One race per case: this project's product or layer and the others', in turns.

use std::time::Duration;

use anyhow::{Context as _, Result};
use marlinspike::num::dims::GroupSize;
use marlinspike::w4a8::fastest;
use marlinspike_bench::ours::{Ours, Weights, input, tiles};
use marlinspike_bench::timing::{Budget, race};
use marlinspike_bench::{Contender, Seconds, Workload, machine, threads};
use serde::{Deserialize, Serialize};

use crate::{candle, ggml};

/// K must be a multiple of this for candle's Q4_K.
const Q4_K_ROWS: usize = 256;

/// What to measure, all with one number of threads.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Products and layers.
    pub shapes: Vec<Workload>,
    /// Rows of a call.
    pub tokens: Vec<usize>,
    /// Group size of this project's weights; the others use 32.
    pub group: GroupSize,
    /// One CPU per thread.
    pub cpus: Vec<usize>,
    /// Whether threads stay on their CPUs.
    pub pinned: bool,
    /// Calls of each contender.
    pub calls: usize,
    /// Seconds for a case.
    pub seconds: f64,
    /// Go through one matrix only.
    pub warm: bool,
}

/// The measurement of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Workload.
    pub shape: String,
    /// Rows of a call.
    pub tokens: usize,
    /// Threads of every contender.
    pub threads: usize,
    /// Multiply-accumulates of a call.
    pub macs: u64,
    /// This project first.
    pub contenders: Vec<Measurement>,
}

/// One contender's part of a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Library and format.
    pub name: String,
    /// Seconds of the fastest call.
    pub best: f64,
    /// Seconds of the median call.
    pub median: f64,
    /// Calls.
    pub calls: usize,
    /// Its best time over this project's best time.
    pub ratio_best: f64,
    /// Its median time over this project's median time.
    pub ratio_median: f64,
    /// Root mean square of the difference to this project's result, over the result's. It consists
    /// of the roundings of activations to 8 bits (by rows here, by blocks elsewhere) and, for Q4_K,
    /// of weights that were quantized twice.
    pub difference: f64,
}

impl Plan {
    /// Every shape with every number of tokens.
    ///
    /// # Errors
    /// Returns the error of a contender that does not support a shape.
    pub fn measure(&self) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for &shape in &self.shapes {
            let cold = if self.warm { 0 } else { machine::cold_bytes() };
            let weights = Weights::new(shape, self.group, cold, fastest)?;
            // The others use the groups of Q4_0.
            let tiles = tiles(shape, GroupSize::Of(ggml::GROUP))?;
            let of_candle = match shape {
                Workload::Dense { size_k, .. } if size_k.is_multiple_of(Q4_K_ROWS) => {
                    Some(candle::Weights::new(&tiles[0], cold)?)
                }
                _ => None,
            };
            for &tokens in &self.tokens {
                let case = self.case(shape, tokens, &weights, of_candle.as_ref(), &tiles, cold);
                cases.push(case.with_context(|| format!("{shape}, {tokens} tokens"))?);
            }
        }
        Ok(cases)
    }

    #[cfg_attr(not(ggml), allow(unused_variables))]
    fn case(
        &self,
        shape: Workload,
        tokens: usize,
        weights: &Weights,
        of_candle: Option<&candle::Weights>,
        tiles: &[marlinspike_bench::tile::Tile],
        cold: usize,
    ) -> Result<Case> {
        let x = input(shape, tokens);
        let pool = threads::pool(self.cpus.len(), if self.pinned { &self.cpus } else { &[] })?;
        let mut ours = Ours::new(&pool, shape, weights, tokens);
        let expected = ours.output(0).to_vec();
        let mut candle = of_candle.map(|w| candle::Candle::new(w, &x, tokens)).transpose()?;
        let mut names = vec!["marlinspike".to_owned()];
        let mut differences = vec![0.0];
        if let Some(candle) = &mut candle {
            names.push("candle Q4_K".to_owned());
            differences.push(difference(&candle.output(0)?, &expected));
        }
        #[cfg(ggml)]
        let mut ggml = Vec::new();
        #[cfg(ggml)]
        for (name, buffer) in [("ggml Q4_0", c"CPU_REPACK"), ("ggml AMX", c"AMX")] {
            let (routings, cpus) = (ours.routings().to_vec(), &self.cpus);
            let found =
                ggml::Ggml::new(shape, buffer, tiles, cold, &x, routings, cpus, self.pinned);
            // Layers have one arrangement; few builds and CPUs have tiles.
            let mut found = match found {
                Err(_) if buffer == c"AMX" => continue,
                found => found?,
            };
            names.push(name.to_owned());
            differences.push(difference(&found.output(0)?, &expected));
            ggml.push(found);
        }
        let mut contenders: Vec<&mut dyn Contender> = vec![&mut ours];
        contenders.extend(candle.as_mut().map(|c| c as &mut dyn Contender));
        #[cfg(ggml)]
        contenders.extend(ggml.iter_mut().map(|g| g as &mut dyn Contender));
        let budget = Budget { calls: self.calls, time: Duration::from_secs_f64(self.seconds) };
        let seconds = race(&mut contenders, budget);
        let first = seconds[0];
        let found = |((name, difference), seconds): ((String, f64), Seconds)| {
            let Seconds { best, median, calls } = seconds;
            let (ratio_best, ratio_median) = (best / first.best, median / first.median);
            Measurement { name, best, median, calls, ratio_best, ratio_median, difference }
        };
        Ok(Case {
            shape: shape.to_string(),
            tokens,
            threads: self.cpus.len(),
            macs: shape.macs(tokens),
            contenders: names.into_iter().zip(differences).zip(seconds).map(found).collect(),
        })
    }
}

/// Root mean square of y − `expected` over `expected`'s.
fn difference(y: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(y.len(), expected.len(), "results of one shape");
    let square = |x: f64| x * x;
    let apart = y.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b)));
    let size = expected.iter().map(|&b| square(b.into()));
    (apart.sum::<f64>() / size.sum::<f64>()).sqrt()
}
