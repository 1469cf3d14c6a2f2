//! Every value of a packed tensor with the matrix element it holds: what a viewer of layouts draws.
//!
//! [`ALL`] lists the layouts by name; [`positions`] lists the values of one of them for given sizes.

use serde::{Deserialize, Serialize};

use super::{ALL, Fragment, Layout};
use crate::num::dims::{GroupSize, LogicalK};
use crate::{Error, Result};

/// The largest number of values of one answer.
pub const MAX_VALUES: usize = 1 << 17;

/// A layout and the sizes of the matrix to pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Request {
    /// Name of a layout in [`ALL`].
    pub layout: String,
    /// K of the matrix.
    pub size_k: usize,
    /// N of the matrix; M of `kleidi_lhs`.
    pub size_n: usize,
    /// Matrices, one after another.
    pub experts: usize,
    /// Bits per code, 4 or 8.
    pub bits: u32,
    /// Bits per activation, 16 or 8.
    pub activation_bits: u32,
    /// k per scale, or −1.
    pub group_size: i64,
    /// Whether the rows of the weight are sorted by a `g_idx` of groups that take turns
    /// (`g_idx[k] = k mod groups`).
    pub act_order: bool,
    /// Columns (`kleidi_rhs`: 4 or 8) or rows (`kleidi_lhs`: 1 or 4) in a block.
    pub block: usize,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            layout: "marlin_qweight".to_owned(),
            size_k: 64,
            size_n: 64,
            experts: 1,
            bits: 4,
            activation_bits: 16,
            group_size: 32,
            act_order: false,
            block: 4,
        }
    }
}

/// What a value of a packed tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// A weight's or an activation's code at (k, n).
    Code,
    /// A scale at (group, n).
    Scale,
    /// A zero point at (group, n).
    ZeroPoint,
    /// A bias at n.
    Bias,
    /// KleidiAI: a column's sum of codes, or a row's reciprocal of its scale.
    Sum,
    /// Bytes that no element of the matrix fills.
    Padding,
}

/// A value of a packed tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value {
    /// Index of its first storage element, over all experts.
    pub element: usize,
    /// Its lowest bit in that element.
    pub bit: u32,
    /// Its bits.
    pub width: u32,
    /// What it is.
    pub part: Part,
    /// Its matrix.
    pub expert: usize,
    /// k of a code (that of the checkpoint, also with act-order), the group of a scale or zero point.
    pub row: usize,
    /// n; m of `kleidi_lhs`.
    pub col: usize,
    /// Tile, lane and register of a Marlin weight.
    pub fragment: Option<Fragment>,
}

/// All values of a packed tensor, in storage order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    /// Shape `[rows, cols]` of one matrix's packed tensor, in storage elements.
    pub packed_shape: [usize; 2],
    /// Bits of a storage element.
    pub element_bits: u32,
    /// Shape `[rows, cols]` of the matrix: `[K, N]`, `[groups, N]`, or `[K, M]`.
    pub shape: [usize; 2],
    /// The values.
    pub values: Vec<Value>,
}

/// A layout by name.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Named {
    /// Its name in a [`Request`].
    pub name: &'static str,
    /// What it holds, and for which kernel.
    pub title: &'static str,
    /// Fields of [`Request`] that it reads besides the sizes.
    pub options: &'static [&'static str],
    /// The values of one matrix.
    pub(super) one: fn(&Request) -> Result<Positions>,
}

/// The values of a layout of [`ALL`].
///
/// # Errors
/// [`Error::Unsupported`] for an unknown name, [`Error::Size`] for sizes that the layout does not
/// take and for more than [`MAX_VALUES`] values.
pub fn positions(request: &Request) -> Result<Positions> {
    let Some(layout) = ALL.iter().copied().flatten().find(|layout| layout.name == request.layout)
    else {
        let names: Vec<_> = ALL.iter().copied().flatten().map(|layout| layout.name).collect();
        let found = format!("layout {:?}", request.layout);
        return Err(Error::unsupported(found, format!("one of {}", names.join(", "))));
    };
    let count = [request.size_k, request.size_n, request.experts];
    let count = count.into_iter().try_fold(1usize, usize::checked_mul);
    if count.is_none_or(|count| count == 0 || count > MAX_VALUES) {
        let Request { size_k, size_n, experts, .. } = request;
        let found = format!("{size_k} x {size_n} x {experts}");
        return Err(Error::size("size_k x size_n x experts", found, format!("1 to {MAX_VALUES}")));
    }
    let mut all = (layout.one)(request)?;
    let len = all.packed_shape.iter().product::<usize>();
    let one = all.values.clone();
    for expert in 1..request.experts {
        let moved = one.iter().map(|v| Value { element: expert * len + v.element, expert, ..*v });
        all.values.extend(moved);
    }
    Ok(all)
}

