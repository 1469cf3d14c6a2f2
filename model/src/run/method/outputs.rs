//! What follows the sum over the experts, and a layer as a part of another's block.

use marlinspike::method::Quantizer;
use marlinspike::ndarray::Array2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::{Error, Result};

use super::load::Loaded;
use super::parts::LayerWeights;
use crate::run::block::quantized::dequantized;
use crate::run::block::tail::{Engine, Linear};
use crate::run::input::{Halves, Inputs, Routing};
use crate::run::output::Output;

impl Loaded {
    /// The outputs from `sum` on, the sum over the routed experts `[M, H]`: `y`, or `y_experts`, the
    /// shared expert's part and `y`.
    ///
    /// # Errors
    /// As the products of `engine`.
    pub(in crate::run) fn finish(
        &self,
        inputs: &Inputs<Halves>,
        sum: Vec<u16>,
        engine: Engine<'_>,
    ) -> Result<Vec<Output>> {
        let Halves { ty: dtype, bits: x } = &inputs.x;
        let hidden = self.sizes().size_k;
        if self.surrounding.tail.is_empty() {
            return Ok(vec![Output::halves("y", *dtype, hidden, &sum)]);
        }
        let widen = |bits: &[u16]| -> Vec<f32> {
            bits.iter().map(|&b| dtype.to_f64(b.into()) as f32).collect()
        };
        let (x, y_experts) = (widen(x), widen(&sum));
        let (shared, y) = self.surrounding.tail.apply(&x, &y_experts, None, *dtype, engine)?;
        let floats = |name, values: &[f32]| Output::floats(name, *dtype, hidden, values);
        let mut outputs = vec![Output::halves("y_experts", *dtype, hidden, &sum)];
        outputs.extend(shared.map(|values| floats("shared", &values)));
        outputs.push(floats("y", &y));
        Ok(outputs)
    }
}

impl Linear for Loaded {
    fn rows(&self, x: &[f32], ty: ScalarType, engine: Engine<'_>) -> Result<Vec<f32>> {
        let size_k = self.sizes().size_k;
        if !x.len().is_multiple_of(size_k.max(1)) {
            let found = format!("{} values", x.len());
            return Err(Error::size(
                format!("{}: activations", self.module),
                found,
                format!("rows of {size_k}"),
            ));
        }
        let bits = x.iter().map(|&x| ty.encode_rne(x.into()) as u16).collect();
        let inputs = Inputs { x: Halves { ty, bits }, routing: Routing::Logits(Vec::new()) };
        let out = self.forward(&inputs, engine)?.swap_remove(0);
        let widen = |b: &[u8]| ty.to_f64(u16::from_le_bytes([b[0], b[1]]).into()) as f32;
        Ok(out.bytes.chunks_exact(2).map(widen).collect())
    }

    fn matrix(&self) -> Option<(Array2<f64>, Option<Vec<f64>>)> {
        match &self.weights {
            LayerWeights::Linear { weight, quantizer: Quantizer::None } => {
                Some(dequantized(weight))
            }
            _ => None,
        }
    }

    fn dequantized(&self) -> Result<(Array2<f64>, Option<Vec<f64>>)> {
        match &self.weights {
            LayerWeights::Linear { weight, .. } => Ok(dequantized(weight)),
            LayerWeights::Moe(_) => {
                Err(Error::unsupported(&*self.module, "expected a linear layer"))
            }
        }
    }
}
