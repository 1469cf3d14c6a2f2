//! Layers of rows as candle operators.
//!
//! An operator takes contiguous f32 or bf16 tensors on the CPU; [`apply`] checks and converts what
//! callers give. Backward passes are refused, because an operator without gradient that is left out of
//! the graph would give wrong gradients without an error.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, DeviceLocation, Layout, Shape, Tensor};
use marlinspike::ndarray::{Array2, ArrayView2};
use marlinspike::num::array::{FloatView2, into_vec, rows_of};
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::num::element::bf16;
use marlinspike::w4a8::LinearWorkspace;
use marlinspike::w4a8::moe::Workspace;

use crate::error::{Error, Result};

/// A tensor's place in errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument<'a> {
    pub(crate) module: &'a str,
    pub(crate) tensor: &'static str,
}

impl Argument<'_> {
    /// Fails unless `x` is a tensor of floats on the CPU.
    pub(crate) fn check_floats(self, x: &Tensor) -> Result<()> {
        self.check_device(x.device().location())?;
        match x.dtype() {
            DType::F32 | DType::BF16 | DType::F16 => Ok(()),
            found => {
                let (module, tensor) = (self.module.to_owned(), self.tensor);
                Err(Error::Dtype { module, tensor, found })
            }
        }
    }

    /// Fails for a device other than the CPU.
    fn check_device(self, found: DeviceLocation) -> Result<()> {
        if found == DeviceLocation::Cpu {
            return Ok(());
        }
        let (module, tensor) = (self.module.to_owned(), self.tensor);
        Err(Error::Device { module, tensor, found })
    }

    /// Fails unless `x` has rows of `width` floats on the CPU.
    pub(crate) fn check(self, x: &Tensor, width: usize) -> Result<()> {
        self.check_floats(x)?;
        if x.dims().last() != Some(&width) {
            return Err(self.shape(x, format!("[.., {width}]")));
        }
        Ok(())
    }

    /// The error for a tensor of another shape.
    pub(crate) fn shape(self, x: &Tensor, expected: String) -> Error {
        let (module, tensor) = (self.module.to_owned(), self.tensor);
        Error::Shape { module, tensor, found: x.dims().to_vec(), expected }
    }
}

/// The buffers of the int4 path.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    pub(crate) linear: LinearWorkspace,
    pub(crate) experts: Workspace,
}

thread_local! {
    /// Shared by all layers that a thread calls.
    static WORKSPACES: Cell<Workspaces> = Cell::default();
}

/// Runs `work` with this thread's buffers. A call within a call, on a thread that waits for rayon,
/// gets new ones.
pub(crate) fn with_workspaces<T>(work: impl FnOnce(&mut Workspaces) -> T) -> T {
    let mut own = WORKSPACES.take();
    let made = work(&mut own);
    WORKSPACES.set(own);
    made
}

/// A layer that maps each row of one tensor to a row.
pub(crate) trait RowLayer: Send + Sync + 'static {
    /// The operator's name.
    const NAME: &'static str;

    /// The layer, in errors.
    fn module(&self) -> &str;

    /// Values of a row of the output, for rows of `width` values.
    fn width(&self, width: usize) -> usize;

    /// `out` of `x`, which has the same type.
    fn run(&self, x: FloatView2<'_>, out: FloatViewMut2<'_>) -> marlinspike::Result<()>;
}

/// Applies `layer` to checked rows. f16 is widened to f32, and the output rounded to f16.
pub(crate) fn apply<L: RowLayer>(layer: &Arc<L>, x: &Tensor) -> candle_core::Result<Tensor> {
    let rows = widened(x)?.contiguous()?;
    rows.apply_op1(RowOperator(layer.clone()))?.to_dtype(x.dtype())
}

