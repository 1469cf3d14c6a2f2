//! Run-time compilation for a named architecture. Needs NVIDIA's NVRTC library, but no GPU and no
//! driver, so that every kernel's source can be compiled on a laptop.

use std::{fmt, path::Path};

pub use marlinspike_kernels::Parameter;
use marlinspike_kernels::{Source, prelude};

use crate::{
    error::AccelError,
    raw::nvrtc::{Library, Outcome},
};

/// Environment variable with the path of the NVRTC library to use before any found by name.
pub const LIBRARY_VARIABLE: &str = "MARLINSPIKE_NVRTC";

/// File names tried in turn; the newest first, since it knows the most architectures.
#[cfg(not(windows))]
const LIBRARY_NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// File names tried in turn; the newest first, since it knows the most architectures.
#[cfg(windows)]
const LIBRARY_NAMES: &[&str] = &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];

/// A GPU architecture to compile for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// With the features that only this capability has (the `a` of `sm_90a`).
    pub specific: bool,
}

impl Arch {
    /// The architecture for code that runs only on devices of this capability: from 9.0 on, with
    /// its specific features.
    pub fn of_device(compute_capability: (u32, u32)) -> Self {
        Self { compute_capability, specific: compute_capability >= (9, 0) }
    }

    /// Whether thread blocks can form clusters and read each other's shared memory.
    pub(crate) fn has_clusters(self) -> bool {
        self.compute_capability >= (9, 0)
    }

    /// Whether it has warpgroup products: only sm_90a does.
    pub(crate) fn has_wgmma(self) -> bool {
        self.compute_capability == (9, 0) && self.specific
    }

    /// Bytes of shared memory that a thread block may take at most (CUDA C++ Programming Guide,
    /// technical specifications per compute capability); for a capability that is not listed, the
    /// least of them.
    pub fn shared_memory(self) -> u32 {
        let kib = match self.compute_capability {
            (8, 0 | 7) => 163,
            (9, 0) | (10, 0 | 3) => 227,
            (7, 5) => 64,
            _ => 99,
        };
        kib * 1024
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.compute_capability;
        write!(f, "sm_{major}{minor}{}", if self.specific { "a" } else { "" })
    }
}

/// The compiler's options. No multiplication and addition become one unless the source says so
/// (`--fmad=false`): results are defined operation by operation.
pub(crate) fn options(arch: Arch) -> [String; 3] {
    [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--fmad=false".into()]
}

/// What is compiled: a source under these parameters.
pub(crate) fn text(source: &Source, parameters: &[Parameter]) -> String {
    prelude(parameters) + source.text
}

/// The loaded compiler.
pub struct Nvrtc {
    library: Library,
}

impl Nvrtc {
    /// Loads the library named by [`LIBRARY_VARIABLE`] or, where that is unset, the newest one
    /// that the system's loader finds.
    ///
    /// # Errors
    /// [`AccelError::NvrtcMissing`] with the library and the loader's reason.
    pub fn open() -> Result<Self, AccelError> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            return Self::open_at(Path::new(&path));
        }
        let mut first_refusal = None;
        for name in LIBRARY_NAMES {
            match Self::open_at(Path::new(name)) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(refusal) => _ = first_refusal.get_or_insert(refusal),
            }
        }
        Err(first_refusal.unwrap_or_else(|| AccelError::NvrtcMissing {
            library: "NVRTC".into(),
            reason: "no known file name on this system".into(),
        }))
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    /// [`AccelError::NvrtcMissing`] with the path and the loader's reason, also where the file is
    /// a library that lacks NVRTC's functions.
    pub fn open_at(path: &Path) -> Result<Self, AccelError> {
        Library::open(path).map(|library| Self { library }).map_err(|reason| {
            AccelError::NvrtcMissing { library: path.display().to_string(), reason }
        })
    }

    /// The library's version (major, minor).
    ///
    /// # Errors
    /// [`AccelError::Driver`] where the library does not state it.
    pub fn version(&self) -> Result<(i32, i32), AccelError> {
        self.library.version().map_err(|reason| AccelError::Driver { call: "nvrtcVersion", reason })
    }

    /// Compiles `source` under these parameters to machine code (a CUBIN) for `arch`.
    ///
    /// Machine code rather than PTX: it does not depend on which PTX version the installed driver
    /// reads.
    ///
    /// # Errors
    /// [`AccelError::Compile`] with the compiler's log.
    pub fn compile(
        &self,
        source: &Source,
        arch: Arch,
        parameters: &[Parameter],
    ) -> Result<Vec<u8>, AccelError> {
        let fail = |reason: String, log: String| AccelError::Compile {
            source_name: source.name.into(),
            arch: arch.to_string(),
            reason,
            log,
        };
        match self.library.compile(source.name, &text(source, parameters), &options(arch)) {
            Outcome::Cubin(cubin) if !cubin.is_empty() => Ok(cubin),
            Outcome::Cubin(_) => Err(fail("no machine code produced".into(), String::new())),
            Outcome::Refused { reason, log } => Err(fail(reason, log)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_nvidias_names() {
        assert_eq!(Arch::of_device((8, 0)).to_string(), "sm_80");
        assert_eq!(Arch::of_device((8, 9)).to_string(), "sm_89");
        assert_eq!(Arch::of_device((9, 0)).to_string(), "sm_90a");
        assert_eq!(Arch::of_device((10, 0)).to_string(), "sm_100a");
        assert_eq!(Arch { compute_capability: (9, 0), specific: false }.to_string(), "sm_90");
    }

    #[test]
    fn a_path_without_a_library_is_named() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml.absent");
        match Nvrtc::open_at(Path::new(path)).err() {
            Some(AccelError::NvrtcMissing { library, reason }) => {
                assert_eq!(library, path);
                assert!(!reason.is_empty());
            }
            other => panic!("expected NvrtcMissing, found {other:?}"),
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let error = Nvrtc::open_at(Path::new(path)).err();
        assert!(
            matches!(&error, Some(AccelError::NvrtcMissing { library, .. }) if library == path),
            "{error:?}"
        );
    }
}
