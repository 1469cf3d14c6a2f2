//! Products whose rows lie in the blocks of experts, from codes or made of gate and up.

use marlinspike::num::dims::Shape;

use super::{MOE, RowsA8, RowsOfX, W4a8Plan, launch, on_device};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{align::RoutedRows, fp8_rows, gemm::MarlinWeight, layer::blocks::GateUp},
};

/// Each row of y `[places, N]` = the row of x `[places, K]` · W of the expert of its block, times the row's scale, plus
/// bias, times router weight. Rows of padding are undefined afterwards, and those of x are not used.
///
/// # Errors
/// As [`w4a8_gemm_planned`](super::w4a8_gemm_planned); [`AccelError::Argument`] also for blocks of other sizes than the
/// plan's or for other experts, and where x, its scales, y or weights do not have a row for each place.
pub fn moe_w4a8_gemm(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: W4a8Plan,
    routed: RoutedRows<'_>,
) -> Result<(), AccelError> {
    multiply_experts(device, RowsOfX::Codes(x), weight, y, plan, routed)
}

/// [`moe_w4a8_gemm`] of rows that the kernel makes itself: the rows of `gate_up` are activated and quantized as
/// [`gather_on_device`](crate::ops::gather::gather_on_device) does it. The last kernel on the stream wrote neither the blocks
/// nor their router weights. Does nothing and returns false if the plan does not [`activate`](W4a8Plan::activates) rows, or
/// if a kernel that makes the rows first is faster.
///
/// # Errors
/// As [`moe_w4a8_gemm`].
pub(super) fn moe_w4a8_gemm_activated(
    device: &Device,
    gate_up: GateUp<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: W4a8Plan,
    routed: RoutedRows<'_>,
) -> Result<bool, AccelError> {
    let (form, shape) = (weight.form(), weight.shape());
    if !plan.activates(form, shape.size_k)? {
        return Ok(false);
    }
    // A thread block makes the rows of each of its tiles anew: with more than one it takes longer than a kernel that makes
    // them once.
    if plan.tiles(routed.blocks.places(), shape.size_n) > plan.concurrent(form, device)? {
        return Ok(false);
    }
    multiply_experts(device, RowsOfX::GateUp(gate_up), weight, y, plan, routed).map(|()| true)
}

/// The product of rows of blocks, checked and launched.
fn multiply_experts(
    device: &Device,
    x: RowsOfX<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: W4a8Plan,
    routed: RoutedRows<'_>,
) -> Result<(), AccelError> {
    on_device(&MOE, device, x, weight, y, Some(routed))?;
    let Shape { size_k, size_n } = weight.shape();
    let of_y = ("y", y.len(), size_n);
    let block = (plan.rows, weight.experts());
    let places = match x {
        RowsOfX::Codes(RowsA8 { codes, scales }) => {
            let lengths = [("x", codes.len(), size_k), ("x_scales", scales.len(), 1), of_y];
            fp8_rows::places(&MOE, &lengths, block, routed)?
        }
        RowsOfX::GateUp(GateUp { rows, activation }) => {
            let lengths = [("gate_up", rows.len(), activation.width_in(size_k)), of_y];
            fp8_rows::places(&MOE, &lengths, block, routed)?
        }
    };
    if places == 0 {
        return Ok(());
    }
    launch(device, x, weight, y, plan, places, Some(routed))
}
