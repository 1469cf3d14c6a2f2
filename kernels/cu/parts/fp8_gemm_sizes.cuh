#pragma once
// Sizes of a thread block of fp8_gemm.cu, which follow from its parameters. The host reads them here.

#include "resident.cuh"

constexpr unsigned PRODUCERS = 128;  // threads
constexpr unsigned THREADS = PRODUCERS + WARPS * 32;
// k of a pipeline stage, of a sum in the unit and of a scale block.
constexpr unsigned STAGE_K = 128;
// Whether rows of x are the 64-row side of the products (fp8_gemm_many.cuh), else the weights (fp8_gemm_few.cuh).
constexpr bool HAS_MANY_ROWS = ROWS == 128;
static_assert(HAS_MANY_ROWS ? WARPS == 8 : !IS_WIDE);
static_assert(IS_PROMOTED || !HAS_BLOCKS);
constexpr unsigned X_BYTES = ROWS * STAGE_K;
constexpr unsigned X_SCALE_BYTES = HAS_BLOCKS * ROWS * 4;
// Bytes of a stage apart from the STAGE_K bytes of each column of the tile: x, its scales, two barriers.
constexpr unsigned STAGE_BYTES = X_BYTES + X_SCALE_BYTES + 16;
// A finished tile. The last warpgroup's products read up to 48 columns past a tile; the ring is followed by as many
// bytes.
constexpr unsigned Y_BYTES = WARPS / 4 * ROWS * 128;
constexpr unsigned END_BYTES = Y_BYTES > 48 * STAGE_K ? Y_BYTES : 48 * STAGE_K;
