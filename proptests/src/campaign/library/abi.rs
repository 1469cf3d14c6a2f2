//! The types of `include/marlinspike_kernel.h`.

use std::ffi::{CString, c_char, c_void};

#[repr(C)]
pub(super) struct DlDevice {
    pub(super) device_type: i32,
    pub(super) device_id: i32,
}

#[repr(C)]
pub(super) struct DlDataType {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

#[repr(C)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: DlDevice,
    pub(super) ndim: i32,
    pub(super) dtype: DlDataType,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
pub(super) struct NamedTensor {
    pub(super) name: *const c_char,
    pub(super) tensor: DlTensor,
}

#[repr(C)]
pub(super) struct Setting {
    pub(super) key: *const c_char,
    pub(super) value: *const c_char,
}

#[repr(C)]
pub(super) struct Call {
    pub(super) size: usize,
    pub(super) op: *const c_char,
    pub(super) config: *const c_char,
    pub(super) inputs: *const NamedTensor,
    pub(super) num_inputs: usize,
    pub(super) reference: *const NamedTensor,
    pub(super) num_reference: usize,
    pub(super) outputs: *const NamedTensor,
    pub(super) num_outputs: usize,
    pub(super) message: *mut c_char,
    pub(super) message_bytes: usize,
    pub(super) settings: *const Setting,
    pub(super) num_settings: usize,
}

// The sizes of marlinspike_kernel.h on a 64-bit system.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<DlTensor>() == 48);
    assert!(size_of::<NamedTensor>() == 56);
    assert!(size_of::<Call>() == 104);
};

impl Setting {
    pub(super) fn of([key, value]: &[CString; 2]) -> Self {
        Self { key: key.as_ptr(), value: value.as_ptr() }
    }
}
