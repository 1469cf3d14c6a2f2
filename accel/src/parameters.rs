//! Parameters of the products' sources whose values have names there (`formats/types.cuh`, `gemm_sizes.cuh`), and what
//! follows from parameters: the sources' own constants.

use marlinspike_kernels::constant;

use crate::nvrtc::Parameter;

/// The parameter `CODES`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Codes {
    Uint4b8 = 0,
    Uint4 = 1,
    Uint8b128 = 2,
    E2m1 = 3,
    E4m3 = 4,
}

/// The parameter `SCALES`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Scales {
    Bits16 = 0,
    E8m0 = 1,
    Ue4m3 = 2,
    E8m0Wide = 3,
    Bits16BelowHalf = 4,
    Bits16Below32nd = 5,
}

/// The parameter `PRODUCT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Product {
    Dense = 0,
    Experts = 1,
    /// With the activation of gate and up in two halves of the columns.
    ExpertsGateUpHalves = 2,
    /// With that of gate and up in alternating columns.
    ExpertsGateUpPairs = 3,
}

/// A size of a source under these parameters. One that cannot be evaluated is larger than every device's memory, so
/// that it is refused.
pub(crate) fn size(source: &str, name: &str, parameters: &[Parameter]) -> u32 {
    constant(source, name, parameters).unwrap_or(u32::MAX)
}

/// Value of a parameter; 0 where it is absent.
pub(crate) fn value(parameters: &[Parameter], name: &str) -> u32 {
    parameters.iter().find(|parameter| parameter.0 == name).map_or(0, |parameter| parameter.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_sources() {
        let same = |source, all: &[(u32, &str)]| {
            for &(value, name) in all {
                assert_eq!(constant(source, name, &[]), Ok(value), "{source}: {name}");
            }
        };
        let codes = [
            (Codes::Uint4b8 as u32, "UINT4B8"),
            (Codes::Uint4 as u32, "UINT4"),
            (Codes::Uint8b128 as u32, "UINT8B128"),
            (Codes::E2m1 as u32, "E2M1"),
            (Codes::E4m3 as u32, "E4M3"),
        ];
        let scales = [
            (Scales::Bits16 as u32, "BITS16"),
            (Scales::E8m0 as u32, "E8M0"),
            (Scales::Ue4m3 as u32, "UE4M3"),
            (Scales::E8m0Wide as u32, "E8M0_WIDE"),
            (Scales::Bits16BelowHalf as u32, "BITS16_BELOW_HALF"),
            (Scales::Bits16Below32nd as u32, "BITS16_BELOW_32ND"),
        ];
        for source in ["marlin_gemm", "marlin_gemm_wgmma", "marlin_gemm_a8"] {
            same(source, &codes);
            same(source, &scales);
        }
        let products = [
            (Product::Dense as u32, "DENSE"),
            (Product::Experts as u32, "EXPERTS"),
            (Product::ExpertsGateUpHalves as u32, "EXPERTS_GATE_UP_HALVES"),
            (Product::ExpertsGateUpPairs as u32, "EXPERTS_GATE_UP_PAIRS"),
        ];
        same("marlin_gemm", &products);
    }

    #[test]
    fn a_size_without_a_value_fits_no_device() {
        assert_eq!(size("marlin_gemm", "SHARED_BYTES", &[]), u32::MAX);
        assert_eq!(size("marlin_gemm", "ABSENT", &[]), u32::MAX);
    }
}
