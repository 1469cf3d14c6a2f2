//! Quantized experts of a whole block: their products by the checkpoint's method, each rounded once.

use marlinspike::method::{Product, Quantizer};
use marlinspike::moe::block::{Capped, Mlp};
use marlinspike::ndarray::Array2;
use marlinspike::num::array::FloatView2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};

use super::rows::ExpertRows;
use super::tail::{Engine, activate_row};

/// Experts of one shape.
#[derive(Debug)]
pub(in crate::run) struct ExpertGroup {
    pub(in crate::run) w13: Vec<Weight<'static>>,
    pub(in crate::run) w2: Vec<Weight<'static>>,
    /// Of the inputs of w13 and of w2.
    pub(in crate::run) quantizers: [Quantizer; 2],
    /// Global multipliers of gate and up of each expert, if they differ from those of w13.
    pub(in crate::run) multipliers: Option<Vec<[f32; 2]>>,
}

/// The experts of a block: one group, or one for each type of token, of equally many experts.
#[derive(Debug)]
pub(in crate::run) struct QuantizedExperts {
    pub(in crate::run) groups: Vec<ExpertGroup>,
}

/// A matrix `[N, K]` in f64, and its bias.
pub(in crate::run) fn dequantized(weight: &Weight<'_>) -> (Array2<f64>, Option<Vec<f64>>) {
    let matrix = weight.dequantize_all().reversed_axes();
    let bias = weight.bias.as_ref().map(|b| (0..b.cols()).map(|n| b.value(0, n)).collect());
    (matrix.as_standard_layout().into_owned(), bias)
}

impl QuantizedExperts {
    /// Experts of all groups.
    pub(super) fn count(&self) -> usize {
        self.groups.iter().map(|g| g.w13.len()).sum()
    }

    /// Experts of each group.
    fn each(&self) -> usize {
        self.count() / self.groups.len().max(1)
    }

    /// The largest I.
    pub(super) fn inner(&self) -> usize {
        self.groups.iter().filter_map(|g| Some(g.w2.first()?.shape().size_k)).max().unwrap_or(0)
    }

    /// Whether activations enter every product in 16 bits.
    pub(super) fn is_weight_only(&self) -> bool {
        self.groups.iter().flat_map(|g| &g.quantizers).all(|q| *q == Quantizer::None)
    }

    /// How activations enter the products.
    pub(super) fn activations(&self) -> String {
        self.groups.first().map_or(String::new(), |g| g.quantizers[0].to_string())
    }

    /// Checks the experts of a block with `hidden` features at their inputs and outputs.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a matrix, or [`Error::Size`] for groups of different lengths;
    /// [`Error::Unsupported`] for multipliers of gate and up whose columns alternate.
    pub(super) fn validate(&self, hidden: usize, activation: &Capped) -> Result<()> {
        let (definition, each) = (&activation.definition, self.each());
        for group in &self.groups {
            if group.w13.len() != each || group.w2.len() != each || each == 0 {
                let rule = format!("{each} w13 and w2, as in the other groups, and 1 or more");
                return Err(Error::size("experts of a group", group.w13.len(), rule));
            }
            let halves = marlinspike::moe::activation::Columns::Halves;
            if group.multipliers.is_some() && definition.columns != halves {
                let what = "multipliers of gate and up each";
                return Err(Error::unsupported(what, "gate and up must be halves of w13"));
            }
            let inner = group.w2[0].shape().size_k;
            let expected = [[hidden, definition.width_in(inner)], [inner, hidden]];
            for (weights, [k, n]) in [&group.w13, &group.w2].into_iter().zip(expected) {
                for weight in weights {
                    let shape = weight.shape();
                    if [shape.size_k, shape.size_n] != [k, n] {
                        let found = [shape.size_n, shape.size_k];
                        return Err(Error::shape(&weight.name, &found, format!("[{n}, {k}]")));
                    }
                }
            }
        }
        Ok(())
    }

