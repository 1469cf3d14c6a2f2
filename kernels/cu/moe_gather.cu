// Rows in the order of a product's blocks: the row for entry t is row place_of[t]. Without ACTIVATES it is row
// t / top_k of x, and its router weight is gathered with it; with ACTIVATES it is the activation of the row of gate_up
// in the same place. Rows of padding keep their contents.
//
//   rows      16-bit, x [entries / top_k, size_k], written by no kernel later than the one before the last; or
//             gate_up [places, width], whose width is size_k (gate alone) or 2 * size_k
//   gathered  16-bit [places, size_k]
//   place_of  int32 [entries] of `moe_align_block_size`; negative: the entry has no row
//   topk_weights  f32 [entries], without ACTIVATES
//   row_weights   f32 [places], likewise
//
// Parameters: IS_BF16 (half.cuh), and ACTIVATES: 0 or 1. size_k is a multiple of 8; a piece is eight values.
// Launch: with ACTIVATES threads (x, y) of a block for pieces (x) of entries (y), a grid (blocks of entries, blocks
// of pieces); without, a grid (rows of x, blocks for PIECES pieces of a thread), of whole warps.

#include "activate_eight.cuh"
#include "depend.cuh"
#include "half.cuh"

constexpr unsigned PIECES = 4;  // most pieces of one row that a thread copies

// A thread copies up to PIECES pieces of one row of x to all of its places.
__device__ __forceinline__ void copy_rows(const uint4 *x, uint4 *gathered, const int *place_of,
                                          const float *topk_weights, float *row_weights, unsigned size_k,
                                          unsigned top_k) {
    const unsigned pieces = size_k / 8, lane = threadIdx.x % 32;
    const unsigned first = blockIdx.y * blockDim.x * PIECES + threadIdx.x;
    const size_t row = blockIdx.x;
    // Reads x before waiting: the previous kernel is the alignment, which does not write x.
    uint4 piece[PIECES];
#pragma unroll
    for (unsigned i = 0; i < PIECES; ++i) {
        const unsigned at = first + i * blockDim.x;
        if (at < pieces) {
            piece[i] = __ldcg(x + row * pieces + at);
        }
    }
    wait_for_last_kernel();
    let_next_kernel_start();
    for (unsigned slots = 0; slots < top_k; slots += 32) {
        const unsigned count = min(top_k - slots, 32);
        const size_t entry = row * top_k + slots + lane;
        const int of_lane = lane < count ? __ldcg(place_of + entry) : -1;
        if (blockIdx.y == 0 && threadIdx.x < 32 && of_lane >= 0) {
            row_weights[of_lane] = __ldcg(topk_weights + entry);
        }
        for (unsigned slot = 0; slot < count; ++slot) {
            const int place = __shfl_sync(~0u, of_lane, slot);
            if (place < 0) {
                continue;
            }
            uint4 *to = gathered + static_cast<size_t>(place) * pieces;
#pragma unroll
            for (unsigned i = 0; i < PIECES; ++i) {
                const unsigned at = first + i * blockDim.x;
                if (at < pieces) {
                    to[at] = piece[i];
                }
            }
        }
    }
}

extern "C" __global__ void moe_gather(const uint4 *__restrict__ rows,
                                      uint4 *__restrict__ gathered,
                                      const int *__restrict__ place_of,
                                      unsigned entries,
                                      unsigned size_k,
                                      // With ACTIVATES:
                                      Activation activation,
                                      // Without:
                                      const float *__restrict__ topk_weights,
                                      float *__restrict__ row_weights,
                                      unsigned top_k) {
    if constexpr (ACTIVATES) {
        // A thread computes a piece.
        wait_for_last_kernel();
        let_next_kernel_start();
        const unsigned entry = blockIdx.x * blockDim.y + threadIdx.y;
        const unsigned pieces = size_k / 8, piece = blockIdx.y * blockDim.x + threadIdx.x;
        if (entry >= entries || piece >= pieces) {
            return;
        }
        const int place = __ldcg(place_of + entry);
        if (place >= 0) {
            gathered[static_cast<size_t>(place) * pieces + piece] =
                activate_piece(activation, rows, place, pieces, piece);
        }
    } else {
        copy_rows(rows, gathered, place_of, topk_weights, row_weights, size_k, top_k);
    }
}
