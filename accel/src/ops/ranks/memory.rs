//! Memory that ranks share, in one process or in several: one region for each rank, on its device.
//!
//! A region holds, each at its place, the flags of the barrier, the count of calls, the status, the ranks that have left,
//! f32 sums of two calls in turn, and 16-bit outputs.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::CudaStream;
use sha2::{Digest, Sha256};

use super::{LIMIT, MOST_RANKS, RANK_BLOCKS, ROW};
use crate::{
    device::{Device, failed},
    error::AccelError,
    launch::{Pointer, Ranks},
    raw::peers::{IpcHandle, PeerMemory, enable_access},
};

const CALLS: usize = 2 * RANK_BLOCKS * MOST_RANKS * 4;
const STATUS: usize = CALLS + RANK_BLOCKS * 4;
/// A word for each rank: 1 where it uses this memory no longer.
const LEFT: usize = STATUS + 256;
const PARTS: usize = 8192;
const _: () = assert!(LEFT + MOST_RANKS * 4 <= PARTS);

/// Sizes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    /// f32 sums of a call: a multiple of 64, so that those of both turns are aligned.
    pub(super) capacity: usize,
    pub(super) bytes: usize,
}

impl Region {
    pub(super) fn new(capacity: usize) -> Result<Self, AccelError> {
        let sizes = || {
            let capacity = capacity.checked_next_multiple_of(64)?;
            Some(Self { capacity, bytes: capacity.checked_mul(10)?.checked_add(PARTS)? })
        };
        sizes().ok_or_else(|| ROW.refuse("capacity", capacity, "fewer than 2^60 outputs"))
    }
}

/// One rank's memory that other processes access, before the ranks know each other.
pub struct RankMemory {
    memory: PeerMemory,
    handle: Handle,
    stream: Arc<CudaStream>,
}

impl fmt::Debug for RankMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {:?}", self.handle)
    }
}

impl RankMemory {
    /// Memory of `rank` among 1, 2, 4 or 8 `ranks`, each in a process of its own, for products of up to
    /// `capacity` outputs. Takes 10 bytes for each output.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of ranks; [`AccelError::Driver`] where the device has too
    /// little memory, or cannot share it.
    pub fn new(
        device: &Device,
        [rank, ranks]: [usize; 2],
        capacity: usize,
    ) -> Result<Self, AccelError> {
        check_ranks("ranks", ranks)?;
        if rank >= ranks {
            return Err(ROW.refuse("rank", rank, format!("below {ranks}")));
        }
        let region = Region::new(capacity)?;
        let memory =
            PeerMemory::zeroed(device.context(), region.bytes).map_err(failed("cuMemAlloc"))?;
        let ipc = memory.handle().map_err(failed("cuIpcGetMemHandle"))?;
        let uuid = device.context().uuid().map_err(failed("cuDeviceGetUuid"))?;
        let device_uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
        let handle = Handle { region, rank, ranks, device_uuid, ipc };
        Ok(Self { memory, handle, stream: device.stream().clone() })
    }

    /// What the other ranks' processes need to open it.
    pub fn handle(&self) -> Handle {
        self.handle
    }
}

/// Names a rank's memory in other processes of the same machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    region: Region,
    rank: usize,
    ranks: usize,
    device_uuid: [u8; 16],
    ipc: IpcHandle,
}

/// Of the bytes of a handle; the last one is the version of a region's layout.
const MAGIC: [u8; 8] = *b"MSRANKS\x01";

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { region, rank, ranks, device_uuid, .. } = self;
        let uuid = u128::from_be_bytes(*device_uuid);
        write!(f, "rank {rank} of {ranks}, {} bytes on device {uuid:032x}", region.bytes)
    }
}

impl Handle {
    /// Length of [`Handle::to_bytes`].
    pub const BYTES: usize = 120;

