//! The GPU as a subject of the laws of `marlinspike-proptests`: each operation behind the copies to
//! and from the device.

use marlinspike::layouts::marlin::{Activations, ScalePermutation};
use marlinspike::moe::align::{Absent, Align};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::vectors::Rng;
use marlinspike_accel::{
    AccelError, Buffer, Device,
    ops::{
        self, MarlinLayer, MarlinWeight, RepackArgs,
        align::{Runs, align_on_device},
        gemm::{Routed, Tiling, marlin_gemm, marlin_gemm_tiled, moe_marlin_gemm},
        gemm_a8::{RowsA8, marlin_gemm_a8},
    },
};
use marlinspike_proptests::{Operation, Subject, SubjectError, ops as laws};

/// The GPU.
pub(crate) struct Cuda(pub(crate) Device);

/// A subject's return value if an operation failed.
fn failed(error: AccelError) -> SubjectError {
    SubjectError(error.to_string())
}

/// Copies an operation's result to its output.
fn fill<T: Copy>(out: &mut [T], made: &[T]) -> Result<(), SubjectError> {
    if out.len() != made.len() {
        let what = format!("{} elements where {} belong", made.len(), out.len());
        return Err(SubjectError(what));
    }
    out.copy_from_slice(made);
    Ok(())
}

fn repack(
    device: &Device,
    qweight: &[u32],
    (size_k, size_n): (usize, usize),
    out: &mut [u32],
) -> Result<(), SubjectError> {
    let args = RepackArgs::new(qweight, None, size_k, size_n, 4, false).map_err(failed)?;
    fill(out, &ops::gptq_marlin_repack(device, &args).map_err(failed)?)
}

impl Subject<laws::Repack> for Cuda {
    fn call(&self, i: &laws::RepackInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let (perm, n) = (i.perm.as_deref(), i.size_n);
        let args =
            RepackArgs::stack(&i.qweight, perm, i.experts, i.size_k, n, i.num_bits, i.is_a_8bit);
        fill(out, &ops::gptq_marlin_repack(&self.0, &args.map_err(failed)?).map_err(failed)?)
    }
}

