//! A weight in Marlin's layout in a device's memory.

use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::marlin::{Options, prepare};
use marlinspike::scalar::ScalarType;
use marlinspike::weight::{Table, Weight};

use super::{ROW, Tiling, kind::Kind};
use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, bytes, halves},
    nvrtc::{Arch, Define},
};

/// One matrix, or a stack of experts of one shape, in Marlin's layout for 16-bit activations.
#[derive(Debug)]
pub struct MarlinWeight {
    shape: Shape,
    experts: usize,
    dtype: ScalarType,
    kind: Kind,
    /// k of a scale group; all of k where there is one.
    group_size: usize,
    groups: usize,
    /// `[experts, K / 16, N · 16 / pack]`.
    pub(crate) qweight: Buffer<u32>,
    /// `[experts, groups, N]`: of one byte, or two where they are 16-bit.
    pub(crate) scales: Buffer<u8>,
    /// `[experts, groups, N / 8]`.
    pub(crate) zeros: Option<Buffer<u32>>,
    /// `[experts, N]`.
    pub(crate) bias: Option<Buffer<u16>>,
    /// `[experts]`.
    pub(crate) global_scale: Option<Buffer<f32>>,
    perms: Option<Vec<Vec<u32>>>,
}

impl MarlinWeight {
    /// Packs `weights` for activations of `dtype` (float16 or bfloat16) and copies them to the
    /// device. K is a multiple of 64; act-order has whole groups. Scales of 16 bits are
    /// converted to `dtype` first, as Marlin's preparation does.
    ///
    /// | codes | scales | groups of k |
    /// | --- | --- | --- |
    /// | `uint4b8`, `uint4` with zero points, `uint8b128` | 16-bit | 32, multiples of 64, one |
    /// | `float8_e4m3fn`, no NaN | 16-bit, below 256 | multiples of 64, one |
    /// | `float8_e4m3fn`, no NaN; `float4_e2m1f` | e8m0 up to 2^126; `dtype` bfloat16 | 32 |
    /// | `float4_e2m1f` | e4m3, not negative; with or without a global scale | 16 |
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight that the kernel or the layout refuses;
    /// [`AccelError::Driver`] where the device has not so much memory.
    pub fn new(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
    ) -> Result<Self, AccelError> {
        let refuse = |what, found: String, expected: &str| {
            Err(AccelError::argument(&ROW, what, found, expected))
        };
        let prepared = match prepare(weights, Options::new(dtype)) {
            Ok(prepared) => prepared,
            Err(error) => return refuse("weight", error.to_string(), "a weight that Marlin takes"),
        };
        let (first, experts) = (&weights[0], prepared.experts);
        let shape = first.shape();
        if !shape.size_k.is_multiple_of(64) {
            return refuse("size_k", shape.size_k.to_string(), "a multiple of 64");
        }
        if shape.size_k > i32::MAX as usize || shape.size_n / 64 > 65535 {
            return refuse("shape", shape.to_string(), "K below 2^31, N below 64 * 2^16");
        }
        let groups = prepared.groups();
        let group_size = shape.size_k / groups;
        let kind = Kind::of(weights, dtype)?;
        let scales = match kind.scale_bits() {
            // The checkpoint's own bytes: Marlin's preparation flushes small scales of NVFP4.
            8 => {
                let layout = prepared.scale_layout.with_quads();
                let packed: Result<Vec<Table>, _> =
                    weights.iter().map(|weight| layout.pack(&weight.scales)).collect();
                match packed {
                    Ok(packed) => packed.iter().flat_map(bytes).collect(),
                    Err(error) => return refuse("scales", error.to_string(), "[groups, N]"),
                }
            }
            _ => bytes(&prepared.scales),
        };
        let perms = match &prepared.sorted {
            None => None,
            Some(sorted) => {
                let whole = |g_idx: &[u32]| {
                    g_idx.iter().enumerate().all(|(k, &g)| g as usize == k / group_size)
                };
                if !sorted.iter().all(|s| whole(&s.g_idx)) {
                    let expected = "groups of equal size: a whole K";
                    return refuse("g_idx", "groups of several sizes".into(), expected);
                }
                Some(sorted.iter().map(|s| s.perm.clone()).collect())
            }
        };
        let of_experts: Vec<f32> =
            weights.iter().filter_map(|weight| weight.global_scale).collect();
        let global_scale = match of_experts.len() {
            0 => None,
            // All have one, or `prepare` would have failed.
            _ => Some(device.upload(&of_experts)?),
        };
        Ok(Self {
            shape,
            experts,
            dtype,
            kind,
            group_size,
            groups,
            qweight: device.upload(&prepared.qweight)?,
            scales: device.upload(&scales)?,
            zeros: match &prepared.zeros {
                Some((_, words)) => Some(device.upload(words)?),
                None => None,
            },
            bias: match &prepared.bias {
                Some(bias) => Some(device.upload(halves(bias))?),
                None => None,
            },
            global_scale,
            perms,
        })
    }

    /// The same in other memory.
    ///
    /// # Errors
    /// [`AccelError::Driver`] where the device has not so much memory.
    pub fn copy(&self, device: &Device) -> Result<Self, AccelError> {
        let zeros = self.zeros.as_ref().map(|zeros| device.copy(zeros));
        let bias = self.bias.as_ref().map(|bias| device.copy(bias));
        let global_scale = self.global_scale.as_ref().map(|scale| device.copy(scale));
        Ok(Self {
            qweight: device.copy(&self.qweight)?,
            scales: device.copy(&self.scales)?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
            global_scale: global_scale.transpose()?,
            perms: self.perms.clone(),
            ..*self
        })
    }

    /// Shape of each matrix.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Number of matrices.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Type of scales, bias, activations and outputs.
    pub fn dtype(&self) -> ScalarType {
        self.dtype
    }

    /// How many k share a scale.
    pub fn group_size(&self) -> GroupSize {
        if self.groups == 1 { GroupSize::Channel } else { GroupSize::Of(self.group_size) }
    }

    /// With act-order: column k of the x that a product with this matrix takes is column
    /// `perm[k]` of the model's.
    pub fn perm(&self, expert: usize) -> Option<&[u32]> {
        self.perms.as_ref().and_then(|perms| perms.get(expert)).map(Vec::as_slice)
    }

    /// Bytes of codes, scales and zero points of one matrix: what a product must read at least.
    pub fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| zeros.len() * 4);
        (self.qweight.len() * 4 + self.scales.len() + zeros) / self.experts
    }

    /// The tiling that is taken for a product of `size_m` rows.
    pub fn tiling(&self, device: &Device, size_m: usize) -> Tiling {
        self.tiling_of_experts(device, size_m, 1, false)
    }

    /// The tiling that is taken for products of `size_m` rows with each of so many experts at once;
    /// `paired`: a thread block computes 64 columns of each half of N.
    pub fn tiling_of_experts(
        &self,
        device: &Device,
        size_m: usize,
        experts: usize,
        paired: bool,
    ) -> Tiling {
        let arch = Arch::of_device(device.compute_capability());
        let wide = Tiling::is_wide(self.shape.size_n, experts, device.multiprocessors());
        let chunks = Tiling::chunks(self.shape.size_k);
        Tiling::choose(arch, size_m, chunks, wide, paired, &self.form())
    }

    /// k of a group, as the kernel takes it.
    pub(crate) fn group_k(&self) -> u32 {
        self.group_size as u32
    }

    /// The macros that follow from the weight.
    pub(super) fn form(&self) -> Vec<Define> {
        self.kind.form(self.groups, self.group_size)
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        self.qweight.is_on(device)
    }
}
