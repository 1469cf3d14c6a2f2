//! The activations that a layer runs on.

use std::path::Path;

use marlinspike::container::Container;
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne, f32_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::Values;
use marlinspike::{Error, Result};

use super::error::RunError;
use crate::map::MappedFile;
use crate::model::ModelError;

/// The largest number of values of seeded activations: 16 GiB as f32.
const MAX_VALUES: usize = 1 << 32;

/// The sizes that activations of a layer must match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// K of a row.
    pub size_k: usize,
    /// Experts of all ranks; `None` for a linear layer.
    pub num_experts: Option<usize>,
    /// Whether the layer's files have the router's weight, which computes logits that are not
    /// given.
    pub has_router: bool,
}

/// Row-major activations of the types that a path takes.
pub trait Numbers: Sized {
    /// `values` rounded to `ty`, to nearest even.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a type that the path does not take.
    fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self>;

    /// The elements of a tensor.
    ///
    /// # Errors
    /// [`Error::Dtype`] for a type that the path does not take.
    fn from_tensor(tensor: &Tensor<'_>) -> Result<Self>;
}

impl Numbers for Values {
    fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self> {
        Self::from_f32(values, ty)
    }

    fn from_tensor(tensor: &Tensor<'_>) -> Result<Self> {
        Self::from_tensor(tensor)
    }
}

/// 16-bit floats, as bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Halves {
    /// FLOAT16 or BFLOAT16.
    pub ty: ScalarType,
    /// The numbers.
    pub bits: Vec<u16>,
}

impl Numbers for Halves {
    fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self> {
        let round = match ty {
            ScalarType::FLOAT16 => f32_to_f16_rne,
            ScalarType::BFLOAT16 => f32_to_bf16_rne,
            _ => {
                let what = format!("{ty} activations");
                return Err(Error::unsupported(what, "this layer takes float16 or bfloat16"));
            }
        };
        Ok(Self { ty, bits: values.into_iter().map(round).collect() })
    }

    fn from_tensor(tensor: &Tensor<'_>) -> Result<Self> {
        tensor.expect_dtype(&[DType::F16, DType::BF16])?;
        let half = tensor.dtype() == DType::F16;
        let ty = if half { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 };
        Ok(Self { ty, bits: tensor.elements::<u16>().into_owned() })
    }
}

/// Rows of activations, and how their tokens are routed.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs<X> {
    /// `[M, K]`.
    pub x: X,
    /// Empty logits for a linear layer.
    pub routing: Routing,
}

/// How tokens are routed to experts.
#[derive(Debug, Clone, PartialEq)]
pub enum Routing {
    /// `[M, experts]`; empty until the router's weight computes them.
    Logits(Vec<f32>),
    /// `[M, top_k]` each.
    Given {
        /// Experts per token.
        top_k: usize,
        /// Global expert ids.
        ids: Vec<i32>,
        /// Router weights.
        weights: Vec<f32>,
    },
}

impl<X: Numbers> Inputs<X> {
    /// Numbers evenly spread over −1 to 1 in steps of 2⁻²³: rows first, then logits unless a router
    /// computes them. The stream depends on the seed alone.
    ///
    /// # Errors
    /// [`Error::Size`] for no tokens or too many.
    pub fn seeded(seed: u64, tokens: usize, dtype: ScalarType, sizes: Sizes) -> Result<Self> {
        let experts = sizes.num_experts.unwrap_or(0);
        let widest = sizes.size_k.max(experts);
        if tokens == 0 || tokens.checked_mul(widest).is_none_or(|n| n > MAX_VALUES) {
            let rule = format!("1 to {}", MAX_VALUES / widest.max(1));
            return Err(Error::size("--tokens", tokens, rule));
        }
        let mut rng = Rng::new(seed);
        let mut numbers = |count: usize| -> Vec<f32> {
            let one = |bits: u32| (bits >> 8) as f32 / (1u32 << 23) as f32 - 1.0;
            (0..count).map(|_| one(rng.next_u32())).collect()
        };
        let x = numbers(tokens * sizes.size_k);
        let logits = numbers(if sizes.has_router { 0 } else { tokens * experts });
        Ok(Self { x: X::from_f32(x, dtype)?, routing: Routing::Logits(logits) })
    }

    /// The tensors of a file, checked against the layer's sizes.
    ///
    /// # Errors
    /// [`ModelError::Format`] with the path and the tensor that is missing or does not fit.
    pub fn read(path: &Path, sizes: Sizes) -> Result<Self, RunError> {
        let map = MappedFile::open(path)?;
        let read = Container::parse(&map).map_err(Error::from).and_then(|f| Self::of(&f, sizes));
        read.map_err(|e| ModelError::Format { path: path.to_owned(), source: Box::new(e) }.into())
    }

    /// Like [`Self::read`], for a parsed file.
    pub(crate) fn of(file: &Container<'_>, sizes: Sizes) -> Result<Self> {
        let x = need(file, "x")?;
        let size_k = sizes.size_k;
        let tokens = match *x.shape() {
            [tokens, k] if k == size_k && tokens > 0 => tokens,
            _ => {
                return Err(Error::shape(
                    x.name(),
                    x.shape(),
                    format!("[M, {size_k}], M 1 or more"),
                ));
            }
        };
        let inputs = |routing| Ok(Self { x: X::from_tensor(&x)?, routing });
        let Some(num_experts) = sizes.num_experts else {
            return inputs(Routing::Logits(Vec::new()));
        };
        if let Some(logits) = find(file, "router_logits")? {
            let shape = [tokens, num_experts];
            logits.expect_dtype(&[DType::F32])?.expect_shape(&shape)?;
            return inputs(Routing::Logits(logits.elements::<f32>().into_owned()));
        }
        if sizes.has_router && find(file, "topk_ids")?.is_none() {
            return inputs(Routing::Logits(Vec::new()));
        }
        let ids = need(file, "topk_ids")?;
        let weights = need(file, "topk_weights")?;
        let [rows, top_k] = ids.expect_dtype(&[DType::I32])?.dims2()?;
        if rows != tokens || top_k == 0 {
            let expected = format!("[{tokens}, top_k], top_k 1 or more");
            return Err(Error::shape(ids.name(), ids.shape(), expected));
        }
        weights.expect_dtype(&[DType::F32])?.expect_shape(&[tokens, top_k])?;
        inputs(Routing::Given {
            top_k,
            ids: ids.elements::<i32>().into_owned(),
            weights: weights.elements::<f32>().into_owned(),
        })
    }
}

/// A tensor by its name, or by its name in case files.
pub(super) fn find<'f>(file: &Container<'f>, name: &str) -> Result<Option<Tensor<'f>>> {
    let names = [name.to_owned(), format!("in.{name}")];
    let found = names.iter().find(|n| file.get(n).is_some());
    found.map(|n| file.tensor(n)).transpose()
}

fn need<'f>(file: &Container<'f>, name: &str) -> Result<Tensor<'f>> {
    let what = match name {
        "topk_ids" => "a layer of experts without router_logits or a router's weight",
        _ => "the layer",
    };
    find(file, name)?.ok_or_else(|| Error::missing(name, what))
}
