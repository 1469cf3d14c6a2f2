//! The kernels that measure a device's limits compile, read every word, and give plausible rates.

use crate::common;

use marlinspike_accel::{
    limits::{self, Operands},
    nvrtc::Arch,
};
use marlinspike_kernels::PROBES;

#[test]
fn the_probes_compile() {
    let Some(nvrtc) = common::nvrtc_or_skip("the_probes_compile") else { return };
    for (capability, wgmma) in [((8, 0), 0), ((9, 0), 0), ((9, 0), 1), ((9, 0), 2), ((10, 0), 0)] {
        for probe in PROBES.iter() {
            let parameter = if probe.name == "read_limit" { "FILL" } else { "WGMMA" };
            let arch = Arch::of_device(capability);
            nvrtc.compile(probe, arch, &[(parameter, wgmma)]).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}

/// The hash that `read_limit.cu` writes, below 2^32 words.
fn hash(at: u32) -> u32 {
    let mut h = at.wrapping_mul(2_654_435_761);
    h ^= h >> 15;
    h = h.wrapping_mul(2_246_822_519);
    h ^ h >> 13
}

#[test]
fn every_word_is_read() {
    let Some(device) = common::device_or_skip("every_word_is_read") else { return };
    let (words, found) = limits::checksum(&device, 1 << 20).unwrap();
    assert!(words >= 1 << 18);
    assert_eq!(found, (0..words as u32).fold(0, |all, at| all ^ hash(at)));
    common::say(&format!("LAW read_limit, every word is read: 1 cases, {words} outputs"));
}

#[test]
fn limits_are_measured() {
    let Some(device) = common::device_or_skip("limits_are_measured") else { return };
    for operands in [Operands::Bf16, Operands::E4m3] {
        let limits = limits::measure(&device, operands).unwrap();
        common::say(&format!(
            "{}: reads {:.2} TB/s, {} {:.0} TFLOP/s",
            device.name(),
            limits.read / 1e12,
            limits.instruction,
            limits.matrix / 1e12
        ));
        assert!(limits.read.is_finite() && limits.matrix.is_finite(), "{limits:?}");
    }
}
