#pragma once
// Consumers of marlin_gemm_a8_wgmma.cu whose warpgroups take 64 columns each.

#include "a8_wgmma_stages.cuh"

// Two warpgroups with many rows.
constexpr bool TAKES_TURNS = ROWS > 64;
static_assert(!TAKES_TURNS || WARPS == 8);

// Adds the parts of a tile of few rows to the totals, k ascending. The next stage's fragments are made while products run.
template <int N>
__device__ __forceinline__ void add_parts(const Product &p, const Tile &tile, const WarpTile &warp, const Reader &reader,
                                          Place &place, float (&total)[N / 2]) {
    const unsigned k_stages = p.k_stages();
    Zeros zeros(p, tile, warp, 0);
    if constexpr (GROUPS == 0) {
        zeros.advance(0);
    }
    float part[N / 2];
    unsigned a[STEPS][4];
    StageCodes codes;
    reader.load(codes, place);
    dequantize(a, codes, zeros, 0);
    for (unsigned stage = 0; stage < k_stages; ++stage) {
        const unsigned slot = place.slot;
        const unsigned char *scales = reader.scales(slot);
        float scale[2] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step % PART_STEPS == 0) {
                wgmma_fence();
            }
            wgmma_fp8<N>(part, a[step], reader.x(slot) + 2 * step, step % PART_STEPS);
            if ((step + 1) % PART_STEPS == 0) {
                wgmma_commit();
                load_part_scales(scale, scales, step / PART_STEPS, warp);
                if (step + 1 < STEPS) {
                    wgmma_wait<0>();
                    promote(total, 0, part, scale);
                }
            }
        }
        place.next(p.stages);
        unsigned next[STEPS][4];
        if (stage + 1 < k_stages) {
            reader.load(codes, place);
            dequantize(next, codes, zeros, stage + 1);
        }
        wgmma_wait<0>();
        keep(a);
        reader.release(slot, warp.lane);
        promote(total, 0, part, scale);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[step][i] = next[step][i];
            }
        }
    }
}

// The warpgroups take turns on the unit: one promotes and makes fragments while the other one's products run. Barrier
// 3 + i opens when it is the turn of warpgroup i of two.
__device__ __forceinline__ void wait_for_turn(unsigned group) {
    asm volatile("bar.sync %0, 256;" ::"r"(3 + group) : "memory");
}

__device__ __forceinline__ void pass_turn(unsigned group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(3 + (group ^ 1)) : "memory");
}

// Likewise of a tile of many rows, in pieces of rows: registers are left for the parts of one.
template <int N>
__device__ __forceinline__ void add_parts_in_turns(const Product &p, const Tile &tile, const WarpTile &warp,
                                                   const Reader &reader, Place &place, float (&total)[N / 2]) {
    constexpr int PIECE_ROWS = N == 256 ? 128 : N, COUNT = PIECE_ROWS / 2, LAST = N / PIECE_ROWS * PARTS - 1;
    const unsigned k_stages = p.k_stages();
    Zeros zeros(p, tile, warp, 0);
    if constexpr (GROUPS == 0) {
        zeros.advance(0);
    }
    float part[COUNT], scale[2] = {};
    unsigned a[STEPS][4];
    StageCodes codes;
    reader.load(codes, place);
    dequantize(a, codes, zeros, 0);
    for (unsigned stage = 0; stage < k_stages; ++stage) {
        const unsigned slot = place.slot;
        place.next(p.stages);
#pragma unroll
        for (int now = 0; now <= LAST; ++now) {
            const int first = now % PARTS * PART_STEPS, at = now / PARTS * COUNT;
            wait_for_turn(warp.group);
            wgmma_fence();
#pragma unroll
            for (int step = first; step < first + PART_STEPS; ++step) {
                wgmma_fp8<PIECE_ROWS>(part, a[step], reader.x(slot) + at * (2 * STAGE_K / 16) + 2 * step, step != first);
            }
            wgmma_commit();
            pass_turn(warp.group);
            if (PARTS > 1 || now == 0) {
                load_part_scales(scale, reader.scales(slot), now % PARTS, warp);
            }
            if (now == LAST && stage + 1 < k_stages) {
                reader.load(codes, place);
            }
            wgmma_wait<0>();
            if (now == LAST) {
                keep(a);
                reader.release(slot, warp.lane);
                // Without a next stage of any codes.
                dequantize(a, codes, zeros, stage + 1);
            }
            promote(total, at, part, scale);
        }
    }
}

// Scales, bias and router weights, in f32.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, const WarpTile &warp,
                                       float (&total)[ROWS / 2]) {
    float w_scale[2], bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned n = min(tile.n0 + warp.n + half * 8 + warp.lane / 4, p.size_n - 1);
        const size_t at = place_of_column(p, tile, n);
        if constexpr (GROUPS == 0) {
            w_scale[half] = widen(reinterpret_cast<const unsigned short *>(p.scales)[at]);
        }
        bias[half] = p.bias ? widen(p.bias[at]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned row = tile.row + i * 2 + warp.lane % 4 * 2 + r;
            const unsigned m = IS_MOE ? row : min(row, p.size_m - 1);
            const bool is_weighted = IS_MOE && p.row_weights;
            const float x_scale = p.x_scales[m], row_weight = is_weighted ? p.row_weights[m] : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &value = total[i + half * 2 + r];
                if constexpr (GROUPS == 0) {
                    value = __fmul_rn(value, w_scale[half]);
                }
                value = scaled(p, value, x_scale, bias[half]);
                value = is_weighted ? __fmul_rn(value, row_weight) : value;
            }
        }
    }
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128;
    const WarpTile warp = {threadIdx.x % 32, group, group * GROUP_N + threadIdx.x / 32 % 4 * 16};
    const Reader reader(p, memory, warp, pointer);
    const unsigned box = memory.y_at + group * BOX_BYTES;
    if (TAKES_TURNS && group == 1) {
        // The first turn is that of warpgroup 0.
        pass_turn(group);
    }
    Place place;
    for_each_tile(p, [&](const Tile &tile) {
        float total[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[i] = 0.0f;
        }
        if constexpr (TAKES_TURNS) {
            add_parts_in_turns<ROWS>(p, tile, warp, reader, place, total);
        } else {
            add_parts<ROWS>(p, tile, warp, reader, place, total);
        }
        finish(p, tile, warp, total);
        write_tile(p, y_map, tile, warp, memory.start + box, pointer + box, total);
    });
    // Turns end as they began.
    if (TAKES_TURNS && group == 0) {
        wait_for_turn(group);
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}