impl Request {
    /// Number of groups.
    pub(super) fn groups(&self) -> Result<usize> {
        GroupSize::from_config(self.group_size)?.groups(LogicalK(self.size_k))
    }

    /// Groups that take turns, so that sorting moves nearly every row.
    pub(super) fn g_idx(&self) -> Result<Vec<u32>> {
        let groups = self.groups()?;
        Ok((0..self.size_k).map(|k| (k % groups) as u32).collect())
    }
}

/// The values of a layout object.
pub(super) fn values(
    layout: &impl Layout,
    element_bits: u32,
    shape: [usize; 2],
    part: Part,
) -> Result<Positions> {
    let width = layout.offset(0, 0).width;
    let len = layout.packed_len() * (element_bits / width) as usize;
    if len > MAX_VALUES {
        return Err(Error::size(
            "values of the packed tensor",
            len,
            format!("{MAX_VALUES} or fewer"),
        ));
    }
    let all = (0..layout.packed_len()).flat_map(|element| {
        (0..element_bits).step_by(width as usize).map(move |bit| (element, bit))
    });
    let values = all.map(|(element, bit)| {
        let place = layout.locate(element, bit);
        let inside = place.row < shape[0] && place.col < shape[1];
        let part = if inside { part } else { Part::Padding };
        let (row, col, fragment) = (place.row, place.col, place.fragment);
        Value { element, bit, width, part, expert: 0, row, col, fragment }
    });
    Ok(Positions {
        packed_shape: layout.packed_shape(),
        element_bits,
        shape,
        values: values.collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn of(layout: &str) -> Request {
        Request { layout: layout.to_owned(), size_k: 256, size_n: 128, ..Request::default() }
    }

    #[test]
    fn every_layout_holds_every_element_once_and_fills_its_tensor() {
        for named in ALL.iter().copied().flatten() {
            let request = Request { experts: 2, act_order: true, ..of(named.name) };
            let all = positions(&request).unwrap();
            let main = all.values[0].part;
            let mut seen = HashSet::new();
            for v in all.values.iter().filter(|v| v.part == main) {
                assert!(seen.insert((v.expert, v.row, v.col)), "{}: {v:?} twice", named.name);
            }
            let rows = if main == Part::Bias { 1 } else { all.shape[0] };
            assert_eq!(seen.len(), 2 * rows * all.shape[1], "{}", named.name);
            let bits: usize = all.values.iter().map(|v| v.width as usize).sum();
            let len: usize = all.packed_shape.iter().product();
            assert_eq!(bits, 2 * len * all.element_bits as usize, "{}", named.name);
        }
    }

    /// A warp's lane reads four consecutive words of a tile of 4-bit codes; word 0 holds the lane's
    /// rows of the first two products. By hand from the PTX manual's m16n8k16 B fragment.
    #[test]
    fn the_first_word_of_a_marlin_tile() {
        let all = positions(&of("marlin_qweight")).unwrap();
        let places: Vec<_> = all.values[..8].iter().map(|v| (v.row, v.col)).collect();
        assert_eq!(places, [(0, 0), (8, 0), (0, 8), (8, 8), (1, 0), (9, 0), (1, 8), (9, 8)]);
        // With groups of 32 that take turns, sorted row 1 is the second row of group 0.
        let sorted = positions(&Request { act_order: true, ..of("marlin_qweight") }).unwrap();
        assert_eq!((sorted.values[4].row, sorted.values[4].col), (8, 0));
    }

    #[test]
    fn bad_requests_are_errors() {
        let error = |request: &Request| positions(request).unwrap_err().to_string();
        assert!(error(&of("marlin")).contains("one of marlin_qweight"));
        assert!(error(&Request { size_n: 1 << 40, ..of("marlin_qweight") }).contains("131072"));
        assert!(error(&Request { size_k: usize::MAX, ..of("kleidi_rhs") }).contains("131072"));
        assert!(error(&Request { bits: 3, ..of("marlin_zeros") }).contains("4 or 8"));
        assert!(error(&Request { group_size: 0, ..of("marlin_scales") }).contains("group_size"));
        assert!(error(&Request { block: 3, ..of("kleidi_lhs") }).contains("mr"));
        // One scale for each column of two: the tile pads it to 128 rows and four groups.
        let small = Request { size_k: 32, size_n: 2, ..of("block_scales_128x4") };
        let padded = positions(&small).unwrap();
        assert_eq!(padded.values.len(), 512);
        assert_eq!(padded.values.iter().filter(|v| v.part != Part::Padding).count(), 2);
    }
}
