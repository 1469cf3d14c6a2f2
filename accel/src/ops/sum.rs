//! The sum over a token's experts.

use marlinspike::moe::{Chain, sum::sum};
use marlinspike::num::array::{FloatView3, HalfArray2};
use marlinspike::num::scalar::ScalarType;

use super::{
    align::{PlacedBlocks, Runs},
    check,
};
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: `moe_sum`.
pub(crate) static ROW: Row = Row {
    name: "moe_sum",
    source: "moe_sum",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_BF16", &[0, 1]), ("SLOTS", &[0, 1, 2]), ("WIDTH", &[1, 8])])),
    arguments: SumArguments::SIZES,
    mutants: &[Mutant::new(
        "slots added from the last",
        "size_t of = first + j;",
        "size_t of = first + top_k - 1 - j;",
    )],
};

static KERNEL: Kernel<SumArguments> = Kernel::early(&ROW);

arguments! {
    /// Arguments of `moe_sum.cu`.
    SumArguments {
        down: Pointer,
        y: Pointer,
        top_k: u32,
        size_n: u32,
        slots: Pointer,
        expert_of: Pointer,
        num_experts: u32,
    }
}

/// `y` `[rows, size_n]` of `down` `[rows, top_k, size_n]`, bits of `dtype`: the bits of
/// [`sum`] by the canonical chain.
///
/// # Errors
/// As [`sum_on_device`].
pub fn moe_sum(
    device: &Device,
    down: &[u16],
    dtype: ScalarType,
    top_k: usize,
    size_n: usize,
) -> Result<Vec<u16>, AccelError> {
    check::positive(&ROW, "top_k", top_k)?;
    let mut y = device.zeroed(down.len() / top_k)?;
    sum_on_device(device, &device.upload(down)?, dtype, top_k, size_n, None, &mut y)?;
    device.download(&y)
}

/// The slots of a token that are added: those whose expert is on this rank.
#[derive(Debug, Clone, Copy)]
pub enum Slots<'a> {
    /// `down` is in the slots' order.
    OfExperts {
        /// `[rows, top_k]`.
        topk_ids: &'a Buffer<i32>,
        /// The experts of this rank.
        runs: &'a Runs,
    },
    /// `down` is `[places, size_n]`: a slot's row is at its place. A slot without a place is not added.
    InBlocks(&'a PlacedBlocks),
}

impl Slots<'_> {
    fn is_on(&self, device: &Device) -> bool {
        match self {
            Self::OfExperts { topk_ids, runs } => topk_ids.is_on(device) && runs.is_on(device),
            Self::InBlocks(blocks) => blocks.is_on(device),
        }
    }

    /// Number of slots.
    fn count(&self) -> usize {
        match self {
            Self::OfExperts { topk_ids, .. } => topk_ids.len(),
            Self::InBlocks(blocks) => blocks.entries(),
        }
    }

    /// Rows of `down` where that has one for each place.
    fn places(&self) -> Option<usize> {
        match self {
            Self::OfExperts { .. } => None,
            Self::InBlocks(blocks) => Some(blocks.places()),
        }
    }
}

/// [`moe_sum`] in the device's memory; with `slots`, only of those slots.
///
/// # Errors
/// [`AccelError::Argument`] for another type, a `down` that is not whole tokens or not a row for each
/// place, a `y` of another number of rows, and ids or places that are not one for each slot; those of
/// preparing and running a kernel.
pub fn sum_on_device(
    device: &Device,
    down: &Buffer<u16>,
    dtype: ScalarType,
    top_k: usize,
    size_n: usize,
    slots: Option<Slots<'_>>,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let parts = [
        ("down", down.is_on(device)),
        ("slots", slots.is_none_or(|slots| slots.is_on(device))),
        ("y", y.is_on(device)),
    ];
    check::same_device(&ROW, device, &parts)?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let (k, n) = (check::positive(&ROW, "top_k", top_k)?, check::positive(&ROW, "size_n", size_n)?);
    let rows = if let Some(places) = slots.and_then(|slots| slots.places()) {
        if down.len() / size_n < places {
            let found = format!("{} elements", down.len());
            let expected = format!("at least {places} rows of {size_n}");
            return Err(ROW.refuse("down", found, expected));
        }
        check::rows(&ROW, "y", y.len(), size_n)?
    } else {
        let token = top_k.checked_mul(size_n).unwrap_or(0);
        check::rows(&ROW, "down", down.len(), token)?
    };
    if y.len() != rows as usize * size_n {
        let found = format!("{} elements", y.len());
        return Err(ROW.refuse("y", found, format!("[{rows}, {size_n}]")));
    }
    let width = if size_n.is_multiple_of(8) { 8 } else { 1 };
    check::columns(&ROW, "size_n", size_n, width)?;
    let entries = slots.map(|slots| slots.count());
    if let Some(found) = entries.filter(|&entries| entries != rows as usize * top_k) {
        let found = format!("{found} entries");
        return Err(ROW.refuse("topk_ids", found, format!("[{rows}, {top_k}]")));
    }
    // down has top_k rows of size_n for each of y, or one for each place; there is an id or a place for each slot. Ids
    // beyond the experts are not looked up; places are negative or below those of `down`. WIDTH divides size_n.
    let (kind, slots, expert_of, num_experts) = match slots {
        None => (0, Pointer::NULL, Pointer::NULL, 0),
        Some(Slots::OfExperts { topk_ids, runs }) => {
            // At most 8192.
            let num_experts = runs.run_of.len() as u32;
            (1, topk_ids.into(), runs.expert_of.as_ref().into(), num_experts)
        }
        Some(Slots::InBlocks(blocks)) => (2, blocks.place_of().into(), Pointer::NULL, 0),
    };
    let (down, y) = (down.into(), y.into());
    let arguments = SumArguments { down, y, top_k: k, size_n: n, slots, expert_of, num_experts };
    let width = width as u32;
    let grid = Grid::new((rows, (n / width).div_ceil(256), 1), (256, 1, 1));
    KERNEL.launch(device, &[is_bf16, ("SLOTS", kind), ("WIDTH", width)], grid, arguments)
}

/// [`moe_sum`].
#[derive(Debug, Clone, Copy)]
pub struct SumSlots<'a> {
    /// `[rows, top_k, size_n]`, bits of `dtype`.
    pub down: &'a [u16],
    /// float16 or bfloat16.
    pub dtype: ScalarType,
    /// Slots of a row.
    pub top_k: usize,
    /// Columns.
    pub size_n: usize,
}

impl Call for SumSlots<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        moe_sum(device, self.down, self.dtype, self.top_k, self.size_n)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let size_m = self.down.len() / (self.top_k * self.size_n).max(1);
        let shape = [size_m, self.top_k, self.size_n];
        let down = FloatView3::from_bits("down", self.dtype, shape, self.down)?;
        sum(down, Chain::Canonical).map(HalfArray2::into_bits)
    }
}
