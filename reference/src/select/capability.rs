//! Device capabilities as data.

use std::fmt;

/// Kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Platform {
    /// NVIDIA GPU.
    Cuda,
    /// AMD GPU.
    Rocm,
    /// Intel GPU.
    Xpu,
    /// x86 CPU.
    CpuX86,
    /// Arm CPU.
    CpuArm,
    /// Anything else.
    Other,
}

impl Platform {
    /// Whether this is a CPU of any architecture.
    pub const fn is_cpu(self) -> bool {
        matches!(self, Self::CpuX86 | Self::CpuArm)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Rocm => "ROCm",
            Self::Xpu => "XPU",
            Self::CpuX86 => "CPU (x86)",
            Self::CpuArm => "CPU (Arm)",
            Self::Other => "this device",
        })
    }
}

/// A device, as described to the selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capability {
    /// Kind of device.
    pub platform: Platform,
    /// Compute capability (major, minor); `None` if unknown or not applicable.
    pub compute: Option<(u32, u32)>,
}

impl Capability {
    /// An NVIDIA GPU of compute capability `major.minor`.
    pub const fn cuda(major: u32, minor: u32) -> Self {
        Self { platform: Platform::Cuda, compute: Some((major, minor)) }
    }

    /// A CPU.
    pub const fn cpu(platform: Platform) -> Self {
        Self { platform, compute: None }
    }

    /// `major · 10 + minor` (80, 89, 90, ...), or −1 when unknown.
    pub fn to_int(self) -> i64 {
        self.compute.map_or(-1, |(major, minor)| i64::from(major) * 10 + i64::from(minor))
    }

    /// Whether the compute capability is known and at least `(major, minor)`.
    pub fn at_least(self, major: u32, minor: u32) -> bool {
        self.compute.is_some_and(|c| c >= (major, minor))
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.compute {
            Some((major, minor)) => write!(f, "{} {major}.{minor}", self.platform),
            None => write!(f, "{}", self.platform),
        }
    }
}
