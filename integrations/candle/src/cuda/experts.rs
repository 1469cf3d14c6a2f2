//! Layers of experts.

use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use marlinspike::moe::activation::Definition;
use marlinspike_accel::ops::{MarlinLayer, Runs};

use super::launch::{held, run};
use super::linear::filled;
use super::tensors::{MarlinTensors, aligned, half_elements};
use crate::error::Error;

/// Routed experts of packed weights on a CUDA device, with activations of 16 bits. A backward pass is an error.
#[derive(Debug, Clone)]
pub struct MarlinExperts {
    w13: MarlinTensors,
    w2: MarlinTensors,
    activation: Definition,
    /// For each expert its run, as alignment takes it.
    run_of: Tensor,
}

impl MarlinExperts {
    /// The layer of all experts' first and second products. Weights that do not fit each other are errors of
    /// [`forward`](Self::forward).
    ///
    /// # Errors
    /// [`Error::Packed`], wrapped, for weights on different devices or of different types.
    pub fn new(w13: MarlinTensors, w2: MarlinTensors, activation: Definition) -> Result<Self> {
        let of = |w: &MarlinTensors| (w.packed.experts, w.dtype(), w.device().location());
        if of(&w13) != of(&w2) {
            return Err(w2.wrong("w2", of(&w2), format!("{:?} of w13", of(&w13))));
        }
        let runs: Vec<i32> = (0..w13.packed.experts as i32).map(|expert| expert * 65537).collect();
        let run_of = Tensor::new(runs, w13.device())?;
        Ok(Self { w13, w2, activation, run_of })
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.w13.packed.shape.size_k
    }

    /// y `[M, H]` of `x` `[M, H]` and the routing `[M, top_k]`: experts (U32) and their weights (F32). An expert beyond
    /// the last does not count. The bits are the reference's, whatever the other rows are.
    ///
    /// # Errors
    /// [`Error::Packed`], wrapped, that names a tensor of another type, shape or device; those of the kernels.
    pub fn forward(&self, x: &Tensor, topk_ids: &Tensor, topk_weights: &Tensor) -> Result<Tensor> {
        let rows = self.w13.rows(x, self.hidden_size())?;
        let (size_m, _) = rows.dims2()?;
        let here = x.device().location();
        for (name, tensor, ty) in
            [("topk_ids", topk_ids, DType::U32), ("topk_weights", topk_weights, DType::F32)]
        {
            let fits = matches!(tensor.dims(), [m, k] if *m == size_m && *k > 0);
            let fits = fits && tensor.dtype() == ty && tensor.device().location() == here;
            if !fits || tensor.dims() != topk_ids.dims() {
                let found = (tensor.dtype(), tensor.dims(), tensor.device().location());
                return Err(self.w13.wrong(
                    name,
                    found,
                    format!("{ty:?} [{size_m}, top_k] on {here:?}"),
                ));
            }
        }
        if size_m == 0 {
            return x.zeros_like();
        }
        rows.apply_op3(&aligned(topk_ids)?, &aligned(topk_weights)?, Operator(self.clone()))
    }
}

struct Operator(MarlinExperts);

impl CustomOp3 for Operator {
    fn name(&self) -> &'static str {
        "marlin-experts"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{}: found a tensor on the CPU, expected one on a CUDA device", self.0.w13.module)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        ids: &CudaStorage,
        ids_layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let MarlinExperts { w13, w2, activation, run_of } = &self.0;
        let (size_m, top_k) = ids_layout.shape().dims2()?;
        let dtype = w13.packed.dtype;
        let device = x.device.clone();
        let stream = device.cuda_stream();
        let locked = [w13.locked(), w2.locked()];
        let held_weights = [locked[0].held(&stream)?, locked[1].held(&stream)?];
        let x = half_elements(x, x_layout, dtype, &stream)?;
        let ids = held::<u32>(ids, ids_layout, &stream)?;
        let weights = held::<f32>(weights, weights_layout, &stream)?;
        let (storage, layout) = run_of.storage_and_layout();
        let candle_core::Storage::Cuda(storage) = &*storage else {
            bail!("{}: found experts that are not on a CUDA device", w13.module)
        };
        let run_of = held::<i32>(storage, layout, &stream)?;
        let y = filled(&device, dtype, x_layout.shape().elem_count(), |y| {
            run(&device, |view| {
                let weights_of = [held_weights[0].load(view)?, held_weights[1].load(view)?];
                let runs = Runs::from_tables(view.take(&run_of), None, w13.packed.experts)?;
                let layer =
                    MarlinLayer::from_weights(view.device(), weights_of, runs, *activation, false)?;
                let mut work = layer.workspace(view.device(), size_m, top_k)?;
                let splits = work.splits();
                if splits {
                    view.split()?;
                }
                if view.is_launched() {
                    let (x, ids, weights) = (view.take(&x), view.take(&ids), view.take(&weights));
                    let mut y = view.take(y);
                    layer.forward(view.device(), &x, &ids, &weights, &mut work, &mut y)?;
                }
                Ok(splits)
            })
        })?;
        Ok((y, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Err(Error::Gradient { module: self.0.w13.module.to_string() }.into())
    }
}
