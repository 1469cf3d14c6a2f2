//! Linear layers, whatever the format of their weights.

use std::borrow::Cow;
use std::fmt::Debug;

use super::linear::{LinearOf, LinearWorkspace, multiply, same_rows};
use super::matrices::{Matrices, Packed};
use super::moe::{kernel_names as names_of, named_kernel};
use super::quantize::ActivationRounding;
use super::stored::{LinearDescription, linear_bytes};
use super::{LINEARS, Values, scalar};
use crate::container::Container;
use crate::layouts::CPU_INT4;
use crate::layouts::cpu::CpuFormat;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::num::dims::Shape;
use crate::w4a8::packed::PackedRhs;
use crate::{Error, Result};

/// How a stored layer runs.
#[derive(Debug, Clone, Copy)]
pub struct LinearOptions<'o> {
    /// Int4: rounding of quantized activations. The other formats define their own.
    pub rounding: ActivationRounding,
    /// A kernel by name; absent: the fastest of this CPU.
    pub kernel: Option<&'o str>,
}

/// A packed weight, ready to run. Every kernel gives the bits of [`LinearLayer::definition`].
pub trait LinearLayer: Debug + Send + Sync {
    /// `[K, N]`.
    fn shape(&self) -> Shape;

    /// The kernel's name.
    fn kernel_name(&self) -> &'static str;

    /// `out` `[M, N]` of `x` `[M, K]`, on rayon's current pool.
    ///
    /// # Errors
    /// As [`LinearOf::forward`].
    fn forward(
        &self,
        x: FloatView2<'_>,
        workspace: &mut LinearWorkspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()>;

    /// The weight with its kernel, for [`forward_all`].
    fn product(&self) -> Product<'_>;

    /// `[M, N]` of `x` `[M, K]` by the scalar definition, value by value.
    ///
    /// # Errors
    /// [`Error::Shape`] unless `x` is a whole number of rows.
    fn definition(&self, x: &Values) -> Result<Values>;

    /// The weights in f32, `[N][K]`.
    fn dequantized(&self) -> Vec<f32>;
}

/// A weight with its kernel, of a format that callers need not know.
pub struct Product<'l>(Box<dyn Matrices + 'l>);

/// [`LinearLayer::forward`] of several layers with the same f32 `x` `[M, K]`: `outs` `[M, N]` of each. Layers that
/// take the same rows quantize them once, and share one division of work.
///
/// # Errors
/// [`Error::Shape`] if a length does not agree. On an error `outs` are unchanged.
pub fn forward_all<const N: usize>(
    layers: [&dyn LinearLayer; N],
    x: &[f32],
    workspace: &mut LinearWorkspace,
    outs: [&mut [f32]; N],
) -> Result<()> {
    let products = layers.map(LinearLayer::product);
    let weights = products.each_ref().map(|product| &*product.0);
    for (weight, out) in weights.iter().zip(&outs) {
        let Shape { size_k, size_n } = weight.shape();
        let rows = x.len() / size_k;
        if x.len() != rows * size_k {
            return Err(Error::shape("x", &[x.len()], format!("[M, {size_k}]")));
        }
        if out.len() != rows * size_n {
            return Err(Error::shape("out", &[out.len()], format!("[{rows}, {size_n}]")));
        }
    }
    if same_rows(&weights) {
        multiply(weights, x, workspace, outs);
    } else {
        let each = weights.into_iter().zip(outs);
        each.for_each(|(weight, out)| multiply([weight], x, workspace, [out]));
    }
    Ok(())
}

/// A packed matrix of one format, as a layer runs it.
pub(super) trait Dense<'a>: Packed + Sized + 'a {
    /// The matrix of a description.
    ///
    /// # Errors
    /// [`Error::Shape`] for bytes that do not fit.
    fn read(described: &LinearDescription, bytes: Cow<'a, [u8]>) -> Result<Self>;

    /// The layer. `rounding` is for formats that do not define their own.
    fn linear(self, rounding: ActivationRounding) -> LinearOf<Self, Self::Kernel>;

    /// The product by the scalar definition.
    fn definition(&self, x: &Values, rounding: ActivationRounding) -> Result<Values>;

    /// As [`LinearLayer::dequantized`].
    fn dequantized(&self) -> Vec<f32>;
}

/// A layer of a description and the bytes of its matrix.
type Load = for<'a> fn(
    LinearDescription,
    Cow<'a, [u8]>,
    LinearOptions<'_>,
) -> Result<Box<dyn LinearLayer + 'a>>;

