//! One GPU.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaStream, DriverError,
        sys::{
            CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute,
            CUresult,
        },
    },
    nvrtc::Ptx,
};
use marlinspike_kernels::Source;

use crate::{
    cache::ModuleCache,
    error::AccelError,
    nvrtc::{Arch, Nvrtc, Parameter},
    operation::{Mutant, Row},
    raw::{
        self,
        scratch::Scratch,
        stream::{SplitTotals, Stream},
    },
};

/// The first driver version that can record programmatic dependent launches: 12.3.
const RECORDS_EARLY_LAUNCHES: i32 = 12_030;

type ModuleKey = (&'static str, Vec<Parameter>);

/// The modules of all devices of one context.
type Modules = Arc<Mutex<HashMap<ModuleKey, Loaded>>>;

/// A module, and the dynamic shared memory that its entry point may use so far.
#[derive(Debug)]
struct Loaded {
    module: Arc<CudaModule>,
    shared_bytes: u32,
}

/// An opened CUDA device, with the modules compiled for it so far.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Stream,
    /// Where [`Device::room`] takes memory from; absent if it allocates.
    scratch: Option<Scratch>,
    name: Arc<str>,
    compute_capability: (u32, u32),
    multiprocessors: u32,
    shared_memory: u32,
    launches_early: bool,
    cache: Arc<ModuleCache>,
    /// Replaces the source of its name.
    wrong_source: Option<&'static Source>,
    nvrtc: Arc<OnceLock<Result<Nvrtc, AccelError>>>,
    modules: Modules,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("compute_capability", &self.compute_capability)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Number of devices.
    ///
    /// # Errors
    /// [`AccelError::NoDriver`] or [`AccelError::NoDevice`] on a machine without a GPU,
    /// [`AccelError::DriverTooOld`], or [`AccelError::Driver`].
    pub fn count() -> Result<usize, AccelError> {
        raw::driver::probe()?;
        cudarc::driver::result::init().map_err(init_error)?;
        let count = CudaContext::device_count().map_err(failed("cuDeviceGetCount"))?;
        match usize::try_from(count) {
            Ok(count @ 1..) => Ok(count),
            _ => Err(AccelError::NoDevice { reason: "the driver reports 0 devices".into() }),
        }
    }

    /// Opens the first device.
    ///
    /// # Errors
    /// As [`Device::open_ordinal`].
    pub fn open() -> Result<Self, AccelError> {
        Self::open_ordinal(0)
    }

    /// Opens the device of that ordinal.
    ///
    /// # Errors
    /// [`AccelError::NoDriver`] or [`AccelError::NoDevice`] on a machine without a GPU,
    /// [`AccelError::Ordinal`], [`AccelError::DriverTooOld`], or [`AccelError::Driver`].
    pub fn open_ordinal(ordinal: usize) -> Result<Self, AccelError> {
        Self::open_with(ordinal, true)
    }

    /// [`Device::open_ordinal`] for [`Device::on_stream`] only: without memory of its own, it computes no product of
    /// many rows itself.
    ///
    /// # Errors
    /// As [`Device::open_ordinal`].
    pub fn open_for_streams(ordinal: usize) -> Result<Self, AccelError> {
        Self::open_with(ordinal, false)
    }

    fn open_with(ordinal: usize, has_own_memory: bool) -> Result<Self, AccelError> {
        let version = raw::driver::probe()?;
        let count = Self::count()?;
        if ordinal >= count {
            return Err(AccelError::Ordinal { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let name = context.name().map_err(failed("cuDeviceGetName"))?;
        let (major, minor) =
            context.compute_capability().map_err(failed("cuDeviceGetAttribute"))?;
        let attribute = |which| {
            context.attribute(which).map(i32::unsigned_abs).map_err(failed("cuDeviceGetAttribute"))
        };
        let compute_capability = (major.unsigned_abs(), minor.unsigned_abs());
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let splits = has_own_memory && Arch::of_device(compute_capability).has_wgmma();
        let split_blocks = if splits { multiprocessors as usize } else { 0 };
        let stream = Stream::only(&context, split_blocks).map_err(failed("cuStreamCreate"))?;
        Ok(Self {
            stream,
            scratch: None,
            name: name.into(),
            compute_capability,
            multiprocessors,
            shared_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            launches_early: (major, minor) >= (9, 0) && version >= RECORDS_EARLY_LAUNCHES,
            context,
            cache: Arc::new(ModuleCache::from_environment()),
            wrong_source: None,
            nvrtc: Arc::default(),
            modules: Modules::default(),
        })
    }

    /// The same device with a mutant of an operation's kernel, for tests of the laws. The mutant's
    /// text is never freed.
    ///
    /// # Errors
    /// [`AccelError::Argument`] unless the operation's source holds the text to change exactly
    /// once.
    pub fn with_mutant(mut self, row: &'static Row, mutant: &Mutant) -> Result<Self, AccelError> {
        let right = row.embedded_source(self.arch())?;
        let Some(wrong) = mutant.text(right) else {
            return Err(row.refuse("mutant", mutant.from, format!("a text of `{}`", right.name)));
        };
        let wrong = Source { name: right.name, text: Box::leak(wrong.into_boxed_str()) };
        self.wrong_source = Some(Box::leak(Box::new(wrong)));
        self.modules = Modules::default();
        Ok(self)
    }

    /// The device's name, as the driver gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's compute capability (major, minor).
    pub fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    /// The architecture that its kernels are compiled for.
    pub(crate) fn arch(&self) -> Arch {
        Arch::of_device(self.compute_capability)
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Bytes of shared memory that one thread block may take.
    pub fn shared_memory(&self) -> u32 {
        self.shared_memory
    }

    /// Whether kernels may start before the previous one is complete.
    pub(crate) fn launches_early(&self) -> bool {
        self.launches_early
    }

    /// Waits until everything launched so far is done.
    ///
    /// # Errors
    /// [`AccelError::Driver`], also for a launch before that failed on the device.
    pub fn synchronize(&self) -> Result<(), AccelError> {
        self.stream.cuda().synchronize().map_err(failed("cuStreamSynchronize"))
    }

    /// The same device on another stream: it shares the modules and waits for nothing.
    pub(crate) fn with_stream(&self, stream: Stream, scratch: Scratch) -> Self {
        Self {
            context: self.context.clone(),
            stream,
            scratch: Some(scratch),
            name: self.name.clone(),
            compute_capability: self.compute_capability,
            multiprocessors: self.multiprocessors,
            shared_memory: self.shared_memory,
            launches_early: self.launches_early,
            cache: self.cache.clone(),
            wrong_source: self.wrong_source,
            nvrtc: self.nvrtc.clone(),
            modules: self.modules.clone(),
        }
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(crate) fn scratch(&self) -> Option<&Scratch> {
        self.scratch.as_ref()
    }

    /// Gives products of many rows memory for their totals.
    pub(crate) fn set_split_totals(&mut self, totals: SplitTotals) {
        self.stream.set_split_totals(totals);
    }

    /// Returns an error while launches are recorded: a module that is not loaded by then cannot be.
    fn check_can_load(&self, row: &Row) -> Result<(), AccelError> {
        let is_capturing = self.scratch.is_some()
            && self.stream.is_capturing().map_err(failed("cuStreamIsCapturing"))?;
        if !is_capturing {
            return Ok(());
        }
        let expected = "a call with the same sizes before the capture";
        Err(row.refuse("kernel", "one that is not loaded, while a graph is captured", expected))
    }

    /// The one stream on which everything runs, in order.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        self.stream.cuda()
    }

    /// The stream's memory for products of many rows; `None` if the device has no kernel for them.
    pub(crate) fn split_totals(&self) -> Option<&SplitTotals> {
        self.stream.split_totals()
    }

    /// The entry point of the operation's source, compiled for this device under these parameters, for
    /// launches with so much dynamic shared memory. Each is compiled once.
    pub(crate) fn function(
        &self,
        row: &Row,
        parameters: &[Parameter],
        shared_bytes: u32,
    ) -> Result<CudaFunction, AccelError> {
        let needed = row.needs.compute_capability;
        if self.compute_capability < needed {
            let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
            return Err(AccelError::Capability {
                operation: row.name,
                device: self.name.to_string(),
                found: dotted(self.compute_capability),
                expected: dotted(needed),
            });
        }
        let arch = self.arch();
        let source = match self.wrong_source.filter(|wrong| wrong.name == row.source) {
            Some(wrong) => wrong,
            None => row.embedded_source(arch)?,
        };
        // A panic elsewhere cannot leave the map half changed, so a poisoned lock is still good.
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source.name, parameters.to_vec());
        let loaded = match modules.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                self.check_can_load(row)?;
                let nvrtc = self.nvrtc.get_or_init(Nvrtc::open);
                let (cubin, _) = self.cache.module(nvrtc, source, arch, parameters)?;
                let module = self
                    .context
                    .load_module(Ptx::from_binary(cubin))
                    .map_err(failed("cuModuleLoadData"))?;
                entry.insert(Loaded { module, shared_bytes: 0 })
            }
        };
        let function =
            loaded.module.load_function(source.name).map_err(failed("cuModuleGetFunction"))?;
        // Threads that launch the same function share this limit: it is only raised, while the map is locked.
        if shared_bytes > loaded.shared_bytes {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function
                .set_attribute(attribute, shared_bytes.cast_signed())
                .map_err(failed("cuFuncSetAttribute"))?;
            loaded.shared_bytes = shared_bytes;
        }
        Ok(function)
    }
}

/// Distinguishes a machine without a usable device from a driver that fails.
fn init_error(error: DriverError) -> AccelError {
    match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_STUB_LIBRARY
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            AccelError::NoDevice { reason: error.to_string() }
        }
        _ => AccelError::Driver { call: "cuInit", reason: error.to_string() },
    }
}

pub(crate) fn failed(call: &'static str) -> impl FnOnce(DriverError) -> AccelError {
    move |error| AccelError::Driver { call, reason: error.to_string() }
}
