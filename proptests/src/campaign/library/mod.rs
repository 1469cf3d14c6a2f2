//! A kernel in a shared library (`include/marlinspike_kernel.h`), called in a separate process.
//!
//! Each tensor lies between inaccessible pages. Its end, rounded up to 16 bytes, is the end of a page:
//! an access past it kills the process, which is a finding. The bytes around tensors are checked. Each
//! case runs twice on outputs filled with two patterns, which reveals unwritten bytes and
//! nondeterminism.
#![allow(unsafe_code)]

mod abi;
mod memory;
mod serve;
mod settings;

use std::error::Error as _;
use std::ffi::{CString, OsString, c_int};
use std::path::Path;
use std::time::Duration;

use libloading::Library;
use marlinspike::container::Container;
use marlinspike::num::tensor::{DType, Tensor};

use abi::{Call, DlDataType, DlDevice, DlTensor, NamedTensor, Setting};
use memory::Guarded;
pub use serve::serve;

use super::kernel::dtype;
use super::{CampaignError, Fault, Kernel, OutputSpec, Outputs, ProcessKernel, Trial};

/// Version of `marlinspike_kernel.h`.
pub const ABI_VERSION: i32 = 1;
/// The text of `marlinspike_kernel.h`, which a library is compiled with.
pub const HEADER: &str = include_str!("../../../include/marlinspike_kernel.h");
/// `MARLINSPIKE_UNSUPPORTED`.
const UNSUPPORTED: c_int = 77;
/// Fill patterns of outputs before the first and the second run.
const FILLS: [u8; 2] = [0xa5, 0x5a];
/// Bytes for a kernel's message.
const MESSAGE_BYTES: usize = 1024;

/// A kernel in a shared library.
#[derive(Debug)]
pub struct LibraryKernel(ProcessKernel);

impl LibraryKernel {
    /// Runs the kernel of `library` through `worker`, a command that calls [`serve()`] with the library,
    /// which is appended to it.
    ///
    /// # Errors
    /// As [`ProcessKernel::new`]. A library that cannot be loaded is [`Fault::NotStarted`] of its first
    /// case.
    pub fn new(
        worker: &[OsString],
        library: &Path,
        timeout: Duration,
    ) -> Result<Self, CampaignError> {
        let command = [worker, &[library.into()]].concat();
        ProcessKernel::of_library(&command, library.as_os_str(), timeout).map(Self)
    }
}

impl Kernel for LibraryKernel {
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        if let Some(open) = trial.wanted.iter().find(|wanted| wanted.shape.is_none()) {
            let reason = format!("the values decide the shape of `{}`: use --cmd", open.name);
            return Err(Fault::Unsupported { reason });
        }
        self.0.run(trial)
    }
}

/// A tensor in guarded memory, as C sees it.
struct GuardedTensor {
    name: CString,
    bare: String,
    dtype: DType,
    shape: Vec<i64>,
    memory: Guarded,
}

impl GuardedTensor {
    fn new(bare: &str, dtype: DType, shape: &[usize]) -> Result<Self, String> {
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.bytes()));
        let bytes = bytes.ok_or_else(|| format!("`{bare}`: shape {shape:?} overflows"))?;
        let memory = Guarded::new(bytes).map_err(|e| format!("memory for `{bare}`: {e}"))?;
        let name = CString::new(bare).map_err(|_| format!("`{bare}`: a name with NUL"))?;
        let shape = shape.iter().map(|size| *size as i64).collect();
        Ok(Self { name, bare: bare.to_owned(), dtype, shape, memory })
    }

    fn filled(tensor: &Tensor<'_>, bare: &str) -> Result<Self, String> {
        let guarded = Self::new(bare, tensor.dtype(), tensor.shape())?;
        guarded.memory.fill(|data| data.copy_from_slice(tensor.bytes()));
        guarded.memory.protect().map_err(|e| format!("memory for `{bare}`: {e}"))?;
        Ok(guarded)
    }

    fn as_c(&mut self) -> NamedTensor {
        let (code, bits) = (code(self.dtype), self.dtype.bits() as u8);
        let data = self.memory.address();
        NamedTensor {
            name: self.name.as_ptr(),
            tensor: DlTensor {
                data,
                device: DlDevice { device_type: 1, device_id: 0 },
                ndim: self.shape.len() as i32,
                dtype: DlDataType { code, bits, lanes: 1 },
                shape: self.shape.as_mut_ptr(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
        }
    }
}

/// DLPack's code of an element type.
const fn code(dtype: DType) -> u8 {
    match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::F16 | DType::F32 | DType::F64 => 2,
        DType::BF16 => 4,
        DType::Bool => 6,
        DType::F8E4M3 => 10,
        DType::F8E5M2 => 12,
        DType::F8E8M0 => 14,
        _ => 1,
    }
}

