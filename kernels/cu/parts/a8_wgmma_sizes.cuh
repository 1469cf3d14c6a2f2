#pragma once
// Sizes of a thread block of marlin_gemm_a8_wgmma.cu, which follow from its parameters. The host reads them here.

#include "formats/types.cuh"
#include "resident.cuh"

constexpr unsigned IS_FLOAT = CODES == E2M1;
constexpr unsigned HAS_ZERO = CODES == UINT4;
static_assert(CODES == UINT4B8 || CODES == UINT4 || CODES == E2M1, "4-bit codes");
static_assert(!IS_FLOAT || GROUPS == 4, "e2m1 has groups of 32");

// With SPLITS above 1, four warpgroups share their columns: each computes parts of other stages, and promoters add them.
constexpr unsigned IS_SHARED = SPLITS > 1;
static_assert(!IS_SHARED || WARPS == 16 && (SPLITS == 4 || SPLITS == 8) && GROUPS <= 1, "a stage is one part");
// Stages whose parts one instruction computes: with 32 columns, half of its 64 rows are columns of another stage.
constexpr unsigned PAIR = SPLITS == 8 ? 2 : 1;

constexpr unsigned PRODUCERS = 128;  // threads
constexpr unsigned PROMOTERS = IS_SHARED ? 128 : 0;
constexpr unsigned THREADS = PRODUCERS + WARPS * 32 + PROMOTERS;
// The most columns of a tile.
constexpr unsigned N_TILE = WARPS * 16 / SPLITS;
// k of a pipeline stage: four instructions.
constexpr unsigned STAGE_K = 128;
constexpr unsigned SCALE_SIZE = IS_FLOAT ? 1 : 2;  // bytes

constexpr unsigned X_BOX = ROWS * STAGE_K;  // x of a stage
// With ACTIVATES consumers make a tile's rows of x for all k, and the ring has none.
constexpr unsigned X_BYTES = ACTIVATES ? 0 : X_BOX;
constexpr unsigned MOST_K = ACTIVATES * 1024;
constexpr unsigned CODES_BYTES = ROWS * MOST_K;
// Rows before they are quantized, and the largest number of each 256.
constexpr unsigned HALVES_BYTES = ROWS * MOST_K * 2 + ROWS * MOST_K / 256 * 4;
// Weights of 32 k: in Marlin's layout 16 bytes for each column.
constexpr unsigned STEP_BYTES = N_TILE * 16;
constexpr unsigned WEIGHT_BYTES = STAGE_K / 32 * STEP_BYTES;
constexpr unsigned SCALE_BYTES = GROUPS * N_TILE * SCALE_SIZE;
// With few rows and one part in a stage, a stage's products begin before the last one's are waited for, and producers
// describe each tile to the consumers: its head is four numbers and, with experts, the scale and the router weight of each
// row.
constexpr unsigned OVERLAPS = WARPS == 8 && ROWS <= 32 && GROUPS <= 1;
static_assert(!ACTIVATES || OVERLAPS && IS_MOE && ROWS == 8, "rows are made for few entries");
constexpr unsigned HEAD_BYTES = OVERLAPS ? 16 + IS_MOE * ROWS * 8 : 0;
// A stage, with its two barriers, and a head: there is one more of those than stages, so that the head of the tile that
// consumers finish is kept while the ring fills.
constexpr unsigned STAGE_BYTES = X_BYTES + WEIGHT_BYTES + SCALE_BYTES + 16 + HEAD_BYTES;
// A finished tile: boxes of 64 columns. Promoters, and consumers of few rows, write theirs without.
constexpr unsigned BOX_BYTES = ROWS * 128;
constexpr unsigned Y_BYTES = IS_SHARED || OVERLAPS ? 0 : N_TILE / 64 * BOX_BYTES;
// Parts on their way to the promoters: PART_SLOTS times those of PAIR stages, with their scales, and two barriers. A
// producer must not be two passes of the ring ahead of a warpgroup: the ring has 4 stages more than these slots.
constexpr unsigned PART_SLOTS = PAIR == 2 ? 6 : 8;
constexpr unsigned PART_LANES = N_TILE * 2;
constexpr unsigned PART_FLOATS = (ROWS / 2 + 2) * PART_LANES;
constexpr unsigned PARTS_BYTES = IS_SHARED ? PART_SLOTS * (PAIR * PART_FLOATS * 4 + 16) : 0;
constexpr unsigned FOUND_BYTES = IS_MOE * 16;  // a tile (few_entries.cuh)
constexpr unsigned END_BYTES = Y_BYTES + PARTS_BYTES + HEAD_BYTES + FOUND_BYTES + CODES_BYTES + HALVES_BYTES;
// The ring's length is a multiple of this, so that each of its slots belongs to one of the warpgroups that share columns,
// and at least LEAST_STAGES.
constexpr unsigned STAGE_MULTIPLE = IS_SHARED ? 4 * PAIR : 1;
constexpr unsigned LEAST_STAGES = IS_SHARED ? PAIR * PART_SLOTS + 4 : 4;