/// What runs the linear layers of a format.
pub(super) struct LinearEngine {
    pub(super) format: &'static CpuFormat,
    /// Names of the kernels that this CPU supports, slowest first.
    pub(super) kernels: fn() -> Vec<&'static str>,
    pub(super) load: Load,
}

/// Linear layers of int4 codes.
pub(super) const INT4: LinearEngine = LinearEngine {
    format: &CPU_INT4,
    kernels: names_of::<PackedRhs<'_>>,
    load: |described, bytes, options| load_as::<PackedRhs<'_>>(described, bytes, options),
};

/// [`LinearEngine::load`] of a format.
pub(super) fn load_as<'a, W: Dense<'a>>(
    described: LinearDescription,
    bytes: Cow<'a, [u8]>,
    options: LinearOptions<'_>,
) -> Result<Box<dyn LinearLayer + 'a>> {
    let kernel = named_kernel::<W>(options.kernel)?;
    let layer = W::read(&described, bytes)?.linear(options.rounding);
    Ok(Box::new(layer.with_kernel(kernel)))
}

/// Names of the kernels that run linear layers of `format` on this CPU, slowest first.
pub fn kernel_names(format: &CpuFormat) -> Vec<&'static str> {
    let engine = LINEARS.iter().find(|engine| engine.format == format);
    engine.map_or(Vec::new(), |engine| (engine.kernels)())
}

/// The linear layer `module` of a packed file, of any format. The weight borrows the file's bytes.
///
/// # Errors
/// As [`linear_bytes`] and [`layer`].
pub fn load<'a>(
    file: &Container<'a>,
    module: &str,
    options: LinearOptions<'_>,
) -> Result<Box<dyn LinearLayer + 'a>> {
    let (described, bytes) = linear_bytes(file, module)?;
    layer(described, bytes, options)
}

/// The layer of a description and the bytes of its matrix, from any source.
///
/// # Errors
/// [`Error::Size`] for a kernel that the format or this CPU lacks; [`Error::Shape`] for bytes that do not
/// fit; [`Error::Unsupported`] for a format of experts only.
pub fn layer<'a>(
    described: LinearDescription,
    bytes: Cow<'a, [u8]>,
    options: LinearOptions<'_>,
) -> Result<Box<dyn LinearLayer + 'a>> {
    match LINEARS.iter().find(|engine| engine.format == described.format) {
        Some(engine) => (engine.load)(described, bytes, options),
        None => Err(Error::unsupported(described.format.name, "no linear layer runs this format")),
    }
}

impl<'a> Dense<'a> for PackedRhs<'a> {
    fn read(described: &LinearDescription, bytes: Cow<'a, [u8]>) -> Result<Self> {
        Self::new(described.int4_layout()?, bytes)
    }

    fn linear(self, rounding: ActivationRounding) -> LinearOf<Self, Self::Kernel> {
        LinearOf::of(self, rounding)
    }

    fn definition(&self, x: &Values, rounding: ActivationRounding) -> Result<Values> {
        super::linear(&scalar::Scalar, x, self, rounding)
    }

    fn dequantized(&self) -> Vec<f32> {
        self.dequantized()
    }
}

impl<'a, W: Dense<'a, Kernel = K>, K: ?Sized + Debug + Send + Sync> LinearLayer for LinearOf<W, K> {
    fn shape(&self) -> Shape {
        self.weight().shape()
    }

    fn kernel_name(&self) -> &'static str {
        self.kernel_name()
    }

    fn forward(
        &self,
        x: FloatView2<'_>,
        workspace: &mut LinearWorkspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()> {
        self.forward(x, workspace, out)
    }

    fn product(&self) -> Product<'_> {
        Product(Box::new(self.matrices()))
    }

    fn definition(&self, x: &Values) -> Result<Values> {
        self.weight().definition(x, self.rounding())
    }

    fn dequantized(&self) -> Vec<f32> {
        self.weight().dequantized()
    }
}
