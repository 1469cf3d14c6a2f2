//! Linear layers.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use marlinspike::num::array::FloatView2;
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::num::element::{bf16, f16};
use marlinspike::num::tensor::{DType as Stored, Tensor as StoredTensor};
use marlinspike::{ndarray, w4a8};
use marlinspike_generate::ops::dense::Dense;

use crate::error::{Error, Result};
use crate::operator::{Argument, RowLayer, apply, with_workspaces};

/// A linear layer with packed 4-bit weights (W4A8): activations are quantized to 8 bits per row, sums of
/// products are exact integers. A clone shares the weights.
///
/// [`Module::forward`] takes `x` `[.., K]` in F32, BF16 or F16, with any strides, and gives `[.., N]` of
/// the same type: the bits of [`w4a8::linear`], for any batch and any number of threads. F16 is widened
/// to F32, and the output is rounded to F16. The work runs on rayon's current pool. A backward pass
/// through the layer is an error.
#[derive(Debug, Clone)]
pub struct Int4Linear(Arc<Int4>);

#[derive(Debug)]
struct Int4 {
    module: String,
    linear: w4a8::Linear<'static>,
}

impl Int4Linear {
    /// The layer of packed weights. `module` names it in errors.
    pub fn new(module: impl Into<String>, linear: w4a8::Linear<'static>) -> Self {
        Self(Arc::new(Int4 { module: module.into(), linear }))
    }

    /// The layer's name in errors.
    pub fn module(&self) -> &str {
        &self.0.module
    }

    /// K.
    pub fn size_k(&self) -> usize {
        self.0.linear.weight().layout().shape().size_k
    }

    /// N.
    pub fn size_n(&self) -> usize {
        self.0.linear.weight().layout().shape().size_n
    }
}

impl Module for Int4Linear {
    /// # Errors
    /// [`Error`], wrapped, that names the tensor of another shape, type or device.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Argument { module: self.module(), tensor: "x" }.check(x, self.size_k())?;
        apply(&self.0, x)
    }
}

impl RowLayer for Int4 {
    const NAME: &'static str = "int4-linear";

    fn module(&self) -> &str {
        &self.module
    }

    fn width(&self, _: usize) -> usize {
        self.linear.weight().layout().shape().size_n
    }

    fn run(&self, x: FloatView2<'_>, out: FloatViewMut2<'_>) -> marlinspike::Result<()> {
        with_workspaces(|w| self.linear.forward(x, &mut w.linear, out))
    }
}

/// A linear layer whose weights are not quantized, with one order of additions.
///
/// [`Module::forward`] takes the tensors that [`Int4Linear`] takes. Products and sums are f32, and the
/// output is rounded to the type of `x`: the same bits for any batch and any number of threads, which
/// candle's own products do not promise. Routers and unquantized shared experts use it.
#[derive(Debug, Clone)]
pub struct DenseLinear(Arc<DenseLayer>);

#[derive(Debug)]
struct DenseLayer {
    module: String,
    dense: Dense<'static>,
}

impl DenseLinear {
    /// The layer of `weight` `[N, K]` and `bias` `[N]` in F32, BF16 or F16, which are copied. `module`
    /// names it in errors.
    ///
    /// # Errors
    /// [`Error`] that names the tensor of another shape, type or device.
    pub fn new(module: impl Into<String>, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let module = module.into();
        let [size_n, size_k] = match *weight.dims() {
            [n, k] if n > 0 && k > 0 => [n, k],
            _ => {
                let argument = Argument { module: &module, tensor: "weight" };
                return Err(argument.shape(weight, "[N, K]".to_owned()));
            }
        };
        let stored = stored(Argument { module: &module, tensor: "weight" }, weight)?;
        let dense = Dense::new(stored, size_n, size_k).map_err(Error::layer(&module))?;
        let dense = match bias {
            None => dense,
            Some(bias) => {
                let argument = Argument { module: &module, tensor: "bias" };
                argument.check_floats(bias)?;
                if bias.dims() != [size_n] {
                    return Err(argument.shape(bias, format!("[{size_n}]")));
                }
                let values = bias.to_dtype(DType::F32).and_then(|b| b.to_vec1());
                let values = values.map_err(|e| unreadable(argument, &e))?;
                dense.with_bias("bias", values).map_err(Error::layer(&module))?
            }
        };
        Ok(Self::of(module, dense))
    }

    pub(crate) fn of(module: String, dense: Dense<'static>) -> Self {
        Self(Arc::new(DenseLayer { module, dense }))
    }

    /// The layer's name in errors.
    pub fn module(&self) -> &str {
        &self.0.module
    }

    /// K.
    pub fn size_k(&self) -> usize {
        self.0.dense.size_k()
    }

    /// N.
    pub fn size_n(&self) -> usize {
        self.0.dense.size_n()
    }

    /// The output in f32, not rounded to the type of `x`.
    pub(crate) fn wide(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Argument { module: self.module(), tensor: "x" }.check(x, self.size_k())?;
        apply(&self.0, &x.to_dtype(DType::F32)?)
    }
}

impl Module for DenseLinear {
    /// # Errors
    /// [`Error`], wrapped, that names the tensor of another shape, type or device.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.wide(x)?.to_dtype(x.dtype())
    }
}

impl RowLayer for DenseLayer {
    const NAME: &'static str = "dense-linear";

    fn module(&self) -> &str {
        &self.module
    }

    fn width(&self, _: usize) -> usize {
        self.dense.size_n()
    }

    fn run(&self, x: FloatView2<'_>, mut out: FloatViewMut2<'_>) -> marlinspike::Result<()> {
        if let FloatViewMut2::F32(out) = &mut out {
            let out: &mut ndarray::ArrayViewMut2<'_, f32> = out;
            if let Some(out) = out.as_slice_mut() {
                self.dense.forward(&x.widened(), out);
                return Ok(());
            }
        }
        Err(marlinspike::Error::unsupported("an output of another type", "expected f32 rows"))
    }
}

fn unreadable(argument: Argument<'_>, error: &candle_core::Error) -> Error {
    let source = marlinspike::Error::unsupported(argument.tensor, error.to_string());
    Error::Layer { module: argument.module.to_owned(), source }
}

/// A copy of a tensor of floats in its type.
fn stored(argument: Argument<'_>, x: &Tensor) -> Result<StoredTensor<'static>> {
    argument.check_floats(x)?;
    let bits = |values: Vec<bf16>| values.into_iter().map(bf16::to_bits).collect();
    let half_bits = |values: Vec<f16>| values.into_iter().map(f16::to_bits).collect();
    let shape = x.dims().to_vec();
    let wrong = |e: candle_core::Error| unreadable(argument, &e);
    let flat = x.flatten_all().map_err(wrong)?;
    let name = argument.tensor;
    let made = match x.dtype() {
        DType::BF16 => {
            let bits: Vec<u16> = flat.to_vec1().map(bits).map_err(wrong)?;
            StoredTensor::from_vec(name, Stored::BF16, shape, bits)
        }
        DType::F16 => {
            let bits: Vec<u16> = flat.to_vec1().map(half_bits).map_err(wrong)?;
            StoredTensor::from_vec(name, Stored::F16, shape, bits)
        }
        _ => {
            let values: Vec<f32> = flat.to_vec1().map_err(wrong)?;
            StoredTensor::from_vec(name, Stored::F32, shape, values)
        }
    };
    made.map_err(Error::layer(argument.module))
}
