//! Deterministic case files from a seed.
//!
//! Case i of a seed depends only on the pair (seed, i) and is the same on every platform.
//! Consecutive cases walk the [`lattice`] of their operation: as many cases as the lattice has
//! points visit each point once, in an order that the seed determines. A failing case can be
//! regenerated from the seed and the index in its provenance.

pub use crate::ops::axes::{Axes, Axis, Rule};
pub use crate::ops::draw::Rng;
pub use crate::ops::quant::weight;

use crate::case::{Case, CaseConfig, Op};
use crate::{Error, Result};

/// Generates the cases of one operation from one seed.
#[derive(Debug, Clone)]
pub struct Generator {
    op: Op,
    seed: u64,
    lattice: Vec<CaseConfig>,
    /// Order in which the first round visits the lattice.
    first_round: Vec<u32>,
    hard: bool,
}

impl Generator {
    /// The generator of `op` under `seed`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an operation whose cases cannot be generated.
    pub fn new(op: Op, seed: u64) -> Result<Self> {
        let lattice = lattice(op)?;
        if lattice.is_empty() {
            return Err(Error::size(format!("configurations of `{op}`"), 0, "at least one"));
        }
        let first_round = order(seed, 0, lattice.len());
        Ok(Self { op, seed, lattice, first_round, hard: false })
    }

    /// Keeps the configurations that meet every requirement: `meets` returns one flag for each of them.
    /// Where the operation declares its [`axes`], the configurations of a covering array over the
    /// combinations that meet them are added, so that every legal combination of requirements has some.
    /// Case i depends on what is kept, too.
    ///
    /// # Errors
    /// [`Error::Size`] where none is kept.
    pub fn only(mut self, meets: impl Fn(&CaseConfig) -> Vec<bool>) -> Result<Self> {
        let keep = |config: &CaseConfig| meets(config).into_iter().all(|met| met);
        let all = self.lattice.len();
        self.lattice.retain(keep);
        if self.lattice.len() < all
            && let Some(axes) = axes(self.op)?
        {
            let mut more = axes.meeting(&meets).configs(PAIRS);
            more.retain(|config| keep(config) && !self.lattice.contains(config));
            self.lattice.append(&mut more);
        }
        self.ordered()
    }

    /// Replaces each configuration by `change` of it, and drops those that `change` drops.
    ///
    /// # Errors
    /// [`Error::Size`] where none is left.
    pub fn map(mut self, change: impl Fn(&CaseConfig) -> Option<CaseConfig>) -> Result<Self> {
        self.lattice = self.lattice.iter().filter_map(change).collect();
        self.ordered()
    }

    /// The first round over the present configurations.
    fn ordered(mut self) -> Result<Self> {
        if self.lattice.is_empty() {
            let what = format!("configurations of `{}` that are asked for", self.op);
            return Err(Error::size(what, 0, "at least one"));
        }
        self.first_round = order(self.seed, 0, self.lattice.len());
        Ok(self)
    }

