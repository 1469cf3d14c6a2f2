//! Launch of `marlin_gemm_wgmma`.

use std::ptr;

use cudarc::driver::{
    CudaFunction, DriverError,
    sys::{
        self, CUtensorMap, CUtensorMapDataType_enum as DataType,
        CUtensorMapFloatOOBfill_enum as Fill, CUtensorMapInterleave_enum as Interleave,
        CUtensorMapL2promotion_enum as Promotion, CUtensorMapSwizzle_enum as Swizzle,
    },
};

use super::launch::{Argument, address, launch as launch_early, with_shared_memory};
use crate::{device::Device, memory::Buffer, ops::gemm::many::ManyGemm};

/// A matrix `[rows, columns]` in boxes of 64 columns and `box_rows` rows, for the copy engine.
fn boxes(
    matrix: &Buffer<u16>,
    rows: u32,
    columns: u32,
    box_rows: u32,
) -> Result<CUtensorMap, DriverError> {
    let mut map = CUtensorMap { opaque: [0; 16] };
    let sizes = [u64::from(columns), u64::from(rows)];
    let row_bytes = [u64::from(columns) * 2];
    // SAFETY: every pointer is to a live value of as many elements as a matrix of two dimensions has; the
    // address is only kept in the map, which a kernel uses while the buffer lives.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            ptr::with_exposed_provenance_mut(address(matrix) as usize),
            sizes.as_ptr(),
            row_bytes.as_ptr(),
            [64, box_rows].as_ptr(),
            [1, 1].as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()?;
    Ok(map)
}

/// Launches a product.
///
/// `function` must be the entry point of `marlin_gemm_wgmma.cu`, compiled with the macros of the weight's
/// form, of the plan and of what `gemm` has of experts. [`crate::ops::gemm::many`] alone calls this, with
/// exactly that.
pub(crate) fn launch(
    device: &Device,
    function: &CudaFunction,
    gemm: ManyGemm<'_>,
) -> Result<(), DriverError> {
    let threads = gemm.plan.threads();
    let config = with_shared_memory(function, (gemm.grid, 1, 1), threads, gemm.shared_bytes)?;
    let weight = gemm.weight;
    device.stream().context().bind_to_thread()?;
    let mut arguments = vec![
        Argument::TensorMap(boxes(gemm.x, gemm.rows, gemm.size_k, gemm.plan.rows)?),
        Argument::TensorMap(boxes(gemm.y, gemm.rows, gemm.size_n, gemm.plan.rows)?),
        (&weight.qweight).into(),
        (&weight.scales).into(),
        weight.zeros.as_ref().into(),
        weight.bias.as_ref().into(),
        weight.global_scale.as_ref().into(),
        gemm.size_m.into(),
        gemm.size_n.into(),
        gemm.size_k.into(),
        gemm.chunk_k.into(),
        weight.group_k().into(),
    ];
    arguments.push(gemm.raster.into());
    arguments.push((&gemm.handover.totals).into());
    arguments.push((&gemm.handover.are_there).into());
    match gemm.experts {
        Some((blocks, row_weights)) => {
            arguments.push((&blocks.expert_ids).into());
            arguments.push((&blocks.num_tokens_post_padded).into());
            arguments.push(row_weights.into());
        }
        None => arguments.extend([Argument::Pointer(0); 3]),
    }
    // SAFETY: the arguments are the entry point's, in its order and of its types, and all of this
    // device. `ManyGemm` holds only checked values: x has `rows` rows of size_k, y as many of size_n, and the
    // copy engine reads and writes no others; the weight's buffers are what the reference packs for that
    // shape, N a multiple of 64, K of 64 and of the group, and columns of a tile beyond N are not read;
    // at most 8 chunks of chunk_k, a multiple of 128, make K. Zeros are read only where HAS_ZERO, which the
    // weight's form says. Every element of y is written once. Shared memory is as large as the source demands.
    // With experts: `DeviceBlocks` are room for this M and block size, zero until the alignment kernel
    // writes it, so that experts are below the weight's; x and y have a row for each place of every block, and
    // so have the weights of rows, if there are any. The kernel waits before it reads what another wrote.
    // `Handover` has room for the totals of a tile of every thread block, of which there are no more than
    // multiprocessors; a kernel leaves `are_there` zero, and the next one waits for it.
    unsafe { launch_early(device, function, config, arguments) }
}
