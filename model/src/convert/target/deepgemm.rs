//! DeepGEMM: FP8 blocks as vLLM passes them to its products.

use marlinspike::formats::float_type;
use marlinspike::layouts::Layout as _;
use marlinspike::layouts::deepgemm::{MnMajorScales, ScaleForm, repeat_blocks};
use marlinspike::layouts::packed_rows::PackedRows;
use marlinspike::layouts::rows::RowOrder;
use marlinspike::num::dims::Shape;
use marlinspike::num::element::E4m3fn;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::quantize::requantize_ue8m0;
use marlinspike::weight::{Table, Weight};
use marlinspike::{Error, Result};
use ndarray::{Array2, ArrayView2, Axis};
use serde_json::{Value, json};

use super::fp8_blocks::{self, BLOCK};
use super::{Choice, Context, Descriptor, Format, Planned, Target};
use crate::convert::entry::Entry;
use crate::convert::job::Job;
use crate::convert::names::TensorKind;
use crate::convert::piece::{Bytes, Constants, Piece};
use crate::convert::settings::Settings;
use crate::convert::stack::StackPlan;
use crate::convert::stack::info::{StackInfo, cut, cut_blocks};
use crate::model::bind::Part;
use crate::model::layers::{Role, Stack};

/// N of a linear layer must be a multiple of this (vLLM `should_use_deepgemm_for_fp8_linear`).
const LINEAR_N: usize = 64;

/// How scales are stored, by the names of vLLM's `DeepGemmQuantScaleFMT` in small letters.
const FORMS: [(&str, Scales); 3] = [
    ("float32", Scales::Float32),
    ("float32_ceil_ue8m0", Scales::Float32CeilUe8m0),
    ("ue8m0", Scales::Ue8m0),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scales {
    /// f32 as in the checkpoint.
    Float32,
    /// f32 powers of two.
    Float32CeilUe8m0,
    /// Exponent bytes, four in a word, one for each row.
    Ue8m0,
}

impl Scales {
    fn name(self) -> &'static str {
        FORMS.iter().find(|(_, form)| *form == self).map_or("", |(name, _)| name)
    }

    /// Whether weights are quantized again, to scales that are powers of two.
    fn requantizes(self) -> bool {
        self != Self::Float32
    }

    /// Type and shape of the scales of one matrix.
    fn tensor(self, shape: Shape) -> Result<(DType, Vec<usize>)> {
        let groups = shape.size_k / BLOCK;
        Ok(match self {
            Self::Ue8m0 => (DType::I32, packed(shape)?.packed_shape().to_vec()),
            _ => (DType::F32, vec![shape.size_n.div_ceil(BLOCK), groups]),
        })
    }
}

/// The layout of packed UE8M0 scales.
fn packed(shape: Shape) -> Result<MnMajorScales> {
    MnMajorScales::new(shape.size_k / BLOCK, shape.size_n, ScaleForm::PackedUe8m0)
}

/// Codes, row-major.
fn rows(shape: Shape) -> Result<PackedRows> {
    PackedRows::new(shape, 8, RowOrder::new(shape.size_n, &[])?, None)
}

/// DeepGEMM's format.
pub const FORMAT: Format = Format::new(&Descriptor {
    name: "deepgemm",
    title: "DeepGEMM",
    about: || "DeepGEMM's form of FP8 blocks, for Hopper and Blackwell".to_owned(),
    column: "DeepGEMM",
    tensors: || {
        "\
  --to deepgemm        weight, weight_scale_inv (compressed-tensors: weight_scale), bias"
            .to_owned()
    },
    takes: || {
        "\
FP8 checkpoints with blocks of 128 x 128 and quantized activations. K must be a
multiple of 128, and N a multiple of 64 for linear layers and of 128 for experts. The UE8M0 forms
requantize weights that have f32 scales."
            .to_owned()
    },
    examples: &[["./DeepSeek-V3 ./out", "--scale-format ue8m0"]],
    model_dtype: false,
    choice: Some(Choice {
        name: "scale-format",
        about: || {
            "scales: float32 for Hopper, float32_ceil_ue8m0 for Hopper with E8M0 scales, ue8m0 for \
                Blackwell [default: float32]"
                .to_owned()
        },
        values: &[FORMS[0].0, FORMS[1].0, FORMS[2].0],
    }),
});

