//! The activations that a layer runs on.

use std::path::Path;

use marlinspike::container::Container;
use marlinspike::scalar::ScalarType;
use marlinspike::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::Values;
use marlinspike::{Error, Result};

use super::DtypeArg;
use super::layer::Layer;
use crate::map::MappedFile;
use crate::model::ModelError;

/// Most values of seeded activations: 16 GiB as f32.
const MAX_VALUES: usize = 1 << 32;

/// Rows of activations, and for experts what chooses them.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// `[M, K]`.
    pub x: Values,
    /// Empty logits for a linear layer.
    pub routing: Routing,
}

/// How tokens find their experts.
#[derive(Debug, Clone, PartialEq)]
pub enum Routing {
    /// `[M, experts]`.
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

impl Inputs {
    /// Numbers evenly spread over −1 to 1 in steps of 2⁻²³: rows first, then logits. The stream
    /// depends on the seed alone.
    ///
    /// # Errors
    /// [`Error::Size`] for no tokens or too many.
    pub fn seeded(seed: u64, tokens: usize, dtype: DtypeArg, layer: &Layer<'_>) -> Result<Self> {
        let widest = match layer {
            Layer::Moe(moe) => layer.size_k().max(moe.config().num_experts),
            Layer::Linear(_) => layer.size_k(),
        };
        if tokens == 0 || tokens.checked_mul(widest).is_none_or(|n| n > MAX_VALUES) {
            let rule = format!("1 to {}", MAX_VALUES / widest.max(1));
            return Err(Error::size("--tokens", tokens, rule));
        }
        let mut rng = Rng::new(seed);
        let mut numbers = |count: usize| -> Vec<f32> {
            let one = |bits: u32| (bits >> 8) as f32 / (1u32 << 23) as f32 - 1.0;
            (0..count).map(|_| one(rng.next_u32())).collect()
        };
        let x = numbers(tokens * layer.size_k());
        let logits = match layer {
            Layer::Moe(moe) => numbers(tokens * moe.config().num_experts),
            Layer::Linear(_) => Vec::new(),
        };
        let ty = match dtype {
            DtypeArg::Float32 => ScalarType::FLOAT32,
            DtypeArg::Bfloat16 => ScalarType::BFLOAT16,
        };
        Ok(Self { x: Values::from_f32(x, ty)?, routing: Routing::Logits(logits) })
    }

    /// The tensors of a file, checked against the layer's sizes.
    ///
    /// # Errors
    /// [`ModelError::Format`] with the path and the tensor that is missing or does not fit.
    pub fn read(path: &Path, layer: &Layer<'_>) -> anyhow::Result<Self> {
        let map = MappedFile::open(path)?;
        let read = Container::parse(&map).map_err(Error::from).and_then(|f| Self::of(&f, layer));
        read.map_err(|e| ModelError::Format { path: path.to_owned(), source: Box::new(e) }.into())
    }

    fn of(file: &Container<'_>, layer: &Layer<'_>) -> Result<Self> {
        let x = need(file, "x")?;
        let size_k = layer.size_k();
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
        let inputs = |routing| Ok(Self { x: Values::from_tensor(&x)?, routing });
        let Layer::Moe(moe) = layer else { return inputs(Routing::Logits(Vec::new())) };
        if let Some(logits) = find(file, "router_logits")? {
            let shape = [tokens, moe.config().num_experts];
            logits.expect_dtype(&[DType::F32])?.expect_shape(&shape)?;
            return inputs(Routing::Logits(logits.elements::<f32>().into_owned()));
        }
        let ids = need(file, "topk_ids")?;
        let weights = need(file, "topk_weights")?;
        let [rows, top_k] = ids.expect_dtype(&[DType::I32])?.dims2()?;
        if rows != tokens {
            return Err(Error::shape(ids.name(), ids.shape(), format!("[{tokens}, top_k]")));
        }
        weights.expect_dtype(&[DType::F32])?.expect_shape(&[tokens, top_k])?;
        inputs(Routing::Given {
            top_k,
            ids: ids.elements::<i32>().into_owned(),
            weights: weights.elements::<f32>().into_owned(),
        })
    }
}

/// A tensor by its own name or by the one that case files give it.
fn find<'f>(file: &Container<'f>, name: &str) -> Result<Option<Tensor<'f>>> {
    let names = [name.to_owned(), format!("in.{name}")];
    let found = names.iter().find(|n| file.get(n).is_some());
    found.map(|n| file.tensor(n)).transpose()
}

fn need<'f>(file: &Container<'f>, name: &str) -> Result<Tensor<'f>> {
    let what = match name {
        "topk_ids" => "a layer of experts without router_logits",
        _ => "the layer",
    };
    find(file, name)?.ok_or_else(|| Error::missing(name, what))
}
