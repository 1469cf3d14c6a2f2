//! The kernel that adds the sums of all ranks.

use super::{MOST_RANKS, THREADS, grid};
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, Ranks, arguments},
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
    ops::{MarlinWeight, check},
};

/// Upstream: the all-reduce behind a `RowParallelLinear`, whose bits depend on the number of ranks.
pub(crate) static ROW: Row = Row {
    name: "add_ranks",
    source: "add_ranks",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| {
        Ok(lattice(&[("IS_BF16", &[0, 1]), ("RANKS", &[1, 2, 4, 8]), ("SHOTS", &[0, 1, 2])]))
    },
    arguments: AddArguments::SIZES,
    mutants: &[
        Mutant::new(
            "a chain over ranks",
            "step *= 2) {\n#pragma unroll\n            for (unsigned r = 0; r + step < RANKS; r += 2 * step) {",
            "++step) {\n#pragma unroll\n            for (unsigned r = 0; r < 1; ++r) {",
        ),
        Mutant::new(
            "the parts of the call before",
            "ranks.turn * capacity",
            "(1 - ranks.turn) * capacity",
        ),
        Mutant::new(
            "16-bit parts",
            "float4 (&sum)[RANKS], size_t piece) const {\n",
            "float4 (&sum)[RANKS], size_t piece) const {\n        for (unsigned r = 0; r < RANKS; ++r) {\n            \
             sum[r].x = widen(narrow(sum[r].x));\n            sum[r].y = widen(narrow(sum[r].y));\n        }\n",
        ),
        Mutant::new(
            "a bias for each rank",
            "low = __fadd_rn(low, widen(of[0]));",
            "low = __fadd_rn(low, RANKS * widen(of[0]));",
        ),
    ],
};

static KERNEL: Kernel<AddArguments> = Kernel::early(&ROW);

arguments! {
    /// Arguments of `add_ranks.cu`.
    AddArguments {
        ranks: Ranks,
        bias: Pointer,
        global_scale: Pointer,
        y: Pointer,
        size_m: u32,
        size_n: u32,
        capacity: u64,
        limit_ms: u32,
    }
}

/// The parameter `SHOTS` where no rank waits for others.
const GATHERED: u32 = 0;

/// What a call adds to the ranks' sums, and where.
pub(super) struct Addition {
    is_bf16: Parameter,
    bias: Pointer,
    global_scale: Pointer,
    y: Pointer,
    /// M, N.
    size: [usize; 2],
    /// Sums between those of two turns.
    capacity: u64,
    limit_ms: u32,
}

impl Addition {
    /// Nothing, so that only the kernel is loaded.
    pub(super) fn none(is_bf16: Parameter) -> Self {
        let (bias, global_scale, y) = (Pointer::NULL, Pointer::NULL, Pointer::NULL);
        Self { is_bf16, bias, global_scale, y, size: [0, 64], capacity: 0, limit_ms: 0 }
    }

    /// The same for ranks that take turns and wait for each other.
    pub(super) fn in_turns(self, capacity: u64, limit_ms: u32) -> Self {
        Self { capacity, limit_ms, ..self }
    }

    /// y of the sums that a rank `[rank, ranks]` multiplied, by the weight's part of that rank.
    pub(super) fn of_call(
        device: &Device,
        weight: &MarlinWeight,
        place: [usize; 2],
        multiplied: Option<[usize; 2]>,
        y: &mut Buffer<u16>,
    ) -> Result<Self, AccelError> {
        check_part(weight, place)?;
        let Some(size) = multiplied else {
            let found = format!("{} elements", y.len());
            return Err(ROW.refuse("y", found, "a call of `multiply` before"));
        };
        Self::new(device, weight, size, y)
    }

    /// Elements of y.
    pub(super) fn len(&self) -> usize {
        self.size.iter().product()
    }

    /// y of sums of that size, with the weight's bias and global scale.
    fn new(
        device: &Device,
        weight: &MarlinWeight,
        size: [usize; 2],
        y: &mut Buffer<u16>,
    ) -> Result<Self, AccelError> {
        let parts = [("weight", weight.is_on(device)), ("y", y.is_on(device))];
        check::same_device(&ROW, device, &parts)?;
        if weight.shape().size_n != size[1] {
            let found = format!("{} columns", weight.shape().size_n);
            return Err(ROW.refuse("weight", found, format!("{}, as the part has", size[1])));
        }
        if y.len() != size[0] * size[1] {
            return Err(ROW.refuse("y", format!("{} elements", y.len()), format!("{size:?}")));
        }
        Ok(Self {
            bias: weight.bias.as_ref().into(),
            global_scale: weight.global_scale.as_ref().into(),
            y: y.into(),
            size,
            ..Self::none(check::is_bf16(&ROW, "dtype", weight.dtype())?)
        })
    }
}

