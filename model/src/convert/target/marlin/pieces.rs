//! The pieces of a converted stack that a job's packed tensors become.

use marlinspike::layouts::marlin::Prepared;
use marlinspike::num::array::into_vec;
use marlinspike::{Error, Result};

use crate::convert::names::TensorKind;
use crate::convert::piece::{Bytes, Piece};
use crate::convert::stack::StackPlan;
use crate::convert::stack::part::MatrixPart;

/// The outputs of a job, and their places in the stack's tensors.
///
/// # Errors
/// For data whose outputs are larger than the plan, which follows from headers and config, has room
/// for.
pub(super) fn pieces(
    plan: &StackPlan,
    prepared: Prepared,
    expert: usize,
    part: &MatrixPart,
) -> Result<Vec<Piece>> {
    let (e, n, whole_k) =
        (expert as u64, plan.slice.shape.size_n as u64, plan.slice.shape.size_k as u64);
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
    list.push(rows(
        TensorKind::Weight,
        tile_rows,
        tile_width,
        Bytes::B32(into_vec(prepared.qweight)),
    ));

    let groups = plan.groups.count as u64;
    // Every part of a channel-wise matrix has the same scales: the first part writes them.
    let shared = plan.groups.count == prepared.scales.rows();
    let group = if shared { 0 } else { part.rows.start as u64 / (whole_k / groups) };
    if first || !shared {
        let width = u64::from(prepared.scales.ty().storage_bits() / 8);
        list.push(rows(TensorKind::Scales, e * groups + group, width, Bytes::of(&prepared.scales)));
        if let Some((_, words)) = prepared.zeros {
            // One word for several columns.
            let pack = 32 / u64::from(plan.code_bits());
            let part = columns.start / pack * 4..columns.end / pack * 4;
            let (at, width) = ((e * groups + group) * n / pack * 4, n / pack * 4);
            list.push(Piece::rows(TensorKind::Zeros, at, width, part, Bytes::B32(into_vec(words))));
        }
    }
    if first && let Some(bias) = &prepared.bias {
        list.push(rows(TensorKind::Bias, e, 2, Bytes::of(bias)));
    }
    if first && columns.start == 0 {
        let mut whole = |kind, offset, bytes| list.push(Piece::whole(kind, offset, bytes));
        if let Some([sorted]) = prepared.sorted.as_deref() {
            whole(TensorKind::GIdx, e * whole_k * 4, Bytes::B32(sorted.g_idx.clone()));
            whole(TensorKind::SortIndices, e * whole_k * 4, Bytes::B32(sorted.perm.clone()));
        }
        if let Some(global) = prepared.global_scale {
            whole(TensorKind::GlobalScale, e * 4, Bytes::F32(global));
        }
        if let (Some(scale), 0) = (prepared.input_global_scale, expert) {
            whole(TensorKind::InputGlobalScale, 0, Bytes::F32(vec![scale]));
        }
    }
    for piece in &list {
        let spec = plan.output(piece.kind).map(|o| &o.spec);
        let fits = spec.and_then(|s| s.byte_len());
        let end = piece.end();
        if fits.is_none_or(|len| end > len) {
            // The plan follows from headers and config alone; data that contradicts it is refused.
            let what = format!("{}: {:?}", plan.module, piece.kind);
            return Err(Error::size(what, end, format!("at most {fits:?} bytes")));
        }
    }
    Ok(list)
}
