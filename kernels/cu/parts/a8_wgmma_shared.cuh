#pragma once
// Consumers of marlin_gemm_a8_wgmma.cu for few columns and rows: four warpgroups share the columns, each computes the parts
// of every fourth stage or pair of stages, and a fifth one promotes them, k ascending.

#include "a8_wgmma_stages.cuh"

// Where parts wait for the promoters.
struct PartSlots {
    float *parts;
    unsigned barriers;

    __device__ __forceinline__ PartSlots(const Memory &memory, const unsigned char *pointer)
        : parts(reinterpret_cast<float *>(const_cast<unsigned char *>(pointer) + memory.parts_at)),
          barriers(memory.start + memory.parts_at + PART_SLOTS * PAIR * PART_FLOATS * 4) {}

    __device__ __forceinline__ void init() const {
        for (unsigned slot = 0; slot < PART_SLOTS; ++slot) {
            barrier_init(full(slot), 4);
            barrier_init(empty(slot), 4);
        }
    }

    __device__ __forceinline__ unsigned full(unsigned count) const { return barriers + count % PART_SLOTS * 16; }
    __device__ __forceinline__ unsigned empty(unsigned count) const { return full(count) + 8; }
    __device__ __forceinline__ static unsigned phase(unsigned count) { return count / PART_SLOTS & 1; }
    __device__ __forceinline__ float *at(unsigned count, unsigned in_pair) const {
        return parts + (count % PART_SLOTS * PAIR + in_pair) * PART_FLOATS;
    }
};

// Warpgroups that share columns, and warps of one for the columns of a stage.
constexpr unsigned SHARERS = SPLITS / PAIR, COLUMN_WARPS = N_TILE / 16;
// Sums of a promoter, and how many of them are neighbours in shared memory.
constexpr unsigned PROMOTED = IS_SHARED ? N_TILE * ROWS / 128 : 4;
constexpr unsigned VECTOR = PROMOTED < 4 ? 2 : 4;

// Computes the parts of every SHARERS-th pair of stages, of all tiles of this thread block.
template <int N>
__device__ __forceinline__ void multiply_shared(const Product &p, const Memory &memory, const unsigned char *pointer) {
    const unsigned in_block = warp_of_block(), group = (in_block - PRODUCERS / 32) / 4, in_group = in_block % 4;
    const unsigned in_pair = in_group / COLUMN_WARPS;
    const WarpTile warp = {threadIdx.x % 32, group, in_group % COLUMN_WARPS * 16};
    const Reader reader(p, memory, warp, pointer);
    const PartSlots slots(memory, pointer);
    const unsigned k_stages = p.k_stages();
    const unsigned pairs = (k_stages + PAIR - 1) / PAIR, ring = p.stages / PAIR;
    const unsigned lane = warp.n * 2 + warp.lane;
    Place place;
    unsigned count = 0;
    for_each_tile(p, [&](const Tile &tile) {
        // Every fourth pair of all tiles, so that a slot of the ring is always read by the same warpgroup.
        const unsigned first = (group - count) % SHARERS;
        Zeros zeros(p, tile, warp, GROUPS > 0 ? first * PAIR + in_pair : 0);
        if constexpr (GROUPS == 0) {
            zeros.advance(0);
        }
        Place mine = place.after(first, ring);
        for (unsigned pair = first; pair < pairs; pair += SHARERS) {
            const unsigned slot = mine.slot * PAIR;
#pragma unroll
            for (unsigned i = 0; i < PAIR; ++i) {
                barrier_wait(memory.start + memory.full_at + (slot + i) * 8, mine.phase);
            }
            StageCodes codes;
            codes.load(reader.weights + (slot + in_pair) * WEIGHT_BYTES);
            float scale[2] = {1.0f, 1.0f};
            load_part_scales(scale, reader.scales(slot + in_pair), 0, warp);
            unsigned a[STEPS][4];
            dequantize(a, codes, zeros, pair * PAIR + in_pair, SPLITS);
            float part[PAIR * N / 2];
            const unsigned long long x = reader.x(slot);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                wgmma_fp8<PAIR * N>(part, a[step], x + 2 * step, step);
            }
            wgmma_commit();
            const unsigned at = count + pair;
            barrier_wait(slots.empty(at), slots.phase(at) ^ 1);
            wgmma_wait<0>();
            keep(a);
#pragma unroll
            for (unsigned i = 0; i < PAIR; ++i) {
                reader.release(slot + i, warp.lane);
            }
            float *const to = slots.at(at, in_pair);
#pragma unroll
            for (unsigned i = 0; i < N / 2; i += VECTOR) {
                float of[VECTOR];
#pragma unroll
                for (unsigned j = 0; j < VECTOR; ++j) {
                    of[j] = PAIR == 2 && in_pair == 1 ? part[PAIR == 2 ? N / 2 + i + j : 0] : part[i + j];
                }
                if constexpr (VECTOR == 4) {
                    reinterpret_cast<float4 *>(to)[i / 4 * PART_LANES + lane] = make_float4(of[0], of[1], of[2], of[3]);
                } else {
                    reinterpret_cast<float2 *>(to)[i / 2 * PART_LANES + lane] = make_float2(of[0], of[1]);
                }
            }
            reinterpret_cast<float2 *>(to + ROWS / 2 * PART_LANES)[lane] = make_float2(scale[0], scale[1]);
            __syncwarp();
            if (warp.lane == 0) {
                barrier_arrive(slots.full(at));
            }
            mine = mine.after(SHARERS, ring);
        }
        const unsigned end = place.slot + pairs;
        place = {end % ring, place.phase ^ (end / ring & 1)};
        count += pairs;
    });
}

