//! Checks for a driver before cudarc is used, which panics if the library is absent.

use std::{
    env::consts::{DLL_PREFIX, DLL_SUFFIX},
    ffi::c_int,
};

use super::words;
use crate::error::AccelError;

/// The oldest driver interface that the calls used here exist in: 12.0.
const LEAST_VERSION: i32 = 12_000;

/// The version of the driver library that cudarc will use (1000 · major + 10 · minor), when it loads
/// and is new enough.
pub(crate) fn probe() -> Result<i32, AccelError> {
    // In cudarc's order, so that both find the same library. A program that links the driver has loaded it by the last.
    let name = |library: &str, version| format!("{DLL_PREFIX}{library}{DLL_SUFFIX}{version}");
    let names = ["cuda", "nvcuda"].map(|library| ["", ".1"].map(|version| name(library, version)));
    probe_names(&names.concat())
}

fn probe_names(names: &[String]) -> Result<i32, AccelError> {
    let mut refusals = Vec::new();
    for name in names {
        // SAFETY: loading runs the library's initializers. The names are those of NVIDIA's driver
        // library, whose initializers may run on any thread at any time.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => return check_version(&library, name),
            Err(error) => refusals.push((name, words(&error))),
        }
    }
    // `libcuda.so.1` is the name that drivers install, so its error is the most useful.
    let refusal = refusals
        .iter()
        .find(|(name, _)| name.ends_with("cuda.so.1"))
        .or(refusals.first())
        .map(|(name, reason)| (name.to_string(), reason.clone()));
    let (library, reason) = refusal.unwrap_or_else(|| ("libcuda".into(), "no name to try".into()));
    Err(AccelError::NoDriver { library, reason })
}

fn check_version(library: &libloading::Library, name: &str) -> Result<i32, AccelError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;
    // SAFETY: `cuDriverGetVersion` has had this signature since the driver API's first version.
    let get_version = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion\0") };
    let get_version = get_version
        .map_err(|error| AccelError::NoDriver { library: name.into(), reason: words(&error) })?;
    let mut found: c_int = 0;
    // SAFETY: the pointer is to a live integer; the call is allowed before `cuInit`.
    let status = unsafe { get_version(&mut found) };
    if status != 0 {
        let reason = format!("cuDriverGetVersion returned {status}");
        return Err(AccelError::Driver { call: "cuDriverGetVersion", reason });
    }
    if found < LEAST_VERSION {
        return Err(AccelError::DriverTooOld { found, expected: LEAST_VERSION });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_an_error_that_names_it() {
        let names = ["libabsent-cuda.so", "libabsent-cuda.so.1"].map(String::from);
        match probe_names(&names) {
            Err(AccelError::NoDriver { library, reason }) => {
                assert_eq!(library, "libabsent-cuda.so.1");
                assert!(!reason.is_empty());
            }
            other => panic!("expected NoDriver, found {other:?}"),
        }
    }

    /// The C library loads everywhere and is no driver.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_that_is_no_driver_is_an_error_that_names_the_symbol() {
        match probe_names(&["libc.so.6".into()]) {
            Err(AccelError::NoDriver { library, reason }) => {
                assert_eq!(library, "libc.so.6");
                assert!(reason.contains("cuDriverGetVersion"), "{reason}");
            }
            other => panic!("expected NoDriver, found {other:?}"),
        }
    }
}
