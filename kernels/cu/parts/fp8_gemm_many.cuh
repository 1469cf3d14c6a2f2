#pragma once
// The consumers of fp8_gemm.cu for many rows. Rows of x are the 64-row side of wgmma: each of two warpgroups computes 64
// rows of a tile, half of its columns after the other. While one promotes a half's sum, the other one's products run.

#include "fp8_gemm_ring.cuh"
#include "fragments.cuh"
#include "mma.cuh"

namespace many {

constexpr unsigned GROUP_ROWS = 64;
// Columns of a half, which share a scale of W.
constexpr unsigned HALF_N = 128;
constexpr unsigned TILE_N = 2 * HALF_N;
// A piece of a finished tile: 64 columns of a warpgroup's rows. Two take turns, so that one is written while the copy
// engine reads the other.
constexpr unsigned BOX_BYTES = GROUP_ROWS * 128;
static_assert(2 * 2 * BOX_BYTES <= END_BYTES || ROWS != 128);

// A consumer thread's view of its tile.
struct Thread {
    unsigned lane, group;
    unsigned row;  // of the tile: its first, the second one is row + 8
};

// The scales of W of a tile: lane i has that of stage i / 2 and half i % 2, of 16 stages.
struct BlockScales {
    static constexpr unsigned STAGES = 16;
    const float *from;
    unsigned count;
    float now, next;

    __device__ __forceinline__ BlockScales(const Product &p, const Tile &tile, unsigned lane) {
        if constexpr (HAS_BLOCKS) {
            count = p.k_stages();
            const unsigned rows = (p.size_n + HALF_N - 1) / HALF_N;
            const unsigned row = min(tile.n0 / HALF_N + lane % 2, rows - 1);
            from = p.w_scales + (static_cast<size_t>(tile.expert) * rows + row) * count;
            now = from[min(lane / 2, count - 1)];
            next = from[min(STAGES + lane / 2, count - 1)];
        }
    }

    // Stages ascend.
    __device__ __forceinline__ void begin(unsigned stage, unsigned lane) {
        if (HAS_BLOCKS && stage % STAGES == 0 && stage > 0) {
            now = next;
            next = from[min(stage + STAGES + lane / 2, count - 1)];
        }
    }

    __device__ __forceinline__ float at(unsigned stage, unsigned half) const {
        return HAS_BLOCKS ? __shfl_sync(~0u, now, stage % STAGES * 2 + half) : 1.0f;
    }
};

// The values of a thread's two rows.
struct OfRows {
    float of[2] = {1.0f, 1.0f};
};

// Issues the sum of a stage's products for 64 rows and a half of the columns.
__device__ __forceinline__ void multiply(unsigned x_at, unsigned w_at, float (&sum)[HALF_N / 2]) {
    const unsigned long long x = matrix_descriptor(x_at), w = matrix_descriptor(w_at);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma_fp8<HALF_N>(sum, x + 2 * step, w + 2 * step, step);
    }
    wgmma_commit();
}

