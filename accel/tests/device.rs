//! Opening a device: works, or says what is missing.

mod common;

use marlinspike_accel::{AccelError, Device};

#[test]
fn open_works_or_names_what_is_missing() {
    match Device::open() {
        Ok(device) => {
            assert!(!device.name().is_empty());
            assert!(device.compute_capability() >= (5, 0), "{device:?}");
        }
        Err(error) => {
            let no_device =
                matches!(error, AccelError::NoDriver { .. } | AccelError::NoDevice { .. });
            assert!(no_device, "{error:?}");
            assert!(error.is_no_device());
            let message = error.to_string();
            assert!(message.starts_with("no CUDA device: "), "{message}");
            if let AccelError::NoDriver { library, reason } = error {
                assert!(library.contains("cuda"), "{library}");
                assert!(message.contains(&library) && message.contains(&reason), "{message}");
            }
        }
    }
}

#[test]
fn an_ordinal_beyond_the_devices_is_refused() {
    let Some(_) = common::device_or_skip("an_ordinal_beyond_the_devices_is_refused") else {
        return;
    };
    let error = Device::open_ordinal(4096).unwrap_err();
    assert!(matches!(error, AccelError::Ordinal { ordinal: 4096, count: 1.. }), "{error:?}");
}
