//! Dense products.

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

use marlinspike::vectors::Rng;

use super::{WeightType, activations};
use crate::{
    device::Device,
    error::AccelError,
    ops::gemm::{
        ManyRows, MarlinWeight, Tiling, marlin_gemm, marlin_gemm_many_rows, marlin_gemm_tiled,
    },
    ops::gemm_a8::{RowsA8, marlin_gemm_a8},
    ops::gemm_w4a8::w4a8_gemm,
    timing::Times,
};

/// How the work of a product is divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProductPlan {
    /// For few rows: reading the weights bounds the time.
    Tiled(Tiling),
    /// For many rows.
    Many(ManyRows),
}

/// Copies of one matrix: enough to keep the next call's copy out of the caches.
#[derive(Debug)]
pub struct Dense {
    copies: Vec<MarlinWeight>,
    shape: Shape,
}

impl Dense {
    /// A random matrix for bf16 activations, or for int8 or e4m3 ones (`input`), and as many copies
    /// as take `cold_bytes` together, two at least.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a shape or type that the kernel does not take;
    /// [`AccelError::Driver`] where the device has too little memory.
    pub fn new(
        device: &Device,
        ty: WeightType,
        shape: Shape,
        input: Option<ScalarType>,
        cold_bytes: usize,
    ) -> Result<Self, AccelError> {
        let (weight, dtype) = (ty.weight(&mut Rng::new(1), shape)?, ScalarType::BFLOAT16);
        let weights = std::slice::from_ref(&weight);
        let first = match input {
            None => MarlinWeight::new(device, weights, dtype)?,
            Some(input) => MarlinWeight::for_8_bit(device, weights, dtype, input)?,
        };
        let count = cold_bytes.div_ceil(first.bytes()).max(2);
        let mut copies = vec![first];
        while copies.len() < count {
            copies.push(copies[0].copy(device)?);
        }
        Ok(Self { copies, shape })
    }

    /// The same products by version 2 of the canonical schedule, of all of k.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for 8-bit activations.
    pub fn by_version_2(self) -> Result<Self, AccelError> {
        let copies = self.copies.into_iter().map(MarlinWeight::by_version_2);
        Ok(Self { copies: copies.collect::<Result<_, _>>()?, ..self })
    }

    /// Bytes of codes, scales and zero points: what a product must read at least, apart from x.
    pub fn bytes(&self) -> usize {
        self.copies[0].bytes()
    }

    /// Time of one product of `size_m` rows, by the plan that the crate takes or, with 16-bit
    /// activations, another. On Hopper e4m3 activations are multiplied by `w4a8_gemm`.
    ///
    /// # Errors
    /// Those of the product; [`AccelError::Driver`].
    pub fn time(
        &self,
        device: &Device,
        size_m: usize,
        plan: Option<ProductPlan>,
        replays: usize,
    ) -> Result<Times, AccelError> {
        let Shape { size_k, size_n } = self.shape;
        let halves = activations(&mut Rng::new(7), size_m * size_k);
        // Small numbers in int8 and in e4m3.
        let codes: Vec<u8> = halves.iter().map(|bits| (bits % 64) as u8).collect();
        let (x, codes) = (device.upload(&halves)?, device.upload(&codes)?);
        let scales = device.upload(&vec![1.0; size_m])?;
        let mut y = device.zeroed(size_m * size_n)?;
        let mut product = |weight: &MarlinWeight| match (weight.input_dtype(), plan) {
            (None, None) => marlin_gemm(device, &x, weight, &mut y),
            (None, Some(ProductPlan::Tiled(tiling))) => {
                marlin_gemm_tiled(device, &x, weight, &mut y, tiling)
            }
            (None, Some(ProductPlan::Many(plan))) => {
                marlin_gemm_many_rows(device, &x, weight, &mut y, plan)
            }
            (Some(input), _) => {
                let rows = RowsA8 { codes: &codes, scales: &scales };
                let is_fp8 = input == ScalarType::FLOAT8_E4M3FN;
                match is_fp8 && device.arch().has_wgmma() {
                    true => w4a8_gemm(device, rows, weight, &mut y),
                    false => marlin_gemm_a8(device, rows, weight, &mut y),
                }
            }
        };
        // Modules are loaded before anything is recorded.
        product(&self.copies[0])?;
        let graph = device.record(|| self.copies.iter().try_for_each(&mut product))?;
        Ok(device.time(&graph, replays)?.each(self.copies.len()))
    }
}
