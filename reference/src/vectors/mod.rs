//! Deterministic case files from a seed.
//!
//! Case i under a seed depends on the pair (seed, i) alone, is the same on every platform, and
//! walks the [`lattice`] of its operation: as many consecutive cases as the lattice has points
//! visit each point once, in an order that the seed decides. A failing case is made again from
//! the seed and its index, which its provenance states.

mod computed;
mod dyn_quant;
mod lattice;
mod methods;
mod random;
mod refusal;
mod tensors;
mod values;

pub use lattice::lattice;
pub use random::Rng;
pub use values::weight;

use values::whole_k;

use crate::case::{
    AlignConfig, Case, CaseConfig, CheckpointFormat, LinearConfig, MoeConfig, Op, Packing,
    PreprocessConfig, QuantConfig, RouterConfig, ScheduleChoice,
};
use crate::dims::{GroupSize, Shape};
use crate::layers::{ExpertPlacement, determine_expert_map};
use crate::layout::marlin::{int4_to_fp8_asymmetric, int4_to_fp8_symmetric};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::{Error, Result};
use tensors::{Stack, bytes_of, half};

/// Makes the cases of one operation under one seed.
#[derive(Debug, Clone)]
pub struct Generator {
    op: Op,
    seed: u64,
    lattice: Vec<CaseConfig>,
    /// Order in which the first round visits the lattice.
    first_round: Vec<u32>,
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
        Ok(Self { op, seed, lattice, first_round })
    }

    /// The configurations that the cases go through.
    pub fn lattice(&self) -> &[CaseConfig] {
        &self.lattice
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Name of the file of case `index`.
    pub fn file_name(&self, index: u64) -> String {
        format!("{}-{:016x}-{index:06}.safetensors", self.op, self.seed)
    }

    /// Case `index`: random inputs, and every output that the reference computes: the layouts, and
    /// of products, activations and sums the bits of the canonical arithmetic, which the case
    /// declares as its schedule (there is none for 8-bit activations under act-order where a group
    /// does not fill whole instructions). Cases of `router` and `moe_align_block_size` have inputs alone.
    ///
    /// # Errors
    /// None for a configuration of the lattice; a failure of the packing functions, if one
    /// refused what the lattice let through.
    pub fn case(&self, index: u64) -> Result<Case<'static>> {
        let len = self.lattice.len() as u64;
        let (round, at) = (index / len, (index % len) as usize);
        let point = match round {
            0 => self.first_round[at],
            _ => order(self.seed, round, self.lattice.len())[at],
        };
        let mut rng = Rng::for_case(self.seed, index);
        let config = self.lattice[point as usize].clone();
        let name = format!("{} {index}: {}", self.op, describe(&config));
        let provenance = format!(
            "marlinspike {} reference, seed {:#018x}, index {index}",
            env!("CARGO_PKG_VERSION"),
            self.seed
        );
        let mut case = case_of(config, &mut rng)?;
        (case.name, case.provenance) = (name, provenance);
        case.validate()?;
        Ok(case)
    }
}

/// A case of one configuration of a [`lattice`], its inputs drawn by `rng`, with the outputs that
/// [`Generator::case`] gives. Name and provenance are left empty.
///
/// # Errors
/// As [`Generator::case`].
pub fn case_of(config: CaseConfig, rng: &mut Rng) -> Result<Case<'static>> {
    match config {
        CaseConfig::Linear(c) => linear(c, rng),
        CaseConfig::Moe(c) => moe(c, rng),
        CaseConfig::Preprocess(c) => preprocess(c, rng),
        CaseConfig::Router(c) => router(c, rng),
        CaseConfig::Align(c) => align(c, rng),
        CaseConfig::DynQuant(c) => dyn_quant::case(c, rng),
        CaseConfig::Method(c) => methods::case(c, rng),
    }
}

/// The order in which a round of the seed visits `len` configurations.
fn order(seed: u64, round: u64, len: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..len as u32).collect();
    Rng::for_case(!seed, round).shuffle(&mut order);
    order
}

/// A configuration in a few words.
fn describe(config: &CaseConfig) -> String {
    let quant = |q: &QuantConfig| {
        let mut words = vec![
            q.checkpoint_format.to_string(),
            q.weight_type.to_string(),
            q.dtype.to_string(),
            format!("g{}", q.group_size),
        ];
        words.extend(q.input_dtype.map(|t| format!("{t} activations")));
        words.extend(q.desc_act.then(|| "desc_act".to_owned()));
        words.extend(q.has_bias.then(|| "bias".to_owned()));
        words.extend(q.tensor_parallel.map(|t| format!("{} {}/{}", t.style, t.rank, t.size)));
        words.join(" ")
    };
    match config {
        CaseConfig::Linear(c) => format!("{} k{} n{}", quant(&c.quant), c.size_k, c.size_n),
        CaseConfig::Moe(c) => format!(
            "{} h{} i{} e{} top{}",
            quant(&c.quant),
            c.hidden_size,
            c.intermediate_size,
            c.num_experts,
            c.top_k
        ),
        CaseConfig::Router(c) => format!("{} top{}", c.scoring_func, c.top_k),
        CaseConfig::Align(c) => {
            format!("block {} e{} top{}", c.block_size, c.num_experts, c.top_k)
        }
        CaseConfig::Preprocess(c) => {
            format!("{} k{} n{}", c.checkpoint_format, c.size_k, c.size_n)
        }
        CaseConfig::DynQuant(c) => {
            let bias = if c.has_bias { " bias" } else { "" };
            let (Packing { mr, nr, .. }, g) = (&c.packing, c.group_size);
            let sizes = format!("k{} n{}", c.size_k, c.size_n);
            format!("{} g{g} {} mr{mr} nr{nr}{bias} {sizes}", c.dtype, c.activation_rounding)
        }
        CaseConfig::Method(_) => methods::describe(config),
    }
}

