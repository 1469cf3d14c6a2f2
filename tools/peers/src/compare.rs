//! One race per case: this project's product or layer and the others', in turns.

use std::time::Duration;

use anyhow::{Context as _, Result};
use marlinspike::num::dims::GroupSize;
use marlinspike::w4a8::fastest;
use marlinspike_bench::ours::{Ours, SEED, Weights, input, tiles};
#[cfg(ggml)]
use marlinspike_bench::routing::Routing;
use marlinspike_bench::routing::routings;
use marlinspike_bench::tile::Tile;
use marlinspike_bench::timing::{Budget, race};
use marlinspike_bench::{Contender, Seconds, Workload, machine, threads};
use serde::{Deserialize, Serialize};

use crate::{candle, ggml, mxfp4};

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
    /// Layers with MXFP4 weights instead of int4.
    pub mxfp4: bool,
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

/// What begins a line of the measuring process that names the next contender.
pub const BEGINS: &str = "begins ";

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
            if self.mxfp4 {
                cases.extend(self.mxfp4_cases(shape)?);
                continue;
            }
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
        tiles: &[Tile],
        cold: usize,
    ) -> Result<Case> {
        let x = input(shape, tokens);
        let pool = threads::pool(self.cpus.len(), if self.pinned { &self.cpus } else { &[] })?;
        begins(shape, tokens, "marlinspike");
        let mut ours = Ours::new(&pool, shape, weights, tokens);
        let expected = ours.output(0).to_vec();
        begins(shape, tokens, "candle");
        let mut candle = of_candle.map(|w| candle::Candle::new(w, &x, tokens)).transpose()?;
        let mut names = vec!["marlinspike".to_owned()];
        let mut differences = vec![0.0];
        if let Some(candle) = &mut candle {
            names.push("candle Q4_K".to_owned());
            differences.push(difference(&candle.output(0)?, &expected));
        }
        #[cfg(ggml)]
        let mut ggml = self.ggml(
            (shape, tiles, cold, &x, ours.routings()),
            &ggml::INT4,
            &expected,
            (&mut names, &mut differences),
        )?;
        let mut contenders: Vec<&mut dyn Contender> = vec![&mut ours];
        contenders.extend(candle.as_mut().map(|c| c as &mut dyn Contender));
        #[cfg(ggml)]
        contenders.extend(ggml.iter_mut().map(|g| g as &mut dyn Contender));
        Ok(self.race(shape, tokens, names, differences, &mut contenders))
    }

    /// Layers with MXFP4 weights, every number of tokens.
    fn mxfp4_cases(&self, shape: Workload) -> Result<Vec<Case>> {
        let tiles = tiles(shape, GroupSize::Of(ggml::GROUP))?;
        let layer = mxfp4::layer(shape, &tiles)?;
        let one = |&tokens: &usize| {
            let x = input(shape, tokens);
            let pool = threads::pool(self.cpus.len(), if self.pinned { &self.cpus } else { &[] })?;
            let config = layer.config();
            let routings = routings(config.num_experts, config.router.top_k(), tokens, SEED);
            let mut ours = mxfp4::Ours::new(&pool, &layer, routings.clone(), &x);
            #[cfg_attr(not(ggml), allow(unused_mut))]
            let (mut names, mut differences) = (vec!["marlinspike".to_owned()], vec![0.0]);
            #[cfg(ggml)]
            let mut ggml = {
                let expected = ours.output(0).to_vec();
                let call = (shape, &tiles[..], 0, &x[..], &routings[..]);
                self.ggml(call, &ggml::MXFP4, &expected, (&mut names, &mut differences))?
            };
            let mut contenders: Vec<&mut dyn Contender> = vec![&mut ours];
            #[cfg(ggml)]
            contenders.extend(ggml.iter_mut().map(|g| g as &mut dyn Contender));
            Ok(self.race(shape, tokens, names, differences, &mut contenders))
        };
        self.tokens.iter().map(one).collect()
    }

    /// ggml in each of the configurations that take the workload.
    #[cfg(ggml)]
    fn ggml(
        &self,
        (shape, tiles, cold, x, routings): (Workload, &[Tile], usize, &[f32], &[Routing]),
        configurations: &[ggml::Configuration],
        expected: &[f32],
        (names, differences): (&mut Vec<String>, &mut Vec<f64>),
    ) -> Result<Vec<ggml::Ggml>> {
        let mut all = Vec::new();
        for configuration in configurations.iter().filter(|c| c.takes(shape)) {
            begins(shape, x.len() / shape.sizes()[0], configuration.name);
            let (routings, cpus) = (routings.to_vec(), &self.cpus);
            let found =
                ggml::Ggml::new(shape, *configuration, tiles, cold, x, routings, cpus, self.pinned);
            let mut found = match found {
                Err(_) if !configuration.required => continue,
                found => found?,
            };
            names.push(configuration.name.to_owned());
            differences.push(difference(&found.output(0)?, expected));
            all.push(found);
        }
        Ok(all)
    }

    fn race(
        &self,
        shape: Workload,
        tokens: usize,
        names: Vec<String>,
        differences: Vec<f64>,
        contenders: &mut [&mut dyn Contender],
    ) -> Case {
        begins(shape, tokens, "all in turns");
        let budget = Budget { calls: self.calls, time: Duration::from_secs_f64(self.seconds) };
        let seconds = race(contenders, budget);
        let first = seconds[0];
        let found = |((name, difference), seconds): ((String, f64), Seconds)| {
            let Seconds { best, median, calls } = seconds;
            let (ratio_best, ratio_median) = (best / first.best, median / first.median);
            Measurement { name, best, median, calls, ratio_best, ratio_median, difference }
        };
        Case {
            shape: shape.to_string(),
            tokens,
            threads: self.cpus.len(),
            macs: shape.macs(tokens),
            contenders: names.into_iter().zip(differences).zip(seconds).map(found).collect(),
        }
    }
}

/// States on standard output which contender begins, for the process that reads the results.
fn begins(shape: Workload, tokens: usize, contender: &str) {
    println!("{BEGINS}{shape}, {tokens} tokens: {contender}");
}

/// Root mean square of y − `expected` over `expected`'s.
fn difference(y: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(y.len(), expected.len(), "results of one shape");
    let square = |x: f64| x * x;
    let apart = y.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b)));
    let size = expected.iter().map(|&b| square(b.into()));
    (apart.sum::<f64>() / size.sum::<f64>()).sqrt()
}