    /// Every stage but the outputs, of each slot that has an expert. `x` are the slots' inputs; a
    /// group of experts sees the rows of its own tokens alone.
    pub(super) fn forward(
        &self,
        x: &[f32],
        ids: &[i32],
        activation: &Capped,
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> Result<Vec<(usize, ExpertRows<f32>)>> {
        let (each, hidden) = (self.each(), x.len() / ids.len().max(1));
        let mut all = Vec::with_capacity(ids.len());
        for (g, group) in self.groups.iter().enumerate() {
            let own = g * each..(g + 1) * each;
            let expert = |s: usize| usize::try_from(ids[s]).ok().filter(|id| own.contains(id));
            let slots = (0..ids.len()).filter(|&s| self.groups.len() == 1 || expert(s).is_some());
            let slots: Vec<usize> = slots.collect();
            if slots.is_empty() {
                continue;
            }
            let expert_of: Vec<_> = slots.iter().map(|&s| Some(expert(s)? - own.start)).collect();
            let rows = slots.iter().flat_map(|s| x[s * hidden..(s + 1) * hidden].iter().copied());
            let rows: Vec<f32> = rows.collect();
            let gate_up = group.product(0, &rows, &expert_of, ty, engine)?;
            let width = group.w13[0].shape().size_n;
            let activated = gate_up.chunks_exact(width);
            let activated = activated.flat_map(|row| activate_row(activation, row, ty));
            let activated: Vec<f32> = activated.collect();
            let down = group.product(1, &activated, &expert_of, ty, engine)?;
            let row = |all: &[f32], i: usize| {
                let width = all.len() / slots.len();
                all[i * width..(i + 1) * width].to_vec()
            };
            let known = slots.iter().enumerate().filter(|(i, _)| expert_of[*i].is_some());
            all.extend(known.map(|(i, &slot)| {
                let (gate_up, activated) = (row(&gate_up, i), row(&activated, i));
                let down = row(&down, i);
                (slot, ExpertRows { gate_up, activated, down, output: Vec::new() })
            }));
        }
        Ok(all)
    }

    /// The matrices of an expert in f64.
    pub(super) fn mlp(&self, e: usize) -> Mlp {
        let group = &self.groups[e / self.each()];
        let e = e % self.each();
        let (mut w13, w13_bias) = dequantized(&group.w13[e]);
        if let Some(own) = group.multipliers.as_ref().map(|all| all[e]) {
            let stored = f64::from(group.w13[e].global_scale.unwrap_or(1.0));
            let half = w13.nrows() / 2;
            for (n, mut row) in w13.rows_mut().into_iter().enumerate() {
                let factor = f64::from(own[usize::from(n >= half)]);
                row.mapv_inplace(|w| w / stored * factor);
            }
        }
        let (w2, w2_bias) = dequantized(&group.w2[e]);
        Mlp { w13, w2, w13_bias, w2_bias }
    }
}

impl ExpertGroup {
    /// Rows times w13 (`which` 0) or w2 (1) of their experts; a row without one gives zeros.
    fn product(
        &self,
        which: usize,
        x: &[f32],
        expert_of: &[Option<usize>],
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> Result<Vec<f32>> {
        let weights = [&self.w13, &self.w2][which];
        let bits: Vec<u16> = x.iter().map(|&x| ty.encode_rne(x.into()) as u16).collect();
        let x = FloatView2::from_rows("activations", ty, weights[0].shape().size_k, &bits)?;
        let product = Product {
            rows: &self.quantizers[which].quantize(x, expert_of)?,
            expert_of,
            weights,
            halves: self.multipliers.as_deref().filter(|_| which == 0),
            router_weights: None,
            dtype: ty,
        };
        let y = (engine.multiply)(&product)?.into_bits();
        Ok(y.into_iter().map(|b| ty.to_f64(b.into()) as f32).collect())
    }
}
