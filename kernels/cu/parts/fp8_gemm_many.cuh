#pragma once
// The consumers of fp8_gemm.cu for many rows. Rows of x are the 64-row side of wgmma: each of two warpgroups computes 64
// rows of a tile. A stage's products run while the sum of the stage before is promoted.

#include "fp8_gemm_ring.cuh"
#include "fragments.cuh"
#include "mma.cuh"

namespace many {

constexpr unsigned GROUP_ROWS = 64;
// Columns of a tile, which share a scale of W.
constexpr unsigned TILE_N = 128;
// A piece of a finished tile: 64 columns of a warpgroup's rows.
constexpr unsigned BOX_BYTES = GROUP_ROWS * 128;

// A consumer thread's view of its tile.
struct Thread {
    unsigned lane, group;
    unsigned row;  // of the tile: its first, the second one is row + 8
};

// The values of a thread's two rows.
struct OfRows {
    float of[2] = {1.0f, 1.0f};
};

// A stage whose products run.
struct Stage {
    float sum[TILE_N / 2];
    OfRows x_scale;
    float w_scale;
    unsigned slot;

    // Issues the products of stage `index`.
    __device__ __forceinline__ void begin(const Product &p, const Memory &memory, const unsigned char *pointer,
                                          const Thread &thread, BlockScales &scales, unsigned index, Place &place) {
        slot = place.slot;
        const unsigned at = memory.start + slot * (TILE_N * STAGE_K + X_BYTES);
        const unsigned x_at = at + TILE_N * STAGE_K + thread.group * (GROUP_ROWS * STAGE_K);
        barrier_wait(memory.start + memory.full_at + slot * 8, place.phase);
        const unsigned long long x = matrix_descriptor(x_at), w = matrix_descriptor(at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma_fp8<TILE_N>(sum, x + 2 * step, w + 2 * step, step);
        }
        wgmma_commit();
        if constexpr (HAS_BLOCKS) {
            const unsigned char *of_rows = pointer + memory.x_scales_at + slot * X_SCALE_BYTES;
            x_scale.of[0] = reinterpret_cast<const float *>(of_rows)[thread.row];
            x_scale.of[1] = reinterpret_cast<const float *>(of_rows)[thread.row + 8];
            w_scale = scales.at(index, thread.lane);
        }
        place.next(p.stages);
    }

    // Adds the sums, which are complete, to the totals.
    __device__ __forceinline__ void promote(const Memory &memory, const Thread &thread, float (&total)[TILE_N / 2]) {
        release(memory.start + memory.empty_at + slot * 8, thread.lane);
        if constexpr (HAS_BLOCKS) {
            const float scale[2] = {__fmul_rn(x_scale.of[0], w_scale), __fmul_rn(x_scale.of[1], w_scale)};
#pragma unroll
            for (int i = 0; i < TILE_N / 2; ++i) {
                total[i] = __fmaf_rn(sum[i], scale[i / 2 % 2], total[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILE_N / 2; ++i) {
                total[i] = __fadd_rn(total[i], sum[i]);
            }
        }
    }
};

// Scales, bias and router weights, in f32.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, const Thread &thread,
                                       [[maybe_unused]] const OfRows &x_scale, [[maybe_unused]] const OfRows &row_weight,
                                       float (&total)[TILE_N / 2]) {
    float2 w_scale[TILE_N / 8], bias[TILE_N / 8];
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
        const unsigned n = min(tile.n0 + j * 8 + thread.lane % 4 * 2, p.size_n - 2);
        const size_t at = static_cast<size_t>(tile.expert) * p.size_n + n;
        if constexpr (!HAS_BLOCKS) {
            w_scale[j] = *reinterpret_cast<const float2 *>(p.w_scales + at);
        }
        const unsigned two = p.bias ? *reinterpret_cast<const unsigned *>(p.bias + at) : 0;
        bias[j] = make_float2(widen(two & 0xffff), widen(two >> 16));
    }
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float &value = total[j * 4 + i];
            const float added = i % 2 ? bias[j].y : bias[j].x;
            if constexpr (HAS_BLOCKS) {
                value = p.bias ? __fadd_rn(value, added) : value;
            } else {
                value = __fmul_rn(value, i % 2 ? w_scale[j].y : w_scale[j].x);
                value = p.bias ? __fmaf_rn(value, x_scale.of[i / 2], added) : __fmul_rn(value, x_scale.of[i / 2]);
            }
            if constexpr (IS_MOE) {
                value = p.row_weights ? __fmul_rn(value, row_weight.of[i / 2]) : value;
            }
        }
    }
}

// Rounds a warpgroup's rows of a tile; the copy engine writes them, and continues during the next tile.
__device__ __forceinline__ void write_tile(const TensorMap &y_map, const Tile &tile, const Thread &thread,
                                           unsigned boxes, const float (&total)[TILE_N / 2]) {
    const bool is_writer = threadIdx.x % 128 == 0;
    const unsigned row = threadIdx.x / 32 % 4 * 16 + thread.lane % 16, piece = thread.lane / 16;
    if (is_writer) {
        wait_for_stores();
    }
    // The last tile has been read from shared memory.
    warpgroup_sync(thread.group);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i += 8) {
        const unsigned packed[4] = {narrow2(total[i], total[i + 1]), narrow2(total[i + 2], total[i + 3]),
                                    narrow2(total[i + 4], total[i + 5]), narrow2(total[i + 6], total[i + 7])};
        store_matrices(boxes + i / 32 * BOX_BYTES + SwizzledRows::at(row, i / 4 % 8 + piece), packed);
    }
    fence_async_proxy();
    warpgroup_sync(thread.group);
    if (is_writer) {
        const unsigned row_0 = tile.row + thread.group * GROUP_ROWS;
        store_box(y_map, tile.n0, row_0, boxes);
        store_box(y_map, tile.n0 + 64, row_0, boxes + BOX_BYTES);
        commit_stores();
    }
    __syncwarp();
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128, lane = threadIdx.x % 32;
    const Thread thread = {lane, group, group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4};
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns();
    const unsigned boxes = memory.start + memory.y_at + group * (2 * BOX_BYTES);
    Place place;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index, blocks);
        if (tile.expert < 0) {
            continue;
        }
        const unsigned n = min(tile.n0 + threadIdx.x % TILE_N, p.size_n - 1);
        const size_t column = static_cast<size_t>(tile.expert) * p.size_n + n;
        if constexpr (!HAS_BLOCKS) {
            prefetch(p.w_scales + column);
        }
        if (p.bias) {
            prefetch(p.bias + column);
        }
        BlockScales scales(p, tile, 0, lane);
        OfRows x_scale, row_weight;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned row = tile.row + thread.row + 8 * r, m = IS_MOE ? row : min(row, p.size_m - 1);
            if constexpr (!HAS_BLOCKS) {
                x_scale.of[r] = __ldcg(p.x_scales + m * static_cast<size_t>(p.x_scale_step));
            }
            if (IS_MOE && p.row_weights) {
                row_weight.of[r] = __ldcg(p.row_weights + m);
            }
        }
        float total[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) {
            total[i] = 0.0f;
        }
        run_stages<Stage>(
            p.k_stages(),
            [&](Stage &stage, unsigned index) { stage.begin(p, memory, pointer, thread, scales, index, place); },
            [&](Stage &stage) { stage.promote(memory, thread, total); });
        finish(p, tile, thread, x_scale, row_weight, total);
        write_tile(y_map, tile, thread, boxes, total);
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}

}  // namespace many
