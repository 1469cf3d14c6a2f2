//! Dense products of e4m3fn weights and activations.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::fp8_gemm::{Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight, RowsFp8, fp8_gemm, fp8_gemm_planned},
    ops::quantize::fp8_scale_step,
    timing::Times,
};

/// Copies of one e4m3fn matrix: enough to keep the next call's copy out of the caches.
#[derive(Debug)]
pub struct Fp8Dense {
    copies: Vec<Fp8Weight>,
    shape: Shape,
}

/// Random words of e4m3fn codes that are not NaN, of both signs, up to 2.
fn words(rng: &mut Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.next_u32() & 0xbfbf_bfbf).collect()
}

impl Fp8Dense {
    /// A random matrix with scales of channels or blocks and such sums, for bf16 outputs, and as many copies as take `cold_bytes`
    /// together, two at least.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a shape that the kernel does not take; [`AccelError::Driver`] where the device has
    /// too little memory.
    pub fn new(
        device: &Device,
        shape: Shape,
        (scales, sums): (Fp8Scales, Fp8Sums),
        cold_bytes: usize,
    ) -> Result<Self, AccelError> {
        let weight = fp8_weight(shape, scales)?;
        let first = Fp8Weight::new(device, &[weight], ScalarType::BFLOAT16)?.summed(sums)?;
        let count = cold_bytes.div_ceil(first.bytes()).max(2);
        let mut copies = vec![first];
        while copies.len() < count {
            copies.push(copies[0].copy(device)?);
        }
        Ok(Self { copies, shape })
    }

    /// Bytes of codes and scales: what a product must read at least, apart from x.
    pub fn bytes(&self) -> usize {
        self.copies[0].bytes()
    }

    /// Time of one product of `size_m` rows, by the plan that the crate takes or another.
    ///
    /// # Errors
    /// Those of the product; [`AccelError::Driver`].
    pub fn time(
        &self,
        device: &Device,
        size_m: usize,
        plan: Option<Fp8Plan>,
        replays: usize,
    ) -> Result<Times, AccelError> {
        let Shape { size_k, size_n } = self.shape;
        let words = words(&mut Rng::new(7), (size_m * size_k).div_ceil(4));
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        let codes = device.upload(&bytes[..size_m * size_k])?;
        let count = match self.copies[0].scales_of() {
            Fp8Scales::Channels => size_m,
            Fp8Scales::Blocks => size_k / Fp8Weight::BLOCK * fp8_scale_step(size_m),
        };
        let scales = device.upload(&vec![1.0; count])?;
        let mut y: Buffer<u16> = device.zeroed(size_m * size_n)?;
        let x = RowsFp8 { codes: &codes, scales: &scales };
        let mut product = |weight: &Fp8Weight| match plan {
            Some(plan) => fp8_gemm_planned(device, x, weight, &mut y, plan),
            None => fp8_gemm(device, x, weight, &mut y),
        };
        // Modules are loaded before anything is recorded.
        product(&self.copies[0])?;
        let graph = device.record(|| self.copies.iter().try_for_each(&mut product))?;
        Ok(device.time(&graph, replays)?.each(self.copies.len()))
    }
}

/// A random matrix with scales of channels or blocks.
pub(super) fn fp8_weight(shape: Shape, scales: Fp8Scales) -> Result<Weight<'static>, AccelError> {
    matrix(shape, scales).map_err(|error| AccelError::Argument {
        operation: "workload",
        what: "shape",
        found: format!("{shape}: {error}"),
        expected: "whole words and groups of k".into(),
    })
}

fn matrix(shape: Shape, scales: Fp8Scales) -> marlinspike::Result<Weight<'static>> {
    let group_size = match scales {
        Fp8Scales::Channels => GroupSize::Channel,
        Fp8Scales::Blocks => GroupSize::Of(Fp8Weight::BLOCK),
    };
    let groups = group_size.groups(shape.k())?;
    let scale = TableData::B32(vec![0.01f32.to_bits(); groups * shape.size_n]);
    Ok(Weight {
        name: "weight".into(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes: Codes::from_words(8, shape, words(&mut Rng::new(1), shape.len() / 4))?,
        scales: Table::new(ScalarType::FLOAT32, groups, shape.size_n, scale)?,
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias: None,
    })
}
