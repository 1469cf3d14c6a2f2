//! Packed weights in candle tensors.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, DType, Device, Layout, Result, Storage, StorageRef, Tensor, bail};
use half::{bf16, f16};
use marlinspike::layouts::marlin::{Options, prepare};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_accel::AccelError;
use marlinspike_accel::ops::{MarlinWeight, Packed, PackedParts, PackedScales, ScaleBound};

use super::launch::{Held, View, held};
use crate::error::Error;

/// The tensors of a matrix, or of a stack of experts', in Marlin's layout on a CUDA device.
#[derive(Debug, Clone)]
pub struct PackedTensors {
    /// U32 `[experts, K / 16, N · 16 / pack]`, without the first axis for a matrix.
    pub qweight: Tensor,
    /// `[experts, groups, N]` in the kernel's order: of the type of the activations, or U8 for e8m0.
    pub scales: Tensor,
    /// U32 `[experts, groups, N / 8]`: of uint4.
    pub zeros: Option<Tensor>,
    /// `[experts, N]` in the kernel's order.
    pub bias: Option<Tensor>,
}

/// A packed weight, checked.
#[derive(Debug, Clone)]
pub struct MarlinTensors {
    pub(super) module: Arc<str>,
    pub(super) packed: Packed,
    parts: PackedTensors,
}

impl MarlinTensors {
    /// Takes packed tensors, as vLLM 0.21.0 prepares them for Marlin; `dtype` is that of the activations, F16 or BF16.
    /// `module` names them in errors.
    ///
    /// # Errors
    /// [`Error::Packed`], wrapped, for a tensor of another type, shape or device. Sizes and types that the kernels do
    /// not take are errors of the first product.
    pub fn new(
        module: impl Into<Arc<str>>,
        codes: ScalarType,
        scales: PackedScales,
        dtype: DType,
        parts: PackedTensors,
    ) -> Result<Self> {
        let module = module.into();
        let wrong = |tensor: &str, t: &Tensor, expected: String| {
            let found = format!("{:?} {:?} on {:?}", t.dtype(), t.dims(), t.device().location());
            let (module, tensor) = (module.to_string(), tensor.to_owned());
            candle_core::Error::from(Error::Packed { module, tensor, found, expected })
        };
        let q = &parts.qweight;
        let bits =
            if matches!(codes, ScalarType::UINT8B128 | ScalarType::FLOAT8_E4M3FN) { 8 } else { 4 };
        let (stack, [tiles, words]) = match *q.dims() {
            [tiles, words] => (vec![], [tiles, words]),
            [experts, tiles, words] => (vec![experts], [tiles, words]),
            _ => return Err(wrong("qweight", q, "two axes, or three of experts".into())),
        };
        let (size_k, size_n) = (tiles * 16, words * 2 / bits);
        let groups = parts.scales.dims().iter().rev().nth(1).copied().unwrap_or(0);
        let scale_type =
            if matches!(scales, PackedScales::Bits16 { .. }) { dtype } else { DType::U8 };
        let shape = |rows: Option<usize>, columns| {
            [&stack[..], &rows.into_iter().collect::<Vec<_>>(), &[columns]].concat()
        };
        let expected = [
            ("qweight", Some(q), DType::U32, shape(Some(tiles), words)),
            ("scales", Some(&parts.scales), scale_type, shape(Some(groups), size_n)),
            ("zeros", parts.zeros.as_ref(), DType::U32, shape(Some(groups), size_n / 8)),
            ("bias", parts.bias.as_ref(), dtype, shape(None, size_n)),
        ];
        let here = q.device().location();
        for (name, tensor, ty, dims) in expected {
            let Some(t) = tensor else { continue };
            let fits = t.dtype() == ty && t.dims() == dims && t.is_contiguous();
            if !fits || t.device().location() != here || !t.device().is_cuda() {
                return Err(wrong(
                    name,
                    t,
                    format!("{ty:?} {dims:?}, contiguous, on one CUDA device"),
                ));
            }
        }
        let ty = match dtype {
            DType::F16 => ScalarType::FLOAT16,
            DType::BF16 => ScalarType::BFLOAT16,
            other => bail!("{module}: found activations of {other:?}, expected F16 or BF16"),
        };
        if groups == 0 {
            return Err(wrong("scales", &parts.scales, "at least one group".into()));
        }
        let experts = stack.first().copied().unwrap_or(1);
        let shape = Shape::new(size_k, size_n);
        let packed = Packed { shape, experts, dtype: ty, codes, scales, groups };
        Ok(Self { module, packed, parts })
    }

