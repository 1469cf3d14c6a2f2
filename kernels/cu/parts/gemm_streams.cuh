#pragma once
// The copies of a team of marlin_gemm.cu into its ring of stages.

#include "fragments.cuh"
#include "gemm_operands.cuh"
#include "mma.cuh"

// A thread's copies of weights, scales and zero points. Each next piece of the weights is LANES further in the stage,
// in a later row of 16 k or in the same one. Steps count bytes.
struct WeightStream {
    unsigned member, size_n, group_size;
    unsigned weight_step, weight_64, copy_to;
    const unsigned char *weight_from;
    unsigned group_left;  // stages of the group, with this one
    const unsigned char *scale_from;
    const unsigned *zero_from;
    unsigned long long policy;

    static constexpr unsigned SCALES_64 = 4 * SCALE_SIZE, SCALE_PIECES = N_TILE / 64 * SCALES_64;
    static constexpr unsigned ZERO_PIECES = N_TILE / 32;

    __device__ __forceinline__ WeightStream(const Operands &p, const Thread &thread, const Columns &columns,
                                            unsigned ring, unsigned begin)
        : member(thread.member), size_n(p.size_n), group_size(p.group_size) {
        weight_step = size_n / 64 * (TILE_PIECES * 16);
        weight_64 = columns.next_64 / 64 * (TILE_PIECES * 16);
        copy_to = ring + member * 16;
        weight_from = p.qweight + static_cast<size_t>(begin / 16 + member / ROW_PIECES) * weight_step +
                      columns.n0 / 64 * (TILE_PIECES * 16) +
                      member % ROW_PIECES / TILE_PIECES * weight_64 + member % TILE_PIECES * 16;
        if constexpr (GROUPS > 0) {
            group_left = (group_size - begin % group_size) / STAGE_K;
            const size_t first_scale =
                static_cast<size_t>(begin / group_size + member / SCALE_PIECES) * size_n + columns.n0 +
                member % SCALE_PIECES / SCALES_64 * columns.next_64;
            scale_from = p.scales + first_scale * SCALE_SIZE + member % SCALES_64 * 16;
            if constexpr (HAS_ZERO) {
                zero_from =
                    p.zeros +
                    static_cast<size_t>(begin / group_size + member / ZERO_PIECES) * (size_n / 8) +
                    columns.n0 / 8 + member % ZERO_PIECES / 2 * (columns.next_64 / 8) + member % 2 * 4;
            }
        }
        // Further blocks of rows read the same weights.
        policy = cache_policy(HAS_EXPERTS ? M_TILES == 1 : p.size_m <= ROWS);
    }

    // Copies the next stage to the ring's slot at that offset.
    __device__ __forceinline__ void copy(unsigned slot) {
        const unsigned to = copy_to + slot;
#pragma unroll
        for (int i = 0; i < 4 * ROW_PIECES / LANES; ++i) {
            const int row = i * LANES / ROW_PIECES, in_row = i * LANES % ROW_PIECES;
            const unsigned char *from = weight_from + static_cast<size_t>(weight_step) * row;
            from += in_row / TILE_PIECES * weight_64 + in_row % TILE_PIECES * 16;
            copy_async(to + i * LANES * 16, from, policy);
        }
        weight_from += static_cast<size_t>(weight_step) * 4;
        if constexpr (GROUPS > 0) {
            if (member < GROUPS * SCALE_PIECES) {
                copy_async(to + SCALES_AT, scale_from);
            }
            if constexpr (HAS_ZERO) {
                if (member < GROUPS * ZERO_PIECES) {
                    copy_async(to + ZEROS_AT, zero_from);
                }
            }
            if (GROUPS > 1 || --group_left == 0) {
                scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * size_n;
                if constexpr (HAS_ZERO) {
                    zero_from += GROUPS * (size_n / 8);
                }
                group_left = group_size / STAGE_K;
            }
        }
    }
};

// How a thread copies x: X_THREADS threads copy a row, each from one pointer. Few rows are copied all at once; of
// many, eight or more at a time, since each row that a warp reads from costs it a step.
constexpr unsigned X_FEW = LANES >= ROWS * 8 ? 8 : LANES / ROWS, X_MANY = LANES >= 64 ? 8 : 4;
constexpr int X_THREADS = ROWS <= 16 ? X_FEW : X_MANY;
constexpr int X_PASSES = ROWS * X_THREADS > LANES ? ROWS * X_THREADS / LANES : 1;

// The rows of x that a thread copies, one in each pass. Rows that do not exist are not copied: the old contents of
// the stage reach only sums that are never read.
using RowPointers = const unsigned short *[X_PASSES];
using RowsExist = bool[X_PASSES];

template <class Rows>
__device__ __forceinline__ void find_rows(RowPointers &from, RowsExist &exists, const Operands &p,
                                          const Rows &rows, unsigned row_0, unsigned piece, unsigned begin) {
#pragma unroll
    for (int i = 0; i < X_PASSES; ++i) {
        const unsigned row = i * (LANES / X_THREADS) + row_0, entry = rows.entry(row % ROWS);
        exists[i] = row < ROWS && entry < p.size_m;
        from[i] = p.x + static_cast<size_t>(exists[i] ? rows.x_row(entry) : 0) * p.size_k + begin + piece * 8;
    }
}

// Copies their next stage to x's place at `to`; `first_to` is the thread's place there in the first pass.
__device__ __forceinline__ void copy_rows(unsigned to, unsigned first_to, RowPointers &from,
                                          const RowsExist &exists) {
#pragma unroll
    for (int i = 0; i < X_PASSES; ++i) {
        if (exists[i]) {
#pragma unroll
            for (int j = 0; j < 8; j += X_THREADS) {
                // A pass has a multiple of 8 rows, so that the next one's are swizzled alike.
                const unsigned row_0 = i * (LANES / X_THREADS);
                copy_async(to + row_0 * 128 + (first_to ^ j * 16), from[i] + j * 8);
            }
        }
        from[i] += STAGE_K;
    }
}
