//! Opens a device, or reports what is missing.

use crate::common;

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

/// Two devices on one GPU have streams of their own: neither waits for the other's work.
#[test]
fn buffers_of_another_device_are_refused() {
    let Some(device) = common::device_or_skip("buffers_of_another_device_are_refused") else {
        return;
    };
    let other = Device::open().unwrap();
    let buffer = other.upload(&[1u32, 2, 3]).unwrap();
    let refused = |error: AccelError, name: &str| match error {
        AccelError::Argument { operation, what: "buffer", .. } => assert_eq!(operation, name),
        error => panic!("{error:?}"),
    };
    refused(device.download(&buffer).unwrap_err(), "download");
    refused(device.copy(&buffer).unwrap_err(), "copy");
    assert_eq!(other.download(&other.copy(&buffer).unwrap()).unwrap(), [1, 2, 3]);
}
