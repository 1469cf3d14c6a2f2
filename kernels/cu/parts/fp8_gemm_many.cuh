#pragma once
// The consumers of fp8_gemm.cu for many rows. Rows of x are the 64-row side of wgmma: each of two warpgroups computes 64
// rows of a tile.

#include "fp8_gemm_ring.cuh"
#include "fragments.cuh"
#include "mma.cuh"

namespace many {

constexpr unsigned GROUP_ROWS = 64;
// Columns of a part of a tile, which share a scale of W.
constexpr unsigned PART_N = 128;
constexpr unsigned PARTS = IS_WIDE ? 2 : 1;
constexpr unsigned TILE_N = PARTS * PART_N;
// 64 columns of a warpgroup's rows of a finished tile. Two take turns: one is written while the copy engine reads the
// other.
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

// Issues the products of the stage at `place` with N columns from column n of the tile; sums as in fp8_gemm_few.cuh.
template <int N>
__device__ __forceinline__ void multiply(const Memory &memory, const Thread &thread, const Place &place, unsigned n,
                                         bool is_start, float (&sum)[N / 2]) {
    const unsigned at = memory.start + place.slot * (TILE_N * STAGE_K + X_BYTES);
    const unsigned long long x = matrix_descriptor(at + TILE_N * STAGE_K + thread.group * (GROUP_ROWS * STAGE_K));
    const unsigned long long w = matrix_descriptor(at + n * STAGE_K);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma_fp8<N>(sum, x + 2 * step, w + 2 * step, step || !is_start);
    }
    wgmma_commit();
}

// The scales of x of a thread's rows in a stage.
__device__ __forceinline__ OfRows scales_of_rows(const Memory &memory, const unsigned char *pointer, const Thread &thread,
                                                 unsigned slot) {
    OfRows scales;
    if constexpr (HAS_BLOCKS) {
        const unsigned char *of_rows = pointer + memory.x_scales_at + slot * X_SCALE_BYTES;
        scales.of[0] = reinterpret_cast<const float *>(of_rows)[thread.row];
        scales.of[1] = reinterpret_cast<const float *>(of_rows)[thread.row + 8];
    }
    return scales;
}

// Adds a part's sums, which are complete, to its totals.
__device__ __forceinline__ void promote(const float (&sum)[PART_N / 2], const OfRows &x_scale, float w_scale,
                                        float (&total)[PART_N / 2]) {
    if constexpr (HAS_BLOCKS) {
        const float scale[2] = {__fmul_rn(x_scale.of[0], w_scale), __fmul_rn(x_scale.of[1], w_scale)};
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) {
            total[i] = __fmaf_rn(sum[i], scale[i / 2 % 2], total[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) {
            total[i] = __fadd_rn(total[i], sum[i]);
        }
    }
}

// A stage of a narrow tile whose products run.
struct Stage {
    float sum[PART_N / 2];
    OfRows x_scale;
    float w_scale;
    unsigned slot;
};

// The warpgroups take turns on the unit: one promotes while the other one's products run.
__device__ __forceinline__ void wait_for_turn(unsigned group) {
    asm volatile("bar.sync %0, 256;" ::"r"(4 + group) : "memory");
}

__device__ __forceinline__ void pass_turn(unsigned group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(5 - group) : "memory");
}

constexpr bool HAS_TURNS = IS_WIDE && IS_PROMOTED;

// The totals of a tile: its parts' sums, promoted or not.
__device__ __forceinline__ void sum_tile(const Product &p, const Tile &tile, const Memory &memory,
                                         const unsigned char *pointer, const Thread &thread, Place &place,
                                         float (&total)[PARTS][PART_N / 2]) {
    const unsigned k_stages = p.k_stages();
    const auto wait_for_stage = [&] { barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase); };
    const auto release_slot = [&](unsigned slot) { release(memory.start + memory.empty_at + slot * 8, thread.lane); };
    if constexpr (!IS_PROMOTED) {
        float sum[TILE_N / 2];
        run_chain(
            k_stages,
            [&](unsigned index) {
                wait_for_stage();
                multiply<TILE_N>(memory, thread, place, 0, index == 0, sum);
                const unsigned slot = place.slot;
                place.next(p.stages);
                return slot;
            },
            release_slot);
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) {
            total[i / (PART_N / 2)][i % (PART_N / 2)] = sum[i];
        }
        return;
    }
    BlockScales<PARTS> scales(p, tile, 0, thread.lane);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        total[i / (PART_N / 2)][i % (PART_N / 2)] = 0.0f;
    }
    if constexpr (HAS_TURNS) {
        float sum[PART_N / 2];
        for (unsigned index = 0; index < k_stages; ++index) {
            wait_for_stage();
            scales.advance(index, thread.lane);
            const OfRows x_scale = scales_of_rows(memory, pointer, thread, place.slot);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                wait_for_turn(thread.group);
                multiply<PART_N>(memory, thread, place, part * PART_N, true, sum);
                pass_turn(thread.group);
                const float w_scale = scales.at(index, part);
                wgmma_wait<0>();
                if (part == PARTS - 1) {
                    release_slot(place.slot);
                }
                promote(sum, x_scale, w_scale, total[part]);
            }
            place.next(p.stages);
        }
    } else {
        run_stages<Stage>(
            k_stages,
            [&](Stage &stage, unsigned index) {
                wait_for_stage();
                multiply<PART_N>(memory, thread, place, 0, true, stage.sum);
                stage.slot = place.slot;
                stage.x_scale = scales_of_rows(memory, pointer, thread, place.slot);
                scales.advance(index, thread.lane);
                stage.w_scale = scales.at(index);
                place.next(p.stages);
            },
            [&](Stage &stage) {
                release_slot(stage.slot);
                promote(stage.sum, stage.x_scale, stage.w_scale, total[0]);
            });
    }
}

