//! Row-parallel products over tensor-parallel ranks, with the bits of one device.
//!
//! Each rank multiplies its part of k into memory that all ranks read, and [`Rank::add`] adds the parts by
//! the upper levels of version 2's tree. The order of additions follows from the model's K alone, so that 1,
//! 2, 4 and 8 ranks give the same bits.
//!
//! ```no_run
//! # use marlinspike_accel::{AccelError, Device, memory::Buffer, ops::{MarlinWeight, ranks::Rank}};
//! # fn layer(devices: &[Device], weights: &[MarlinWeight], x: &[Buffer<u16>], y: &mut [Buffer<u16>],
//! #          size_m: usize, size_n: usize) -> Result<(), AccelError> {
//! let devices: Vec<&Device> = devices.iter().collect();
//! let mut ranks = Rank::of_process(&devices, size_m * size_n)?;
//! for (r, rank) in ranks.iter_mut().enumerate() {
//!     rank.multiply(devices[r], &x[r], &weights[r])?;
//! }
//! for (r, rank) in ranks.iter_mut().enumerate() {
//!     rank.add(devices[r], &weights[r], &mut y[r])?;
//! }
//! ranks.iter().enumerate().try_for_each(|(r, rank)| rank.check(devices[r]))
//! # }
//! ```

use std::{sync::Arc, time::Duration};

use cudarc::driver::CudaStream;

use super::{
    check,
    gemm::{MarlinWeight, Output, PeerSums, part},
};
use crate::{
    device::{Device, failed},
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, Ranks, arguments},
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
    raw::peers::{PeerMemory, enable_access},
};

/// Upstream: the all-reduce behind a `RowParallelLinear`, whose bits depend on the number of ranks.
pub(crate) static ROW: Row = Row {
    name: "add_ranks",
    source: "add_ranks",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| {
        Ok(lattice(&[("IS_BF16", &[0, 1]), ("RANKS", &[1, 2, 4, 8]), ("IS_TWO_SHOT", &[0, 1])]))
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

/// Ranks at most: leaves of the canonical schedule.
const MOST_RANKS: usize = 8;
/// `RANK_BLOCKS` of `ranks.cuh`.
const RANK_BLOCKS: usize = 64;
/// Few enough for eight ranks on one GPU of 64 multiprocessors.
const THREADS: u32 = 256;
/// How long a rank waits for others.
const LIMIT: Duration = Duration::from_secs(10);
/// Elements up to which every rank adds everything: exchanging shares takes a second barrier. By the bytes of each on the
/// wire at 373 GB/s and 3 µs for a barrier; on one device it makes no difference.
const ONE_SHOT_ELEMENTS: [usize; 4] = [usize::MAX, 900_000, 200_000, 40_000];

/// One rank's memory that others access.
struct Memory {
    /// `[2, capacity]` f32.
    parts: PeerMemory,
    /// `[capacity]` of 16 bits.
    outputs: PeerMemory,
    flags: PeerMemory,
    calls: PeerMemory,
    status: PeerMemory,
    stream: Arc<CudaStream>,
}

/// The memory of all ranks, freed when none of them uses it.
struct Shared {
    capacity: usize,
    ranks: Vec<Memory>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Any rank's kernels may use any rank's memory. A stream that fails has no kernels left.
        for memory in &self.ranks {
            let _ = memory.stream.synchronize();
        }
    }
}

/// One of the ranks that share row-parallel products.
///
/// Each call of [`multiply`](Self::multiply) and [`add`](Self::add) is one on every rank, in the same order and
/// of the same sizes. Recorded launches hold an even number of calls: two buffers take turns, so that one
/// barrier a call is enough.
pub struct Rank {
    shared: Arc<Shared>,
    rank: usize,
    /// Calls so far, modulo 2.
    turn: usize,
    /// M and N of the part that waits to be added.
    multiplied: Option<[usize; 2]>,
    limit: Duration,
    /// Whether shares are exchanged; `None`: by size.
    two_shot: Option<bool>,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.shared.ranks.len())
    }
}

/// What a call adds to the ranks' sums, and where.
struct Addition {
    bias: Pointer,
    global_scale: Pointer,
    y: Pointer,
    /// M, N.
    size: [usize; 2],
}

impl Addition {
    const NONE: Self =
        Self { bias: Pointer::NULL, global_scale: Pointer::NULL, y: Pointer::NULL, size: [0, 64] };
}