impl Subject<laws::AwqRepack> for Cuda {
    fn call(&self, i: &laws::AwqInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let (k, n) = (i.size_k, i.size_n);
        let made = ops::awq_marlin_repack(&self.0, &i.qweight, k, n, i.num_bits, i.is_a_8bit);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::Fp4Repack> for Cuda {
    fn call(&self, i: &laws::Fp4Input, out: &mut [u32]) -> Result<(), SubjectError> {
        // Bytes of a column follow each other: the words of the packed form, transposed.
        let words: Vec<u32> =
            i.weight.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        let words = rows_of("weight", &words, i.size_k / 8);
        let words = words.map_err(|e| SubjectError(e.to_string()))?;
        let qweight = into_vec(marlinspike::formats::transpose_words(words));
        repack(&self.0, &qweight, (i.size_k, i.size_n), out)
    }
}

impl Subject<laws::MergeW13> for Cuda {
    fn call(&self, i: &laws::MergeInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let rows = i.gate.chunks_exact(i.size).zip(i.up.chunks_exact(i.size));
        let qweight: Vec<u32> = rows.flat_map(|(gate, up)| [gate, up].concat()).collect();
        repack(&self.0, &qweight, (i.size_k, 2 * i.size), out)
    }
}

impl Subject<laws::PermuteScales> for Cuda {
    fn call(&self, i: &laws::ScalesInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let activations = if i.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        let group =
            GroupSize::from_config(i.group_size).map_err(|e| SubjectError(e.to_string()))?;
        let order = ScalePermutation::choose(group, LogicalK(i.size_k), activations);
        let made = ops::marlin_permute_scales(&self.0, &i.scales, i.size_n, order);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::PermuteBias> for Cuda {
    fn call(&self, i: &laws::BiasInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let (n, order) = (i.bias.len(), ScalePermutation::Single);
        fill(out, &ops::marlin_permute_scales(&self.0, &i.bias, n, order).map_err(failed)?)
    }
}

impl Subject<laws::Preprocess> for Cuda {
    fn call(&self, i: &laws::PreprocessInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let zeros = i.qzeros.as_deref();
        let words = if zeros.is_some() { i.size_n / 8 } else { i.qweight.len() };
        let made = ops::marlin_int4_fp8_preprocess(&self.0, &i.qweight, zeros, words);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::PerTokenInt8> for Cuda {
    fn call(
        &self,
        i: &<laws::PerTokenInt8 as Operation>::Input,
        out: &mut [u32],
    ) -> Result<(), SubjectError> {
        let made = ops::per_token_quant_int8(&self.0, &i.x, i.dtype, i.size_k, i.choice);
        let made = made.map_err(failed)?;
        let codes = made.codes.iter().map(|&c| u32::from(c.cast_unsigned()));
        let all: Vec<u32> = codes.chain(made.scales.iter().map(|s| s.to_bits())).collect();
        fill(out, &all)
    }
}

impl Subject<laws::PerTokenFp8> for Cuda {
    fn call(
        &self,
        i: &<laws::PerTokenFp8 as Operation>::Input,
        out: &mut [u32],
    ) -> Result<(), SubjectError> {
        let made = ops::per_token_quant_fp8(&self.0, &i.x, i.dtype, i.size_k, i.choice);
        let made = made.map_err(failed)?;
        let codes = made.codes.iter().map(|c| u32::from(c.to_bits()));
        let all: Vec<u32> = codes.chain(made.scales.iter().map(|s| s.to_bits())).collect();
        fill(out, &all)
    }
}

impl Subject<laws::TopkRouter> for Cuda {
    fn call(&self, i: &laws::RouterInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let made = ops::topk_router(&self.0, &i.router(), &i.logits, i.experts).map_err(failed)?;
        let ids = made.topk_ids.iter().map(|id| id.cast_unsigned());
        let all: Vec<u32> = ids.chain(made.topk_weights.iter().map(|w| w.to_bits())).collect();
        fill(out, &all)
    }
}

impl Subject<laws::AlignBlocks> for Cuda {
    fn call(&self, i: &laws::AlignInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let made = ops::moe_align_block_size(&self.0, &i.align(), &i.topk_ids).map_err(failed)?;
        let total = std::iter::once(&made.num_tokens_post_padded);
        let all = total.chain(&made.sorted_token_ids).chain(&made.expert_ids);
        fill(out, &all.map(|x| x.cast_unsigned()).collect::<Vec<_>>())
    }
}

impl Subject<laws::Activate> for Cuda {
    fn call(&self, i: &laws::ActivateInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let made = ops::moe_activation(&self.0, &i.definition, &i.gate_up, i.dtype, i.size_i);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::SumSlots> for Cuda {
    fn call(&self, i: &laws::SumInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let made = ops::moe_sum(&self.0, &i.down, i.dtype, i.top_k, i.size_n).map_err(failed)?;
        fill(out, &made)
    }
}

/// Divisions of the work that a product is tried with besides the usual one: every number of rows, both
/// widths, whole and split k, few and many stages. Each is a module of its own for every form of weight.
const TILINGS: [[u32; 5]; 4] =
    [[1, 64, 32, 4, 6], [2, 128, 64, 2, 3], [4, 64, 64, 8, 3], [8, 64, 32, 8, 2]];

/// A division by `choice` for K = `size_k`; `None` for the one that the crate chooses.
fn tiling(choice: u64, size_k: usize) -> Option<Tiling> {
    use marlinspike::products::schedule::Cut;
    let [m_tiles, n_tile, columns, teams, stages] = *TILINGS.get(choice as usize % 5)?;
    let chunks = Cut::version_1(size_k).chunks() as u32;
    let teams = teams.min(chunks.next_power_of_two());
    Some(Tiling {
        m_tiles,
        n_tile,
        columns,
        teams,
        ranks: chunks.div_ceil(teams).next_power_of_two(),
        stages,
    })
}

/// Whether the error says that there is no kernel for such an argument, as opposed to a failure.
fn not_taken<T>(made: &Result<T, AccelError>) -> bool {
    matches!(made, Err(AccelError::Argument { .. }))
}

impl Subject<laws::DenseProduct> for Cuda {
    /// The kernels follow the canonical schedule.
    fn claims_bits(&self) -> bool {
        true
    }

    fn takes(&self, i: &laws::DenseInput) -> bool {
        !not_taken(&self.dense(i))
    }

    fn call(&self, i: &laws::DenseInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let product = self.dense(i).map_err(failed)?;
        // Not zeros, so that an output that is not written is noticed.
        let mut y = self.0.upload(out).map_err(failed)?;
        product.run(&self.0, &mut y).map_err(failed)?;
        fill(out, &self.0.download(&y).map_err(failed)?)
    }
}

/// A product with everything but its result on the device.
pub(crate) enum Dense {
    A16 { weight: Box<MarlinWeight>, x: Buffer<u16>, tiling: Option<Tiling> },
    A8 { weight: Box<MarlinWeight>, codes: Buffer<u8>, scales: Buffer<f32> },
}

impl Dense {
    pub(crate) fn run(&self, device: &Device, y: &mut Buffer<u16>) -> Result<(), AccelError> {
        let (weight, x, tiling) = match self {
            Self::A16 { weight, x, tiling } => (weight, x, *tiling),
            Self::A8 { weight, codes, scales } => {
                return marlin_gemm_a8(device, RowsA8 { codes, scales }, weight, y);
            }
        };
        let tiled = match tiling {
            Some(tiling) => marlin_gemm_tiled(device, x, weight, y, tiling),
            None => marlin_gemm(device, x, weight, y),
        };
        match tiled {
            // Blocks of 128 columns if N is not a multiple of 128, or more shared memory than available.
            Err(AccelError::Argument { what: "tiling", .. }) => marlin_gemm(device, x, weight, y),
            other => other,
        }
    }
}

impl Cuda {
    pub(crate) fn dense(&self, i: &laws::DenseInput) -> Result<Dense, AccelError> {
        let (device, quant) = (&self.0, &i.form.quant);
        let weights = std::slice::from_ref(&i.weight);
        if let (Some(input), Some(scales)) = (quant.input_dtype, &i.x_scales) {
            let weight = MarlinWeight::for_8_bit(device, weights, quant.dtype, input)?.into();
            let codes: Vec<u8> = i.x.iter().map(|&code| code as u8).collect();
            let (codes, scales) = (device.upload(&codes)?, device.upload(scales)?);
            return Ok(Dense::A8 { weight, codes, scales });
        }
        let weight = MarlinWeight::new(device, weights, quant.dtype)?;
        let gathered =
            weight.perm(0).map(|perm| ops::permute_cols(device, &i.x, perm)).transpose()?;
        let x = device.upload(gathered.as_deref().unwrap_or(&i.x))?;
        let tiling = tiling(i.choice, weight.shape().size_k);
        Ok(Dense::A16 { weight: weight.into(), x, tiling })
    }
}

impl Subject<laws::ExpertProduct> for Cuda {
    /// The kernels follow the canonical schedule.
    fn claims_bits(&self) -> bool {
        true
    }

    fn takes(&self, i: &laws::ExpertInput) -> bool {
        match MarlinWeight::new(&self.0, &i.weights, i.form.quant.dtype) {
            // Experts have orders of their own, which a gather of x cannot follow.
            Ok(weight) => weight.perm(0).is_none(),
            refused => !not_taken(&refused),
        }
    }

    fn call(&self, i: &laws::ExpertInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let device = &self.0;
        let weight = MarlinWeight::new(device, &i.weights, i.form.quant.dtype).map_err(failed)?;
        let shape = weight.shape();
        let usual = weight
            .tiling_of_experts(device, i.topk_ids.len(), i.weights.len(), false)
            .map_err(failed)?;
        let tiling = tiling(i.choice, shape.size_k)
            .filter(|tiling| shape.size_n.is_multiple_of(tiling.n_tile as usize))
            .unwrap_or(usual);
        // Rows without an expert stay as they are: zeros.
        let mut y = device.zeroed(out.len()).map_err(failed)?;
        let mut run = |tiling: Tiling| {
            let align = Align {
                block_size: 1,
                num_experts: i.weights.len(),
                expert_map: None,
                absent: Absent::Ignore,
            };
            let runs = Runs::new(device, &align)?;
            let mut blocks = runs.room(device, i.topk_ids.len(), tiling.rows())?;
            align_on_device(device, &runs, &device.upload(&i.topk_ids)?, &mut blocks)?;
            let router = i.topk_weights.as_ref().map(|w| device.upload(w)).transpose()?;
            let (blocks, topk_weights) = (&blocks, router.as_ref());
            let routed = Routed { blocks, top_k: i.top_k, topk_weights };
            moe_marlin_gemm(device, &device.upload(&i.x)?, &weight, &mut y, tiling, routed)
        };
        match run(tiling) {
            Err(AccelError::Argument { what: "tiling", .. }) => run(usual).map_err(failed)?,
            other => other.map_err(failed)?,
        }
        fill(out, &device.download(&y).map_err(failed)?)
    }
}

impl Cuda {
    /// `y` of a layer.
    pub(crate) fn layer(&self, i: &laws::LayerInput) -> Result<Vec<u16>, AccelError> {
        let (device, local) = (&self.0, self.local(i)?);
        let layer = MarlinLayer::new(device, &local.layer(i))?;
        let top_k = i.config.top_k;
        let mut work = layer.workspace(device, i.size_m(), top_k)?;
        let mut y = device.upload(&vec![0xabcd; i.x.len()])?;
        let (x, weights) = (device.upload(&i.x)?, device.upload(&i.topk_weights)?);
        // Other tokens first: what they leave in the workspace must not matter.
        let mut ids = i.topk_ids.clone();
        Rng::new(i.seed).shuffle(&mut ids);
        for ids in [&ids, &i.topk_ids] {
            layer.forward(device, &x, &device.upload(ids)?, &weights, &mut work, &mut y)?;
        }
        device.download(&y)
    }

    fn local(&self, i: &laws::LayerInput) -> Result<laws::Local, AccelError> {
        i.local().map_err(|error| AccelError::Argument {
            operation: "moe",
            what: "layer",
            found: error.to_string(),
            expected: "a rank's part".into(),
        })
    }
}

impl Subject<laws::MoeLayer> for Cuda {
    fn takes(&self, i: &laws::LayerInput) -> bool {
        let Ok(local) = self.local(i) else { return false };
        !not_taken(&MarlinLayer::new(&self.0, &local.layer(i)))
    }

    /// Stricter than the laws, some of which allow a bound: every bit of every call is the canonical
    /// arithmetic's.
    fn call(&self, i: &laws::LayerInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let made = self.layer(i).map_err(failed)?;
        let wanted = laws::MoeLayer::expected(i).map_err(|e| SubjectError(e.to_string()))?;
        let differ = made.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        if differ > 0 {
            let what = format!("{differ} of {} values are not the canonical ones", wanted.len());
            return Err(SubjectError(what));
        }
        fill(out, &made)
    }
}
