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
//!
//! Where ranks are decides whose memory they use:
//!
//! | ranks | memory |
//! | --- | --- |
//! | of one process | [`Rank::of_process`] allocates it |
//! | of several processes | [`RankMemory`] allocates it, a [`Handle`] names it in the others: [`Rank::of_processes`] |
//! | of an engine that has memory of all ranks | its addresses: [`Rank::of_addresses`] |
//! | on several machines | NCCL gathers the sums: [`NcclRank`]; or another library: [`add_gathered`] |
//!
//! Experts over ranks give their slots' rows to the token's owner, which adds them in slot order:
//! [`Rank::compute_experts`], [`Rank::add_experts`].
//!
//! A call that waits for other ranks holds thread blocks of its GPU. Calls of several groups of ranks on one
//! GPU must therefore not overlap: issue them on one stream, or one after the other.

mod add;
mod experts;
mod memory;
mod nccl;

use std::{sync::Arc, time::Duration};

use cudarc::driver::CudaStream;

pub(crate) use add::ROW;
pub use add::add_gathered;
use add::{Addition, add, check_part, product_size};
pub(crate) use experts::ROW as MOE;
use experts::Slots;
pub use memory::{Handle, RankMemory};
use memory::{Region, Shared};
pub use nccl::{NCCL_VARIABLE, NcclId, NcclRank};

use super::{
    check,
    gemm::{MarlinWeight, Output, PeerSums, part},
};
use crate::{
    device::Device, error::AccelError, launch::Grid, memory::Buffer, raw::peers::PeerMemory,
};

/// Ranks at most: leaves of the canonical schedule.
const MOST_RANKS: usize = 8;
/// `RANK_BLOCKS` of `ranks.cuh`.
const RANK_BLOCKS: usize = 64;
/// Threads of a block. Few enough for eight ranks that share one GPU of 132 multiprocessors.
const THREADS: u32 = 256;
/// Threads where two ranks add more than `MANY_ELEMENTS`: enough bytes in flight for one wire.
const MANY_THREADS: u32 = 512;
const MANY_ELEMENTS: usize = 2_000_000;
/// How long a rank waits for others.
const LIMIT: Duration = Duration::from_secs(10);
/// Elements up to which every rank adds everything: exchanging shares takes a second barrier. Measured on 2 and 4 H200s
/// (`rank_times`); of 8 ranks estimated by the bytes on the wire. On one device it makes no difference.
const ONE_SHOT_ELEMENTS: [usize; 4] = [usize::MAX, 900_000, 130_000, 40_000];

/// One of the ranks that share row-parallel products.
///
/// Each call of [`multiply`](Self::multiply) and [`add`](Self::add), and of those for experts, is one on every
/// rank, in the same order and of the same sizes. Recorded launches hold an even number of calls: two buffers
/// take turns, so that one barrier a call is enough.
pub struct Rank {
    shared: Arc<Shared>,
    stream: Arc<CudaStream>,
    rank: usize,
    /// Calls so far, modulo 2.
    turn: usize,
    started: Option<Started>,
    limit: Duration,
    /// Whether shares are exchanged; `None`: by size.
    two_shot: Option<bool>,
}