impl Rank {
    /// Ranks of this process, one for each of 1, 2, 4 or 8 devices, for products of up to `capacity`
    /// outputs. Several may be on one GPU, each with a [`Device`] of its own. Takes 10 bytes for each
    /// output on every device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of devices; [`AccelError::Driver`] where devices have
    /// too little memory, or no access to each other's.
    pub fn of_process(devices: &[&Device], capacity: usize) -> Result<Vec<Self>, AccelError> {
        if !matches!(devices.len(), 1 | 2 | 4 | 8) {
            return Err(ROW.refuse("devices", devices.len(), "1, 2, 4 or 8"));
        }
        for from in devices {
            for to in devices {
                enable_access(from.context(), to.context())
                    .map_err(failed("cuCtxEnablePeerAccess"))?;
            }
        }
        let memory = |device: &&Device| -> Result<Memory, AccelError> {
            let zeroed = |bytes: Option<usize>| match bytes {
                Some(bytes) => {
                    PeerMemory::zeroed(device.context(), bytes).map_err(failed("cuMemAlloc"))
                }
                None => Err(ROW.refuse("capacity", capacity, "fewer than 2^61 outputs")),
            };
            Ok(Memory {
                parts: zeroed(capacity.checked_mul(8))?,
                outputs: zeroed(capacity.checked_mul(2))?,
                flags: zeroed(Some(2 * RANK_BLOCKS * MOST_RANKS * 4))?,
                calls: zeroed(Some(RANK_BLOCKS * 4))?,
                status: zeroed(Some(4))?,
                stream: device.stream().clone(),
            })
        };
        let all = devices.iter().map(memory).collect::<Result<_, _>>()?;
        let shared = Arc::new(Shared { capacity, ranks: all });
        let of = |rank| Self {
            shared: shared.clone(),
            rank,
            turn: 0,
            multiplied: None,
            limit: LIMIT,
            two_shot: None,
        };
        let ranks: Vec<Self> = (0..devices.len()).map(of).collect();
        // Loading a module may wait for the device, which may wait for a rank whose launch comes later.
        for (rank, device) in ranks.iter().zip(devices) {
            for (is_bf16, two_shot) in [(0, false), (0, true), (1, false), (1, true)] {
                rank.launch(device, ("IS_BF16", is_bf16), two_shot, Addition::NONE)?;
            }
        }
        Ok(ranks)
    }

    /// The same rank, waiting so long for others instead of 10 seconds.
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// The same rank, with or without an exchange of shares whatever the size. All ranks must agree. The
    /// bits are the same.
    pub fn with_two_shot(self, two_shot: bool) -> Self {
        Self { two_shot: Some(two_shot), ..self }
    }

    /// Starts a call: the f32 sums of x `[M, K / ranks]` · W in shared memory, by
    /// [`marlin_gemm_part`](super::gemm::marlin_gemm_part).
    ///
    /// # Errors
    /// As that function; [`AccelError::Argument`] also for a weight that is not this rank's part, for more
    /// outputs than the capacity, and for a call that was started and not added.
    pub fn multiply(
        &mut self,
        device: &Device,
        x: &Buffer<u16>,
        weight: &MarlinWeight,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        self.check_weight(weight)?;
        let shape = weight.shape();
        if self.multiplied.is_some() {
            return Err(ROW.refuse(
                "call",
                "a part that waits to be added",
                "a call of `add` first",
            ));
        }
        let size = [x.len() / shape.size_k, shape.size_n];
        let elements = size[0] * size[1];
        if elements > self.shared.capacity {
            let expected = format!("at most {}", self.shared.capacity);
            return Err(ROW.refuse("outputs", elements, expected));
        }
        let turn = (self.turn + 1) % 2;
        let parts = &self.shared.ranks[self.rank].parts;
        let address = parts.address() + (turn * self.shared.capacity * 4) as u64;
        let sums = PeerSums { address: Pointer::new(address), len: elements };
        part(device, x, weight, Output::Peer(sums))?;
        self.multiplied = Some(size);
        Ok(())
    }

