//! One unit of work: a part of one expert's matrix, packed.

use std::ops::Range;

use marlinspike::checkpoint::nvfp4;
use marlinspike::config::Scheme;
use marlinspike::dims::GroupSize;
use marlinspike::layout::kleidi::{PackedRhs, RhsLayout, operator_scales};
use marlinspike::layout::marlin::{InputDtype, Options, Prepared, nvfp4_scale_factor, prepare};
use marlinspike::prepare::fp8::largest_scale;
use marlinspike::prepare::gate_up::GateUp;
use marlinspike::tensor::DType;
use marlinspike::weight::{Table, TableData, Weight};
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::names::Kind;
use super::plan::{FlashinferLayout, Packing, Part, StackPlan};
use super::settings::Settings;
use crate::load;
use crate::model::layers::Role;
use crate::model::{Model, bind, values};

/// All of a stack's output in memory, for the int4 path: `[experts][packed_len]` bytes, packed on
/// rayon's current pool.
///
/// # Errors
/// As [`run`]; [`Error::Unsupported`] for a stack of another format.
pub fn packed_stack(model: &Model<'_>, plan: &StackPlan, settings: &Settings) -> Result<Vec<u8>> {
    let Packing::Kleidi(layout) = plan.packing else {
        return Err(Error::unsupported(&plan.module, "not planned for the int4 path"));
    };
    let mut bytes = vec![0u8; plan.experts.len() * layout.packed_len()];
    let parts = plan.parts(u64::MAX);
    let experts = bytes.par_chunks_exact_mut(layout.packed_len()).enumerate();
    experts.try_for_each(|(e, expert)| -> Result<()> {
        for part in &parts {
            for piece in run(model, plan, Constants::default(), settings, e, part)? {
                let at = piece.offset as usize - e * layout.packed_len();
                expert[at..][..piece.bytes.get().len()].copy_from_slice(piece.bytes.get());
            }
        }
        Ok(())
    })?;
    Ok(bytes)
}

/// What all parts of a stack share: found by looking at all of its scales.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Constants {
    /// NVFP4: factor that goes from the global scale into the block scales.
    pub scale_factor: Option<f32>,
    /// int8 activations: the largest scale in the model's type.
    pub int8_scale_max: Option<f32>,
    /// FlashInfer: the multiplier of the quantized activations that all experts share.
    pub input_scale: Option<f32>,
}

