#pragma once
// The operands of marlin_gemm.cu, a thread's part of the work, and the rows of a thread block.

#include "activation.cuh"
#include "cut.cuh"
#include "depend.cuh"
#include "gemm_sizes.cuh"
#include "routing.cuh"

struct Operands {
    const unsigned char *qweight, *scales;
    const unsigned *zeros, *g_idx;
    const unsigned short *bias;
    const float *global_scale;
    const unsigned short *x;
    void *y;
    unsigned size_m, size_n, size_k, group_size;
    const Cut &cut;

    // Advances to the weight of an expert.
    __device__ __forceinline__ void select(size_t expert) {
        const unsigned groups = HAS_G_IDX ? group_size : GROUPS == 0 ? 1 : size_k / group_size;
        qweight += expert * (size_k / 16) * (size_n / 64) * (TILE_PIECES * 16);
        scales += expert * groups * size_n * SCALE_SIZE;
        if constexpr (HAS_ZERO) {
            zeros += expert * groups * (size_n / 8);
        }
    }
};

// A thread's part: one of LANES of its team, and one of 32 of its warp; its thread block is one of RANKS of its tile.
struct Thread {
    unsigned team, member, lane;
    unsigned warp_n;  // the warp's first column in the tile
    unsigned part;    // and its part of 64 columns
    unsigned rank, tile;

    __device__ __forceinline__ Thread()
        : team(threadIdx.x / LANES), member(threadIdx.x % LANES), lane(threadIdx.x % 32) {
        warp_n = member / 32 * COLUMNS;
        part = warp_n % 64 / COLUMNS;
        rank = blockIdx.x % RANKS;
        tile = blockIdx.x / RANKS;
    }
};

// The thread block's columns: from n0 on; every 64 are `next_64` columns behind those before. And its block of rows:
// neighbouring thread blocks read on in a weight.
struct Columns {
    unsigned next_64, n0, block;

    __device__ __forceinline__ Columns(unsigned tile, unsigned size_n) {
        constexpr bool HALVES = PRODUCT == EXPERTS_GATE_UP_HALVES;
        next_64 = HALVES ? size_n / 2 : 64;
        n0 = tile % (size_n / N_TILE) * (HALVES ? 64 : N_TILE);
        block = tile / (size_n / N_TILE);
    }

    // Column n of the tile in the weight, of 64 columns their first.
    __device__ __forceinline__ unsigned of_64(unsigned n) const { return n0 + n / 64 * next_64; }
};

// The rows of a thread block of a dense product.
struct DenseRows {
    unsigned block;

    __device__ __forceinline__ unsigned entry(unsigned row) const { return block * ROWS + row; }
    __device__ __forceinline__ unsigned x_row(unsigned entry) const { return entry; }
    __device__ __forceinline__ unsigned count(unsigned size_m, unsigned) const {
        return min(size_m - block * ROWS, static_cast<unsigned>(ROWS));
    }
};

// The entries of a thread block's rows: a lane's are those of row i * 32 + lane; size_m and above: no row.
using Entries = unsigned[(ROWS + 31) / 32];

// Finds them. Returns the block's expert; negative: none.
__device__ __forceinline__ int find_entries(Entries &entries, const Routing &routing, unsigned size_m,
                                            unsigned block, unsigned lane) {
    int expert;
    if (M_TILES == 1 && !routing.sorted_token_ids) {
        expert = find_block(routing, size_m, block, entries[0]);
    } else {
        // All loads at once: each has a long latency. There is room for every block that there may be.
        const int padded = __ldcg(routing.num_tokens_post_padded);
        expert = __ldcg(routing.expert_ids + block);
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
            entries[i / 32] = i + lane < ROWS
                                  ? __ldcg(routing.sorted_token_ids + block * ROWS + i + lane)
                                  : size_m;
        }
        expert = block * ROWS < static_cast<unsigned>(padded) ? expert : -1;
    }
    return expert;
}

// The rows of a thread block of a product with experts.
struct ExpertRows {
    const Entries &entries;
    const unsigned &top_k;

    // For whole warps.
    __device__ __forceinline__ unsigned entry(unsigned row) const {
        return __shfl_sync(0xffffffffu, entries[row / 32], row % 32);
    }

    __device__ unsigned x_row(unsigned entry) const { return entry / top_k; }

    // Rows that exist: they come first.
    __device__ __forceinline__ unsigned count(unsigned size_m, unsigned lane) const {
        unsigned rows = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
            rows += __popc(__ballot_sync(0xffffffffu, i + lane < ROWS && entries[i / 32] < size_m));
        }
        return rows;
    }
};