// Adds a stage's sums to the totals.
__device__ __forceinline__ void promote(const float (&sum)[HALF_N / 2], float (&total)[HALF_N / 2],
                                        [[maybe_unused]] const OfRows &x_scale, [[maybe_unused]] float w_scale) {
    if constexpr (HAS_BLOCKS) {
        const float scale[2] = {__fmul_rn(x_scale.of[0], w_scale), __fmul_rn(x_scale.of[1], w_scale)};
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            total[i] = __fmaf_rn(sum[i], scale[i / 2 % 2], total[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            total[i] = __fadd_rn(total[i], sum[i]);
        }
    }
}

// Scales, bias and router weights, in f32, of a half that begins at column n0.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, const Thread &thread, unsigned n0,
                                       [[maybe_unused]] const OfRows &x_scale, [[maybe_unused]] const OfRows &row_weight,
                                       float (&total)[HALF_N / 2]) {
    float2 w_scale[HALF_N / 8], bias[HALF_N / 8];
#pragma unroll
    for (int j = 0; j < HALF_N / 8; ++j) {
        const unsigned n = min(n0 + j * 8 + thread.lane % 4 * 2, p.size_n - 2);
        const size_t at = static_cast<size_t>(tile.expert) * p.size_n + n;
        if constexpr (!HAS_BLOCKS) {
            w_scale[j] = *reinterpret_cast<const float2 *>(p.w_scales + at);
        }
        const unsigned two = p.bias ? *reinterpret_cast<const unsigned *>(p.bias + at) : 0;
        bias[j] = make_float2(widen(two & 0xffff), widen(two >> 16));
    }
#pragma unroll
    for (int j = 0; j < HALF_N / 8; ++j) {
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

// Rounds a half that begins at column n0; the copy engine writes it, and continues during the next products.
__device__ __forceinline__ void write_half(const TensorMap &y_map, const Tile &tile, const Thread &thread, unsigned n0,
                                           unsigned boxes, const float (&total)[HALF_N / 2]) {
    const bool is_writer = threadIdx.x % 128 == 0;
    const unsigned row = threadIdx.x / 32 % 4 * 16 + thread.lane % 16, piece = thread.lane / 16;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const unsigned box = boxes + part * BOX_BYTES;
        if (is_writer) {
            // The box's last columns have been read from it.
            wait_for_stores<1>();
        }
        warpgroup_sync(thread.group);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float *of = total + part * 32 + j * 8;
            const unsigned packed[4] = {narrow2(of[0], of[1]), narrow2(of[2], of[3]), narrow2(of[4], of[5]),
                                        narrow2(of[6], of[7])};
            store_matrices(box + SwizzledRows::at(row, j * 2 + piece), packed);
        }
        fence_async_proxy();
        warpgroup_sync(thread.group);
        if (is_writer) {
            store_box(y_map, n0 + part * 64, tile.row + thread.group * GROUP_ROWS, box);
            commit_stores();
        }
        __syncwarp();
    }
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer, unsigned rank) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128, lane = threadIdx.x % 32;
    const Thread thread = {lane, group, group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4};
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns(), k_stages = p.k_stages();
    const unsigned boxes = memory.start + memory.y_at + group * (2 * BOX_BYTES);
    Place place;
    for (unsigned index = blockIdx.x / RANKS; index < tiles; index += gridDim.x / RANKS) {
        const Tile tile = tile_at(p, index, blocks, rank);
        if (tile.expert < 0) {
            continue;
        }
        BlockScales scales(p, tile, lane);
        OfRows x_scale, row_weight;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned row = tile.row + thread.row + 8 * r, m = IS_MOE ? row : min(row, p.size_m - 1);
            if constexpr (!HAS_BLOCKS) {
                x_scale.of[r] = p.x_scales[m * static_cast<size_t>(p.x_scale_step)];
            }
            if (IS_MOE && p.row_weights) {
                row_weight.of[r] = p.row_weights[m];
            }
        }
        float total[2][HALF_N / 2], sum[HALF_N / 2];
#pragma unroll
        for (int i = 0; i < HALF_N; ++i) {
            total[i / (HALF_N / 2)][i % (HALF_N / 2)] = 0.0f;
        }
        for (unsigned stage = 0; stage < k_stages; ++stage) {
            const unsigned w_at = memory.start + place.slot * memory.stage_bytes, x_at = w_at + TILE_N * STAGE_K;
            barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
            scales.begin(stage, lane);
            if constexpr (HAS_BLOCKS) {
                const unsigned char *of_stage = pointer + memory.x_scales_at + place.slot * X_SCALE_BYTES;
                x_scale.of[0] = reinterpret_cast<const float *>(of_stage)[thread.row];
                x_scale.of[1] = reinterpret_cast<const float *>(of_stage)[thread.row + 8];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                multiply(x_at + group * GROUP_ROWS * STAGE_K, w_at + half * HALF_N * STAGE_K, sum);
                const float w_scale = scales.at(stage, half);
                wgmma_wait<0>();
                if (half == 1) {
                    release(memory.start + memory.empty_at + place.slot * 8, lane);
                }
                promote(sum, total[half], x_scale, w_scale);
            }
            place.next(p.stages);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned n0 = tile.n0 + half * HALF_N;
            finish(p, tile, thread, n0, x_scale, row_weight, total[half]);
            write_half(y_map, tile, thread, n0, boxes, total[half]);
        }
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}

}  // namespace many