    /// The same configurations under another seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        let first_round = order(seed, 0, self.lattice.len());
        Self { seed, first_round, ..self }
    }

    /// Draws more inputs that few kernels get wrong: sums that overflow, and ties. Campaigns do.
    #[must_use]
    pub fn hard(self) -> Self {
        Self { hard: true, ..self }
    }

    /// The configuration that case `index` is drawn from.
    pub fn configuration(&self, index: u64) -> &CaseConfig {
        let len = self.lattice.len() as u64;
        let (round, at) = (index / len, (index % len) as usize);
        let point = match round {
            0 => self.first_round[at],
            _ => order(self.seed, round, self.lattice.len())[at],
        };
        &self.lattice[point as usize]
    }

    /// The configurations that the cases visit.
    pub fn lattice(&self) -> &[CaseConfig] {
        &self.lattice
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The random numbers that the inputs of case `index` are drawn from.
    pub fn rng(&self, index: u64) -> Rng {
        Rng::for_case(self.seed, index).hard(self.hard)
    }

    /// Name of the file of case `index`.
    pub fn file_name(&self, index: u64) -> String {
        format!("{}-{:016x}-{index:06}.safetensors", self.op, self.seed)
    }

    /// Case `index`: random inputs, and every output that the reference computes. Layouts are
    /// exact; products, activations and sums have the bits of the canonical arithmetic, which the
    /// case declares as its schedule (except for 8-bit activations with act-order and groups that
    /// do not fill whole instructions). Cases of `router` and `moe_align_block_size` have only
    /// inputs.
    ///
    /// At least 95 % of each product and of what follows it in a layer is finite, since infinities and
    /// NaN say little about a kernel: where the inputs of a configuration would overflow, smaller ones
    /// are drawn. One in eight [`Generator::hard`] cases keeps its inputs.
    ///
    /// # Errors
    /// Returns an error only if a packing function refuses a configuration that the lattice admits.
    pub fn case(&self, index: u64) -> Result<Case<'static>> {
        let mut rng = self.rng(index);
        let config = self.configuration(index).clone();
        let name = format!("{} {index}: {}", self.op, config.operation().describe());
        let provenance = format!(
            "marlinspike {} reference, seed {:#018x}, index {index}{}",
            env!("CARGO_PKG_VERSION"),
            self.seed,
            if self.hard { ", hard" } else { "" }
        );
        let keeps_inputs = self.hard && index.is_multiple_of(EXTREME);
        let mut case = match keeps_inputs {
            true => drawn(config, &mut rng)?,
            false => case_of(config, &mut rng)?,
        };
        (case.name, case.provenance) = (name, provenance);
        case.validate()?;
        Ok(case)
    }
}

/// All configurations of `op` that the reference does not refuse, in a fixed order.
///
/// Row counts (`size_m`) are not part of the lattice; each case draws its own.
///
/// # Errors
/// Currently none.
pub fn lattice(op: Op) -> Result<Vec<CaseConfig>> {
    (op.entry().lattice)()
}

/// The axes of the configurations of `op`: the values of each, and every illegal combination with its
/// reason. `None` for operations whose lattice is a list.
///
/// # Errors
/// Currently none.
pub fn axes(op: Op) -> Result<Option<Axes>> {
    (op.entry().axes)()
}

/// A case of one configuration of a [`lattice`], its inputs drawn by `rng`, with the outputs that
/// [`Generator::case`] gives. Name and provenance are left empty.
///
/// # Errors
/// As [`Generator::case`].
pub fn case_of(config: CaseConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let start = rng.clone();
    let mut case = drawn(config.clone(), rng)?;
    for powers in CALM {
        if is_finite(&case) {
            break;
        }
        case = drawn(config.clone(), &mut start.clone().calm(powers))?;
    }
    Ok(case)
}

/// A case of one configuration, its inputs as `rng` draws them.
fn drawn(config: CaseConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let mut case = Case::new("", config.clone(), "");
    config.operation().draw(&mut case, rng)?;
    Ok(case)
}

/// Strength of the covering array over the configurations that are asked for.
const PAIRS: usize = 2;

/// One in this many hard cases may overflow everywhere.
const EXTREME: u64 = 8;

/// Powers of two by which inputs shrink until their products are finite.
const CALM: [u32; 6] = [1, 3, 5, 8, 11, 14];

/// The least share of finite values.
const FINITE: f64 = 0.95;

/// Whether nearly all values of every output of arithmetic are finite.
fn is_finite(case: &Case<'_>) -> bool {
    case.outputs.keys().filter_map(|name| case.finite_share(name)).all(|share| share >= FINITE)
}

/// The order in which a round of the seed visits `len` configurations.
fn order(seed: u64, round: u64, len: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..len as u32).collect();
    Rng::for_case(!seed, round).shuffle(&mut order);
    order
}
