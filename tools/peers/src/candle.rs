//! candle's Q4_K product.

use std::sync::Arc;
use std::time::Instant;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Module as _, Result, Tensor};
use marlinspike_bench::Contender;
use marlinspike_bench::ours::copies;
use marlinspike_bench::tile::Tile;

/// Matrices of a tile's columns, quantized once more by candle.
#[derive(Debug)]
pub struct Weights(Vec<QMatMul>);

/// A call: the product of all rows with one of the matrices.
#[derive(Debug)]
pub struct Candle<'w> {
    weights: &'w Weights,
    x: Tensor,
    out: Option<Tensor>,
}

impl Weights {
    /// Builds the number of matrices that [`copies`] returns.
    ///
    /// # Errors
    /// candle's, for K that is not a multiple of 256.
    pub fn new(tile: &Tile, cold_bytes: usize) -> Result<Self> {
        let (k, n) = (tile.shape().size_k, tile.shape().size_n);
        let floats: Vec<f32> = (0..tile.columns()).flat_map(|column| tile.floats(column)).collect();
        let floats = Tensor::from_vec(floats, (tile.columns(), k), &Device::Cpu)?;
        let quantized = QTensor::quantize(&floats, GgmlDType::Q4K)?;
        let rows = quantized.data()?;
        let row = rows.len() / tile.columns();
        let matrix = |copy| {
            let columns = (0..n).map(|n| tile.column(copy, n));
            let bytes: Vec<u8> =
                columns.flat_map(|c| &rows[c * row..(c + 1) * row]).copied().collect();
            let tensor = qtensor_from_ggml(GgmlDType::Q4K, &bytes, vec![n, k], &Device::Cpu)?;
            QMatMul::from_arc(Arc::new(tensor))
        };
        (0..copies(cold_bytes, row * n)).map(matrix).collect::<Result<_>>().map(Self)
    }
}

impl<'w> Candle<'w> {
    /// `x` `[T, K]`.
    ///
    /// # Errors
    /// candle's, for an `x` of another length.
    pub fn new(weights: &'w Weights, x: &[f32], tokens: usize) -> Result<Self> {
        let x = Tensor::from_slice(x, (tokens, x.len() / tokens), &Device::Cpu)?;
        // candle repacks a matrix in the first call that uses it.
        for matrix in &weights.0 {
            matrix.forward(&x)?;
        }
        Ok(Self { weights, x, out: None })
    }

    fn call(&mut self, number: usize) -> Result<()> {
        let matrix = &self.weights.0[number % self.weights.0.len()];
        self.out = Some(matrix.forward(&self.x)?);
        Ok(())
    }

    /// The result of call `number`, `[T, N]`.
    ///
    /// # Errors
    /// candle's.
    pub fn output(&mut self, number: usize) -> Result<Vec<f32>> {
        self.call(number)?;
        match &self.out {
            Some(out) => out.flatten_all()?.to_vec1(),
            None => Ok(Vec::new()),
        }
    }
}

impl Contender for Candle<'_> {
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
        for number in first..first + calls {
            let start = Instant::now();
            self.call(number).expect("a call that succeeded before");
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
}
