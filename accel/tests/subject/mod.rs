//! The GPU as a subject of the laws of `marlinspike-proptests`: each operation behind the copies to
//! and from the device.

mod layouts;
mod rows;

use marlinspike::moe::align::{Absent, Align};
use marlinspike::vectors::Rng;
use marlinspike_accel::{
    AccelError, Buffer, Device,
    ops::{
        self, MarlinLayer, MarlinWeight,
        align::{DeviceBlocks, Runs, align_on_device},
        gemm::{Routed, Tiling, marlin_gemm, marlin_gemm_tiled, moe_marlin_gemm},
        gemm_a8::{RowsA8, marlin_gemm_a8, moe_marlin_gemm_a8},
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
        !not_taken(&self.experts(i))
    }

    fn call(&self, i: &laws::ExpertInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let weight = self.experts(i).map_err(failed)?;
        // Rows without an expert stay as they are: zeros.
        let mut y = self.0.zeroed(out.len()).map_err(failed)?;
        let run = match i.form.quant.input_dtype {
            Some(_) => self.experts_of_8_bits(i, &weight, &mut y),
            None => self.experts_of_16_bits(i, &weight, &mut y),
        };
        run.map_err(failed)?;
        fill(out, &self.0.download(&y).map_err(failed)?)
    }
}

impl Cuda {
    fn experts(&self, i: &laws::ExpertInput) -> Result<MarlinWeight, AccelError> {
        let dtype = i.form.quant.dtype;
        match i.form.quant.input_dtype {
            Some(input) => MarlinWeight::for_8_bit(&self.0, &i.weights, dtype, input),
            None => MarlinWeight::new(&self.0, &i.weights, dtype),
        }
    }

    /// Blocks of `rows` rows for the experts of an input.
    fn blocks(&self, i: &laws::ExpertInput, rows: usize) -> Result<DeviceBlocks, AccelError> {
        let (num_experts, absent) = (i.weights.len(), Absent::Ignore);
        let align = Align { block_size: 1, num_experts, expert_map: None, absent };
        let runs = Runs::new(&self.0, &align)?;
        let mut blocks = runs.room(&self.0, i.topk_ids.len(), rows)?;
        align_on_device(&self.0, &runs, &self.0.upload(&i.topk_ids)?, &mut blocks)?;
        Ok(blocks)
    }

    fn experts_of_8_bits(
        &self,
        i: &laws::ExpertInput,
        weight: &MarlinWeight,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let device = &self.0;
        // The sizes of blocks differ between few and many rows of an expert.
        let rows = [1, 64][i.choice as usize % 2].max(i.topk_ids.len() / i.weights.len());
        let blocks = self.blocks(i, weight.block_size(device, rows)?)?;
        let codes: Vec<u8> = i.x.iter().map(|&code| code as u8).collect();
        let scales = i.x_scales.as_deref().unwrap_or_default();
        let (codes, scales) = (device.upload(&codes)?, device.upload(scales)?);
        let router = i.topk_weights.as_ref().map(|w| device.upload(w)).transpose()?;
        let routed = Routed { blocks: &blocks, top_k: i.top_k, topk_weights: router.as_ref() };
        let x = RowsA8 { codes: &codes, scales: &scales };
        moe_marlin_gemm_a8(device, x, weight, y, routed)
    }

    fn experts_of_16_bits(
        &self,
        i: &laws::ExpertInput,
        weight: &MarlinWeight,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let device = &self.0;
        // Each expert has an order of its own, in which the operator takes the columns of its rows.
        let (x, top_k) = match weight.perm(0) {
            Some(_) => (ordered_slots(i, weight), 1),
            None => (i.x.clone(), i.top_k),
        };
        let x = device.upload(&x)?;
        let router = i.topk_weights.as_ref().map(|w| device.upload(w)).transpose()?;
        let usual = weight.tiling_of_experts(device, i.topk_ids.len(), i.weights.len(), false)?;
        let shape = weight.shape();
        let tiling = tiling(i.choice, shape.size_k)
            .filter(|tiling| shape.size_n.is_multiple_of(tiling.n_tile as usize))
            .unwrap_or(usual);
        let mut run = |tiling: Tiling| {
            let blocks = self.blocks(i, tiling.rows())?;
            let routed = Routed { blocks: &blocks, top_k, topk_weights: router.as_ref() };
            moe_marlin_gemm(device, &x, weight, y, tiling, routed)
        };
        match run(tiling) {
            Err(AccelError::Argument { what: "tiling", .. }) => run(usual),
            other => other,
        }
    }
}

/// The row of each slot, its columns in the order of its expert.
fn ordered_slots(i: &laws::ExpertInput, weight: &MarlinWeight) -> Vec<u16> {
    let size_k = weight.shape().size_k;
    let row = |(slot, &id): (usize, &i32)| {
        let row = &i.x[slot / i.top_k * size_k..][..size_k];
        match usize::try_from(id).ok().and_then(|expert| weight.perm(expert)) {
            Some(perm) => perm.iter().map(|&k| row[k as usize]).collect::<Vec<_>>(),
            None => row.to_vec(),
        }
    };
    i.topk_ids.iter().enumerate().flat_map(row).collect()
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
