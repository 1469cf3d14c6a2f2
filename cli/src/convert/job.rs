//! One unit of work: some rows of one expert's matrix, or a piece of a copied tensor.

use std::ops::Range;

use marlinspike::layout::marlin::{InputDtype, Options, Prepared, nvfp4_scale_factor, prepare};
use marlinspike::tensor::DType;
use marlinspike::weight::{Table, TableData};
use marlinspike::{Error, Result};

use super::load;
use super::names::Kind;
use super::plan::{Settings, StackPlan};
use crate::model::Model;
use crate::model::bind::Part;

/// What all parts of a stack share: found by looking at all of its scales.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Constants {
    /// NVFP4: factor that goes from the global scale into the block scales.
    pub scale_factor: Option<f32>,
    /// int8 activations: the largest scale in the model's type.
    pub int8_scale_max: Option<f32>,
}

impl Constants {
    /// Looks at the scales of a stack, where the format needs it.
    ///
    /// # Errors
    /// [`Error::Dtype`] or [`Error::Shape`] naming the scale tensor.
    pub fn of(model: &Model<'_>, plan: &StackPlan, settings: &Settings) -> Result<Self> {
        let mut constants = Self::default();
        let nvfp4 = plan.output(Kind::GlobalScale).is_some();
        let int8 = plan.output(Kind::InputGlobalScale).is_some();
        if !nvfp4 && !int8 {
            return Ok(constants);
        }
        let mut largest_code = 0u8;
        let mut max = f64::NEG_INFINITY;
        for matrices in &plan.experts {
            let Some(scale) = load::merged(model, plan, matrices, Part::Scale, &plan.k)? else {
                return Err(Error::missing(format!("{}: scales", plan.module), "its scheme"));
            };
            if nvfp4 {
                scale.expect_dtype(&[DType::F8E4M3])?;
                // Positive e4m3 values are ordered as their codes; 0x7f is NaN and refused later.
                let codes = scale.bytes().iter().copied().filter(|&b| b < 0x7f);
                largest_code = largest_code.max(codes.max().unwrap_or(0));
            }
            if int8 {
                let ty = marlinspike::checkpoint::float_type(scale.dtype());
                let Some(ty) = ty else {
                    let found = scale.dtype();
                    return Err(Error::dtype(scale.name(), found, "a floating-point type"));
                };
                let table = Table::from_tensor(&scale, ty)?;
                let values = table.iter_bits().map(|b| ty.to_f64(b));
                max = values.filter(|v| v.is_finite()).fold(max, f64::max);
            }
        }
        if nvfp4 {
            constants.scale_factor = Some(nvfp4_scale_factor([largest_code], settings.dtype));
        }
        if int8 {
            // Rounding keeps the order, so the largest rounded scale is the largest one, rounded.
            let ty = settings.dtype;
            constants.int8_scale_max = Some(ty.to_f64(ty.encode_rne(max)) as f32);
        }
        Ok(constants)
    }
}

/// Bytes of one output of a job, and where in the output tensor they go.
#[derive(Debug)]
pub struct Piece {
    /// Which output.
    pub kind: Kind,
    /// Offset in the output tensor, in bytes.
    pub offset: u64,
    /// The bytes.
    pub bytes: Bytes,
}

/// Owned bytes, whatever their elements were.
#[derive(Debug)]
pub enum Bytes {
    /// From bytes.
    B8(Vec<u8>),
    /// From 16-bit elements.
    B16(Vec<u16>),
    /// From words.
    B32(Vec<u32>),
    /// From floats.
    F32(Vec<f32>),
}

impl Bytes {
    /// The bytes.
    pub fn get(&self) -> &[u8] {
        match self {
            Self::B8(v) => v,
            Self::B16(v) => bytemuck::cast_slice(v),
            Self::B32(v) => bytemuck::cast_slice(v),
            Self::F32(v) => bytemuck::cast_slice(v),
        }
    }