    /// Ends a call: y `[M, N]`, f16 or bf16 bits, of all ranks' sums, with the weight's global scale and
    /// bias, which every rank's weight has. Waits on the device for all ranks.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight that is not this rank's part or has other columns than the one
    /// multiplied, for a y of another size, and without a call of [`multiply`](Self::multiply); those of preparing and running a kernel. A rank that does not come
    /// is an error of [`check`](Self::check).
    pub fn add(
        &mut self,
        device: &Device,
        weight: &MarlinWeight,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        let parts = [("weight", weight.is_on(device)), ("y", y.is_on(device))];
        check::same_device(&ROW, device, &parts)?;
        self.check_weight(weight)?;
        let Some(size) = self.multiplied else {
            let found = format!("{} elements", y.len());
            return Err(ROW.refuse("y", found, "a call of `multiply` before"));
        };
        if weight.shape().size_n != size[1] {
            let found = format!("{} columns", weight.shape().size_n);
            return Err(ROW.refuse("weight", found, format!("{}, as the part has", size[1])));
        }
        if y.len() != size[0] * size[1] {
            return Err(ROW.refuse("y", format!("{} elements", y.len()), format!("{size:?}")));
        }
        let is_bf16 = check::is_bf16(&ROW, "dtype", weight.dtype())?;
        let (elements, all) = (y.len(), &self.shared.ranks);
        self.multiplied = None;
        if elements == 0 {
            return Ok(());
        }
        self.turn = (self.turn + 1) % 2;
        let bound = ONE_SHOT_ELEMENTS[all.len().ilog2() as usize];
        let two_shot = self.two_shot.unwrap_or(elements > bound);
        let addition = Addition {
            bias: weight.bias.as_ref().into(),
            global_scale: weight.global_scale.as_ref().into(),
            y: y.into(),
            // M was below 2^31 in the product.
            size,
        };
        self.launch(device, is_bf16, two_shot, addition)
    }

    fn launch(
        &self,
        device: &Device,
        is_bf16: Parameter,
        two_shot: bool,
        addition: Addition,
    ) -> Result<(), AccelError> {
        let all = &self.shared.ranks;
        let addresses = |of: fn(&Memory) -> &PeerMemory| {
            let mut pointers = [Pointer::NULL; MOST_RANKS];
            for (pointer, memory) in pointers.iter_mut().zip(all) {
                *pointer = Pointer::new(of(memory).address());
            }
            pointers
        };
        let (own, Addition { bias, global_scale, y, size }) = (&all[self.rank], addition);
        let [size_m, size_n] = size.map(|size| size as u32);
        // y has the elements of this turn's parts, at most the capacity, in rows of N, a multiple of 64, or there are
        // none; every rank's memory is alive as long as a rank is.
        let arguments = AddArguments {
            ranks: Ranks {
                parts: addresses(|memory| &memory.parts),
                outputs: addresses(|memory| &memory.outputs),
                flags: addresses(|memory| &memory.flags),
                calls: Pointer::new(own.calls.address()),
                status: Pointer::new(own.status.address()),
                rank: self.rank as u32,
                turn: self.turn as u32,
            },
            bias,
            global_scale,
            y,
            size_m,
            size_n,
            capacity: self.shared.capacity as u64,
            limit_ms: u32::try_from(self.limit.as_millis()).unwrap_or(u32::MAX),
        };
        let parameters = [is_bf16, ("RANKS", all.len() as u32), ("IS_TWO_SHOT", two_shot.into())];
        let grid = Grid::new((RANK_BLOCKS as u32, 1, 1), (THREADS, 1, 1));
        KERNEL.launch(device, &parameters, grid, arguments)
    }

    /// Waits for the device, and returns an error if a call failed there.
    ///
    /// # Errors
    /// [`AccelError::Ranks`] naming the ranks that did not come to a call in time, or an odd number of
    /// recorded calls. y is undefined then, and the ranks are of no further use. [`AccelError::Driver`].
    pub fn check(&self, device: &Device) -> Result<(), AccelError> {
        self.check_device(device)?;
        device.synchronize()?;
        let status = self.shared.ranks[self.rank].status.first_word();
        let status = status.map_err(failed("cuMemcpyDtoH"))?;
        if status == 0 {
            return Ok(());
        }
        let missing = (0..MOST_RANKS).filter(|rank| status >> rank & 1 == 1).collect();
        Err(AccelError::Ranks { rank: self.rank, missing, odd_calls: status >> MOST_RANKS != 0 })
    }

    /// Returns an error unless the weight is this rank's part.
    fn check_weight(&self, weight: &MarlinWeight) -> Result<(), AccelError> {
        let split = weight.split();
        if split.is_some_and(|split| {
            split.rank() == self.rank && split.ranks() == self.shared.ranks.len()
        }) {
            return Ok(());
        }
        let expected = format!("the part of {self:?}: MarlinWeight::of_part");
        Err(ROW.refuse("weight", format!("{split:?}"), expected))
    }

    /// Returns an error unless `device` is this rank's.
    fn check_device(&self, device: &Device) -> Result<(), AccelError> {
        let is_own = Arc::ptr_eq(&self.shared.ranks[self.rank].stream, device.stream());
        check::same_device(&ROW, device, &[("rank", is_own)])
    }
}
