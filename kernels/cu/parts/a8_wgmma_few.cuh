#pragma once
// Consumers of marlin_gemm_a8_wgmma.cu for few rows where a stage is one part. The products of a stage begin before the last
// one's are waited for, and a warp writes its outputs on its own: with few k, what a tile costs besides its stages counts.

#include "a8_wgmma_activate.cuh"
#include "a8_wgmma_stages.cuh"
#include "run_stages.cuh"

// A stage whose products run.
template <int N>
struct Running {
    unsigned a[STEPS][4];
    float part[N / 2], scale[2];
    unsigned slot;
};

// Adds the parts of all stages. While the products of a stage run, the fragments of the next one are made, and its products
// begin.
template <int N>
__device__ __forceinline__ void add_overlapping_parts(const Product &p, const Tile &tile, const WarpTile &warp,
                                                      const Reader &reader, Place &place, float (&total)[N / 2]) {
    const unsigned k_stages = p.k_stages();
    Zeros zeros(p, tile, warp, 0);
    if constexpr (GROUPS == 0) {
        zeros.advance(0);
    }
    const auto begin = [&](Running<N> &of, unsigned stage) {
        StageCodes codes;
        reader.load(codes, place);
        of.slot = place.slot;
        of.scale[0] = of.scale[1] = 0.0f;
        load_part_scales(of.scale, reader.scales(of.slot), 0, warp);
        dequantize(of.a, codes, zeros, stage);
        const unsigned long long x = reader.x(ACTIVATES ? stage : of.slot);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            wgmma_fp8<N>(of.part, of.a[step], x + 2 * step, step);
        }
        wgmma_commit();
        place.next(p.stages);
    };
    const auto end = [&](const Running<N> &of) {
        keep(of.a);
        reader.release(of.slot, warp.lane);
        promote(total, 0, of.part, of.scale);
    };
    run_stages<Running<N>>(k_stages, begin, end);
}

// The transposed 8 x 8 matrix of 16-bit values: a lane has two neighbours of a row.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
    unsigned turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// Two neighbouring rows' numbers, of a tile's `head` with experts, else of all rows.
__device__ __forceinline__ float2 of_two_rows(const Product &p, const float *of_head, const float *of_all, unsigned row,
                                              unsigned in_tile) {
    if constexpr (IS_MOE) {
        return *reinterpret_cast<const float2 *>(of_head + in_tile);
    } else {
        return make_float2(of_all[min(row, p.size_m - 1)], of_all[min(row + 1, p.size_m - 1)]);
    }
}

// Scales, bias and router weights, in f32; then the outputs of the tile's rows.
template <int N>
__device__ __forceinline__ void write_rows(const Product &p, const Tile &tile, unsigned rows, const WarpTile &warp,
                                           const float *head, float (&total)[N / 2]) {
    const unsigned first = tile.n0 + warp.n;
    const bool is_weighted = IS_MOE && p.row_weights;
    float w_scale[2], bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned n = min(first + half * 8 + warp.lane / 4, p.size_n - 1);
        if constexpr (GROUPS == 0) {
            w_scale[half] = widen(reinterpret_cast<const unsigned short *>(p.scales)[place_of_column(p, tile, n)]);
        }
        if (p.bias) {
            bias[half] = widen(p.bias[place_of_column(p, tile, n)]);
        }
    }
    const bool is_here = warp.n < p.tile_n && first < p.size_n;
    unsigned short *y = p.y + static_cast<size_t>(tile.row + warp.lane / 4) * p.size_n + first + warp.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) {
        if (i * 2 >= rows) {
            break;
        }
        const unsigned in_tile = i * 2 + warp.lane % 4 * 2, row = tile.row + in_tile;
        const float2 x_scales = of_two_rows(p, head, p.x_scales, row, in_tile);
        float2 weights;
        if (is_weighted) {
            weights = of_two_rows(p, head + N, p.row_weights, row, in_tile);
        }
        unsigned turned[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float &value = total[i + half * 2 + r];
                const float x_scale = r == 0 ? x_scales.x : x_scales.y;
                if constexpr (GROUPS == 0) {
                    value = __fmul_rn(value, w_scale[half]);
                }
                value = scaled(p, value, x_scale, bias[half]);
                value = is_weighted ? __fmul_rn(value, r == 0 ? weights.x : weights.y) : value;
            }
            turned[half] = transposed(narrow2(total[i + half * 2], total[i + half * 2 + 1]));
        }
        if (is_here && i * 2 + warp.lane / 4 < rows) {
            unsigned *const to = reinterpret_cast<unsigned *>(y + static_cast<size_t>(i * 2) * p.size_n);
            to[0] = turned[0];
            to[4] = turned[1];
        }
    }
}

// Computes the tiles of this thread block, as producers describe them.
template <int N>
__device__ __forceinline__ void consume_few(const Product &p, const Memory &memory, unsigned char *pointer,
                                            [[maybe_unused]] const GateUp &gate_up) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128;
    const WarpTile warp = {threadIdx.x % 32, group, group * GROUP_N + threadIdx.x / 32 % 4 * 16};
    const Reader reader(p, memory, warp, pointer);
    Place place;
    for (unsigned at = 0;; at = next_head(p, at)) {
        barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
        unsigned char *head = pointer + memory.heads_at + at * HEAD_BYTES;
        const int4 of_tile = *reinterpret_cast<const int4 *>(head);
        const Tile tile = {static_cast<unsigned>(of_tile.x), static_cast<unsigned>(of_tile.y), of_tile.z};
        if (tile.expert < 0) {
            break;
        }
        if constexpr (ACTIVATES) {
            activate_rows(p, gate_up, tile.row, of_tile.w, memory, pointer, reinterpret_cast<float *>(head) + 4);
        }
        float total[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            total[i] = 0.0f;
        }
        add_overlapping_parts<N>(p, tile, warp, reader, place, total);
        write_rows<N>(p, tile, of_tile.w, warp, reinterpret_cast<const float *>(head) + 4, total);
    }
}