/// What waits to be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Started {
    /// The sums `[M, N]` of a product.
    Product([usize; 2]),
    /// The slots of an expert layer.
    Experts(Slots),
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.shared.ranks())
    }
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
        let shared = Arc::new(Shared::of_process(devices, Region::new(capacity)?)?);
        let new = |(rank, &device)| Self::new(device, shared.clone(), rank);
        devices.iter().enumerate().map(new).collect()
    }

    /// This process's rank of several, each in a process of its own on this machine; `handles` are of all
    /// ranks, in order of rank. Any channel may have carried them.
    ///
    /// Dropping it waits for the other processes, up to 10 seconds, until none of them uses this one's memory
    /// any more; else that stays allocated.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for handles of other numbers of ranks or outputs, in another order, or of less
    /// memory than they say; [`AccelError::Driver`] for one that the driver does not open: of memory that is no
    /// longer there, of this process, or of a device that this one cannot access.
    pub fn of_processes(
        device: &Device,
        memory: RankMemory,
        handles: &[Handle],
    ) -> Result<Self, AccelError> {
        let (shared, rank) = Shared::of_processes(device, memory, handles)?;
        Self::new(device, Arc::new(shared), rank)
    }

    /// Bytes of the memory of one rank that [`Rank::of_addresses`] takes.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for more outputs than there are addresses.
    pub fn bytes(capacity: usize) -> Result<usize, AccelError> {
        Ok(Region::new(capacity)?.bytes)
    }

    /// A rank in memory of each rank that something else keeps, zeros.
    pub(crate) fn borrowed(
        device: &Device,
        rank: usize,
        memory: Vec<PeerMemory>,
        capacity: usize,
    ) -> Result<Self, AccelError> {
        memory::check_ranks("addresses", memory.len())?;
        if rank >= memory.len() {
            return Err(ROW.refuse("rank", rank, format!("below {}", memory.len())));
        }
        if let Some(wrong) =
            memory.iter().map(PeerMemory::address).find(|&a| a == 0 || a % 256 != 0)
        {
            return Err(ROW.refuse("address", format!("{wrong:#x}"), "a multiple of 256"));
        }
        let shared = Shared::borrowed(device, Region::new(capacity)?, memory);
        Self::new(device, Arc::new(shared), rank)
    }

    fn new(device: &Device, shared: Arc<Shared>, rank: usize) -> Result<Self, AccelError> {
        let stream = device.stream().clone();
        let (turn, started, limit, two_shot) = (0, None, LIMIT, None);
        let this = Self { shared, stream, rank, turn, started, limit, two_shot };
        // Loading a module may wait for the device, which may wait for a rank whose launch comes later.
        for is_bf16 in [0, 1].map(|is_bf16| ("IS_BF16", is_bf16)) {
            for shots in [1, 2] {
                this.launch(device, shots, Addition::none(is_bf16))?;
                this.load_sum(device, is_bf16, shots)?;
            }
        }
        Ok(this)
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
        check_part(weight, [self.rank, self.shared.ranks()])?;
        self.check_idle()?;
        let size = product_size(x, weight, self.shared.region.capacity)?;
        let address = self.shared.parts(self.rank, (self.turn + 1) % 2);
        let sums = PeerSums { address, len: size[0] * size[1] };
        part(device, x, weight, Output::Peer(sums))?;
        self.started = Some(Started::Product(size));
        Ok(())
    }

    /// Starts a call on sums that kernels of the caller write, in place of [`multiply`](Self::multiply): f32 `[M, N]`
    /// at the returned address of this device's memory, by work that is on this device's stream before [`add`](Self::add).
    /// The address is that of this call alone.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for more outputs than the capacity, and for a call that was started and not added.
    pub fn start_sums(&mut self, device: &Device, size: [usize; 2]) -> Result<u64, AccelError> {
        self.check_device(device)?;
        self.check_idle()?;
        let capacity = self.shared.region.capacity;
        if size[0].checked_mul(size[1]).is_none_or(|outputs| outputs > capacity) {
            let found = format!("[{}, {}] outputs", size[0], size[1]);
            return Err(ROW.refuse("size", found, format!("at most {capacity}")));
        }
        self.started = Some(Started::Product(size));
        Ok(self.shared.parts(self.rank, (self.turn + 1) % 2).address())
    }

    /// Ends a call: y `[M, N]`, f16 or bf16 bits, of all ranks' sums, with the weight's global scale and
    /// bias, which every rank's weight has. Waits on the device for all ranks.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight that is not this rank's part or has other columns than the one
    /// multiplied, for a y of another size, and without a call of [`multiply`](Self::multiply); those of
    /// preparing and running a kernel. A rank that does not come is an error of [`check`](Self::check).
    pub fn add(
        &mut self,
        device: &Device,
        weight: &MarlinWeight,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        let multiplied = match self.started {
            Some(Started::Product(size)) => Some(size),
            _ => None,
        };
        let place = [self.rank, self.shared.ranks()];
        let addition = Addition::of_call(device, weight, place, multiplied, y)?;
        self.started = None;
        let elements = addition.len();
        if elements == 0 {
            return Ok(());
        }
        self.turn = (self.turn + 1) % 2;
        let bound = ONE_SHOT_ELEMENTS[self.shared.ranks().ilog2() as usize];
        let shots = 1 + u32::from(self.two_shot.unwrap_or(elements > bound));
        self.launch(device, shots, addition)
    }

    fn launch(&self, device: &Device, shots: u32, addition: Addition) -> Result<(), AccelError> {
        let ranks = self.shared.arguments(self.rank, self.turn);
        // The parts of this turn have room for y; every rank's memory is alive as long as a rank is.
        let addition = addition.in_turns(self.shared.region.capacity as u64, self.limit_ms());
        add(device, self.shared.ranks(), shots, ranks, addition)
    }

    fn limit_ms(&self) -> u32 {
        u32::try_from(self.limit.as_millis()).unwrap_or(u32::MAX)
    }

    /// Waits for the device, and returns an error if a call failed there.
    ///
    /// # Errors
    /// [`AccelError::Ranks`] naming the ranks that did not come to a call in time, or an odd number of
    /// recorded calls. y is undefined then, and the ranks are of no further use. [`AccelError::Driver`].
    pub fn check(&self, device: &Device) -> Result<(), AccelError> {
        self.check_device(device)?;
        device.synchronize()?;
        let status = self.shared.status(self.rank)?;
        if status == 0 {
            return Ok(());
        }
        let missing = (0..MOST_RANKS).filter(|rank| status >> rank & 1 == 1).collect();
        Err(AccelError::Ranks { rank: self.rank, missing, odd_calls: status >> MOST_RANKS != 0 })
    }

    /// Returns an error if a call was started and not added.
    fn check_idle(&self) -> Result<(), AccelError> {
        match self.started {
            None => Ok(()),
            Some(started) => {
                let found = format!("{started:?}, not added");
                Err(ROW.refuse("call", found, "a call of `add` or `add_experts` first"))
            }
        }
    }

    /// Returns an error unless `device` is this rank's.
    fn check_device(&self, device: &Device) -> Result<(), AccelError> {
        check_stream(&self.stream, device)
    }
}

/// Returns an error unless a rank on this stream is the device's.
fn check_stream(stream: &Arc<CudaStream>, device: &Device) -> Result<(), AccelError> {
    let is_own = Arc::ptr_eq(stream, device.stream());
    check::same_device(&ROW, device, &[("rank", is_own)])
}

/// The thread blocks of a kernel that waits for other ranks: the same on all of them.
fn grid(ranks: usize, elements: usize) -> Grid {
    let threads = if ranks == 2 && elements > MANY_ELEMENTS { MANY_THREADS } else { THREADS };
    Grid::new((RANK_BLOCKS as u32, 1, 1), (threads, 1, 1))
}
