//! Dense products.

use marlinspike::dims::Shape;
use marlinspike::scalar::ScalarType;
use marlinspike::vectors::Rng;

use super::{COLD_BYTES, WeightType, activations};
use crate::{
    device::Device,
    error::AccelError,
    ops::gemm::{MarlinWeight, Tiling, marlin_gemm, marlin_gemm_tiled},
    timing::Times,
};

/// One matrix in so many places that calls in turn find none of them in the caches.
#[derive(Debug)]
pub struct Dense {
    copies: Vec<MarlinWeight>,
}

impl Dense {
    /// A random matrix for bf16 activations, and its copies.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a shape that the type or the kernel does not take;
    /// [`AccelError::Driver`] where the device has not so much memory.
    pub fn new(device: &Device, ty: WeightType, shape: Shape) -> Result<Self, AccelError> {
        let weight = ty.weight(&mut Rng::new(1), shape)?;
        let first = MarlinWeight::new(device, std::slice::from_ref(&weight), ScalarType::BFLOAT16)?;
        let count = COLD_BYTES.div_ceil(first.bytes()).max(2);
        let mut copies = vec![first];
        while copies.len() < count {
            copies.push(copies[0].copy(device)?);
        }
        Ok(Self { copies })
    }

    /// Bytes of codes, scales and zero points: what a product must read at least, beside x.
    pub fn bytes(&self) -> usize {
        self.copies[0].bytes()
    }

    /// Time of one product of `size_m` rows, by the tiling that the crate takes or another.
    ///
    /// # Errors
    /// Those of the product; [`AccelError::Driver`].
    pub fn time(
        &self,
        device: &Device,
        size_m: usize,
        tiling: Option<Tiling>,
        replays: usize,
    ) -> Result<Times, AccelError> {
        let Shape { size_k, size_n } = self.copies[0].shape();
        let x = device.upload(&activations(&mut Rng::new(7), size_m * size_k))?;
        let mut y = device.zeroed(size_m * size_n)?;
        let mut product = |weight: &MarlinWeight| match tiling {
            None => marlin_gemm(device, &x, weight, &mut y),
            Some(tiling) => marlin_gemm_tiled(device, &x, weight, &mut y, tiling),
        };
        // Modules are loaded before anything is recorded.
        product(&self.copies[0])?;
        let graph = device.record(|| self.copies.iter().try_for_each(&mut product))?;
        Ok(device.time(&graph, replays)?.each(self.copies.len()))
    }
}