/// Launches the kernel on the sums of this many ranks.
pub(super) fn add(
    device: &Device,
    count: usize,
    shots: u32,
    ranks: Ranks,
    addition: Addition,
) -> Result<(), AccelError> {
    let Addition { is_bf16, bias, global_scale, y, size, capacity, limit_ms } = addition;
    // M was below 2^31 in the product.
    let [size_m, size_n] = size.map(|size| size as u32);
    // y has the elements of the parts, in rows of N, a multiple of 64, or there are none.
    let arguments =
        AddArguments { ranks, bias, global_scale, y, size_m, size_n, capacity, limit_ms };
    let parameters = [is_bf16, ("RANKS", count as u32), ("SHOTS", shots)];
    let grid = match shots {
        // Up to a thread for each four outputs: no block waits for one of another rank.
        GATHERED => {
            let blocks = (size.iter().product::<usize>() / 4).div_ceil(THREADS as usize);
            Grid::new((blocks.clamp(1, 4096) as u32, 1, 1), (THREADS, 1, 1))
        }
        _ => grid(count, size.iter().product()),
    };
    KERNEL.launch(device, &parameters, grid, arguments)
}

/// y `[M, N]` of the f32 sums `[ranks, M, N]` of all ranks, in order of rank, that any library has copied here:
/// their tree, the global scale, the bias and one rounding, as [`Rank::add`](super::Rank::add). `weight` is a rank's
/// part ([`MarlinWeight::of_part`]), of any rank.
///
/// # Errors
/// [`AccelError::Argument`] for a weight without a split, for sums and a y of other sizes, and for memory of another
/// device; those of preparing and running a kernel.
pub fn add_gathered(
    device: &Device,
    weight: &MarlinWeight,
    sums: &Buffer<f32>,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    check::same_device(&ROW, device, &[("sums", sums.is_on(device))])?;
    let Some(split) = weight.split() else {
        let expected = "a part of the model's k: MarlinWeight::of_part";
        return Err(ROW.refuse("weight", "no split", expected));
    };
    if sums.len() != split.ranks() * y.len() {
        let expected = format!("[{}, M, N], of y {} elements", split.ranks(), y.len());
        return Err(ROW.refuse("sums", format!("{} elements", sums.len()), expected));
    }
    let size_n = weight.shape().size_n;
    let size_m = check::rows(&ROW, "y", y.len(), size_n)?;
    let addition = Addition::new(device, weight, [size_m as usize, size_n], y)?;
    add_at(device, split.ranks(), sums.address(), addition)
}

/// Adds the sums of this many ranks from `address` on, one rank's after the other's.
pub(super) fn add_at(
    device: &Device,
    ranks: usize,
    address: u64,
    addition: Addition,
) -> Result<(), AccelError> {
    let bytes = addition.len() as u64 * 4;
    let mut parts = [Pointer::NULL; MOST_RANKS];
    for (rank, part) in parts.iter_mut().enumerate().take(ranks) {
        *part = Pointer::new(address + rank as u64 * bytes);
    }
    add(device, ranks, GATHERED, Ranks { parts, ..Ranks::default() }, addition)
}

/// Returns an error unless the weight is the part of that rank.
pub(super) fn check_part(
    weight: &MarlinWeight,
    [rank, ranks]: [usize; 2],
) -> Result<(), AccelError> {
    let split = weight.split();
    if split.is_some_and(|split| split.rank() == rank && split.ranks() == ranks) {
        return Ok(());
    }
    let expected = format!("the part of rank {rank} of {ranks}: MarlinWeight::of_part");
    Err(ROW.refuse("weight", format!("{split:?}"), expected))
}

/// M and N of x · W; an error for more outputs than there is room for.
pub(super) fn product_size(
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    capacity: usize,
) -> Result<[usize; 2], AccelError> {
    let shape = weight.shape();
    let size = [x.len() / shape.size_k, shape.size_n];
    let elements = size[0] * size[1];
    if elements > capacity {
        return Err(ROW.refuse("outputs", elements, format!("at most {capacity}")));
    }
    Ok(size)
}
