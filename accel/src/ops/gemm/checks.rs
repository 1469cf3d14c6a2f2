//! Checks that all products share.

use super::MarlinWeight;
use crate::{error::AccelError, memory::Buffer, operation::Row, ops::align::PlacedBlocks};

/// Returns an error for a weight that is packed for 8-bit activations.
pub(super) fn for_16_bit(row: &Row, weight: &MarlinWeight) -> Result<(), AccelError> {
    weight.input_dtype().map_or(Ok(()), |input| {
        let found = format!("packed for {input} activations");
        Err(row.refuse("weight", found, "packed for 16-bit activations"))
    })
}

/// Rows of x, of `size_k` elements each.
///
/// # Errors
/// [`AccelError::Argument`] where x is not whole rows.
pub(super) fn rows_of_x(row: &Row, x: &Buffer<u16>, size_k: usize) -> Result<usize, AccelError> {
    if x.len().is_multiple_of(size_k) {
        return Ok(x.len() / size_k);
    }
    let found = format!("{} elements", x.len());
    Err(row.refuse("x", found, format!("rows of {size_k}")))
}

/// Rows of y: `top_k` rows of `width` elements for each row of x.
///
/// # Errors
/// [`AccelError::Argument`] where y has another number of rows, or 2^31 and more.
pub(crate) fn rows_of_y(
    row: &Row,
    rows_of_x: usize,
    top_k: usize,
    y_len: usize,
    width: usize,
) -> Result<usize, AccelError> {
    let size_m = rows_of_x.checked_mul(top_k).filter(|&m| i32::try_from(m).is_ok());
    let Some(size_m) = size_m.filter(|_| top_k > 0) else {
        let expected = format!("1 or more for {rows_of_x} rows");
        return Err(row.refuse("top_k", top_k, expected));
    };
    if Some(y_len) != size_m.checked_mul(width) {
        let (found, expected) = (format!("{y_len} elements"), format!("[{size_m}, {width}]"));
        return Err(row.refuse("y", found, expected));
    }
    Ok(size_m)
}

/// Returns an error unless blocks have `block_size` entries each and `size_m` in all, for at most the weight's experts.
pub(crate) fn blocks(
    row: &Row,
    blocks: &PlacedBlocks,
    block_size: usize,
    size_m: usize,
    experts: usize,
) -> Result<(), AccelError> {
    let fits = (blocks.block_size(), blocks.entries()) == (block_size, size_m);
    if fits && blocks.experts() <= experts {
        return Ok(());
    }
    let expected = format!("{size_m} entries in blocks of {block_size} for {experts} experts");
    Err(row.refuse("blocks", format!("{blocks:?}"), expected))
}

/// Returns an error unless there are `count` router weights, or none; `what` names them.
pub(crate) fn router_weights(
    row: &Row,
    what: &'static str,
    weights: Option<&Buffer<f32>>,
    count: usize,
) -> Result<(), AccelError> {
    match weights.filter(|weights| weights.len() != count) {
        None => Ok(()),
        Some(weights) => Err(row.refuse(what, weights.len(), count)),
    }
}