    /// Packs integer weights, one or a stack of experts', and copies them to `device`.
    ///
    /// # Errors
    /// What [`prepare`] refuses, wrapped; weights with act-order, and those without 16-bit scales.
    pub fn pack(
        module: impl Into<Arc<str>>,
        weights: &[Weight<'_>],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let module = module.into();
        let ty = if dtype == DType::F16 { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 };
        let prepared = prepare(weights, Options::new(ty)).map_err(Error::layer(&module))?;
        let codes = weights[0].ty;
        let known = [ScalarType::UINT4B8, ScalarType::UINT8B128, ScalarType::UINT4];
        if prepared.sorted.is_some() || !known.contains(&codes) {
            bail!(
                "{module}: found {codes}, or act-order, expected integers without: MarlinTensors::new"
            )
        }
        let experts = prepared.experts;
        let Shape { size_n, .. } = weights[0].shape();
        let of = |rows: usize, columns: usize| match experts {
            1 => vec![rows, columns],
            _ => vec![experts, rows, columns],
        };
        let halves = |bits: Vec<u16>, dims: Vec<usize>| match dtype {
            DType::F16 => {
                Tensor::from_vec(bits.into_iter().map(f16::from_bits).collect(), dims, device)
            }
            _ => Tensor::from_vec(bits.into_iter().map(bf16::from_bits).collect(), dims, device),
        };
        let table = |table: &marlinspike::weight::Table| -> Vec<u16> {
            table.iter_bits().map(|bits| bits as u16).collect()
        };
        let words = prepared.qweight_words().into_owned();
        let columns = words.len() / experts / (weights[0].shape().size_k / 16);
        let qweight = Tensor::from_vec(words, of(weights[0].shape().size_k / 16, columns), device)?;
        let groups = prepared.groups();
        let scales = halves(table(&prepared.scales), of(groups, size_n))?;
        let zeros = prepared.zero_words().map(|words| words.into_owned());
        let zeros = zeros.map(|words| Tensor::from_vec(words, of(groups, size_n / 8), device));
        let bias = prepared.bias.as_ref().map(|bias| {
            let dims = if experts == 1 { vec![size_n] } else { vec![experts, size_n] };
            halves(table(bias), dims)
        });
        let parts =
            PackedTensors { qweight, scales, zeros: zeros.transpose()?, bias: bias.transpose()? };
        Self::new(module, codes, PackedScales::Bits16 { below: ScaleBound::None }, dtype, parts)
    }

    /// The error for a tensor that does not fit.
    pub(super) fn wrong(
        &self,
        tensor: &str,
        found: impl std::fmt::Debug,
        expected: impl Into<String>,
    ) -> candle_core::Error {
        let (module, tensor) = (self.module.to_string(), tensor.to_owned());
        let (found, expected) = (format!("{found:?}"), expected.into());
        Error::Packed { module, tensor, found, expected }.into()
    }

    /// `x`, contiguous and aligned, if it has rows of `width` values of the weight's type on its device.
    pub(super) fn rows(&self, x: &Tensor, width: usize) -> Result<Tensor> {
        let here = self.device().location();
        if x.dtype() != self.dtype()
            || x.device().location() != here
            || x.dims().last() != Some(&width)
        {
            let found = (x.dtype(), x.dims(), x.device().location());
            return Err(self.wrong(
                "x",
                found,
                format!("{:?} [.., {width}] on {here:?}", self.dtype()),
            ));
        }
        aligned(x)
    }

    /// Type of the activations.
    pub(super) fn dtype(&self) -> DType {
        if self.packed.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 }
    }

