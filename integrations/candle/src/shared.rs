//! Shared experts.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use marlinspike::moe::math;
use marlinspike::num::array::FloatView2;
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::w4a8::Values;
use marlinspike::w4a8::moe::GatedActivation;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::linear::{DenseLinear, Int4Linear};
use crate::operator::{RowLayer, apply};

/// Rows that one work item activates.
const ROWS: usize = 8;

/// A linear layer of a shared expert.
#[derive(Debug, Clone)]
pub enum Projection {
    /// Packed 4-bit weights.
    Int4(Int4Linear),
    /// Weights that are not quantized.
    Dense(DenseLinear),
}

impl Projection {
    fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Int4(linear) => [linear.size_k(), linear.size_n()],
            Self::Dense(linear) => [linear.size_k(), linear.size_n()],
        }
    }

    fn module(&self) -> &str {
        match self {
            Self::Int4(linear) => linear.module(),
            Self::Dense(linear) => linear.module(),
        }
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Int4(linear) => linear.forward(x),
            Self::Dense(linear) => linear.forward(x),
        }
    }
}

/// The expert that every token uses: down · activation(gate · x, up · x), times σ(g · x) if it has a gate
/// of its own. Every stage is rounded to the type of `x`; F16 is widened to F32 for the whole expert.
#[derive(Debug, Clone)]
pub struct SharedExpert {
    /// Gate and up, or one layer with the rows of gate before those of up.
    first: Vec<Projection>,
    down: Projection,
    activation: Arc<Activate>,
    gate: Option<DenseLinear>,
}

impl SharedExpert {
    /// The expert of `gate` and `up` `[H] → [S]` and `down` `[S] → [H]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for sizes that do not agree.
    pub fn new(
        gate: Projection,
        up: Projection,
        down: Projection,
        activation: GatedActivation,
    ) -> Result<Self> {
        Self::of(vec![gate, up], down, activation)
    }

    /// The expert of `gate_up` `[H] → [2S]`, gate first, and `down` `[S] → [H]`.
    ///
    /// # Errors
    /// As [`SharedExpert::new`].
    pub fn fused(
        gate_up: Projection,
        down: Projection,
        activation: GatedActivation,
    ) -> Result<Self> {
        Self::of(vec![gate_up], down, activation)
    }

    fn of(first: Vec<Projection>, down: Projection, activation: GatedActivation) -> Result<Self> {
        let [size_s, hidden] = down.sizes();
        let expected = [hidden, 2 * size_s / first.len()];
        for projection in &first {
            if projection.sizes() != expected {
                let (module, found) = (projection.module().to_owned(), projection.sizes());
                let expected = format!("{expected:?}, [K, N] that fit {}", down.module());
                return Err(Error::Shape {
                    module,
                    tensor: "weight",
                    found: found.into(),
                    expected,
                });
            }
        }
        let activation = Activate { module: down.module().to_owned(), kind: activation, size_s };
        Ok(Self { first, down, activation: Arc::new(activation), gate: None })
    }

    /// The expert with a gate `[H] → [1]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another size.
    pub fn with_gate(self, gate: DenseLinear) -> Result<Self> {
        let (found, expected) = ([gate.size_k(), gate.size_n()], [self.hidden_size(), 1]);
        if found != expected {
            let (module, expected) = (gate.module().to_owned(), format!("{expected:?}, [K, N]"));
            return Err(Error::Shape { module, tensor: "weight", found: found.into(), expected });
        }
        Ok(Self { gate: Some(gate), ..self })
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.down.sizes()[1]
    }
}

impl Module for SharedExpert {
    /// # Errors
    /// As [`Int4Linear`]'s.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if x.dtype() == DType::F16 {
            return self.forward(&x.to_dtype(DType::F32)?)?.to_dtype(DType::F16);
        }
        let parts = self.first.iter().map(|p| p.forward(x));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        let gate_up = match &parts[..] {
            [gate_up] => gate_up.clone(),
            parts => Tensor::cat(parts, candle_core::D::Minus1)?,
        };
        let y = self.down.forward(&apply(&self.activation, &gate_up)?)?;
        let Some(gate) = &self.gate else { return Ok(y) };
        let logits = gate.forward(x)?.to_dtype(DType::F32)?;
        let factor = elementwise(gate.module(), &logits, math::sigmoid)?.to_dtype(x.dtype())?;
        y.broadcast_mul(&factor)
    }
}

/// The activation of rows of gate and up.
#[derive(Debug)]
struct Activate {
    module: String,
    kind: GatedActivation,
    size_s: usize,
}

impl RowLayer for Activate {
    const NAME: &'static str = "gated-activation";

    fn module(&self) -> &str {
        &self.module
    }

    fn width(&self, _: usize) -> usize {
        self.size_s
    }

    fn run(&self, x: FloatView2<'_>, out: FloatViewMut2<'_>) -> marlinspike::Result<()> {
        let size_s = self.size_s;
        let activated = |values: Values| self.kind.apply(&values, size_s);
        match (x, out) {
            (FloatView2::F32(_), FloatViewMut2::F32(mut out)) => {
                let x = x.widened();
                let out = out.as_slice_mut().expect("a new row-major array");
                let items = x.par_chunks(ROWS * 2 * size_s).zip(out.par_chunks_mut(ROWS * size_s));
                items.try_for_each(|(x, out)| {
                    if let Values::F32(made) = activated(Values::F32(x.to_vec()))? {
                        out.copy_from_slice(&made);
                    }
                    Ok(())
                })
            }
            (x, FloatViewMut2::Bf16(mut out)) => {
                let x = x.bits_of("gate_up", ScalarType::BFLOAT16)?;
                let out = out.as_slice_mut().expect("a new row-major array");
                let items = x.par_chunks(ROWS * 2 * size_s).zip(out.par_chunks_mut(ROWS * size_s));
                items.try_for_each(|(x, out)| {
                    if let Values::Bf16(made) = activated(Values::Bf16(x.to_vec()))? {
                        for (out, bits) in out.iter_mut().zip(made) {
                            *out = marlinspike::num::element::bf16::from_bits(bits);
                        }
                    }
                    Ok(())
                })
            }
            _ => Err(marlinspike::Error::unsupported("gate_up", "expected float32 or bfloat16")),
        }
    }
}

/// A function of each value.
struct Elementwise<F> {
    module: String,
    function: F,
}

/// `function` of each value of an f32 tensor.
pub(crate) fn elementwise<F: Fn(f32) -> f32 + Send + Sync + 'static>(
    module: &str,
    x: &Tensor,
    function: F,
) -> candle_core::Result<Tensor> {
    apply(&Arc::new(Elementwise { module: module.to_owned(), function }), x)
}

impl<F: Fn(f32) -> f32 + Send + Sync + 'static> RowLayer for Elementwise<F> {
    const NAME: &'static str = "elementwise";

    fn module(&self) -> &str {
        &self.module
    }

    fn width(&self, width: usize) -> usize {
        width
    }

    fn run(&self, x: FloatView2<'_>, out: FloatViewMut2<'_>) -> marlinspike::Result<()> {
        let FloatViewMut2::F32(mut out) = out else {
            return Err(marlinspike::Error::unsupported("x", "expected float32"));
        };
        for (y, &x) in out.iter_mut().zip(x.widened().iter()) {
            *y = (self.function)(x);
        }
        Ok(())
    }
}