// Promotes the parts of all tiles of this thread block, k ascending, and writes the outputs.
__device__ __forceinline__ void promote_shared(const Product &p, const Memory &memory, const unsigned char *pointer) {
    constexpr unsigned SHARE = 128 / PART_LANES;
    const unsigned thread = threadIdx.x % 128, at_lane = thread % PART_LANES, first = thread / PART_LANES * PROMOTED;
    const unsigned lane = at_lane % 32, in_tile = at_lane / 32 * 16 + lane / 4;
    static_assert(!IS_SHARED || SHARE * PROMOTED == ROWS / 2);
    const PartSlots slots(memory, pointer);
    const unsigned k_stages = p.k_stages();
    const unsigned pairs = (k_stages + PAIR - 1) / PAIR;
    unsigned count = 0;
    for_each_tile(p, [&](const Tile &tile) {
        float total[PROMOTED];
#pragma unroll
        for (unsigned i = 0; i < PROMOTED; ++i) {
            total[i] = 0.0f;
        }
        for (unsigned pair = 0; pair < pairs; ++pair, ++count) {
            barrier_wait(slots.full(count), slots.phase(count));
#pragma unroll
            for (unsigned in_pair = 0; in_pair < PAIR; ++in_pair) {
                if (PAIR == 1 || pair * PAIR + in_pair < k_stages) {
                    const float *const from = slots.at(count, in_pair);
                    const float2 scale = reinterpret_cast<const float2 *>(from + ROWS / 2 * PART_LANES)[at_lane];
#pragma unroll
                    for (unsigned i = 0; i < PROMOTED; i += VECTOR) {
                        const float *const of = from + ((first + i) / VECTOR * PART_LANES + at_lane) * VECTOR;
                        float part[VECTOR];
                        if constexpr (VECTOR == 4) {
                            const float4 four = *reinterpret_cast<const float4 *>(of);
                            part[0] = four.x; part[1] = four.y; part[2] = four.z; part[3] = four.w;
                        } else {
                            const float2 two = *reinterpret_cast<const float2 *>(of);
                            part[0] = two.x; part[1] = two.y;
                        }
#pragma unroll
                        for (unsigned j = 0; j < VECTOR; ++j) {
                            total[i + j] = promoted(total[i + j], part[j], (first + i + j) / 2 % 2 ? scale.y : scale.x);
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(slots.empty(count));
            }
        }
#pragma unroll
        for (unsigned i = 0; i < PROMOTED; ++i) {
            const unsigned of = first + i, row = tile.row + of / 4 * 8 + lane % 4 * 2 + of % 2;
            const unsigned n_in_tile = in_tile + of / 2 % 2 * 8, n = tile.n0 + n_in_tile;
            if (n_in_tile < p.tile_n && n < p.size_n && (IS_MOE || row < p.size_m)) {
                const size_t at = place_of_column(p, tile, n);
                float value = total[i];
                if constexpr (GROUPS == 0) {
                    value = __fmul_rn(value, widen(reinterpret_cast<const unsigned short *>(p.scales)[at]));
                }
                const float x_scale = p.x_scales[row];
                value = p.bias ? __fmaf_rn(value, x_scale, widen(p.bias[at])) : __fmul_rn(value, x_scale);
                if (IS_MOE && p.row_weights) {
                    value = __fmul_rn(value, p.row_weights[row]);
                }
                p.y[static_cast<size_t>(row) * p.size_n + n] = narrow2(value, 0.0f) & 0xffffu;
            }
        }
    });
}