/// What the system says about a library (`dlerror`).
fn described(error: &libloading::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

type Run = unsafe extern "C" fn(*const Call) -> c_int;

/// A loaded kernel.
struct Loaded {
    run: Run,
    /// Keeps the functions valid.
    _library: Library,
}

impl Loaded {
    fn new(path: &Path) -> Result<Self, String> {
        type Abi = unsafe extern "C" fn() -> c_int;
        // SAFETY: the user names the library to be run: its initializers are as trusted as the
        // kernel itself, and this process has no other task.
        let library = unsafe { Library::new(path) }.map_err(|e| described(&e))?;
        let missing = |e: libloading::Error| format!("{}; see marlinspike_kernel.h", described(&e));
        // SAFETY: the header declares both functions with these types.
        let (abi, run) = unsafe {
            let abi = library.get::<Abi>(b"marlinspike_kernel_abi\0").map_err(missing)?;
            let run = library.get::<Run>(b"marlinspike_kernel_run\0").map_err(missing)?;
            (*abi, *run)
        };
        // SAFETY: as declared by the header; it takes no arguments.
        let found = unsafe { abi() };
        if found != ABI_VERSION {
            return Err(format!("found ABI version {found}, expected {ABI_VERSION}"));
        }
        Ok(Self { run, _library: library })
    }

    /// Calls the kernel once.
    fn call(&self, file: &InputFile, tensors: &mut Tensors) -> Result<(), Fault> {
        let inputs: Vec<_> = tensors.inputs.iter_mut().map(GuardedTensor::as_c).collect();
        let reference: Vec<_> = tensors.reference.iter_mut().map(GuardedTensor::as_c).collect();
        let outputs: Vec<_> = tensors.outputs.iter_mut().map(GuardedTensor::as_c).collect();
        let settings: Vec<_> = file.settings.iter().map(Setting::of).collect();
        let mut message = vec![0u8; MESSAGE_BYTES];
        let call = Call {
            size: size_of::<Call>(),
            op: file.op.as_ptr(),
            config: file.config.as_ptr(),
            inputs: inputs.as_ptr(),
            num_inputs: inputs.len(),
            reference: reference.as_ptr(),
            num_reference: reference.len(),
            outputs: outputs.as_ptr(),
            num_outputs: outputs.len(),
            message: message.as_mut_ptr().cast(),
            message_bytes: MESSAGE_BYTES - 1,
            settings: settings.as_ptr(),
            num_settings: settings.len(),
        };
        // SAFETY: every pointer of `call` is valid for the call, and what the kernel does beyond
        // the header's contract ends this process or is found by the checks that follow.
        let status = unsafe { (self.run)(&call) };
        let end = message.iter().position(|byte| *byte == 0).unwrap_or(MESSAGE_BYTES);
        let said = String::from_utf8_lossy(&message[..end]).into_owned();
        match status {
            0 => Ok(()),
            UNSUPPORTED => Err(Fault::Unsupported { reason: said }),
            status => Err(Fault::Crashed { detail: format!("returned {status}: {said}") }),
        }
    }
}

/// Metadata that a worker reads from an input file.
struct InputFile {
    op: CString,
    config: CString,
    /// Keys and values of the config ([`settings`]).
    settings: Vec<[CString; 2]>,
}

#[derive(Default)]
struct Tensors {
    inputs: Vec<GuardedTensor>,
    reference: Vec<GuardedTensor>,
    outputs: Vec<GuardedTensor>,
}

impl Tensors {
    fn read(container: &Container<'_>) -> Result<Self, String> {
        let mut all = Self::default();
        for tensor in container.tensors() {
            let tensor = tensor.map_err(|e| e.to_string())?;
            let name = tensor.name().to_owned();
            if let Some(bare) = name.strip_prefix("in.") {
                all.inputs.push(GuardedTensor::filled(&tensor, bare)?);
            } else if let Some(bare) = name.strip_prefix("ref.") {
                all.reference.push(GuardedTensor::filled(&tensor, bare)?);
            }
        }
        let wanted = container.metadata().get("outputs").map_or("[]", String::as_str);
        let wanted: Vec<OutputSpec> = serde_json::from_str(wanted).map_err(|e| e.to_string())?;
        for output in &wanted {
            let shape = output.shape.as_deref().unwrap_or(&[]);
            all.outputs.push(GuardedTensor::new(&output.name, dtype(output), shape)?);
        }
        Ok(all)
    }

    /// Returns a fault if bytes around a tensor were overwritten.
    fn expect_intact(&self) -> Result<(), Fault> {
        for guarded in self.inputs.iter().chain(&self.reference).chain(&self.outputs) {
            if let Some(at) = guarded.memory.overwritten() {
                let tensor = format!("`{}`", guarded.bare);
                let bytes = guarded.memory.len();
                let detail = format!("byte {at} of a tensor of {bytes} bytes");
                return Err(Fault::OutOfBounds { tensor, detail });
            }
        }
        Ok(())
    }
}

/// Runs the kernel twice and returns its outputs.
fn outputs(loaded: &Loaded, file: &InputFile, tensors: &mut Tensors) -> Result<Outputs, Fault> {
    let mut runs: Vec<Vec<Vec<u8>>> = Vec::new();
    for fill in FILLS {
        tensors.outputs.iter().for_each(|guarded| guarded.memory.fill(|data| data.fill(fill)));
        loaded.call(file, tensors)?;
        tensors.expect_intact()?;
        runs.push(tensors.outputs.iter().map(|guarded| guarded.memory.data().to_vec()).collect());
    }
    let mut outputs = Outputs::new();
    for (i, guarded) in tensors.outputs.iter().enumerate() {
        let (one, two) = (&runs[0][i], &runs[1][i]);
        let tensor = format!("`{}`", guarded.bare);
        let kept = |&at: &usize| one[at] == FILLS[0] && two[at] == FILLS[1];
        let unwritten: Vec<usize> = (0..one.len()).filter(kept).collect();
        if let Some(&first) = unwritten.first() {
            return Err(Fault::Unwritten { tensor, bytes: unwritten.len(), of: one.len(), first });
        }
        if let Some(first) = (0..one.len()).find(|&at| one[at] != two[at]) {
            return Err(Fault::Nondeterministic { tensor, first });
        }
        let shape = guarded.shape.iter().map(|size| *size as usize).collect();
        let tensor = Tensor::new(guarded.bare.clone(), guarded.dtype, shape, one.clone());
        let tensor = tensor.map_err(|e| Fault::Unreadable { detail: e.to_string() })?;
        outputs.insert(guarded.bare.clone(), tensor);
    }
    Ok(outputs)
}