/// DeepGEMM's form of FP8 blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeepGemm {
    scales: Scales,
}

impl DeepGemm {
    /// For the option's value of this index.
    pub(crate) fn new(chosen: usize) -> Self {
        Self { scales: FORMS[chosen].1 }
    }
}

impl Target for DeepGemm {
    fn options(&self, _settings: &Settings) -> Vec<(&'static str, Value)> {
        vec![("scale_format", json!(self.scales.name()))]
    }

    fn layer(&self, plan: &StackPlan, _settings: &Settings) -> Vec<(&'static str, Value)> {
        let ue8m0 = self.scales.requantizes() || fp8_blocks::accept(&plan.scheme) == Ok(true);
        vec![("scale_format", json!(self.scales.name())), fp8_blocks::activations(ue8m0)]
    }

    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned {
        let Context { model, kv_heads, settings } = context;
        fp8_blocks::accept(&stack.scheme).map_err(|e| vec![e])?;
        let (k, n) = cut(stack, &info, kv_heads, settings).map_err(|e| vec![e])?;
        let mut reasons = cut_blocks(&info, &n, settings.tp.size);
        let (size_k, size_n) = (k.len(), n.iter().map(|n| n.len()).sum::<usize>());
        let unit_n = if stack.role == Role::Dense { LINEAR_N } else { BLOCK };
        for (what, size, unit) in [("size_k", size_k, BLOCK), ("size_n", size_n, unit_n)] {
            if size == 0 || !size.is_multiple_of(unit) {
                reasons.push(format!("{what}: found {size}, expected a multiple of {unit}"));
            }
        }
        let bias = info.experts[0][0].get(Part::Bias).map(|found| found.name.clone());
        if bias.is_some() && stack.role != Role::Dense {
            reasons.push("found biases of experts, expected none".to_owned());
        }
        if !reasons.is_empty() {
            return Err(reasons);
        }
        let mut plan = StackPlan::cut(stack, info, kv_heads, settings).map_err(|e| vec![e])?;
        plan.groups.count = size_k / BLOCK;
        let experts = (stack.role != Role::Dense).then_some(plan.experts.len());
        let all = |shape: Vec<usize>| experts.into_iter().chain(shape).collect::<Vec<_>>();
        plan.push(TensorKind::Weight, DType::F8E4M3, all(vec![size_n, size_k]));
        let (dtype, shape) =
            self.scales.tensor(plan.slice.shape).map_err(|e| vec![e.to_string()])?;
        plan.push(TensorKind::Scales, dtype, all(shape));
        if let Some(entry) = bias.and_then(|name| model.entry(&name)) {
            plan.push(TensorKind::Bias, entry.dtype(), vec![size_n]);
        }
        Ok(plan)
    }

    fn constants(&self, _plan: &StackPlan, _context: Context<'_>) -> Result<Constants> {
        Ok(Constants::default())
    }

    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>> {
        let shape = weight.shape();
        let mut codes = rows(shape)?.pack(&weight.codes)?;
        let mut scales = fp8_blocks::block_scales(&weight)?;
        if self.scales.requantizes() && !stored_as_e8m0(job) {
            (codes, scales) = requantized(&codes, &scales)?;
        }
        let scales = match self.scales {
            Scales::Ue8m0 => {
                let rows = repeat_blocks(&scales, shape.size_n, BLOCK)?;
                Bytes::B32(packed(shape)?.pack(&rows)?)
            }
            _ => Bytes::of(&scales.transposed()),
        };
        let whole = |kind, bytes: Bytes| {
            Piece::whole(kind, job.expert as u64 * bytes.get().len() as u64, bytes)
        };
        let (codes, _) = codes.into_raw_vec_and_offset();
        let mut pieces =
            vec![whole(TensorKind::Weight, Bytes::B8(codes)), whole(TensorKind::Scales, scales)];
        if let Some(bias) = &weight.bias {
            pieces.push(whole(TensorKind::Bias, Bytes::of(bias)));
        }
        Ok(pieces)
    }