/// f16 as f32; other types are unchanged.
pub(crate) fn widened(x: &Tensor) -> candle_core::Result<Tensor> {
    match x.dtype() {
        DType::F16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

struct RowOperator<L>(Arc<L>);

impl<L: RowLayer> CustomOp1 for RowOperator<L> {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let dims = layout.dims();
        let width = dims.last().copied().unwrap_or(0);
        let rows = rows(x, layout, width, L::NAME)?;
        let out_width = self.0.width(width);
        let made = filled(&rows, out_width, |out| self.0.run(rows, out));
        let made = made.map_err(Error::layer(self.0.module()))?;
        let lead = &dims[..dims.len().saturating_sub(1)];
        Ok((made, Shape::from([lead, &[out_width]].concat())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Err(Error::Gradient { module: self.0.module().to_owned() }.into())
    }
}

/// A layer of hidden states and router logits.
pub(crate) trait RoutedLayer: Send + Sync + 'static {
    /// The layer, in errors.
    fn module(&self) -> &str;

    /// `out` of `x`, which has the same type and shape, and of f32 `logits`.
    fn run(
        &self,
        x: FloatView2<'_>,
        logits: ArrayView2<'_, f32>,
        out: FloatViewMut2<'_>,
    ) -> marlinspike::Result<()>;
}

/// Applies `layer` to checked rows, types as for [`apply`].
pub(crate) fn apply_routed<L: RoutedLayer>(
    layer: &Arc<L>,
    x: &Tensor,
    logits: &Tensor,
) -> candle_core::Result<Tensor> {
    let rows = widened(x)?.contiguous()?;
    let logits = logits.to_dtype(DType::F32)?.contiguous()?;
    rows.apply_op2(&logits, RoutedOperator(layer.clone()))?.to_dtype(x.dtype())
}

struct RoutedOperator<L>(Arc<L>);

impl<L: RoutedLayer> CustomOp2 for RoutedOperator<L> {
    fn name(&self) -> &'static str {
        "int4-experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        logits: &CpuStorage,
        logits_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let width = |layout: &Layout| layout.dims().last().copied().unwrap_or(0);
        let rows = rows(x, x_layout, width(x_layout), self.name())?;
        let logits = self::rows(logits, logits_layout, width(logits_layout), self.name())?;
        let FloatView2::F32(logits) = logits else {
            return Err(candle_core::Error::UnsupportedDTypeForOp(DType::BF16, self.name()));
        };
        let made = filled(&rows, width(x_layout), |out| self.0.run(rows, logits, out));
        let made = made.map_err(Error::layer(self.0.module()))?;
        Ok((made, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Err(Error::Gradient { module: self.0.module().to_owned() }.into())
    }
}

/// The tensor's values, row after row of `width`.
fn rows<'a>(
    storage: &'a CpuStorage,
    layout: &Layout,
    width: usize,
    op: &'static str,
) -> candle_core::Result<FloatView2<'a>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(candle_core::Error::RequiresContiguous { op });
    };
    let wrap = candle_core::Error::wrap;
    match storage {
        CpuStorage::F32(values) => {
            rows_of(op, &values[start..end], width).map(FloatView2::F32).map_err(wrap)
        }
        CpuStorage::BF16(values) => {
            rows_of(op, &values[start..end], width).map(FloatView2::Bf16).map_err(wrap)
        }
        other => {
            use candle_core::backend::BackendStorage as _;
            Err(candle_core::Error::UnsupportedDTypeForOp(other.dtype(), op))
        }
    }
}

/// A new tensor of `x`'s type and rows of `cols` values, filled by `run`.
fn filled(
    x: &FloatView2<'_>,
    cols: usize,
    run: impl FnOnce(FloatViewMut2<'_>) -> marlinspike::Result<()>,
) -> marlinspike::Result<CpuStorage> {
    let shape = (x.shape()[0], cols);
    match x {
        FloatView2::F32(_) => {
            let mut out = Array2::<f32>::zeros(shape);
            run(out.view_mut().into())?;
            Ok(CpuStorage::F32(into_vec(out)))
        }
        _ => {
            let mut out = Array2::from_elem(shape, bf16::ZERO);
            run(out.view_mut().into())?;
            Ok(CpuStorage::BF16(into_vec(out)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tensors of other devices exist only where candle has their drivers.
    #[test]
    fn other_devices_are_refused() {
        let x = Argument { module: "q_proj", tensor: "x" };
        assert!(x.check_device(DeviceLocation::Cpu).is_ok());
        for (found, name) in [
            (DeviceLocation::Cuda { gpu_id: 1 }, "Cuda { gpu_id: 1 }"),
            (DeviceLocation::Metal { gpu_id: 0 }, "Metal { gpu_id: 0 }"),
        ] {
            assert_eq!(
                x.check_device(found).unwrap_err().to_string(),
                format!("q_proj: x: found a tensor on {name}, expected one on the CPU")
            );
        }
    }
}
