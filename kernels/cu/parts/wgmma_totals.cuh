#pragma once
// Totals of marlin_gemm_wgmma.cu that wait for other chunks of k.

#include "wgmma.cuh"
#include "wgmma_ring.cuh"

// A warp's totals of runs that wait for the run behind them. Like the ones of a binary counter, as many wait as the
// index of the next run has ones: two at most. The first lies in shared memory, in place of the tile's outputs; the other
// in global memory, as do totals that a thread block hands to the one after it.
struct WaitingTotals {
    float4 *handed;      // level 0 of those handed to the thread block after
    unsigned inherited;  // levels that still lie with the thread block before
    bool hands_over;

    static constexpr unsigned LEVEL = FRAGMENTS * ROWS / 8 * 32;  // pieces of 16 bytes

    __device__ WaitingTotals(const Product &p, const Piece &piece, unsigned chunks)
        : hands_over(piece.end < chunks) {
        const unsigned run = p.cut.run;
        handed = p.totals + static_cast<size_t>(warp_of_grid()) * (TOTALS_PLACES * LEVEL) + LEVEL + threadIdx.x % 32;
        // Those of whole runs, and that of a run that another thread block began.
        inherited = __popc(piece.begin / run) + (piece.begin % run > 0);
    }

    static __device__ __forceinline__ unsigned warp() { return (threadIdx.x - PRODUCERS) / 32; }
    static __device__ __forceinline__ unsigned warp_of_grid() { return blockIdx.x * WARPS + warp(); }

    // Level 0 of this piece, and level 1 of it.
    static __device__ __forceinline__ float4 *first(unsigned char *memory) {
        return reinterpret_cast<float4 *>(memory + Y_AT) + warp() * LEVEL + threadIdx.x % 32;
    }
    __device__ __forceinline__ float4 *second() const { return handed - LEVEL; }

    // Level 0 of those that the thread block before handed over.
    __device__ __forceinline__ const float4 *from() const { return handed - WARPS * TOTALS_PLACES * LEVEL; }

    // For the whole warpgroup.
    __device__ __forceinline__ void push(unsigned level, unsigned char *memory,
                                         const float (&total)[FRAGMENTS][ROWS / 2]) const {
        if (!WAITS || hands_over) {
            store<false>(handed + level * LEVEL, total);
        } else if (level > 0) {
            store<false>(second(), total);
        } else {
            // The last tile has been copied from shared memory.
            if (threadIdx.x % 128 == 0) {
                wait_for_stores();
            }
            warpgroup_sync((threadIdx.x - PRODUCERS) / 128);
            store<true>(first(memory), total);
        }
    }

    // Adds the highest level, which is `level`, to the totals.
    __device__ __forceinline__ void pop(unsigned level, unsigned char *memory,
                                        float (&total)[FRAGMENTS][ROWS / 2]) {
        // Without waiting totals, only another thread block's are popped.
        if (!WAITS || level < inherited) {
            add<false>(from() + level * LEVEL, total);
            inherited = level;
        } else if (hands_over) {
            add<false>(handed + level * LEVEL, total);
        } else if (level > 0) {
            add<false>(second(), total);
        } else {
            add<true>(first(memory), total);
        }
    }

    template <bool SHARED>
    static __device__ __forceinline__ void store(float4 *to, const float (&total)[FRAGMENTS][ROWS / 2]) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS * ROWS / 2; i += 4) {
            const float *of = &total[i / (ROWS / 2)][i % (ROWS / 2)];
            const float4 four = make_float4(of[0], of[1], of[2], of[3]);
            if constexpr (SHARED) {
                to[i / 4 * 32] = four;
            } else {
                __stcg(to + i / 4 * 32, four);
            }
        }
    }

    template <bool SHARED>
    static __device__ __forceinline__ void add(const float4 *waiting, float (&total)[FRAGMENTS][ROWS / 2]) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS * ROWS / 2; i += 4) {
            const float4 four = SHARED ? waiting[i / 4 * 32] : __ldcg(waiting + i / 4 * 32);
            float *of = &total[i / (ROWS / 2)][i % (ROWS / 2)];
            of[0] = __fadd_rn(four.x, of[0]);
            of[1] = __fadd_rn(four.y, of[1]);
            of[2] = __fadd_rn(four.z, of[2]);
            of[3] = __fadd_rn(four.w, of[3]);
        }
    }

    // Each warp of the grid has a word: 1 while its totals wait to be read, else 0.
    static __device__ __forceinline__ void hand_over(const Product &p) {
        __threadfence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            store_release(p.totals_ready + warp_of_grid(), 1);
        }
    }

    // Waits for the thread block before.
    static __device__ __forceinline__ void take_over(const Product &p) {
        unsigned *ready = p.totals_ready + warp_of_grid() - WARPS;
        // The whole warp waits. If only one lane did, the compiler would assume that lanes leave later loops one by one,
        // and would keep matrix addresses in per-lane registers.
        while (__any_sync(~0u, load_acquire(ready) == 0)) {
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            // Restored for the next product.
            *ready = 0;
        }
    }
};
