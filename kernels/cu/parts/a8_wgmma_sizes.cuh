#pragma once
// Sizes of a thread block of marlin_gemm_a8_wgmma.cu, which follow from its parameters. The host reads them here.

#include "formats/types.cuh"

constexpr unsigned IS_FLOAT = CODES == E2M1;
constexpr unsigned HAS_ZERO = CODES == UINT4;
static_assert(CODES == UINT4B8 || CODES == UINT4 || CODES == E2M1, "4-bit codes");
static_assert(!IS_FLOAT || GROUPS == 4, "e2m1 has groups of 32");

constexpr unsigned PRODUCERS = 128;  // threads
constexpr unsigned THREADS = PRODUCERS + WARPS * 32;
// The most columns of a tile. SPLITS warpgroups share their columns, and take turns by stages.
constexpr unsigned N_TILE = WARPS * 16 / SPLITS;
static_assert(SPLITS == 1 || GROUPS <= 1, "a stage is one part");
// k of a pipeline stage: four instructions.
constexpr unsigned STAGE_K = 128;
constexpr unsigned SCALE_SIZE = IS_FLOAT ? 1 : 2;  // bytes

constexpr unsigned X_BYTES = ROWS * STAGE_K;
// Weights of 32 k: in Marlin's layout 16 bytes for each column.
constexpr unsigned STEP_BYTES = N_TILE * 16;
constexpr unsigned WEIGHT_BYTES = STAGE_K / 32 * STEP_BYTES;
constexpr unsigned SCALE_BYTES = GROUPS * N_TILE * SCALE_SIZE;
// A stage, with its two barriers.
constexpr unsigned STAGE_BYTES = X_BYTES + WEIGHT_BYTES + SCALE_BYTES + 16;
// A finished tile: boxes of 64 columns.
constexpr unsigned BOX_BYTES = ROWS * 128;
constexpr unsigned Y_BYTES = N_TILE / 64 * BOX_BYTES;
// Two rounds of the warpgroups' parts that share columns, with their scales.
constexpr unsigned PART_FLOATS = (ROWS / 2 + 2) * 128;
constexpr unsigned PARTS_BYTES = SPLITS > 1 ? 2 * (WARPS / 4) * PART_FLOATS * 4 : 0;
constexpr unsigned END_BYTES = Y_BYTES + PARTS_BYTES;
