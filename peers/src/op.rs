//! The product and the layer as candle operators.
//!
//! Both take contiguous f32 or bf16 tensors on the CPU, `[.., K]` or `[.., H]`, and give `[.., N]`
//! or `[.., H]` of the same type, computed on rayon's current pool. There is no backward pass.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Error, Layout, Result, Shape};
use half::bf16;
use marlinspike::ndarray::Array2;
use marlinspike::num::array::{FloatView2, into_vec, rows_of};
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::w4a8::moe::{MoeLayer, Workspace};
use marlinspike::w4a8::{Linear, LinearWorkspace};

/// `x` times a packed weight: `x.apply_op1(..)` or `x.apply_op1_no_bwd(&..)`.
#[derive(Debug)]
pub struct Int4Linear {
    linear: Linear<'static>,
    workspace: Mutex<LinearWorkspace>,
}

impl Int4Linear {
    /// The operator of a packed weight.
    pub fn new(linear: Linear<'static>) -> Self {
        Self { linear, workspace: Mutex::default() }
    }
}

impl CustomOp1 for Int4Linear {
    fn name(&self) -> &'static str {
        "int4-linear"
    }

    /// # Errors
    /// [`Error::RequiresContiguous`], [`Error::UnsupportedDTypeForOp`] for types other than f32 and
    /// bf16, [`Error::UnexpectedShape`] unless the last dimension is K.
    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let weight = self.linear.weight().layout().shape();
        let rows = rows(x, layout, weight.size_k, self.name())?;
        let shape = with_last(layout, weight.size_n);
        let mut workspace = lock(&self.workspace);
        let run = |out: FloatViewMut2<'_>| self.linear.forward(rows, &mut workspace, out);
        Ok((filled(&rows, weight.size_n, run)?, shape))
    }
}

/// A Mixture-of-Experts layer of hidden states `x` `[.., H]` and router logits `[.., E]` (f32):
/// `x.apply_op2(&logits, ..)` or `x.apply_op2_no_bwd(&logits, &..)`.
#[derive(Debug)]
pub struct Int4Moe {
    layer: MoeLayer<'static>,
    workspace: Mutex<Workspace>,
}

impl Int4Moe {
    /// The operator of a layer.
    pub fn new(layer: MoeLayer<'static>) -> Self {
        Self { layer, workspace: Mutex::default() }
    }
}

impl CustomOp2 for Int4Moe {
    fn name(&self) -> &'static str {
        "int4-moe"
    }

    /// # Errors
    /// As [`Int4Linear`]'s, for both tensors; [`Error::ShapeMismatchBinaryOp`] unless the logits
    /// have a row for each of x; the layer's own, wrapped (such as NaN among the logits).
    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        logits: &CpuStorage,
        logits_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let rows = rows(x, x_layout, self.layer.hidden_size(), self.name())?;
        let experts = self.layer.config().num_experts;
        let FloatView2::F32(logits) = self::rows(logits, logits_layout, experts, self.name())?
        else {
            return Err(Error::UnsupportedDTypeForOp(DType::BF16, "int4-moe: router logits"));
        };
        let (lead, other) = (x_layout.dims(), logits_layout.dims());
        if lead[..lead.len() - 1] != other[..other.len() - 1] {
            return Err(Error::ShapeMismatchBinaryOp {
                lhs: x_layout.shape().clone(),
                rhs: logits_layout.shape().clone(),
                op: self.name(),
            });
        }
        let mut workspace = lock(&self.workspace);
        let run = |out: FloatViewMut2<'_>| self.layer.forward(rows, logits, &mut workspace, out);
        Ok((filled(&rows, self.layer.hidden_size(), run)?, x_layout.shape().clone()))
    }
}

/// A workspace holds no state between calls, so a panic in one call does not affect the next.
fn lock<T>(workspace: &Mutex<T>) -> MutexGuard<'_, T> {
    workspace.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tensor's values, row after row of `width`.
fn rows<'a>(
    storage: &'a CpuStorage,
    layout: &Layout,
    width: usize,
    op: &'static str,
) -> Result<FloatView2<'a>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::RequiresContiguous { op });
    };
    if layout.dims().last() != Some(&width) {
        return Err(Error::UnexpectedShape {
            msg: format!("{op}: last dimension"),
            expected: with_last(layout, width),
            got: layout.shape().clone(),
        });
    }
    match storage {
        CpuStorage::F32(values) => {
            rows_of(op, &values[start..end], width).map(FloatView2::F32).map_err(Error::wrap)
        }
        CpuStorage::BF16(values) => {
            rows_of(op, &values[start..end], width).map(FloatView2::Bf16).map_err(Error::wrap)
        }
        other => Err(Error::UnsupportedDTypeForOp(dtype(other), op)),
    }
}

/// The layout's shape with another last dimension.
fn with_last(layout: &Layout, last: usize) -> Shape {
    let mut dims = layout.dims().to_vec();
    match dims.last_mut() {
        Some(dim) => *dim = last,
        None => dims.push(last),
    }
    dims.into()
}

/// A new tensor of `x`'s type and rows of `cols` values, filled by `run`.
fn filled(
    x: &FloatView2<'_>,
    cols: usize,
    run: impl FnOnce(FloatViewMut2<'_>) -> marlinspike::Result<()>,
) -> Result<CpuStorage> {
    let shape = (x.shape()[0], cols);
    match x {
        FloatView2::F32(_) => {
            let mut out = Array2::<f32>::zeros(shape);
            run(out.view_mut().into()).map_err(Error::wrap)?;
            Ok(CpuStorage::F32(into_vec(out)))
        }
        _ => {
            let mut out = Array2::from_elem(shape, bf16::ZERO);
            run(out.view_mut().into()).map_err(Error::wrap)?;
            Ok(CpuStorage::BF16(into_vec(out)))
        }
    }
}

fn dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage as _;
    storage.dtype()
}