// Scales, bias and router weights of a part from the tile's column n, in f32.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, unsigned n_part, const Thread &thread,
                                       [[maybe_unused]] const OfRows &x_scale, [[maybe_unused]] const OfRows &row_weight,
                                       float (&total)[PART_N / 2]) {
    float2 w_scale[PART_N / 8], bias[PART_N / 8];
#pragma unroll
    for (int j = 0; j < PART_N / 8; ++j) {
        const unsigned n = min(tile.n0 + n_part + j * 8 + thread.lane % 4 * 2, p.size_n - 2);
        const size_t at = static_cast<size_t>(tile.expert) * p.size_n + n;
        if constexpr (!HAS_BLOCKS) {
            w_scale[j] = *reinterpret_cast<const float2 *>(p.w_scales + at);
        }
        const unsigned two = p.bias ? *reinterpret_cast<const unsigned *>(p.bias + at) : 0;
        bias[j] = make_float2(widen(two & 0xffff), widen(two >> 16));
    }
#pragma unroll
    for (int j = 0; j < PART_N / 8; ++j) {
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

// Rounds a warpgroup's rows of a part; the copy engine writes them, and continues during the next tile.
__device__ __forceinline__ void write_part(const TensorMap &y_map, const Tile &tile, unsigned n_part, const Thread &thread,
                                           unsigned boxes, const float (&total)[PART_N / 2]) {
    const bool is_writer = threadIdx.x % 128 == 0;
    const unsigned row = threadIdx.x / 32 % 4 * 16 + thread.lane % 16, piece = thread.lane / 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned box = boxes + half * BOX_BYTES;
        if (is_writer) {
            wait_for_stores<1>();
        }
        // The box's last columns have been read.
        warpgroup_sync(thread.group);
#pragma unroll
        for (int i = half * 32; i < half * 32 + 32; i += 8) {
            const unsigned packed[4] = {narrow2(total[i], total[i + 1]), narrow2(total[i + 2], total[i + 3]),
                                        narrow2(total[i + 4], total[i + 5]), narrow2(total[i + 6], total[i + 7])};
            store_matrices(box + SwizzledRows::at(row, i / 4 % 8 + piece), packed);
        }
        fence_async_proxy();
        warpgroup_sync(thread.group);
        if (is_writer) {
            store_box(y_map, tile.n0 + n_part + half * 64, tile.row + thread.group * GROUP_ROWS, box);
            commit_stores();
        }
        __syncwarp();
    }
}

// Passes the stages of a tile of which the warpgroup has no rows.
__device__ __forceinline__ void skip_tile(const Product &p, const Memory &memory, const Thread &thread, Place &place) {
    const unsigned k_stages = p.k_stages();
    for (unsigned index = 0; index < k_stages; ++index) {
        barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
        if constexpr (HAS_TURNS) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                wait_for_turn(thread.group);
                pass_turn(thread.group);
            }
        }
        release(memory.start + memory.empty_at + place.slot * 8, thread.lane);
        place.next(p.stages);
    }
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128, lane = threadIdx.x % 32;
    const Thread thread = {lane, group, group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4};
    const unsigned boxes = memory.start + memory.y_at + group * (2 * BOX_BYTES);
    if (HAS_TURNS && group == 1) {
        pass_turn(group);
    }
    Place place;
    for_each_tile(p, [&](const Tile &tile) {
        // The shuffle tells the compiler that all lanes agree: what depends on the tile may stay in uniform registers.
        if (__shfl_sync(~0u, group == 1 && p.is_half(tile.row), 0)) {
            skip_tile(p, memory, thread, place);
            return;
        }
        const unsigned n = min(tile.n0 + threadIdx.x % 128 * PARTS, p.size_n - 1);
        const size_t column = static_cast<size_t>(tile.expert) * p.size_n + n;
        if constexpr (!HAS_BLOCKS) {
            prefetch(p.w_scales + column);
        }
        if (p.bias) {
            prefetch(p.bias + column);
        }
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
        float total[PARTS][PART_N / 2];
        sum_tile(p, tile, memory, pointer, thread, place, total);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            finish(p, tile, part * PART_N, thread, x_scale, row_weight, total[part]);
            write_part(y_map, tile, part * PART_N, thread, boxes, total[part]);
        }
    });
    if (HAS_TURNS && group == 0) {
        wait_for_turn(group);
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}

}  // namespace many
