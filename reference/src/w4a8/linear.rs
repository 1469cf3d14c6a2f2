//! Fast products: the bits of [`linear`](super::linear()), without allocations.
//!
//! Rows are quantized into panels, once for all matrices that multiply them. A work item is a run of columns
//! of a matrix: it multiplies all panels while its weights stay in a core's cache. The results,
//! `[matrix][run][row][column of the run]`, become rows at the end.

use super::buffer::{PanelBuffer, Quantize, Span, grow};
use super::gather::Gathered;
use super::matrices::{Matrices, Packed};
use super::panel::{panel_start, panels};
use super::parallel::for_parts;
use super::rows::{Element, Rows, RowsMut, slices};
use super::runs::{BLOCK, GRAIN, SeveralRuns};
use super::wide::wide;
use super::{Kernel, MAX_PANELS, MAX_ROWS};
use crate::Result;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::w4a8::packed::PackedRhs;
use crate::w4a8::quantize::ActivationRounding;

/// A packed weight of any format with its kernel.
#[derive(Debug)]
pub struct LinearOf<W, K: ?Sized> {
    weight: W,
    rounding: ActivationRounding,
    kernel: Box<K>,
}

/// A packed int4 weight with its kernel.
pub type Linear<'a> = LinearOf<PackedRhs<'a>, dyn Kernel>;

/// The buffers of [`Linear::forward`]. They grow as needed and are reused.
#[derive(Debug, Clone, Default)]
pub struct LinearWorkspace {
    input: PanelBuffer,
    blocked: Vec<f32>,
    gathered: Gathered,
}

impl<'a> Linear<'a> {
    /// `weight` `[K, N]`, run by the fastest kernel of this CPU.
    pub fn new(weight: PackedRhs<'a>, rounding: ActivationRounding) -> Self {
        Self::of(weight, rounding)
    }
}

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<W: Packed<Kernel = K>, K: ?Sized> LinearOf<W, K> {
    /// `weight`, run by the fastest kernel of this CPU.
    pub(super) fn of(weight: W, rounding: ActivationRounding) -> Self {
        Self { weight, rounding, kernel: W::fastest() }
    }

    /// The same run by another kernel.
    pub fn with_kernel(self, kernel: Box<K>) -> Self {
        Self { kernel, ..self }
    }

    /// The weight.
    pub fn weight(&self) -> &W {
        &self.weight
    }

    /// How activations are rounded.
    pub(super) fn rounding(&self) -> ActivationRounding {
        self.rounding
    }

    /// The weight with its kernel.
    pub(super) fn matrices(&self) -> impl Matrices + '_ {
        self.weight.matrices(&self.kernel, self.rounding)
    }

    /// The kernel's name.
    pub fn kernel_name(&self) -> &'static str {
        W::kernel_name(&self.kernel)
    }

    /// `out` `[M, N]` of `x` `[M, K]`, on rayon's current pool.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the sizes do not agree;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if `x` and `out` differ in type or are f16;
    /// [`Error::NotContiguous`](crate::Error::NotContiguous) for other strides than row-major ones. On
    /// an error `out` is unchanged.
    pub fn forward<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        workspace: &mut LinearWorkspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        let (x, out) = (x.into(), out.into());
        let (size_m, shape) = (x.shape()[0], self.weight.shape());
        let (x, out) = slices(x, out, size_m, [shape.size_k, shape.size_n])?;
        let weight = self.matrices();
        match (x, out) {
            (Rows::F32(x), RowsMut::F32(out)) => multiply([&weight], x, workspace, [out]),
            (Rows::Bf16(x), RowsMut::Bf16(out)) => multiply([&weight], x, workspace, [out]),
            _ => unreachable!("types that differ have been refused"),
        }
        Ok(())
    }
}

/// The product of `x` with the first matrix of each of `weights`. All of them take the same quantized rows
/// ([`same_rows`]).
pub(super) fn multiply<T: Element, const N: usize>(
    weights: [&dyn Matrices; N],
    x: &[T],
    workspace: &mut LinearWorkspace,
    outs: [&mut [T]; N],
) {
    let mut sizes = weights.iter().map(|weight| BLOCK * weight.shape().size_n);
    let mut outs = outs.map(|out| out.chunks_mut(sizes.next().expect("a size of each output")));
    for x in x.chunks(BLOCK * weights[0].shape().size_k) {
        let outs = outs.each_mut().map(|blocks| blocks.next().expect("as many rows as x"));
        block(weights, x, workspace, outs);
    }
}

/// Whether the same quantized rows are the input of all `weights`.
pub(super) fn same_rows(weights: &[&dyn Matrices]) -> bool {
    let same = |a: &&dyn Matrices, b: &&dyn Matrices| {
        a.rows() == b.rows() && a.shape().size_k == b.shape().size_k
    };
    let ordered = |weight: &&dyn Matrices| weight.order(0).is_some();
    weights.windows(2).all(|pair| same(&pair[0], &pair[1]))
        && (weights.len() < 2 || !weights.iter().any(ordered))
}

fn block<T: Element, const N: usize>(
    weights: [&dyn Matrices; N],
    x: &[T],
    workspace: &mut LinearWorkspace,
    outs: [&mut [T]; N],
) {
    let (k, shape) = (weights[0].shape().size_k, weights[0].rows());
    let LinearWorkspace { input, blocked, gathered } = workspace;
    let size_m = x.len() / k;
    let x = match weights[0].order(0) {
        Some(order) => gathered.rows(order, size_m, |m| &x[m * k..][..k]),
        None => x,
    };
    input.reserve(size_m, shape);
    grow(blocked, outs.iter().map(|out| out.len()).sum());
    let panels = panels(size_m);
    let start = |panel: usize| panel_start(size_m, panel);
    let parts = input.rows_mut(size_m, shape);
    for_parts(0..panels, parts, GRAIN / (MAX_ROWS * k), &start, &|i, mut panel| {
        for m in 0..start(i + 1) - start(i) {
            let segments = std::iter::once(&x[(start(i) + m) * k..][..k]);
            wide(Quantize { panel: &mut panel, m, segments, value: T::widen });
        }
    });
    let input: &PanelBuffer = input;
    let runs =
        SeveralRuns::new(shape.padded_k, weights.map(|weight| weight.shape().size_n), panels > 1);
    // One row of one matrix is stored as it is computed.
    let direct = if size_m == 1 && N == 1 { T::f32s(&mut *outs[0]) } else { None };
    let is_stored = direct.is_some();
    let (parts, start_of_run) =
        (direct.unwrap_or(&mut blocked[..]), |item| runs.start(item) * size_m);
    for_parts(0..runs.count(), parts, 1, &start_of_run, &|item, y| {
        let (matrix, run) = runs.find(item);
        let (weight, (from, width)) = (weights[matrix], runs.of(matrix).get(run));
        for first in (0..panels).step_by(weight.panels()) {
            let last = (first + weight.panels()).min(panels);
            let panel = |i: usize| {
                let i = (first + i).min(last - 1);
                input.panel(Span { first: start(i), count: start(i + 1) - start(i) }, shape)
            };
            let all: [_; MAX_PANELS] = std::array::from_fn(panel);
            let y = &mut y[start(first) * width..];
            weight.multiply(0, from..from + width, &all[..last - first], y, width);
        }
    });
    if is_stored {
        return;
    }
    let mut blocked = &blocked[..];
    for (i, out) in outs.into_iter().enumerate() {
        let own;
        (own, blocked) = blocked.split_at(out.len());
        runs.of(i).store(own, out);
    }
}
