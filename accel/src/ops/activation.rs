//! The activation between an expert's two products.

use marlinspike::moe::activation::{Columns, Definition, Function};
use marlinspike::scalar::ScalarType;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    nvrtc::Define,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: `silu_and_mul`, `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul` and the kinds
/// without a product.
pub(crate) static ROW: Row = Row {
    name: "moe_activation",
    source: "moe_activation",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| {
        lattice(&[
            ("IS_BF16", &[0, 1]),
            ("FUNCTION", &[0, 1, 2, 3]),
            ("COLUMNS", &[0, 1, 2]),
            ("EXCHANGED", &[0, 1]),
        ])
    },
};

/// Numbers of a launch, checked against the lengths of its buffers.
#[derive(Debug)]
pub(crate) struct Args {
    /// Of `activated`.
    pub(crate) elements: u64,
    pub(crate) size_i: u32,
    pub(crate) alpha: f32,
    pub(crate) gate_limit: f32,
    pub(crate) value_limit: f32,
    pub(crate) up_limit: f32,
    pub(crate) up_shift: f32,
}

/// `activated` `[rows, size_i]` of `gate_up`, bits of `dtype`: the bits of [`Definition::apply`] by
/// the canonical chain.
///
/// # Errors
/// As [`activate_on_device`].
pub fn moe_activation(
    device: &Device,
    definition: &Definition,
    gate_up: &[u16],
    dtype: ScalarType,
    size_i: usize,
) -> Result<Vec<u16>, AccelError> {
    let columns = check::positive(&ROW, "size_i", size_i)?;
    let rows = check::rows(&ROW, "gate_up", gate_up.len(), definition.width_in(size_i))?;
    let mut out = device.zeroed(rows as usize * columns as usize)?;
    activate_on_device(device, definition, &device.upload(gate_up)?, dtype, size_i, &mut out)?;
    device.download(&out)
}

/// [`moe_activation`] in the device's memory.
///
/// # Errors
/// [`AccelError::Argument`] for what [`Definition::validate`] refuses, another type, a `gate_up`
/// that is not whole rows, and an `activated` that has not as many; those of preparing and running a
/// kernel.
pub fn activate_on_device(
    device: &Device,
    definition: &Definition,
    gate_up: &Buffer<u16>,
    dtype: ScalarType,
    size_i: usize,
    activated: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    if let Err(error) = definition.validate() {
        return Err(AccelError::argument(&ROW, "activation", error, "parameters in their range"));
    }
    check::on(&ROW, device, gate_up.is_on(device) && activated.is_on(device))?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let columns = check::positive(&ROW, "size_i", size_i)?;
    let rows = check::rows(&ROW, "gate_up", gate_up.len(), definition.width_in(size_i))?;
    let elements = rows as usize * size_i;
    if activated.len() != elements {
        let found = format!("{} elements", activated.len());
        return Err(AccelError::argument(&ROW, "activated", found, format!("[{rows}, {size_i}]")));
    }
    let limit = |limit: Option<f32>| limit.unwrap_or(f32::INFINITY);
    let args = Args {
        elements: check::threads(&ROW, "activated", elements)?,
        size_i: columns,
        alpha: definition.alpha,
        gate_limit: limit(definition.gate_limit),
        value_limit: limit(definition.value_limit),
        up_limit: limit(definition.up_limit),
        up_shift: definition.up_shift,
    };
    let function = match definition.function {
        Function::Silu => 0,
        Function::Gelu => 1,
        Function::GeluTanh => 2,
        Function::Relu2 => 3,
    };
    let columns = match definition.columns {
        Columns::Halves => 0,
        Columns::Interleaved => 1,
        Columns::Gate => 2,
    };
    let exchanged = u32::from(definition.exchanged);
    let defines: [Define; 4] =
        [is_bf16, ("FUNCTION", function), ("COLUMNS", columns), ("EXCHANGED", exchanged)];
    let function = device.function(&ROW, &defines)?;
    raw::moe::activate(device, &function, &args, gate_up, activated)
}
