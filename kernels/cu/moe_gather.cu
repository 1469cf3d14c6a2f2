// Rows in the order of a product's blocks: the row for entry t is row place_of[t]. Without ACTIVATES it is row
// t / top_k of x, and its router weight is gathered with it; with ACTIVATES it is the activation of the row of gate_up
// in the same place. With QUANTIZES the 16-bit values are quantized by groups of 128. Rows of padding keep their contents.
//
//   rows      16-bit, x [entries / top_k, size_k], written by no kernel later than the one before the last; or
//             gate_up [places, width], whose width is size_k (gate alone) or 2 * size_k
//   gathered  16-bit [places, size_k]; with QUANTIZES e4m3fn
//   scales    with QUANTIZES f32 [size_k / 128, scale_step]: a row's scales are in its column, and scale_step is at least
//             the number of places
//   place_of  int32 [entries] of `moe_align_block_size`; negative: the entry has no row
//   topk_weights  f32 [entries], without ACTIVATES
//   row_weights   f32 [places], likewise
//
// Parameters: IS_BF16 (half.cuh); ACTIVATES, QUANTIZES: 0 or 1; IS_UE8M0 (fp8_groups.cuh). size_k is a multiple of 8, with
// QUANTIZES of 128; a piece is eight values.
// Launch: with ACTIVATES threads (x, y) of a block for pieces (x) of entries (y), a grid (blocks of entries, blocks
// of pieces); without, a grid (rows of x, blocks for PIECES pieces of a thread), of whole warps.

#include "activate_eight.cuh"
#include "depend.cuh"
#include "fp8_groups.cuh"
#include "half.cuh"

constexpr unsigned PIECES = 4;  // most pieces of one row that a thread copies

// Where rows go.
struct Gathered {
    void *rows;
    float *scales;
    unsigned pieces, scale_step;  // pieces of a row

    // With QUANTIZES the lanes of a group's pieces take part together.
    struct Piece {
        uint4 halves;
        uint2 codes;
        float scale;

        __device__ __forceinline__ void take(const uint4 &values) {
            if constexpr (QUANTIZES) {
                const unsigned words[4] = {values.x, values.y, values.z, values.w};
                unsigned eight[2];
                scale = quantize_group(words, eight);
                codes = make_uint2(eight[0], eight[1]);
            } else {
                halves = values;
            }
        }
    };

    __device__ __forceinline__ void store(size_t place, unsigned at, const Piece &piece) const {
        if constexpr (QUANTIZES) {
            constexpr unsigned GROUP_PIECES = FP8_GROUP / 8;
            static_cast<uint2 *>(rows)[place * pieces + at] = piece.codes;
            if (at % GROUP_PIECES == 0) {
                scales[static_cast<size_t>(at / GROUP_PIECES) * scale_step + place] = piece.scale;
            }
        } else {
            static_cast<uint4 *>(rows)[place * pieces + at] = piece.halves;
        }
    }
};

// A thread copies up to PIECES pieces of one row of x to all of its places.
__device__ __forceinline__ void copy_rows(const uint4 *x, const Gathered &gathered, const int *place_of,
                                          const float *topk_weights, float *row_weights, unsigned top_k) {
    const unsigned pieces = gathered.pieces, lane = threadIdx.x % 32;
    const unsigned first = blockIdx.y * blockDim.x * PIECES + threadIdx.x;
    const size_t row = blockIdx.x;
    // Reads x before waiting: the previous kernel is the alignment, which does not write x.
    uint4 values[PIECES];
#pragma unroll
    for (unsigned i = 0; i < PIECES; ++i) {
        const unsigned at = first + i * blockDim.x;
        if (at < pieces) {
            values[i] = __ldcg(x + row * pieces + at);
        }
    }
    Gathered::Piece piece[PIECES];
#pragma unroll
    for (unsigned i = 0; i < PIECES; ++i) {
        if (first + i * blockDim.x < pieces) {
            piece[i].take(values[i]);
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
#pragma unroll
            for (unsigned i = 0; i < PIECES; ++i) {
                const unsigned at = first + i * blockDim.x;
                if (at < pieces) {
                    gathered.store(place, at, piece[i]);
                }
            }
        }
    }
}

extern "C" __global__ void moe_gather(const uint4 *__restrict__ rows,
                                      void *__restrict__ gathered_rows,
                                      // With QUANTIZES:
                                      float *__restrict__ scales,
                                      unsigned scale_step,
                                      const int *__restrict__ place_of,
                                      unsigned entries,
                                      unsigned size_k,
                                      // With ACTIVATES:
                                      Activation activation,
                                      // Without:
                                      const float *__restrict__ topk_weights,
                                      float *__restrict__ row_weights,
                                      unsigned top_k) {
    const unsigned pieces = size_k / 8;
    const Gathered gathered = {gathered_rows, scales, pieces, scale_step};
    if constexpr (ACTIVATES) {
        // A thread computes a piece.
        wait_for_last_kernel();
        let_next_kernel_start();
        const unsigned entry = blockIdx.x * blockDim.y + threadIdx.y;
        const unsigned at = blockIdx.y * blockDim.x + threadIdx.x;
        if (entry >= entries || at >= pieces) {
            return;
        }
        const int place = __ldcg(place_of + entry);
        if (place >= 0) {
            Gathered::Piece piece;
            piece.take(activate_piece(activation, rows, place, pieces, at));
            gathered.store(place, at, piece);
        }
    } else {
        copy_rows(rows, gathered, place_of, topk_weights, row_weights, top_k);
    }
}