/// Row counts: one, a few, one past a block of 16.
const ROWS: [usize; 7] = [1, 2, 3, 4, 8, 16, 17];

/// Activations `[rows, cols]`; now and then a row is all zeros or all one value.
fn activations(
    rng: &mut Rng,
    dtype: ScalarType,
    rows: usize,
    cols: usize,
) -> Result<Tensor<'static>> {
    let mut values = Vec::with_capacity(rows * cols);
    for _ in 0..rows {
        let same = values::activation_bits(rng, dtype);
        let kind = rng.below(12);
        values.extend((0..cols).map(|_| match kind {
            0 => 0u16,
            1 => same,
            _ => values::activation_bits(rng, dtype),
        }));
    }
    Tensor::from_vec("in.x", half(dtype), vec![rows, cols], values)
}

fn linear(mut c: LinearConfig, rng: &mut Rng) -> Result<Case<'static>> {
    c.size_m = rng.pick(&ROWS);
    let shape = Shape::new(c.size_k, c.size_n);
    let weights = vec![weight(rng, "weight", &c.quant, shape, whole_k(&c.quant, c.size_k))?];
    let x = activations(rng, c.quant.dtype, c.size_m, c.size_k)?;
    let mut case = Case::new("", CaseConfig::Linear(c.clone()), "");
    let stack = Stack { prefix: "", quant: &c.quant, shape, weights };
    case.add_input("x", x);
    stack.add_inputs(&mut case)?;
    let prepared = stack.add_outputs(&mut case)?;
    let stated = states_factor(&c.quant).then_some(f64::from(prepared.scale_factor));
    let defined = computed::linear(&mut case, &c, &stack.weights[0])?;
    let schedule = defined.then_some(ScheduleChoice::Canonical);
    case.config = CaseConfig::Linear(LinearConfig { scale_factor: stated, schedule, ..c });
    Ok(case)
}

/// Whether the kernel's format has a power of two in its block scales that a case states.
fn states_factor(q: &QuantConfig) -> bool {
    q.checkpoint_format == CheckpointFormat::Nvfp4 && q.dtype == ScalarType::BFLOAT16
}

fn moe(mut c: MoeConfig, rng: &mut Rng) -> Result<Case<'static>> {
    c.size_m = rng.pick(&ROWS);
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let experts =
        determine_expert_map(c.ep_size, c.ep_rank, c.num_experts, ExpertPlacement::Linear)?;
    let mut stack = |prefix, shape: Shape, whole_k: usize| -> Result<Vec<Weight>> {
        let name = |e| format!("{}[{e}]", str::trim_end_matches(prefix, '_'));
        (0..experts.local_num_experts)
            .map(|e| weight(rng, &name(e), &c.quant, shape, whole_k))
            .collect()
    };
    // w13 is cut along N, w2 along K.
    let (s13, s2) = (Shape::new(h, c.w13_size_n()), Shape::new(i, h));
    let w13 = stack("w13_", s13, h)?;
    let w2 = stack("w2_", s2, whole_k(&c.quant, i))?;
    let mut case = Case::new("", CaseConfig::Moe(c.clone()), "");
    case.add_input("x", activations(rng, c.quant.dtype, c.size_m, h)?);
    case.add_input("router_logits", logits(rng, DType::F32, c.size_m, c.num_experts)?);
    if let Some(map) = experts.map {
        case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
    }
    let w13 = Stack { prefix: "w13_", quant: &c.quant, shape: s13, weights: w13 };
    let w2 = Stack { prefix: "w2_", quant: &c.quant, shape: s2, weights: w2 };
    w13.add_inputs(&mut case)?;
    w2.add_inputs(&mut case)?;
    let factors = [w13.add_outputs(&mut case)?, w2.add_outputs(&mut case)?]
        .map(|p| states_factor(&c.quant).then_some(f64::from(p.scale_factor)));
    let defined = computed::moe(&mut case, &c, &w13.weights, &w2.weights)?;
    let schedule = defined.then_some(ScheduleChoice::Canonical);
    case.config = CaseConfig::Moe(MoeConfig {
        scale_factor_w13: factors[0],
        scale_factor_w2: factors[1],
        schedule_w13: schedule.clone(),
        schedule_w2: schedule,
        ..c
    });
    Ok(case)
}

