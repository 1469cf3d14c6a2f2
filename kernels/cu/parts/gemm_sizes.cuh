#pragma once
// Sizes of a thread block of marlin_gemm.cu, which follow from its parameters. The host reads them here.

#include "formats/codes.cuh"

// What a thread block computes. The values are the parameter PRODUCT.
enum ProductType : unsigned {
    DENSE = 0,
    EXPERTS = 1,
    // With the activation of gate and up, which the columns hold as two halves or alternating.
    EXPERTS_GATE_UP_HALVES = 2,
    EXPERTS_GATE_UP_PAIRS = 3,
    // The f32 sums of a rank's part of k.
    DENSE_PART = 4,
};

constexpr unsigned HAS_EXPERTS = PRODUCT != DENSE && PRODUCT != DENSE_PART;
// Columns of y for each column of the weight: one half with the activation.
constexpr unsigned IS_ACTIVATED = PRODUCT == EXPERTS_GATE_UP_HALVES || PRODUCT == EXPERTS_GATE_UP_PAIRS;

constexpr unsigned STAGE_K = 64;
constexpr unsigned ROWS = M_TILES * 8;
constexpr unsigned LANES = N_TILE / COLUMNS * 32;  // of a team
constexpr unsigned THREADS = TEAMS * LANES;
constexpr unsigned CHUNKS = TEAMS * RANKS;
// With few rows, more warps to hide memory latency are worth more than registers for each.
constexpr unsigned RESIDENT = (M_TILES == 1 ? 1024 : M_TILES == 2 ? 768 : 512) / THREADS;
// 16-byte pieces of 16 k of all columns that a thread block computes.
constexpr unsigned ROW_PIECES = N_TILE / 64 * TILE_PIECES;

// A team's stage in shared memory: weights, scales, zero points, rows of x.
constexpr unsigned WEIGHT_BYTES = 4 * ROW_PIECES * 16;
constexpr unsigned SCALE_BYTES = GROUPS * N_TILE * SCALE_SIZE;
constexpr unsigned ZERO_BYTES = HAS_ZERO * GROUPS * N_TILE / 2;
constexpr unsigned X_BYTES = ROWS * 128;
constexpr unsigned SCALES_AT = WEIGHT_BYTES;
constexpr unsigned ZEROS_AT = SCALES_AT + SCALE_BYTES;
constexpr unsigned X_AT = ZEROS_AT + ZERO_BYTES;
constexpr unsigned STAGE_BYTES = X_AT + X_BYTES;
constexpr unsigned RING_BYTES = STAGES * STAGE_BYTES;

// The partial sums of all chunks. In a cluster each rank adds up RANK_COLUMNS of each 64 columns. Few partial sums
// are pushed to the rank that adds them up; many are pulled by it, which takes fewer instructions.
constexpr unsigned PUSHES_SUMS = RANKS > 1 && M_TILES * N_TILE <= 128;
constexpr unsigned RANK_COLUMNS = 64 / RANKS;
// Pushed sums lie behind the rings, which may still be read when another rank's sums arrive; others replace them.
constexpr unsigned BARRIER_AT = TEAMS * RING_BYTES;
constexpr unsigned SUMS_AT = PUSHES_SUMS ? BARRIER_AT + 16 : 0;
// Floats of a chunk, and from row to row. Four more than needed spread a fragment over all banks.
constexpr unsigned SUM_CHUNK = PUSHES_SUMS ? N_TILE / RANKS + 4 : ROWS * (N_TILE + 4);
constexpr unsigned SUM_ROW = PUSHES_SUMS ? CHUNKS * SUM_CHUNK : N_TILE + 4;

// Dynamic shared memory: SHARED_BYTES, and SHARED_ROW_BYTES for each row that a block may have.
constexpr unsigned PULLED_BYTES = TEAMS * SUM_CHUNK * 4;
constexpr unsigned SHARED_BYTES =
    PUSHES_SUMS ? SUMS_AT : BARRIER_AT > PULLED_BYTES ? BARRIER_AT : PULLED_BYTES;
constexpr unsigned SHARED_ROW_BYTES = PUSHES_SUMS ? SUM_ROW * 4 : 0;
