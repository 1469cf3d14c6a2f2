//! Linear layers.

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, Layout, Module, Result, Shape, Tensor, bail,
};
use half::{bf16, f16};
use marlinspike::num::scalar::ScalarType;
use marlinspike_accel::ops::marlin_gemm;

use super::launch::{Held, allocated, held_slice, run};
use super::tensors::{MarlinTensors, half_elements};
use crate::error::Error;

/// A linear layer of a packed weight on a CUDA device, with activations of 16 bits.
///
/// [`Module::forward`] takes `x` `[.., K]` of the weight's type on its device, with any strides, and gives `[.., N]`: the
/// bits of the reference's canonical schedule, for any number of rows. A backward pass through the layer is an error.
#[derive(Debug, Clone)]
pub struct MarlinLinear(MarlinTensors);

impl MarlinLinear {
    /// The layer of a packed matrix.
    ///
    /// # Errors
    /// [`Error::Packed`], wrapped, for a stack of several.
    pub fn new(weight: MarlinTensors) -> Result<Self> {
        if weight.packed.experts != 1 {
            return Err(weight.wrong("qweight", weight.packed.experts, "one matrix"));
        }
        Ok(Self(weight))
    }

    /// K.
    pub fn size_k(&self) -> usize {
        self.0.packed.shape.size_k
    }

    /// N.
    pub fn size_n(&self) -> usize {
        self.0.packed.shape.size_n
    }
}

impl Module for MarlinLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = self.0.rows(x, self.size_k())?;
        if rows.elem_count() == 0 {
            let lead = &x.dims()[..x.rank() - 1];
            return Tensor::zeros([lead, &[self.size_n()]].concat(), x.dtype(), x.device());
        }
        rows.apply_op1(Operator(self.0.clone()))
    }
}

struct Operator(MarlinTensors);

impl CustomOp1 for Operator {
    fn name(&self) -> &'static str {
        "marlin-linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{}: found a tensor on the CPU, expected one on a CUDA device", self.0.module)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let [size_k, size_n] = [self.0.packed.shape.size_k, self.0.packed.shape.size_n];
        let mut dims = layout.dims().to_vec();
        let size_m = layout.shape().elem_count() / size_k;
        dims.pop();
        dims.push(size_n);
        let device = x.device.clone();
        let stream = device.cuda_stream();
        let locked = self.0.locked();
        let weight = locked.held(&stream)?;
        let x = half_elements(x, layout, self.0.packed.dtype, &stream)?;
        let y = filled(&device, self.0.packed.dtype, size_m * size_n, |y| {
            run(&device, |view| {
                let weight = weight.load(view)?;
                let splits = weight.many_rows(view.device(), size_m)?.is_some();
                if splits {
                    view.split()?;
                }
                if view.is_launched() {
                    marlin_gemm(view.device(), &view.take(&x), &weight, &mut view.take(y))?;
                }
                Ok(splits)
            })
        })?;
        Ok((y, Shape::from(dims)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Err(Error::Gradient { module: self.0.module.to_string() }.into())
    }
}

/// New elements of a 16-bit type, which `work` computes.
pub(super) fn filled(
    device: &CudaDevice,
    ty: ScalarType,
    len: usize,
    work: impl FnOnce(&Held<'_>) -> Result<()>,
) -> Result<CudaStorage> {
    let stream = device.cuda_stream();
    match ty {
        ScalarType::FLOAT16 => {
            let mut y = allocated::<f16>(device, len)?;
            work(&held_slice(&mut y, &stream))?;
            Ok(CudaStorage::wrap_cuda_slice(y, device.clone()))
        }
        _ => {
            let mut y = allocated::<bf16>(device, len)?;
            work(&held_slice(&mut y, &stream))?;
            Ok(CudaStorage::wrap_cuda_slice(y, device.clone()))
        }
    }
}
