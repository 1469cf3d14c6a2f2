#pragma once
// Sizes of a thread block of marlin_gemm_wgmma.cu, which follow from its parameters. The host reads them here.

#include "formats/codes.cuh"

constexpr unsigned PRODUCERS = 128;  // threads
constexpr unsigned THREADS = PRODUCERS + WARPS * 32;
constexpr unsigned N_TILE = WARPS * COLUMNS;
constexpr unsigned STAGE_K = 64;
// Stages that take as long as writing a tile's totals and reading them.
constexpr unsigned SPLIT_STAGES = 24;
// 16-byte pieces of 16 k of all columns that a thread block computes: neighbours in memory.
constexpr unsigned ROW_PIECES = N_TILE / 64 * TILE_PIECES;

// Shared memory: rings of x, weights, scales and zeros; a finished tile, for each 64 columns one box of the copy
// engine; barriers; pieces. With experts each slot has room for the router weights of a piece's rows.
constexpr unsigned X_BYTES = ROWS * 128;
constexpr unsigned WEIGHT_BYTES = 4 * ROW_PIECES * 16;
constexpr unsigned SCALE_BYTES = GROUPS * N_TILE * SCALE_SIZE;
constexpr unsigned ZERO_BYTES = HAS_ZERO * GROUPS * N_TILE / 2;
constexpr unsigned BOX_BYTES = ROWS * 128;
// Where totals wait, the f32 totals of 64 columns take the place of their box.
constexpr unsigned BOX_STEP = WAITS ? 2 * BOX_BYTES : BOX_BYTES;
constexpr unsigned ROW_WEIGHT_BYTES = IS_MOE * ROWS * 4;
constexpr unsigned Y_AT = STAGES * X_BYTES;
constexpr unsigned WEIGHTS_AT = Y_AT + N_TILE / 64 * BOX_STEP;
constexpr unsigned SCALES_AT = WEIGHTS_AT + STAGES * WEIGHT_BYTES;
constexpr unsigned ZEROS_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr unsigned FULL_AT = ZEROS_AT + STAGES * ZERO_BYTES;
constexpr unsigned EMPTY_AT = FULL_AT + STAGES * 8;
constexpr unsigned PIECES_AT = (EMPTY_AT + STAGES * 8 + 15) / 16 * 16;
constexpr unsigned ROW_WEIGHTS_AT = PIECES_AT + STAGES * 16;
constexpr unsigned SHARED_BYTES = ROW_WEIGHTS_AT + STAGES * ROW_WEIGHT_BYTES;
// Floats of a tile's totals.
constexpr unsigned TILE_TOTALS = ROWS * N_TILE;
// Places for the totals of a thread block in global memory: one that waits within a tile, while another waits in shared
// memory, and two that it hands to the next thread block.
constexpr unsigned TOTALS_PLACES = 3;
