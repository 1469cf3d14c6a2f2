//! One product of a method: rows times the matrices of their experts.

use super::activations::Activations;
use crate::moe::half_type;
use crate::num::scalar::ScalarType;
use crate::products::chain::{Chain, Step};
use crate::weight::Weight;
use crate::{Error, Result};

const F32: ScalarType = ScalarType::FLOAT32;

/// Promotion of `wgmma`'s sums of 8-bit floats, which keep 14 bits, to f32 registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Promotion {
    /// Never: one chain over all of k (`FP8FastAccum` of CUTLASS).
    Never,
    /// Every 128 k, as DeepGEMM and CUTLASS's blockwise kernels do.
    Every128,
}

/// The arithmetic of products. Each variant defines every bit on every machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Every output is the exact sum of products of the quantized values, times alpha (NVFP4: the
    /// f32 product of the multipliers of weight and row), plus bias, times router weight, rounded
    /// once.
    Exact,
    /// This project's canonical schedule
    /// ([`Schedule::canonical`](crate::products::schedule::Schedule::canonical)), which the CUDA
    /// kernels follow bit for bit: 16-bit activations, or e4m3 activations with a scale for each
    /// row.
    Canonical,
    /// Upstream's int8 kernels ([`Int8Epilogue::Cutlass`](crate::products::Int8Epilogue)): the sum of
    /// codes less zero points is an int32, exact modulo 2^32, and is converted to f32; the column's
    /// scale, one fused multiply-add with the row's scale and the bias, and the router weight follow
    /// in f32, rounded once at the end.
    Cutlass,
    /// MXFP8 on Blackwell's `kind::mxf8f6f4.block_scale`: fused sums of 32 products with F = 25, whose
    /// exponents include those of the scales, k ascending, the accumulator in f32; bias and router
    /// weight follow in f32, rounded once at the end. Reported by MMA-Sim, not measured here.
    Tcgen05,
    /// Hopper's `wgmma` with e4m3, F = 13, k ascending in instructions of 32. Sums are multiplied
    /// by the row's scale, then by the column's, as upstream's Triton kernel does
    /// ([`Schedule::w8a8_fp8`](crate::products::schedule::Schedule::w8a8_fp8)); bias and router
    /// weight follow, everything in f32 and rounded once at the end. With scales for groups of 128
    /// k, which require [`Promotion::Every128`], the f32 sum is fma(part, row scale · column scale,
    /// sum) for each group.
    Wgmma(Promotion),
}

impl Arithmetic {
    /// Every arithmetic with its name on the command line.
    pub const NAMED: [(&'static str, Self); 6] = [
        ("exact", Self::Exact),
        ("canonical", Self::Canonical),
        ("cutlass", Self::Cutlass),
        ("tcgen05", Self::Tcgen05),
        ("wgmma", Self::Wgmma(Promotion::Never)),
        ("wgmma-promoted", Self::Wgmma(Promotion::Every128)),
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, a)| *a == self).map_or("", |(name, _)| name)
    }
}

/// `y[m] = x[m] · W[expert_of[m]]`, scaled, plus bias, times router weight.
#[derive(Debug, Clone, Copy)]
pub struct Product<'p> {
    /// x.
    pub rows: &'p Activations,
    /// The matrix of each row; a row without one gives zeros.
    pub expert_of: &'p [Option<usize>],
    /// The matrices, of one shape.
    pub weights: &'p [Weight<'p>],
    /// Global multipliers of the first and the second half of each matrix's columns, instead of the
    /// matrix's multiplier, for gate and up that were quantized separately.
    pub halves: Option<&'p [[f32; 2]]>,
    /// Router weight of each row.
    pub router_weights: Option<&'p [f32]>,
    /// Type of the output: float16 or bfloat16.
    pub dtype: ScalarType,
}

impl Product<'_> {
    pub(super) fn size_n(&self) -> usize {
        self.weights.first().map_or(0, |w| w.shape().size_n)
    }

    /// The global multiplier of column `n` of expert `e`, if there is one.
    pub(super) fn multiplier(&self, e: usize, n: usize) -> Option<f32> {
        match self.halves {
            Some(halves) => Some(halves[e][usize::from(n >= self.size_n() / 2)]),
            None => self.weights[e].global_scale,
        }
    }

    /// The factor of the sum of (`m`, `n`).
    pub(super) fn alpha(&self, [m, e, n]: [usize; 3]) -> f32 {
        let of_row = self.rows.globals.as_ref().map_or(1.0, |g| g[m]);
        self.multiplier(e, n).map_or(of_row, |w| w * of_row)
    }

    pub(super) fn validate(&self) -> Result<()> {
        half_type(self.dtype)?;
        let Some(first) = self.weights.first() else {
            return Err(Error::size("matrices", 0, "1 or more"));
        };
        let shape = first.shape();
        for weight in self.weights {
            weight.validate()?;
            if weight.shape() != shape {
                let found = [weight.shape().size_k, weight.shape().size_n];
                return Err(Error::shape(&weight.name, &found, shape));
            }
        }
        if self.rows.size_k != shape.size_k {
            let found = format!("{}, size_k {}", self.rows.rows(), self.rows.size_k);
            return Err(Error::size("activations", found, format!("size_k {}", shape.size_k)));
        }
        let m = self.rows.rows();
        let lens = [("expert_of", Some(self.expert_of.len()))];
        let router = [("router_weights", self.router_weights.map(<[f32]>::len))];
        for (name, len) in lens.into_iter().chain(router) {
            if let Some(found) = len.filter(|&len| len != m) {
                return Err(Error::shape(name, &[found], format!("[{m}]")));
            }
        }
        if let Some(halves) = self.halves.filter(|h| h.len() != self.weights.len()) {
            let expected = format!("[{}, 2]", self.weights.len());
            return Err(Error::shape("multipliers of gate and up", &[halves.len(), 2], expected));
        }
        for (m, expert) in self.expert_of.iter().enumerate() {
            let Some(e) = *expert else { continue };
            if e >= self.weights.len() {
                let expected = format!("an expert below {}", self.weights.len());
                return Err(Error::value("expert_of", &[m], e, expected));
            }
            let scaled = self.rows.globals.is_some() || self.multiplier(e, 0).is_some();
            for n in [0, shape.size_n.saturating_sub(1)] {
                let alpha = self.alpha([m, e, n]);
                if scaled && !(alpha.is_normal() && alpha > 0.0) {
                    let what = format!("{}: product of the global scales", self.weights[e].name);
                    return Err(Error::value(what, &[m, n], alpha, "a positive normal number"));
                }
            }
        }
        Ok(())
    }

    /// The steps after the sum of one output.
    pub(super) fn chain(&self, at @ [m, e, n]: [usize; 3]) -> Chain {
        let bias = self.weights[e].bias.as_ref().map(|b| Step::add(b.value(0, n), F32));
        let router = self.router_weights.map(|r| Step::multiply(r[m].into(), F32));
        let alpha = Some(Step::multiply(self.alpha(at).into(), F32));
        Chain { steps: [alpha, bias, router].into_iter().flatten().collect() }
    }
}

/// Bits of a 16-bit type; every NaN becomes 0x7fff.
pub(super) fn half_bits(ty: ScalarType, bits: u32) -> u16 {
    if ty.to_f64(bits).is_nan() { 0x7fff } else { bits as u16 }
}