    fn of(table: &Table) -> Self {
        match table.data() {
            TableData::B8(v) => Self::B8(v.clone()),
            TableData::B16(v) => Self::B16(v.clone()),
            TableData::B32(v) => Self::B32(v.clone()),
        }
    }
}

/// Packs rows `rows` (of the rank's) of expert `expert`.
///
/// # Errors
/// What the format or the layout refuses, naming the tensor.
pub fn run(
    model: &Model<'_>,
    plan: &StackPlan,
    constants: Constants,
    settings: &Settings,
    expert: usize,
    rows: &Range<usize>,
) -> Result<Vec<Piece>> {
    let file_rows = plan.k.start + rows.start..plan.k.start + rows.end;
    let weight = load::load(model, plan, &plan.experts[expert], &file_rows)?;
    let options = Options {
        dtype: settings.dtype,
        input_dtype: settings.input,
        scale_factor: constants.scale_factor,
        int8_scale_max: constants.int8_scale_max.filter(|_| settings.input == InputDtype::Int8),
        perms: None,
        scale_permutation: Some(plan.permutation),
    };
    let prepared = prepare(&[weight], options)?;
    pieces(plan, prepared, expert, rows)
}

fn pieces(
    plan: &StackPlan,
    prepared: Prepared,
    expert: usize,
    rows: &Range<usize>,
) -> Result<Vec<Piece>> {
    let first = rows.start == 0;
    let (e, n) = (expert as u64, plan.shape.size_n as u64);
    let whole_k = plan.shape.size_k as u64;
    let mut list = Vec::new();
    let mut push = |kind, offset: u64, bytes: Bytes| list.push(Piece { kind, offset, bytes });
    // Every packed row of 16 k has N · 16 · bits / 8 bytes.
    let per_k = n * u64::from(plan.code_bits()) / 8;
    push(Kind::Weight, (e * whole_k + rows.start as u64) * per_k, Bytes::B32(prepared.qweight));

    let groups = plan.groups as u64;
    let found = prepared.scales.rows();
    // A part of a channel-wise matrix has the whole's scales: the first part writes them.
    let shared = plan.groups == found;
    let group = if shared { 0 } else { rows.start as u64 / (whole_k / groups) };
    if first || !shared {
        let width = u64::from(prepared.scales.ty().storage_bits() / 8);
        let at = (e * groups + group) * n;
        push(Kind::Scales, at * width, Bytes::of(&prepared.scales));
        if let Some((_, words)) = prepared.zeros {
            let pack = 32 / u64::from(plan.code_bits());
            push(Kind::Zeros, at / pack * 4, Bytes::B32(words));
        }
    }
    if first {
        if let Some([sorted]) = prepared.sorted.as_deref() {
            push(Kind::GIdx, e * whole_k * 4, Bytes::B32(sorted.g_idx.clone()));
            push(Kind::SortIndices, e * whole_k * 4, Bytes::B32(sorted.perm.clone()));
        }
        if let Some(bias) = &prepared.bias {
            push(Kind::Bias, e * n * 2, Bytes::of(bias));
        }
        if let Some(global) = prepared.global_scale {
            push(Kind::GlobalScale, e * 4, Bytes::F32(global));
        }
        if let (Some(scale), 0) = (prepared.input_global_scale, expert) {
            push(Kind::InputGlobalScale, 0, Bytes::F32(vec![scale]));
        }
    }
    for piece in &list {
        let spec = plan.output(piece.kind).map(|o| &o.spec);
        let fits = spec.and_then(|s| s.byte_len());
        let end = piece.offset + piece.bytes.get().len() as u64;
        if fits.is_none_or(|len| end > len) {
            // The plan follows from headers and config alone; data that says otherwise is refused.
            let what = format!("{}: {:?}", plan.module, piece.kind);
            return Err(Error::size(what, end, format!("at most {fits:?} bytes")));
        }
    }
    Ok(list)
}
