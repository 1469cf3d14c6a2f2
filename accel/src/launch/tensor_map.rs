//! Matrices as Hopper's copy engine takes them.

use std::ptr;

use cudarc::driver::{
    DriverError,
    sys::{
        self, CUtensorMap, CUtensorMapDataType_enum as DataType,
        CUtensorMapFloatOOBfill_enum as Fill, CUtensorMapInterleave_enum as Interleave,
        CUtensorMapL2promotion_enum as Promotion, CUtensorMapSwizzle_enum as Swizzle,
    },
};

use super::Pointer;
use crate::{device::Device, memory::Buffer};

/// `TensorMap` of `wgmma.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct TensorMap(CUtensorMap);

const _: () = assert!(size_of::<TensorMap>() == 128 && align_of::<TensorMap>() == 64);

impl TensorMap {
    /// A matrix `[rows, columns]` of 16-bit elements in boxes of 64 columns and `box_rows` rows, with the 128-byte
    /// swizzle.
    ///
    /// # Errors
    /// The driver's, for sizes that the copy engine does not take.
    pub(crate) fn new(
        device: &Device,
        matrix: &Buffer<u16>,
        rows: u32,
        columns: u32,
        box_rows: u32,
    ) -> Result<Self, DriverError> {
        let ty = DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16;
        Self::encode(device, matrix.into(), (ty, 2), [rows, columns], box_rows)
    }

    /// Likewise of bytes, in boxes of 128 columns.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub(crate) fn of_bytes(
        device: &Device,
        matrix: &Buffer<u8>,
        rows: u32,
        columns: u32,
        box_rows: u32,
    ) -> Result<Self, DriverError> {
        let ty = DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        Self::encode(device, matrix.into(), (ty, 1), [rows, columns], box_rows)
    }

    /// A matrix of elements of that type and number of bytes, in boxes of 128 bytes of a row.
    fn encode(
        device: &Device,
        matrix: Pointer,
        (ty, bytes): (DataType, u32),
        [rows, columns]: [u32; 2],
        box_rows: u32,
    ) -> Result<Self, DriverError> {
        device.stream().context().bind_to_thread()?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        let sizes = [u64::from(columns), u64::from(rows)];
        let row_bytes = [u64::from(columns) * u64::from(bytes)];
        // SAFETY:
        // - Every pointer is to a live value of as many elements as a matrix of two dimensions has.
        // - The address is only kept in the map, which a kernel uses while the buffer lives.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                ty,
                2,
                ptr::with_exposed_provenance_mut(matrix.address() as usize),
                sizes.as_ptr(),
                row_bytes.as_ptr(),
                [128 / bytes, box_rows].as_ptr(),
                [1, 1].as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()?;
        Ok(Self(map))
    }
}
