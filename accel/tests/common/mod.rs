//! What the tests that need hardware or NVIDIA's libraries share: a test that cannot run says so
//! on a line that `scripts/test` counts, and never passes in silence.

use std::io::Write;

use marlinspike_accel::{AccelError, Device, nvrtc::Nvrtc};

/// Set to 1 on a machine with a GPU: a skip is then a failure.
const REQUIRE_GPU: &str = "MARLINSPIKE_REQUIRE_GPU";

/// Reports `test` as skipped. Written past the test harness's capture, in one piece.
fn skip(reason: &str, test: &str) {
    let required = std::env::var(REQUIRE_GPU).is_ok_and(|value| value == "1");
    assert!(!required, "{test} skipped ({reason}) although {REQUIRE_GPU}=1");
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(format!("\nSKIPPED ({reason}): {test}\n").as_bytes()).unwrap();
    stdout.flush().unwrap();
}

/// The device, or a reported skip. A device that is there but fails, fails the test.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn device_or_skip(test: &str) -> Option<Device> {
    match Device::open() {
        Ok(device) => Some(device),
        Err(error) if error.is_no_device() => {
            skip("no CUDA device", test);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The compiler, or a reported skip. A library that was asked for by name must load.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn nvrtc_or_skip(test: &str) -> Option<Nvrtc> {
    let asked = std::env::var_os(marlinspike_accel::nvrtc::LIBRARY_VARIABLE).is_some();
    match Nvrtc::open() {
        Ok(nvrtc) => Some(nvrtc),
        Err(AccelError::NvrtcMissing { .. }) if !asked => {
            skip("no NVRTC", test);
            None
        }
        Err(error) => panic!("{error}"),
    }
}
