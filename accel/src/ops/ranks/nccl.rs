//! Ranks on several machines: NCCL gathers the f32 sums of all ranks on each, and each adds them by the same tree.
//!
//! NCCL only moves bits here. Its own sums depend on the number of ranks, sizes and algorithms; these do not.

use std::{
    env,
    ffi::OsString,
    sync::{Arc, OnceLock},
    time::Duration,
};

use cudarc::driver::CudaStream;

use super::{
    ROW,
    add::{Addition, add_at, check_part, product_size},
    check_stream,
    memory::check_ranks,
};
use crate::{
    device::{self, Device},
    error::AccelError,
    launch::Pointer,
    memory::Buffer,
    ops::gemm::{MarlinWeight, Output, PeerSums, part},
    raw::{
        nccl::{Communicator, Library, UniqueId},
        peers::PeerMemory,
    },
};

/// Names NCCL's library, or gives its path.
pub const NCCL_VARIABLE: &str = "MARLINSPIKE_NCCL";

/// The names that NVIDIA's packages give the library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The library, opened once.
fn library() -> Result<&'static Library, AccelError> {
    static LIBRARY: OnceLock<Result<Library, AccelError>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<Library, AccelError> {
    let named = env::var_os(NCCL_VARIABLE).map(|name| vec![name]);
    let names = named.unwrap_or_else(|| NAMES.map(OsString::from).to_vec());
    let mut first = None;
    for name in names {
        match Library::open(&name) {
            Ok(library) => return Ok(library),
            Err(reason) => {
                let library = name.to_string_lossy().into_owned();
                first.get_or_insert(AccelError::NcclMissing { library, reason });
            }
        }
    }
    Err(first.expect("a name to try"))
}

fn failed(call: &'static str) -> impl FnOnce(String) -> AccelError {
    move |reason| AccelError::Nccl { call, reason }
}

/// Names a group of ranks. One rank makes it, and any channel brings it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclId(UniqueId);

impl NcclId {
    /// Of a new group.
    ///
    /// # Errors
    /// [`AccelError::NcclMissing`]; [`AccelError::Nccl`].
    pub fn new() -> Result<Self, AccelError> {
        library()?.unique_id().map(Self).map_err(failed("ncclGetUniqueId"))
    }

    /// NCCL's bytes.
    pub const fn to_bytes(&self) -> [u8; 128] {
        self.0.0
    }

    /// The id of NCCL's bytes.
    pub const fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(UniqueId(bytes))
    }
}

/// A rank that gathers the others' sums by NCCL, on any machine. NCCL takes each rank on a GPU of its own.
pub struct NcclRank {
    communicator: Communicator,
    /// `[ranks, M, N]`
    sums: PeerMemory,
    capacity: usize,
    stream: Arc<CudaStream>,
    rank: usize,
    ranks: usize,
    /// M, N.
    multiplied: Option<[usize; 2]>,
}

impl std::fmt::Debug for NcclRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} by NCCL", self.rank, self.ranks)
    }
}

impl NcclRank {
    /// `rank` of 1, 2, 4 or 8 `ranks`, for products of up to `capacity` outputs. Waits for the other ranks, up to
    /// `limit`, as [`check`](Self::check) does.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of ranks; [`AccelError::NcclMissing`]; [`AccelError::Nccl`], also
    /// where a rank does not come in time; [`AccelError::Driver`].
    pub fn new(
        device: &Device,
        id: NcclId,
        [rank, ranks]: [usize; 2],
        capacity: usize,
        limit: Duration,
    ) -> Result<Self, AccelError> {
        check_ranks("ranks", ranks)?;
        if rank >= ranks {
            return Err(ROW.refuse("rank", rank, format!("below {ranks}")));
        }
        let Some(len) = capacity.checked_mul(ranks).filter(|&len| len < usize::MAX / 8) else {
            return Err(ROW.refuse("capacity", capacity, "fewer than 2^57 outputs"));
        };
        let sums = PeerMemory::zeroed(device.context(), 4 * len.max(1));
        let (sums, stream) = (sums.map_err(device::failed("cuMemAlloc"))?, device.stream().clone());
        // Both are at most 8.
        let place = [rank as i32, ranks as i32];
        let communicator = Communicator::join(library()?, id.0, place, &stream, limit)
            .map_err(failed("ncclCommInitRankConfig"))?;
        Ok(Self { communicator, sums, capacity, stream, rank, ranks, multiplied: None })
    }

    /// As [`Rank::multiply`](super::Rank::multiply).
    ///
    /// # Errors
    /// As that.
    pub fn multiply(
        &mut self,
        device: &Device,
        x: &Buffer<u16>,
        weight: &MarlinWeight,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        check_part(weight, [self.rank, self.ranks])?;
        if self.multiplied.is_some() {
            let expected = "a call of `add` first";
            return Err(ROW.refuse("call", "a part that waits to be added", expected));
        }
        let size = product_size(x, weight, self.capacity)?;
        let len = size[0] * size[1];
        let address = Pointer::new(self.sums.address() + (4 * self.rank * len) as u64);
        part(device, x, weight, Output::Peer(PeerSums { address, len }))?;
        self.multiplied = Some(size);
        Ok(())
    }

    /// As [`Rank::add`](super::Rank::add).
    ///
    /// # Errors
    /// As that; [`AccelError::Nccl`].
    pub fn add(
        &mut self,
        device: &Device,
        weight: &MarlinWeight,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        let place = [self.rank, self.ranks];
        let addition = Addition::of_call(device, weight, place, self.multiplied, y)?;
        self.multiplied = None;
        let len = addition.len();
        if len == 0 {
            return Ok(());
        }
        let gathered = self.communicator.gather(&self.sums, len, &self.stream);
        gathered.map_err(failed("ncclAllGather"))?;
        add_at(device, self.ranks, self.sums.address(), addition)
    }

    /// Waits for the device, and returns an error if a rank did not come in time or a call failed.
    ///
    /// # Errors
    /// [`AccelError::Nccl`]: y is undefined then, and the rank is of no further use. [`AccelError::Driver`].
    pub fn check(&mut self, device: &Device) -> Result<(), AccelError> {
        self.check_device(device)?;
        self.communicator.wait(&self.stream).map_err(failed("ncclAllGather"))?;
        device.synchronize()
    }

    fn check_device(&self, device: &Device) -> Result<(), AccelError> {
        check_stream(&self.stream, device)
    }
}
