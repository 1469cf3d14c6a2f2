//! NCCL's C interface, loaded from a library that is named at run time: a communicator that never waits without limit.
//!
//! Not cudarc's binding: that one panics where the library is absent, and does not try the name that NVIDIA's packages
//! give it.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaStream, sys};

use super::{peers::PeerMemory, words};

type Handle = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclFloat32`.
const FLOAT32: c_int = 7;

/// `ncclUniqueId`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclConfig_t` as of NCCL 2.14, which later versions extend; they read `size`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// NCCL's functions. The library is never unloaded: its threads outlive the calls that start them.
pub(crate) struct Library {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *const Config) -> Status,
    all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        Handle,
        sys::CUstream,
    ) -> Status,
    async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    finalize: unsafe extern "C" fn(Handle) -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    abort: unsafe extern "C" fn(Handle) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Library {
    /// Loads the library; the error is the loader's reason or names the absent symbol.
    pub(crate) fn open(name: &OsStr) -> Result<Self, String> {
        // SAFETY: loading runs the library's initializers; NCCL's may run on any thread. A caller who names another
        // library runs that library's initializers, as with LD_PRELOAD.
        let library = unsafe { libloading::Library::new(name) }.map_err(|e| words(&e))?;
        let library = Box::leak(Box::new(library));
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field's type is the signature that nccl.h documents for this name, unchanged since NCCL
                // 2.14; the library stays.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|e| words(&e))?
            };
        }
        Ok(Self {
            unique_id: symbol!("ncclGetUniqueId"),
            init: symbol!("ncclCommInitRankConfig"),
            all_gather: symbol!("ncclAllGather"),
            async_error: symbol!("ncclCommGetAsyncError"),
            finalize: symbol!("ncclCommFinalize"),
            destroy: symbol!("ncclCommDestroy"),
            abort: symbol!("ncclCommAbort"),
            error_string: symbol!("ncclGetErrorString"),
        })
    }

    /// What names a group of ranks.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to a live id.
        self.check(unsafe { (self.unique_id)(&mut id) })?;
        Ok(id)
    }

    fn check(&self, status: Status) -> Result<(), String> {
        if matches!(status, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the function takes any status and returns a constant text.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// One rank of a group. Its calls return at once or within a limit.
pub(crate) struct Communicator {
    library: &'static Library,
    handle: Handle,
    /// Rank, ranks.
    place: [c_int; 2],
    limit: Duration,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time; `&mut self` ensures that.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the group; the stream's device is current then.
    pub(crate) fn join(
        library: &'static Library,
        id: UniqueId,
        place: [c_int; 2],
        stream: &Arc<CudaStream>,
        limit: Duration,
    ) -> Result<Self, String> {
        stream.context().bind_to_thread().map_err(|error| error.to_string())?;
        let config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            // 2.14.0.
            version: 21_400,
            blocking: 0,
        };
        let mut this = Self { library, handle: ptr::null_mut(), place, limit };
        let [rank, ranks] = place;
        // SAFETY: a context is current; the pointers are to live values, and NCCL reads as much of the configuration as
        // its size says.
        let status = unsafe { (this.library.init)(&mut this.handle, ranks, id, rank, &config) };
        this.library.check(status)?;
        this.settle()?;
        Ok(this)
    }

    /// Waits until NCCL's work on the host is done.
    fn settle(&mut self) -> Result<(), String> {
        let begin = Instant::now();
        loop {
            let mut status = SUCCESS;
            // SAFETY: the communicator is alive, and the pointer is to a live status.
            self.library.check(unsafe { (self.library.async_error)(self.handle, &mut status) })?;
            self.library.check(status)?;
            if status == SUCCESS {
                return Ok(());
            }
            if begin.elapsed() > self.limit {
                self.give_up();
                return Err(format!("found no answer of other ranks in {:?}", self.limit));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Starts a gather of `count` floats of each rank in `all`, where this rank's are in their place.
    pub(crate) fn gather(
        &mut self,
        all: &PeerMemory,
        count: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<(), String> {
        let [rank, ranks] = self.place.map(|place| place as usize);
        assert!(
            all.bytes() / 4 / ranks >= count,
            "{} bytes for {ranks} times {count}",
            all.bytes()
        );
        if self.handle.is_null() {
            return Err("found a communicator that was given up".into());
        }
        stream.context().bind_to_thread().map_err(|error| error.to_string())?;
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let (own, all) = (at(all.address() + (4 * rank * count) as u64), at(all.address()));
        // SAFETY: the memory has the floats of all ranks, and freeing it waits for the device; the communicator and
        // the stream are alive.
        let status = unsafe {
            (self.library.all_gather)(own, all, count, FLOAT32, self.handle, stream.cu_stream())
        };
        self.library.check(status)?;
        self.settle()
    }

    /// Waits for the stream, which may wait for other ranks.
    pub(crate) fn wait(&mut self, stream: &Arc<CudaStream>) -> Result<(), String> {
        stream.context().bind_to_thread().map_err(|error| error.to_string())?;
        let begin = Instant::now();
        loop {
            // SAFETY: the stream is alive.
            match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                status => return status.result().map_err(|error| error.to_string()),
            }
            if begin.elapsed() > self.limit {
                self.give_up();
                return Err(format!("found no answer of other ranks in {:?}", self.limit));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Ends all work of the communicator, whatever other ranks do.
    fn give_up(&mut self) {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: the communicator is alive, and is not used again.
            unsafe { (self.library.abort)(handle) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        // SAFETY: the communicator is alive.
        let status = unsafe { (self.library.finalize)(self.handle) };
        if self.library.check(status).is_ok() && self.settle().is_ok() {
            // SAFETY: the communicator is alive, and is not used again.
            unsafe { (self.library.destroy)(self.handle) };
        } else {
            self.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_and_other_libraries_are_errors_that_say_so() {
        let absent = Library::open(OsStr::new("libabsent-nccl.so.2")).err().unwrap();
        assert!(absent.contains("libabsent-nccl.so.2"), "{absent}");
        #[cfg(target_os = "linux")]
        {
            let other = Library::open(OsStr::new("libc.so.6")).err().unwrap();
            assert!(other.contains("ncclGetUniqueId"), "{other}");
        }
    }
}