    /// The device of the tensors.
    pub(super) fn device(&self) -> &Device {
        self.parts.qweight.device()
    }

    /// Locks the tensors for a call.
    pub(super) fn locked(&self) -> Locked<'_> {
        let PackedTensors { qweight, scales, zeros, bias } = &self.parts;
        let lock = Tensor::storage_and_layout;
        Locked {
            packed: self.packed,
            qweight: lock(qweight),
            scales: lock(scales),
            zeros: zeros.as_ref().map(lock),
            bias: bias.as_ref().map(lock),
        }
    }
}

type Lock<'a> = (StorageRef<'a>, &'a Layout);

/// Tensors that nothing changes until a call's kernels are launched.
pub(super) struct Locked<'a> {
    packed: Packed,
    qweight: Lock<'a>,
    scales: Lock<'a>,
    zeros: Option<Lock<'a>>,
    bias: Option<Lock<'a>>,
}

/// Where the elements of a weight are.
pub(super) struct HeldWeight<'a> {
    packed: Packed,
    qweight: Held<'a>,
    scales: Held<'a>,
    zeros: Option<Held<'a>>,
    bias: Option<Held<'a>>,
}

impl Locked<'_> {
    pub(super) fn held<'a>(&'a self, stream: &'a CudaStream) -> Result<HeldWeight<'a>> {
        let words = |(storage, layout): &'a Lock<'_>| held::<u32>(cuda(storage)?, layout, stream);
        let halves =
            |lock: &'a Lock<'_>| half_elements(cuda(&lock.0)?, lock.1, self.packed.dtype, stream);
        Ok(HeldWeight {
            packed: self.packed,
            qweight: words(&self.qweight)?,
            scales: match self.packed.scales {
                PackedScales::Bits16 { .. } => halves(&self.scales)?,
                _ => held::<u8>(cuda(&self.scales.0)?, self.scales.1, stream)?,
            },
            zeros: self.zeros.as_ref().map(words).transpose()?,
            bias: self.bias.as_ref().map(halves).transpose()?,
        })
    }
}

impl HeldWeight<'_> {
    pub(super) fn load(&self, view: &View) -> std::result::Result<MarlinWeight, AccelError> {
        let is_16_bit = matches!(self.packed.scales, PackedScales::Bits16 { .. });
        let parts = PackedParts {
            qweight: view.take(&self.qweight),
            scales: view.bytes(&self.scales, if is_16_bit { 2 } else { 1 }),
            zeros: self.zeros.as_ref().map(|zeros| view.take(zeros)),
            bias: self.bias.as_ref().map(|bias| view.take(bias)),
            global_scale: None,
        };
        MarlinWeight::from_parts(view.device(), self.packed, parts)
    }
}

/// A contiguous tensor that begins at a multiple of 16 bytes.
pub(super) fn aligned(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    let offset = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    if offset.is_multiple_of(16) { Ok(tensor) } else { tensor.copy() }
}

/// The elements of a contiguous tensor of a 16-bit type.
pub(super) fn half_elements<'a>(
    storage: &'a CudaStorage,
    layout: &Layout,
    ty: ScalarType,
    stream: &'a CudaStream,
) -> Result<Held<'a>> {
    match ty {
        ScalarType::FLOAT16 => held::<f16>(storage, layout, stream),
        _ => held::<bf16>(storage, layout, stream),
    }
}

fn cuda(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        other => bail!(
            "found a tensor on {:?}, expected one on a CUDA device",
            other.device().location()
        ),
    }
}