type Weight = crate::weight::Weight<'static>;

/// Router logits `[rows, experts]`, finite; with exact ties in some rows.
fn logits(rng: &mut Rng, dtype: DType, rows: usize, experts: usize) -> Result<Tensor<'static>> {
    let mut bytes = Vec::new();
    for _ in 0..rows {
        let levels = rng.pick(&[1, 2, 3, usize::MAX, usize::MAX, usize::MAX]);
        let palette: Vec<u32> = (0..experts.min(levels)).map(|_| rng.next_u32()).collect();
        for e in 0..experts {
            let bits = if levels == usize::MAX { palette[e] } else { rng.pick(&palette) };
            // Sign, an exponent from 2^-6 to 2^3, and as much fraction as the type has.
            let (sign, exponent, fraction) = (bits >> 31, bits >> 23 & 0xff, bits & 0x7f_ffff);
            match dtype {
                DType::F16 => {
                    let bits = sign << 15 | (9 + exponent % 10) << 10 | fraction >> 13;
                    bytes.extend((bits as u16).to_le_bytes());
                }
                DType::BF16 => {
                    let bits = sign << 15 | (121 + exponent % 10) << 7 | fraction >> 16;
                    bytes.extend((bits as u16).to_le_bytes());
                }
                _ => bytes
                    .extend((sign << 31 | (121 + exponent % 10) << 23 | fraction).to_le_bytes()),
            }
        }
    }
    Tensor::new("in.router_logits", dtype, vec![rows, experts], bytes)
}

fn router(c: RouterConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let rows = rng.pick(&ROWS);
    let experts = rng.pick(&[8, 16, 64, 128, 256]);
    let dtype = rng.pick(&[DType::F32, DType::F16, DType::BF16]);
    let with_bias = c.grouped.is_some() && rng.chance(1, 2);
    let mut c = c;
    if let Some(g) = c.grouped {
        // No more experts than the chosen groups hold.
        c.top_k = c.top_k.min(g.topk_group * (experts / g.num_expert_group));
    }
    let mut case = Case::new("", CaseConfig::Router(c), "");
    case.add_input("router_logits", logits(rng, dtype, rows, experts)?);
    if with_bias {
        let bias = logits(rng, DType::F32, 1, experts)?.into_bytes().into_owned();
        case.add_input(
            "e_score_correction_bias",
            Tensor::new("", DType::F32, vec![experts], bias)?,
        );
    }
    Ok(case)
}

fn align(c: AlignConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let rows = rng.pick(&[1, 2, 7, 16, 33, 128]);
    let mut ids = Vec::with_capacity(rows * c.top_k);
    let mut experts: Vec<u32> = (0..c.num_experts as u32).collect();
    // All tokens on the same experts, so that most have none, or each on its own.
    let crowded = rng.chance(1, 4);
    rng.shuffle(&mut experts);
    for _ in 0..rows {
        if !crowded {
            rng.shuffle(&mut experts);
        }
        ids.extend(&experts[..c.top_k]);
    }
    let shape = vec![rows, c.top_k];
    let map = determine_expert_map(c.ep_size, c.ep_rank, c.num_experts, ExpertPlacement::Linear)?;
    let mut case = Case::new("", CaseConfig::Align(c), "");
    case.add_input("topk_ids", Tensor::new("", DType::I32, shape, bytes_of(&ids))?);
    if let Some(map) = map.map {
        case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
    }
    Ok(case)
}

fn preprocess(c: PreprocessConfig, rng: &mut Rng) -> Result<Case<'static>> {
    let awq = c.checkpoint_format == CheckpointFormat::Awq;
    let words: Vec<u32> = (0..c.size_k * c.size_n / 8).map(|_| rng.next_u32()).collect();
    let per_row = c.size_n / 8;
    let shape = if awq { vec![c.size_k, per_row] } else { vec![c.size_k / 8, c.size_n] };
    let group = rng.pick(&[GroupSize::Channel, GroupSize::Of(32), GroupSize::Of(128)]);
    let groups = group.groups(crate::dims::LogicalK(c.size_k))?;
    let mut case = Case::new("", CaseConfig::Preprocess(c), "");
    let tensor =
        |shape: Vec<usize>, words: &[u32]| Tensor::new("", DType::I32, shape, bytes_of(words));
    case.add_input("qweight", tensor(shape.clone(), &words)?);
    let rewritten = if awq {
        let zeros: Vec<u32> = (0..groups * per_row).map(|_| rng.next_u32()).collect();
        case.add_input("qzeros", tensor(vec![groups, per_row], &zeros)?);
        int4_to_fp8_asymmetric(&words, &zeros, per_row)?
    } else {
        int4_to_fp8_symmetric(&words)
    };
    case.add_output("qweight", tensor(shape, &rewritten)?);
    Ok(case)
}