    fn unpack(&self, entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
        let form = entry.text("scale_format");
        let form = FORMS.iter().find(|(name, _)| Some(*name) == form).map(|(_, form)| *form);
        let form = form.ok_or_else(|| entry.bad("scale_format", "float32 or ue8m0"))?;
        let shape = entry.shape()?;
        let (codes, scales) = (entry.need("weight")?, entry.need("scales")?);
        codes.expect_dtype(&[DType::F8E4M3])?;
        let (dtype, of_matrix) = form.tensor(shape)?;
        scales.expect_dtype(&[dtype])?;
        let one = |e: usize| -> Result<Weight<'static>> {
            let part = |role| {
                let tensor = entry.part(role, e)?;
                tensor.ok_or_else(|| entry.bad("tensors", role))
            };
            let codes = part("weight")?.expect_shape(&[shape.size_n, shape.size_k])?.to_owned();
            let scales = part("scales")?.expect_shape(&of_matrix)?.to_owned();
            let view = ArrayView2::from_shape((shape.size_n, shape.size_k), codes.bytes());
            let view = view.map_err(|e| Error::unsupported(codes.name(), e.to_string()))?;
            let table = columns(form, &scales, shape)?;
            let mut weight = fp8_blocks::weight(entry, e, rows(shape)?.unpack(view)?, table)?;
            if let Some(bias) = entry.part("bias", e)? {
                let ty = float_type(bias.dtype());
                let ty = ty.ok_or_else(|| Error::dtype(bias.name(), bias.dtype(), "a float"))?;
                weight.bias = Some(Table::from_tensor(&bias, ty)?);
            }
            weight.validate()?;
            Ok(weight)
        };
        (0..entry.experts()?).map(one).collect()
    }
}

/// Whether the file stores the scales of the job's expert as E8M0: upstream keeps these.
fn stored_as_e8m0(job: &Job<'_>) -> bool {
    let scale = job.plan.experts[job.expert][0].get(Part::Scale);
    let entry = scale.and_then(|found| job.model.entry(&found.name));
    entry.is_some_and(|entry| entry.dtype() == DType::F8E8M0)
}

/// The scales `[groups, size_n]` of a matrix's columns.
fn columns(form: Scales, scales: &Tensor<'_>, shape: Shape) -> Result<Table> {
    match form {
        Scales::Ue8m0 => packed(shape)?.unpack(&scales.elements::<u32>()),
        _ => {
            let blocks = Table::from_tensor(scales, ScalarType::FLOAT32)?.transposed();
            repeat_blocks(&blocks, shape.size_n, BLOCK)
        }
    }
}

/// Codes `[N, K]` and scales `[groups, blocks of N]` whose scales are powers of two. Blocks are
/// independent: one row of them is in memory at a time.
fn requantized(codes: &Array2<u8>, scales: &Table) -> Result<(Array2<u8>, Table)> {
    let mut new_codes = Vec::with_capacity(codes.len());
    let mut new_scales = Vec::with_capacity(scales.rows() * scales.cols());
    let scales = scales.transposed();
    let scales = scales.view::<f32>()?;
    let slabs = codes.axis_chunks_iter(Axis(0), BLOCK).zip(scales.axis_chunks_iter(Axis(0), 1));
    for (codes, scales) in slabs {
        let codes = codes.mapv(E4m3fn::from_bits);
        let slab = requantize_ue8m0(&codes, &scales.to_owned(), [BLOCK, BLOCK])?;
        new_codes.extend(slab.codes.iter().map(|code| code.to_bits()));
        new_scales.extend(slab.scales);
    }
    let wrong = |e: ndarray::ShapeError| Error::unsupported("FP8 blocks", e.to_string());
    let new_codes = Array2::from_shape_vec(codes.dim(), new_codes).map_err(wrong)?;
    let new_scales = Array2::from_shape_vec(scales.dim(), new_scales).map_err(wrong)?;
    Ok((new_codes, Table::from_array(new_scales)?.transposed()))
}