    /// The handle for any channel between the processes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let Self { region, rank, ranks, device_uuid, ipc } = self;
        let mut bytes = MAGIC.to_vec();
        for number in [region.capacity, region.bytes] {
            bytes.extend((number as u64).to_le_bytes());
        }
        for number in [*rank, *ranks] {
            bytes.extend((number as u32).to_le_bytes());
        }
        bytes.extend(device_uuid);
        bytes.extend(ipc);
        bytes.extend(&Sha256::digest(&bytes)[..8]);
        bytes.try_into().expect("the length of the fields")
    }

    /// The handle of [`Handle::to_bytes`].
    ///
    /// # Errors
    /// [`AccelError::Argument`] for bytes that are no handle, changed on the way, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AccelError> {
        let refuse = |found: String, expected: &str| Err(ROW.refuse("handle", found, expected));
        let Ok(bytes) = <&[u8; Self::BYTES]>::try_from(bytes) else {
            return refuse(format!("{} bytes", bytes.len()), "120 bytes");
        };
        let (magic, version) = (&bytes[..7], bytes[7]);
        if magic != &MAGIC[..7] || version != MAGIC[7] {
            let found = format!("{:?}, version {version}", String::from_utf8_lossy(magic));
            return refuse(found, "\"MSRANKS\", version 1");
        }
        let (body, sum) = bytes.split_at(Self::BYTES - 8);
        if Sha256::digest(body)[..8] != *sum {
            return refuse("changed bytes".into(), "those of Handle::to_bytes");
        }
        let number = |at: usize, len: usize| {
            let mut number = [0; 8];
            number[..len].copy_from_slice(&body[at..at + len]);
            usize::try_from(u64::from_le_bytes(number)).unwrap_or(usize::MAX)
        };
        let handle = Self {
            region: Region { capacity: number(8, 8), bytes: number(16, 8) },
            rank: number(24, 4),
            ranks: number(28, 4),
            device_uuid: body[32..48].try_into().expect("16 bytes"),
            ipc: body[48..112].try_into().expect("64 bytes"),
        };
        if Region::new(handle.region.capacity)? != handle.region || handle.rank >= handle.ranks {
            return refuse(format!("{handle:?}"), "sizes that fit each other");
        }
        Ok(handle)
    }
}

/// The memory of all ranks, given back when no rank of this process uses it.
pub(super) struct Shared {
    pub(super) region: Region,
    /// Of all ranks, in order.
    memory: Vec<PeerMemory>,
    /// Of this process's ranks.
    streams: Vec<Arc<CudaStream>>,
    /// The only rank of this process, where others are in other processes.
    alone: Option<usize>,
}

pub(super) fn check_ranks(what: &'static str, ranks: usize) -> Result<(), AccelError> {
    match ranks {
        1 | 2 | 4 | 8 => Ok(()),
        _ => Err(ROW.refuse(what, ranks, "1, 2, 4 or 8")),
    }
}

impl Shared {
    /// Of ranks in this process, on those devices.
    pub(super) fn of_process(devices: &[&Device], region: Region) -> Result<Self, AccelError> {
        check_ranks("devices", devices.len())?;
        for from in devices {
            for to in devices {
                enable_access(from.context(), to.context())
                    .map_err(failed("cuCtxEnablePeerAccess"))?;
            }
        }
        let memory = |device: &&Device| PeerMemory::zeroed(device.context(), region.bytes);
        let memory = devices.iter().map(memory).collect::<Result<_, _>>();
        let memory = memory.map_err(failed("cuMemAlloc"))?;
        let streams = devices.iter().map(|device| device.stream().clone()).collect();
        Ok(Self { region, memory, streams, alone: None })
    }

    /// Of ranks in several processes. Returns this process's rank, too.
    pub(super) fn of_processes(
        device: &Device,
        own: RankMemory,
        handles: &[Handle],
    ) -> Result<(Self, usize), AccelError> {
        let Handle { rank, ranks, region, .. } = own.handle;
        if !Arc::ptr_eq(&own.stream, device.stream()) {
            return Err(ROW.refuse("memory", "memory of another device", format!("{device:?}")));
        }
        if handles.len() != ranks {
            return Err(ROW.refuse("handles", handles.len(), format!("{ranks}: one of each rank")));
        }
        for (r, handle) in handles.iter().enumerate() {
            let is_own = r != rank || *handle == own.handle;
            if (handle.rank, handle.ranks, handle.region) != (r, ranks, region) || !is_own {
                let expected = format!("rank {r} of {ranks}, {} bytes", region.bytes);
                return Err(ROW.refuse("handle", format!("{handle:?}"), expected));
            }
        }
        let open = |handle: &Handle| {
            let memory = PeerMemory::open(device.context(), handle.ipc).map_err(|error| {
                let reason = format!("{error}: {handle:?}");
                AccelError::Driver { call: "cuIpcOpenMemHandle", reason }
            })?;
            match memory.bytes() < region.bytes {
                true => {
                    let found = format!("{} bytes", memory.bytes());
                    Err(ROW.refuse("handle", found, format!("{handle:?}")))
                }
                false => Ok(memory),
            }
        };
        let mut own = Some(own.memory);
        let memory = handles.iter().map(|handle| match own.take_if(|_| handle.rank == rank) {
            Some(own) => Ok(own),
            None => open(handle),
        });
        let memory = memory.collect::<Result<_, _>>()?;
        let streams = vec![device.stream().clone()];
        Ok((Self { region, memory, streams, alone: Some(rank) }, rank))
    }

    /// Of memory that something else keeps.
    pub(super) fn borrowed(device: &Device, region: Region, memory: Vec<PeerMemory>) -> Self {
        Self { region, memory, streams: vec![device.stream().clone()], alone: None }
    }

    pub(super) fn ranks(&self) -> usize {
        self.memory.len()
    }

