//! A weight in Marlin's layout in a device's memory.

use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::marlin::{Options, prepare};
use marlinspike::scalar::ScalarType;
use marlinspike::weight::{TableData, Weight};

use super::{ROW, Tiling, tiling::Width};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    nvrtc::{Arch, Define},
};

/// One matrix, or a stack of experts of one shape, in Marlin's layout for 16-bit activations.
#[derive(Debug)]
pub struct MarlinWeight {
    shape: Shape,
    experts: usize,
    dtype: ScalarType,
    bits: u32,
    /// k of a scale group; all of k where there is one.
    group_size: usize,
    groups: usize,
    /// `[experts, K / 16, N · 16 / pack]`.
    pub(crate) qweight: Buffer<u32>,
    /// `[experts, groups, N]`.
    pub(crate) scales: Buffer<u16>,
    /// `[experts, groups, N / 8]`.
    pub(crate) zeros: Option<Buffer<u32>>,
    /// `[experts, N]`.
    pub(crate) bias: Option<Buffer<u16>>,
    perms: Option<Vec<Vec<u32>>>,
}

impl MarlinWeight {
    /// Packs `weights` for activations of `dtype` (float16 or bfloat16) and copies them to the
    /// device. Takes `uint4b8`, `uint4` with zero points and `uint8b128`; scales per channel or in
    /// groups of 32 or multiples of 64 k; K a multiple of 64; act-order with whole groups.
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
        let known = [ScalarType::UINT4B8, ScalarType::UINT4, ScalarType::UINT8B128];
        if !known.contains(&first.ty) || (first.ty == ScalarType::UINT4) != first.zeros.is_some() {
            let found = format!("{} of {}", first.name, first.ty);
            return refuse("weight", found, "uint4b8, uint4 with zero points, or uint8b128");
        }
        if !shape.size_k.is_multiple_of(64) {
            return refuse("size_k", shape.size_k.to_string(), "a multiple of 64");
        }
        if shape.size_k > i32::MAX as usize || shape.size_n / 64 > 65535 {
            return refuse("shape", shape.to_string(), "K below 2^31, N below 64 * 2^16");
        }
        let groups = prepared.groups();
        let group_size = shape.size_k / groups;
        if groups > 1 && group_size != 32 && !group_size.is_multiple_of(64) {
            let found = group_size.to_string();
            return refuse("group_size", found, "32, a multiple of 64, or all of k");
        }
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
        let halves = |data: &TableData| match data {
            TableData::B16(bits) => device.upload(bits),
            _ => Err(AccelError::argument(&ROW, "scales", "not 16 bits wide", dtype)),
        };
        Ok(Self {
            shape,
            experts,
            dtype,
            bits: first.codes.bits(),
            group_size,
            groups,
            qweight: device.upload(&prepared.qweight)?,
            scales: halves(prepared.scales.data())?,
            zeros: match &prepared.zeros {
                Some((_, words)) => Some(device.upload(words)?),
                None => None,
            },
            bias: match &prepared.bias {
                Some(bias) => Some(halves(bias.data())?),
                None => None,
            },
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
        Ok(Self {
            qweight: device.copy(&self.qweight)?,
            scales: device.copy(&self.scales)?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
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
        (self.qweight.len() * 4 + self.scales.len() * 2 + zeros) / self.experts
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
        let width = Width::new(self.shape.size_n, experts, device.multiprocessors());
        let chunks = Tiling::chunks(self.shape.size_k);
        Tiling::choose(arch, size_m, chunks, width, paired, &self.form())
    }

    /// k of a group, as the kernel takes it.
    pub(crate) fn group_k(&self) -> u32 {
        self.group_size as u32
    }

    /// The macros that follow from the weight.
    pub(super) fn form(&self) -> Vec<Define> {
        let groups = match (self.groups, self.group_size) {
            (1, _) => 0,
            (_, 32) => 2,
            _ => 1,
        };
        let zero = u32::from(self.zeros.is_some());
        vec![("BITS", self.bits), ("HAS_ZERO", zero), ("GROUPS", groups)]
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        self.qweight.is_on(device)
    }
}
