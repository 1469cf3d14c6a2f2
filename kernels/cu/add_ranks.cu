// y[M, N] from the ranks' f32 sums of a row-parallel product: a balanced tree over ranks, then times the global scale,
// then the bias, then one rounding: the upper levels of version 2 of the canonical schedule
// (`Schedule::add_ranks`).
//
//   ranks     shared memory (ranks.cuh): parts of [M, N] at turn * capacity
//   bias      16-bit [N], Marlin's order: single; null: none
//   global_scale  f32 [1]; null: none
//   y         16-bit [M, N], of this rank
//
// Parameters:
//   IS_BF16   0: f16, 1: bf16
//   RANKS     1, 2, 4 or 8
//   SHOTS     ONE: every rank adds everything; TWO: a rank adds its share of the elements for all, and the shares are
//             exchanged; GATHERED: all parts are in this rank's memory, and no rank waits. The bits are the same.
//
// Launch: RANK_BLOCKS thread blocks of any number of threads, on every rank, with the same sizes; all at once, since
// they wait for each other; with GATHERED any number of blocks. N is a multiple of 64. Without elements the kernel does
// not wait.

#include "depend.cuh"
#include "half.cuh"
#include "ranks.cuh"
#include "single_order.cuh"

enum Shots : unsigned { GATHERED = 0, ONE = 1, TWO = 2 };

static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "RANKS must be 1, 2, 4 or 8");

struct Sums {
    const Ranks &ranks;
    const unsigned short *bias;
    const float *global_scale;
    size_t first;  // of this turn's parts
    unsigned size_n;

    // The outputs of four neighbouring columns.
    __device__ __forceinline__ uint2 four(size_t piece) const {
        float4 sum[RANKS];
#pragma unroll
        for (unsigned r = 0; r < RANKS; ++r) {
            sum[r] = __ldcg(reinterpret_cast<const float4 *>(ranks.parts[r] + first) + piece);
        }
#pragma unroll
        for (unsigned step = 1; step < RANKS; step *= 2) {
#pragma unroll
            for (unsigned r = 0; r + step < RANKS; r += 2 * step) {
                sum[r].x = __fadd_rn(sum[r].x, sum[r + step].x);
                sum[r].y = __fadd_rn(sum[r].y, sum[r + step].y);
                sum[r].z = __fadd_rn(sum[r].z, sum[r + step].z);
                sum[r].w = __fadd_rn(sum[r].w, sum[r + step].w);
            }
        }
        const unsigned n = piece * 4 % size_n;
        return make_uint2(finished(sum[0].x, sum[0].y, n), finished(sum[0].z, sum[0].w, n + 2));
    }

    // Two neighbouring outputs.
    __device__ __forceinline__ unsigned finished(float low, float high, unsigned n) const {
        if (global_scale) {
            low = __fmul_rn(low, *global_scale);
            high = __fmul_rn(high, *global_scale);
        }
        if (bias) {
            const unsigned short *of = bias + n / 64 * 64 + single_position(n % 64);
            low = __fadd_rn(low, widen(of[0]));
            high = __fadd_rn(high, widen(of[1]));
        }
        return narrow2(low, high);
    }
};

extern "C" __global__ void add_ranks(const __grid_constant__ Ranks ranks,
                                     const unsigned short *__restrict__ bias,
                                     const float *__restrict__ global_scale,
                                     uint2 *__restrict__ y,
                                     unsigned size_m,
                                     unsigned size_n,
                                     unsigned long long capacity,
                                     unsigned limit_ms) {
    wait_for_last_kernel();
    const size_t pieces = static_cast<size_t>(size_m) * size_n / 4;
    if (pieces == 0) {
        return;
    }
    unsigned call;
    if constexpr (SHOTS != GATHERED) {
        if (!begin_call(ranks, call) || !wait_for_ranks(ranks, 0, call, limit_ms)) {
            return;
        }
    }
    // Not before: where ranks share a GPU, the next kernel would take the room of what is waited for.
    let_next_kernel_start();
    const Sums sums = {ranks, bias, global_scale, ranks.turn * capacity, size_n};
    const size_t begin = SHOTS == TWO ? pieces * ranks.rank / RANKS : 0;
    const size_t end = SHOTS == TWO ? pieces * (ranks.rank + 1) / RANKS : pieces;
    const size_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
#pragma unroll 2
    for (size_t piece = begin + thread; piece < end; piece += threads) {
        const uint2 made = sums.four(piece);
        if constexpr (SHOTS == TWO) {
#pragma unroll
            for (unsigned r = 0; r < RANKS; ++r) {
                reinterpret_cast<uint2 *>(ranks.outputs[r])[piece] = made;
            }
        } else {
            y[piece] = made;
        }
    }
    if constexpr (SHOTS == TWO) {
        if (!wait_for_ranks(ranks, 1, call, limit_ms)) {
            return;
        }
        // The thread blocks of this index wrote these pieces.
        for (unsigned r = 0; r < RANKS; ++r) {
            for (size_t piece = pieces * r / RANKS + thread; piece < pieces * (r + 1) / RANKS; piece += threads) {
                y[piece] = __ldcg(reinterpret_cast<const uint2 *>(ranks.outputs[ranks.rank]) + piece);
            }
        }
    }
}