    /// The address of a rank's sums of a call.
    pub(super) fn parts(&self, rank: usize, turn: usize) -> Pointer {
        let bytes = PARTS + turn * self.region.capacity * 4;
        Pointer::new(self.memory[rank].address() + bytes as u64)
    }

    /// What kernels of a rank take.
    pub(super) fn arguments(&self, rank: usize, turn: usize) -> Ranks {
        let addresses = |at: usize| {
            let mut pointers = [Pointer::NULL; MOST_RANKS];
            for (pointer, memory) in pointers.iter_mut().zip(&self.memory) {
                *pointer = Pointer::new(memory.address() + at as u64);
            }
            pointers
        };
        let own = |at: usize| Pointer::new(self.memory[rank].address() + at as u64);
        Ranks {
            parts: addresses(PARTS),
            outputs: addresses(PARTS + 8 * self.region.capacity),
            flags: addresses(0),
            calls: own(CALLS),
            status: own(STATUS),
            rank: rank as u32,
            turn: turn as u32,
        }
    }

    /// What went wrong on a rank of this process. Waits for its device.
    pub(super) fn status(&self, rank: usize) -> Result<u32, AccelError> {
        let status = self.memory[rank].words::<1>(STATUS);
        status.map(|[status]| status).map_err(failed("cuMemcpyDtoH"))
    }

    /// Tells the other processes that this one uses their memory no longer, and waits until they no longer use this one's.
    /// False if one does not leave in time.
    fn leave(&self, rank: usize) -> bool {
        for memory in &self.memory {
            let _ = memory.set_word(LEFT + rank * 4, 1);
        }
        let missing = self.status(rank) != Ok(0);
        let limit = if missing { Duration::ZERO } else { LIMIT };
        let begin = Instant::now();
        loop {
            match self.memory[rank].words::<MOST_RANKS>(LEFT) {
                Ok(left) if left[..self.ranks()].iter().all(|&word| word == 1) => return true,
                Ok(_) if begin.elapsed() < limit => std::thread::sleep(Duration::from_millis(1)),
                _ => return false,
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Kernels of any rank may use any rank's memory. A stream that fails has no kernels left.
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
        if let Some(rank) = self.alone
            && !self.leave(rank)
        {
            self.memory[rank].keep();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Handle {
        let region = Region::new(1000).unwrap();
        let ipc = std::array::from_fn(|i| i as u8 ^ 0x5a);
        Handle { region, rank: 1, ranks: 4, device_uuid: [7; 16], ipc }
    }

    #[test]
    fn regions_are_aligned_and_refuse_what_no_address_reaches() {
        // 1000 up to a multiple of 64 is 1024; two f32 and one half of each.
        assert_eq!(Region::new(1000).unwrap(), Region { capacity: 1024, bytes: 8192 + 10_240 });
        assert!(Region::new(usize::MAX).is_err() && Region::new(usize::MAX / 8).is_err());
    }

    #[test]
    fn handles_pass_through_bytes() {
        let (handle, bytes) = (handle(), handle().to_bytes());
        assert_eq!(Handle::from_bytes(&bytes).unwrap(), handle);
        // By the layout that the version means: capacity, bytes, rank, ranks.
        assert_eq!(bytes[..8], *b"MSRANKS\x01");
        assert_eq!(bytes[8..16], 1024u64.to_le_bytes());
        assert_eq!(bytes[16..24], 18_432u64.to_le_bytes());
        assert_eq!(bytes[24..32], [1, 0, 0, 0, 4, 0, 0, 0]);
        assert_eq!((bytes[32], bytes[48], bytes[111]), (7, 0x5a, 63 ^ 0x5a));
    }

    #[test]
    fn wrong_handles_are_refused_by_name() {
        let bytes = handle().to_bytes();
        let refused = |bytes: &[u8]| Handle::from_bytes(bytes).unwrap_err().to_string();
        assert!(refused(&bytes[1..]).contains("119 bytes"), "{}", refused(&bytes[1..]));
        assert!(refused(&[]).contains("0 bytes"));
        for at in 0..bytes.len() {
            for bit in [0, 7] {
                let mut wrong = bytes;
                wrong[at] ^= 1 << bit;
                let text = refused(&wrong);
                let expected = if at < 8 { "version" } else { "changed bytes" };
                assert!(text.contains(expected) && text.contains("handle"), "{at}: {text}");
            }
        }
        // Whole, but of sizes that do not fit.
        for wrong in [
            Handle { rank: 4, ..handle() },
            Handle { region: Region { capacity: 1024, bytes: 64 }, ..handle() },
            Handle { region: Region { capacity: 1000, bytes: 18_192 }, ..handle() },
        ] {
            let text = refused(&wrong.to_bytes());
            assert!(text.contains("fit each other"), "{text}");
        }
    }
}