impl Constants {
    /// Looks at the scales of a stack, where the format needs it.
    ///
    /// # Errors
    /// [`Error::Dtype`] or [`Error::Shape`] naming the scale tensor.
    pub fn of(model: &Model<'_>, plan: &StackPlan, settings: &Settings) -> Result<Self> {
        let mut constants = Self::default();
        if let Packing::Flashinfer(FlashinferLayout::Nvfp4(backend)) = plan.packing
            && plan.output(Kind::InputScale).is_some()
            && backend.shares_activation_scale()
        {
            let all = (0..plan.experts.len()).map(|e| input_multipliers(model, plan, e));
            let all = all.collect::<Result<Vec<_>>>()?;
            constants.input_scale = backend.activation_scales(&all)?.first().copied();
        }
        if matches!(plan.packing, Packing::Flashinfer(_)) {
            return Ok(constants);
        }
        let nvfp4 = plan.output(Kind::GlobalScale).is_some();
        let int8 = plan.output(Kind::InputGlobalScale).is_some();
        if !nvfp4 && !int8 {
            return Ok(constants);
        }
        let mut largest_code = 0u8;
        let mut max = f64::NEG_INFINITY;
        for matrices in &plan.experts {
            let scale = load::merged(model, matrices, bind::Part::Scale, &plan.k, &plan.n)?;
            let Some(scale) = scale else {
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

/// Bytes of one output of a job, and where in the output tensor they go: in runs of equal length
/// and distance.
#[derive(Debug)]
pub struct Piece {
    /// Which output.
    pub kind: Kind,
    /// Offset of the first run in the output tensor, in bytes.
    pub offset: u64,
    /// Bytes of a run.
    pub run: u64,
    /// Bytes from one run's beginning to the next one's.
    pub stride: u64,
    /// The bytes of all runs.
    pub bytes: Bytes,
}

impl Piece {
    /// A piece of `kind` in rows of `width` bytes, of which this one has `part`, from the byte
    /// `offset` of the output on. Whole rows are one run.
    fn rows(kind: Kind, offset: u64, width: u64, part: Range<u64>, bytes: Bytes) -> Self {
        let run = part.end - part.start;
        let run = if run == width { bytes.get().len() as u64 } else { run };
        Self { kind, offset: offset + part.start, run, stride: width, bytes }
    }

    /// Each run, and its offset in the output tensor.
    pub fn runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let runs = self.bytes.get().chunks(usize::try_from(self.run).unwrap_or(usize::MAX).max(1));
        (0u64..).zip(runs).map(|(i, run)| (self.offset + i * self.stride, run))
    }

    /// Where the last run ends in the output tensor.
    fn end(&self) -> u64 {
        self.runs().last().map_or(0, |(at, run)| at + run.len() as u64)
    }
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
    /// Packed blocks of columns.
    Blocks(PackedRhs<'static>),
}

impl Bytes {
    /// The bytes.
    pub fn get(&self) -> &[u8] {
        match self {
            Self::B8(v) => v,
            Self::B16(v) => bytemuck::cast_slice(v),
            Self::B32(v) => bytemuck::cast_slice(v),
            Self::F32(v) => bytemuck::cast_slice(v),
            Self::Blocks(packed) => packed.bytes(),
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

/// Packs `part` of expert `expert`.
///
/// # Errors
/// What the format or the layout refuses, naming the tensor.
pub fn run(
    model: &Model<'_>,
    plan: &StackPlan,
    constants: Constants,
    settings: &Settings,
    expert: usize,
    part: &Part,
) -> Result<Vec<Piece>> {
    let (file_rows, columns) = match plan.padding {
        Some(_) => (plan.k.clone(), 0..plan.n.iter().map(Range::len).sum()),
        None => {
            let rows = plan.k.start + part.rows.start..plan.k.start + part.rows.end;
            (rows, part.columns.clone())
        }
    };
    let reading = plan.reading(settings.preparation);
    let weight = load::load(model, reading, &plan.experts[expert], &file_rows, &columns)?;
    if let Packing::Flashinfer(kind) = plan.packing {
        return flashinfer(model, plan, kind, constants, weight, expert);
    }
    let weight = match (&plan.padding, plan.role) {
        (None, _) => weight,
        (Some(shard), Role::W13) => shard.w13(&weight, GateUp::Interleaved)?,
        (Some(shard), _) => shard.w2(&weight)?,
    };
    let permutation = match plan.packing {
        Packing::Marlin { permutation } => permutation,
        Packing::Flashinfer(_) => return Ok(Vec::new()),
        Packing::Kleidi(layout) => return Ok(vec![blocks(plan, layout, weight, expert, part)?]),
    };
    let options = Options {
        dtype: settings.dtype,
        input_dtype: settings.input,
        scale_factor: constants.scale_factor,
        int8_scale_max: constants.int8_scale_max.filter(|_| settings.input == InputDtype::Int8),
        perms: None,
        scale_permutation: Some(permutation),
    };
    let prepared = prepare(&[weight], options)?;
    pieces(plan, prepared, expert, part)
}

/// The multipliers of the quantized activations of an expert's matrices.
fn input_multipliers(model: &Model<'_>, plan: &StackPlan, expert: usize) -> Result<Vec<f32>> {
    let matrices = &plan.experts[expert];
    let part = bind::Part::InputScale;
    let Some(tensor) = load::merged(model, matrices, part, &plan.k, &plan.n)? else {
        let what = format!("{}: the scale of its activations", matrices[0].name);
        return Err(Error::missing(what, plan.scheme.label()));
    };
    match &plan.scheme {
        Scheme::Nvfp4 { container, .. } => {
            nvfp4::multipliers(&tensor, load::global_scale(*container))
        }
        _ => values::floats(&tensor),
    }
}

/// Everything of one expert in FlashInfer's layout.
fn flashinfer(
    model: &Model<'_>,
    plan: &StackPlan,
    kind: FlashinferLayout,
    constants: Constants,
    weight: Weight<'_>,
    expert: usize,
) -> Result<Vec<Piece>> {
    let packed = kind.layout(plan.role, plan.shape)?.pack(std::slice::from_ref(&weight))?;
    let e = expert as u64;
    let whole = |kind, bytes: Bytes| {
        let run = bytes.get().len() as u64;
        Piece { kind, offset: e * run, run, stride: run, bytes }
    };
    let mut list = vec![
        whole(Kind::Weight, Bytes::B8(packed.weights)),
        whole(Kind::Scales, Bytes::of(&packed.scales)),
    ];
    if let Some(global) = weight.global_scale {
        list.push(whole(Kind::GlobalScale, Bytes::F32(vec![global])));
    }
    if plan.output(Kind::InputScale).is_some() {
        let scale = match constants.input_scale {
            Some(shared) => shared,
            None => largest_scale(&input_multipliers(model, plan, expert)?),
        };
        list.push(whole(Kind::InputScale, Bytes::F32(vec![scale])));
    }
    Ok(list)
}

/// The blocks of a part's columns, which lie one after the other in the output.
fn blocks(
    plan: &StackPlan,
    layout: RhsLayout,
    mut weight: Weight<'_>,
    expert: usize,
    part: &Part,
) -> Result<Piece> {
    let grouped = plan.role != Role::Dense && plan.group_size != GroupSize::Channel;
    weight.scales = operator_scales(&weight, grouped)?;
    let own = RhsLayout::new(weight.shape(), plan.group_size, layout.nr())?;
    let packed = own.pack_weight(&weight)?;
    let before = expert * layout.packed_len();
    let at = before + part.columns.start / layout.nr() * layout.block_bytes();
    let run = packed.bytes().len() as u64;
    let bytes = Bytes::Blocks(packed);
    Ok(Piece { kind: Kind::Weight, offset: at as u64, run, stride: run, bytes })
}

fn pieces(plan: &StackPlan, prepared: Prepared, expert: usize, part: &Part) -> Result<Vec<Piece>> {
    let (e, n, whole_k) = (expert as u64, plan.shape.size_n as u64, plan.shape.size_k as u64);
    let columns = part.columns.start as u64..part.columns.end as u64;
    let first = part.rows.start == 0;
    let mut list = Vec::new();
    // Rows of the output, `width` bytes for each column, from row `row` of the expert on.
    let rows = |kind, row: u64, width: u64, bytes| {
        let part = columns.start * width..columns.end * width;
        Piece::rows(kind, row * n * width, n * width, part, bytes)
    };
    // A row of tiles is `tile_k` codes of each column.
    let tile_k = prepared.weight_layout.tile_map().tile_k() as u64;
    let tile_rows = (e * whole_k + part.rows.start as u64) / tile_k;
    let tile_width = tile_k * u64::from(plan.code_bits()) / 8;
    list.push(rows(Kind::Weight, tile_rows, tile_width, Bytes::B32(prepared.qweight)));

    let groups = plan.groups as u64;
    // A part of a channel-wise matrix has the whole's scales: the first part writes them.
    let shared = plan.groups == prepared.scales.rows();
    let group = if shared { 0 } else { part.rows.start as u64 / (whole_k / groups) };
    if first || !shared {
        let width = u64::from(prepared.scales.ty().storage_bits() / 8);
        list.push(rows(Kind::Scales, e * groups + group, width, Bytes::of(&prepared.scales)));
        if let Some((_, words)) = prepared.zeros {
            // One word for several columns.
            let pack = 32 / u64::from(plan.code_bits());
            let part = columns.start / pack * 4..columns.end / pack * 4;
            let (at, width) = ((e * groups + group) * n / pack * 4, n / pack * 4);
            list.push(Piece::rows(Kind::Zeros, at, width, part, Bytes::B32(words)));
        }
    }
    if first && let Some(bias) = &prepared.bias {
        list.push(rows(Kind::Bias, e, 2, Bytes::of(bias)));
    }
    if first && columns.start == 0 {
        let mut whole = |kind, offset: u64, bytes: Bytes| {
            let run = bytes.get().len() as u64;
            list.push(Piece { kind, offset, run, stride: run, bytes });
        };
        if let Some([sorted]) = prepared.sorted.as_deref() {
            whole(Kind::GIdx, e * whole_k * 4, Bytes::B32(sorted.g_idx.clone()));
            whole(Kind::SortIndices, e * whole_k * 4, Bytes::B32(sorted.perm.clone()));
        }
        if let Some(global) = prepared.global_scale {
            whole(Kind::GlobalScale, e * 4, Bytes::F32(global));
        }
        if let (Some(scale), 0) = (prepared.input_global_scale, expert) {
            whole(Kind::InputGlobalScale, 0, Bytes::F32(vec![scale]));
        }
    }
    for piece in &list {
        let spec = plan.output(piece.kind).map(|o| &o.spec);
        let fits = spec.and_then(|s| s.byte_len());
        let end = piece.end();
        if fits.is_none_or(|len| end > len) {
            // The plan follows from headers and config alone; data that says otherwise is refused.
            let what = format!("{}: {:?}", plan.module, piece.kind);
            return Err(Error::size(what, end, format!("at most {fits:?} bytes")));
        }
    }
    Ok(list)
}
