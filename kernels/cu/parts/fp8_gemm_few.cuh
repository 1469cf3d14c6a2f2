#pragma once
// The consumers of fp8_gemm.cu for few rows. Weights are the 64-row side of wgmma: a warpgroup computes 64 columns of a
// tile.

#include "fp8_gemm_ring.cuh"
#include "write_columns.cuh"

namespace few {

// A consumer warp's view of its tile.
struct WarpTile {
    unsigned lane, group;
    unsigned n;       // its first column in the tile
    unsigned read_n;  // its group's first column, or one of another group past the tile
};

// Issues the products of a stage, which are added to `sum`, or, at the start of a chain, to 0; returns its slot.
__device__ __forceinline__ unsigned multiply(const Product &p, const Memory &memory, const WarpTile &warp, bool is_start,
                                             Place &place, float (&sum)[ROWS / 2]) {
    const unsigned slot = place.slot;
    barrier_wait(memory.start + memory.full_at + slot * 8, place.phase);
    const unsigned at = memory.start + slot * memory.stage_bytes;
    const unsigned long long w = matrix_descriptor(at + warp.read_n * STAGE_K);
    const unsigned long long x = matrix_descriptor(at + p.tile_n * STAGE_K);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma_fp8<ROWS>(sum, w + 2 * step, x + 2 * step, step || !is_start);
    }
    wgmma_commit();
    place.next(p.stages);
    return slot;
}

// A stage whose products run.
struct Stage {
    float sum[ROWS / 2];
    float w_scale;
    unsigned slot;

    // Issues the products of stage `index`.
    __device__ __forceinline__ void begin(const Product &p, const Memory &memory, const WarpTile &warp,
                                          BlockScales<1> &scales, unsigned index, Place &place) {
        slot = multiply(p, memory, warp, true, place, sum);
        scales.advance(index, warp.lane);
        w_scale = scales.at(index);
    }

    // Adds the sums, which are complete, to the totals. With blocks, a lane's rows have a scale each, its columns one.
    __device__ __forceinline__ void promote(const Memory &memory, const unsigned char *pointer, const WarpTile &warp,
                                            float (&total)[ROWS / 2]) {
        const unsigned empty = memory.start + memory.empty_at + slot * 8;
        if constexpr (HAS_BLOCKS) {
            const unsigned char *of_stage = pointer + memory.x_scales_at + slot * X_SCALE_BYTES;
            const float2 *x_scales = reinterpret_cast<const float2 *>(of_stage) + warp.lane % 4;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i += 4) {
                const float2 x_scale = x_scales[i];
                const float scale[2] = {__fmul_rn(x_scale.x, w_scale), __fmul_rn(x_scale.y, w_scale)};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    total[i + j] = __fmaf_rn(sum[i + j], scale[j % 2], total[i + j]);
                }
            }
            __syncwarp();
            release(empty, warp.lane);
        } else {
            release(empty, warp.lane);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                total[i] = __fadd_rn(total[i], sum[i]);
            }
        }
    }
};

// Scales, bias and router weights, in f32.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, const WarpTile &warp,
                                       float (&total)[ROWS / 2]) {
    float w_scale[2], bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned n = min(tile.n0 + warp.n + half * 8 + warp.lane / 4, p.size_n - 1);
        const size_t at = static_cast<size_t>(tile.expert) * p.size_n + n;
        w_scale[half] = HAS_BLOCKS ? 1.0f : p.w_scales[at];
        bias[half] = p.bias ? widen(p.bias[at]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned row = tile.row + i * 2 + warp.lane % 4 * 2 + r;
            const unsigned m = IS_MOE ? row : min(row, p.size_m - 1);
            const float x_scale = HAS_BLOCKS ? 1.0f : p.x_scales[m * static_cast<size_t>(p.x_scale_step)];
            const bool is_weighted = IS_MOE && p.row_weights;
            const float row_weight = is_weighted ? p.row_weights[m] : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &value = total[i + half * 2 + r];
                if constexpr (HAS_BLOCKS) {
                    value = p.bias ? __fadd_rn(value, bias[half]) : value;
                } else {
                    value = __fmul_rn(value, w_scale[half]);
                    value = p.bias ? __fmaf_rn(value, x_scale, bias[half]) : __fmul_rn(value, x_scale);
                }
                value = is_weighted ? __fmul_rn(value, row_weight) : value;
            }
        }
    }
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128;
    const WarpTile warp = {threadIdx.x % 32, group, (threadIdx.x - PRODUCERS) / 32 * 16,
                           min(group, (p.tile_n - 1) / GROUP_N) * GROUP_N};
    const unsigned k_stages = p.k_stages();
    const unsigned box = memory.y_at + group * (ROWS * GROUP_N * 2);
    Place place;
    for_each_tile(p, [&](const Tile &tile) {
        float total[ROWS / 2];
        if constexpr (IS_PROMOTED) {
            BlockScales<1> scales(p, tile, warp.n, warp.lane);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                total[i] = 0.0f;
            }
            run_stages<Stage>(
                k_stages, [&](Stage &stage, unsigned index) { stage.begin(p, memory, warp, scales, index, place); },
                [&](Stage &stage) { stage.promote(memory, pointer, warp, total); });
        } else {
            run_chain(
                k_stages, [&](unsigned index) { return multiply(p, memory, warp, index == 0, place, total); },
                [&](unsigned slot) { release(memory.start + memory.empty_at + slot * 8, warp.lane); });
        }
        finish(p, tile, warp, total);
        write_tile(p, y_map, tile, warp, memory.start + box, pointer + box, total);
    });
    // The copy engine may still be reading here.
    wait_for_stores();
}

}  // namespace few
