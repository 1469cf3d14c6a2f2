//! Operators on CUDA tensors. Python passes addresses and sizes; the kernels run on its stream and in its memory.
//!
//! The functions are private to the package: its Python code takes the addresses from tensors that it holds during
//! the call, after it has checked their device, type, layout and alignment.
#![allow(unsafe_code)]

mod layouts;
mod parts;
mod routing;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike_accel::borrowed::Scratch;
use marlinspike_accel::memory::Element;
use marlinspike_accel::ops::{
    MarlinLayer, MarlinWeight, Packed, PackedParts, PackedScales, Runs, ScaleBound, marlin_gemm,
};
use marlinspike_accel::{AccelError, Buffer, Device};
use pyo3::prelude::*;

use crate::error::{Failed, raised};
use crate::products::{activation_named, half_named, weight_type};

pub(crate) use layouts::{cuda_permute_scales, cuda_quantize, cuda_repack};
pub(crate) use parts::{cuda_add_ranks, cuda_gemm_part};
pub(crate) use routing::{cuda_activation, cuda_align, cuda_sum, cuda_topk};

/// A device's ordinal and the handle of a stream.
pub(crate) type Place = (usize, u64);
/// Address and number of elements.
pub(crate) type Memory = (u64, usize);

/// The devices opened so far. They are never closed: torch's context outlives the process's Python code, too.
static DEVICES: Mutex<Option<HashMap<usize, Arc<Device>>>> = Mutex::new(None);

fn device(ordinal: usize) -> Result<Arc<Device>, AccelError> {
    // A panic elsewhere cannot leave the map half changed, so a poisoned lock is still good.
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = devices.get_or_insert_default();
    if let Some(device) = devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Arc::new(Device::open_for_streams(ordinal)?);
    devices.insert(ordinal, device.clone());
    Ok(device)
}

/// A device on Python's stream.
pub(crate) struct View(Device);

impl View {
    /// With scratch memory (address and bytes), or without, to measure.
    pub(crate) fn new(
        (ordinal, stream): Place,
        work: Option<(u64, u64)>,
    ) -> Result<Self, AccelError> {
        let scratch = work.map_or_else(Scratch::measure, |(base, bytes)| Scratch::new(base, bytes));
        // SAFETY:
        // - The stream is torch's current one, which lives as long as the process.
        // - The scratch memory is a tensor of torch's allocator for that stream, aligned to 512 bytes; freed, it is
        //   used again in the stream's order.
        // - Callers launch nothing where they measure.
        Ok(Self(unsafe { device(ordinal)?.on_stream(stream, scratch) }))
    }

    /// A tensor's elements.
    pub(crate) fn take<T: Element>(&self, (address, len): Memory) -> Buffer<T> {
        // SAFETY: Python checked that it is a contiguous tensor of `len` elements of T's size on this device, aligned to
        // 16 bytes; it holds the tensor during the call, and orders other streams as for torch's own operators.
        unsafe { self.0.borrow(address, len) }
    }

    pub(crate) fn optional<T: Element>(&self, memory: Option<Memory>) -> Option<Buffer<T>> {
        memory.map(|memory| self.take(memory))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0
    }

    /// Room for the totals of products of many rows. Measuring, there are no flags yet.
    fn split(&mut self, flags: Option<Memory>) -> Result<usize, AccelError> {
        let count = self.0.split_flags();
        let flags = self.take(flags.unwrap_or((0, count)));
        self.0.split_with(&flags)?;
        Ok(count)
    }
}

/// Names of the codes and the scales, experts, K, N, groups.
type Sizes = (String, String, usize, usize, usize, usize);

/// A packed weight: its sizes; codes, scales, zero points, bias, global scales.
#[derive(FromPyObject)]
pub(crate) struct WeightParts(
    Sizes,
    Memory,
    Memory,
    Option<Memory>,
    Option<Memory>,
    Option<Memory>,
);

