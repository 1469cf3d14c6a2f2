//! The activation between an expert's two products.

use marlinspike::moe::Chain;
use marlinspike::moe::activation::{Columns, Definition, Function};
use marlinspike::num::array::{FloatView2, HalfArray2};
use marlinspike::num::scalar::ScalarType;

use super::check;
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Activation, Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: `silu_and_mul`, `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul` and the kinds
/// without a product.
pub(crate) static ROW: Row = Row {
    name: "moe_activation",
    source: "moe_activation",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_BF16", &[0, 1]), ("WIDTH", &[1, 8])])),
    arguments: ActivationArguments::SIZES,
    mutants: &[
        Mutant::new(
            "a limit that swallows a NaN",
            "return x > limit ? limit : x;",
            "return fminf(x, limit);",
        ),
        Mutant::new("relu2 without its square", "return __fmul_rn(m, m);", "return m;"),
        Mutant::new(
            "the first column's gate for all, without up",
            "activation.function, widen(gate_up[to]))",
            "activation.function, widen(gate_up[row * columns]))",
        ),
    ],
};

static KERNEL: Kernel<ActivationArguments> = Kernel::early(&ROW);

arguments! {
    /// Arguments of `moe_activation.cu`.
    ActivationArguments {
        gate_up: Pointer,
        activated: Pointer,
        rows: u32,
        size_i: u32,
        activation: Activation,
    }
}

impl From<&Definition> for Activation {
    fn from(definition: &Definition) -> Self {
        let limit = |limit: Option<f32>| limit.unwrap_or(f32::INFINITY);
        Self {
            function: match definition.function {
                Function::Silu => 0,
                Function::Gelu => 1,
                Function::GeluTanh => 2,
                Function::Relu2 => 3,
            },
            columns: match definition.columns {
                Columns::Halves => 0,
                Columns::Interleaved => 1,
                Columns::Gate => 2,
            },
            exchanged: definition.exchanged.into(),
            alpha: definition.alpha,
            gate_limit: limit(definition.gate_limit),
            value_limit: limit(definition.value_limit),
            up_limit: limit(definition.up_limit),
            up_shift: definition.up_shift,
        }
    }
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
/// that is not whole rows, and an `activated` of another number of rows; those of preparing and running a
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
        return Err(ROW.refuse("activation", error, "parameters in their range"));
    }
    let parts = [("gate_up", gate_up.is_on(device)), ("activated", activated.is_on(device))];
    check::same_device(&ROW, device, &parts)?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let columns = check::positive(&ROW, "size_i", size_i)?;
    let rows = check::rows(&ROW, "gate_up", gate_up.len(), definition.width_in(size_i))?;
    let elements = rows as usize * size_i;
    if activated.len() != elements {
        let found = format!("{} elements", activated.len());
        return Err(ROW.refuse("activated", found, format!("[{rows}, {size_i}]")));
    }
    let width = if size_i.is_multiple_of(8) { 8 } else { 1 };
    check::columns(&ROW, "size_i", size_i, width as usize)?;
    if elements == 0 {
        return Ok(());
    }
    // gate_up and activated have `rows` rows of the activation's width and of size_i, which WIDTH divides.
    let arguments = ActivationArguments {
        gate_up: gate_up.into(),
        activated: activated.into(),
        rows,
        size_i: columns,
        activation: definition.into(),
    };
    let grid = Grid::one_thread_each_piece(rows, columns / width);
    KERNEL.launch(device, &[is_bf16, ("WIDTH", width)], grid, arguments)
}

/// [`moe_activation`].
#[derive(Debug, Clone, Copy)]
pub struct Activate<'a> {
    /// The activation.
    pub definition: &'a Definition,
    /// Whole rows of its width, bits of `dtype`.
    pub gate_up: &'a [u16],
    /// float16 or bfloat16.
    pub dtype: ScalarType,
    /// Columns of the result.
    pub size_i: usize,
}

impl Call for Activate<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        moe_activation(device, self.definition, self.gate_up, self.dtype, self.size_i)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let width = self.definition.width_in(self.size_i);
        let gate_up = FloatView2::from_rows("gate_up", self.dtype, width, self.gate_up)?;
        self.definition.apply(gate_up, Chain::Canonical).map(HalfArray2::into_bits)
    }
}