fn scales(name: &str) -> PyResult<PackedScales> {
    Ok(match name {
        "bits16" => PackedScales::Bits16 { below: ScaleBound::None },
        "bits16-below-half" => PackedScales::Bits16 { below: ScaleBound::BelowHalf },
        "bits16-below-32nd" => PackedScales::Bits16 { below: ScaleBound::Below32nd },
        "e8m0" => PackedScales::E8m0 { is_narrow: false },
        "e8m0-narrow" => PackedScales::E8m0 { is_narrow: true },
        "e4m3" => PackedScales::E4m3,
        _ => return Err(raised(format!("scales: found {name}"))),
    })
}

impl WeightParts {
    fn load(&self, view: &View, dtype: ScalarType) -> PyResult<MarlinWeight> {
        let Self((codes, names, experts, size_k, size_n, groups), qweight, s, zeros, bias, global) =
            self;
        let packed = Packed {
            shape: Shape::new(*size_k, *size_n),
            experts: *experts,
            dtype,
            codes: weight_type(codes)?,
            scales: scales(names)?,
            groups: *groups,
        };
        let parts = PackedParts {
            qweight: view.take(*qweight),
            scales: view.take(*s),
            zeros: view.optional(*zeros),
            bias: view.optional(*bias),
            global_scale: view.optional(*global),
        };
        MarlinWeight::from_parts(view.device(), packed, parts).failed()
    }
}

/// y `[M, N]` of x `[M, K]`. Without `work`, only the bytes and flags that it takes.
#[pyfunction]
pub(crate) fn cuda_gemm(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    weight: WeightParts,
    x: Memory,
    y: Memory,
    work: Option<(u64, u64)>,
    flags: Option<Memory>,
) -> PyResult<(u64, usize)> {
    let dtype = half_named(dtype)?;
    py.detach(|| {
        let mut view = View::new(place, work).failed()?;
        let weight = weight.load(&view, dtype)?;
        let size_m = x.1 / weight.shape().size_k;
        let mut count = 0;
        if weight.many_rows(view.device(), size_m).failed()?.is_some() {
            count = view.split(flags).failed()?;
        }
        if work.is_some() {
            let (x, mut y) = (view.take(x), view.take(y));
            marlin_gemm(view.device(), &x, &weight, &mut y).failed()?;
        }
        Ok((view.device().scratch_bytes(), count))
    })
}

/// y `[M, H]` of a layer. `tables`: the run and, with an expert map, the expert of each expert of all ranks. Without
/// `work`, only the bytes and flags that it takes.
#[pyfunction]
pub(crate) fn cuda_moe(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    weights: (WeightParts, WeightParts),
    tables: (Memory, Option<Memory>, usize),
    activation: &str,
    apply_router_weight_on_input: bool,
    tokens: (usize, usize),
    routed: (Memory, Memory, Memory, Memory),
    work: Option<(u64, u64)>,
    flags: Option<Memory>,
) -> PyResult<(u64, usize)> {
    let (dtype, activation) = (half_named(dtype)?, activation_named(activation)?);
    py.detach(|| {
        let mut view = View::new(place, work).failed()?;
        let weights = [weights.0.load(&view, dtype)?, weights.1.load(&view, dtype)?];
        let (run_of, expert_of, experts) = tables;
        let runs =
            Runs::from_tables(view.take(run_of), view.optional(expert_of), experts).failed()?;
        let on_input = apply_router_weight_on_input;
        let layer = MarlinLayer::from_weights(view.device(), weights, runs, activation, on_input);
        let layer = layer.failed()?;
        let mut buffers = layer.workspace(view.device(), tokens.0, tokens.1).failed()?;
        let count = if buffers.splits() { view.split(flags).failed()? } else { 0 };
        if work.is_some() {
            let (x, topk_weights, topk_ids, y) = routed;
            let (x, weights, ids) = (view.take(x), view.take(topk_weights), view.take(topk_ids));
            let mut y = view.take(y);
            let device = view.device();
            layer.forward(device, &x, &ids, &weights, &mut buffers, &mut y).failed()?;
        }
        Ok((view.device().scratch_bytes(), count))
    })
}
