// y[M, N] = x[M, K] * W[K, N] with e4m3fn activations and 4-bit weights in Marlin's layout for them, by Hopper's
// warpgroup instructions: `Schedule::w4a8_fp8` of the reference. For sm_90a alone.
//
// A thread block computes tiles of `tile_n` columns x ROWS rows, one after another. Producers keep a ring of `stages`
// stages of 128 k filled. Warpgroups of consumers take 64 columns each: 4-bit codes become e4m3 in registers, the 64-row
// side of wgmma; rows of x are its other side, read from shared memory. A part is one chain of instructions from zero over
// a group of k, or over 128 k where all of k is one group. It joins the total in f32, k ascending: total = fma(part, scale
// of the group, total), or with one group total = total + part, and the column's scale follows the last part. Then the
// row's scale and the bias in one multiply-add, the router weight, one rounding. This order depends on nothing but K and
// the groups.
//
//   x_map       x [rows, K]; boxes of 128 k x ROWS rows, 128-byte swizzle. With IS_MOE the rows are those of the blocks
//               of ROWS entries (gathered), padding included
//   y_map       y; boxes of 64 columns x ROWS rows, 128-byte swizzle
//   qweight, scales, zeros, bias  as in marlin_gemm_a8.cu for e4m3 activations
//   x_scales    f32 [rows]
//   y           16-bit [rows, N]; with IS_MOE rows of padding hold anything
//   raster      blocks of rows whose tiles are computed concurrently, so that the parts of W and x that they read stay
//               in the L2 cache
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//
// Parameters, all required:
//   IS_BF16, CODES, GROUPS, IS_MOE  as in marlin_gemm_a8.cu
//   ROWS        8, 16, 32, 64, 128, 160, 176 or 192
//   WARPS       4, 8 or 16 warps of consumers
//
// Launch: thread blocks of THREADS threads; dynamic shared memory of stages * STAGE_BYTES + Y_BYTES bytes
// (a8_wgmma_sizes.cuh). K is a multiple of 128, N of 64, tile_n of 32 and at most N_TILE.

#include "a8_wgmma_ring.cuh"
#include "formats/a8.cuh"
#include "single_order.cuh"
#include "wgmma_fp8_registers.cuh"
#include "write_columns.cuh"

// Registers of a thread: consumers claim those that producers release. Together they are those of the launch: more
// would never be granted.
constexpr int PRODUCER_REGISTERS = WARPS <= 8 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = WARPS <= 8 ? 232 : 112;

// Products are this multiple of the products of weights and activations.
constexpr float PRODUCT_UNIT = IS_FLOAT ? 0x1p-6f : 0x1p-9f;
constexpr int STEPS = STAGE_K / 32;
// Instructions of a part in a stage.
constexpr int PART_STEPS = GROUPS > 0 ? STEPS / GROUPS : STEPS;

// A consumer warp's view of its tile.
struct WarpTile {
    unsigned lane, group;
    unsigned n;  // its first column in the tile
};

// The two scales of a lane's columns, of the group whose scales are at `from`. In Marlin's single order the scales of
// columns 2i and 2i + 1 of eight are neighbours, and those of one i follow each other.
__device__ __forceinline__ void load_scales(float (&scale)[2], const unsigned char *from, const WarpTile &warp) {
    const unsigned at = warp.n / 32 * 32 + warp.lane / 8 * 8 + warp.n % 32 / 4, odd = warp.lane / 4 % 2;
    if constexpr (IS_FLOAT) {
        const unsigned four = *reinterpret_cast<const unsigned *>(from + at) >> odd * 8;
        scale[0] = __uint_as_float((four & 0xFFu) << 23);
        scale[1] = __uint_as_float((four >> 16 & 0xFFu) << 23);
    } else {
        const uint2 pairs = *reinterpret_cast<const uint2 *>(from + at * 2);
        scale[0] = widen(static_cast<unsigned short>(pairs.x >> odd * 16));
        scale[1] = widen(static_cast<unsigned short>(pairs.y >> odd * 16));
    }
}

// The zero points of a lane's two columns, each in every byte.
struct Zeros {
    const unsigned *from;
    unsigned step, shift;
    unsigned of[2] = {0x08080808u, 0x08080808u};

    __device__ __forceinline__ Zeros(const Product &p, const Tile &tile, const WarpTile &warp) {
        if constexpr (HAS_ZERO) {
            const unsigned n = min(tile.n0 + warp.n, p.size_n - 16);
            step = p.size_n / 8;
            from = p.zeros + static_cast<size_t>(tile.expert) * p.groups() * step + n / 64 * 8 + warp.lane / 4;
            shift = n % 64 / 8 * 4;
        }
    }

    // Loads those of a group.
    __device__ __forceinline__ void load(unsigned group) {
        if constexpr (HAS_ZERO) {
            const unsigned word = __ldg(from + static_cast<size_t>(group) * step) >> shift;
            of[0] = (word & 15u) * 0x01010101u;
            of[1] = (word >> 4 & 15u) * 0x01010101u;
        }
    }
};

// A lane's codes of a stage: of 16 columns x 32 k, two words.
struct StageCodes {
    uint2 of[STEPS];

    __device__ __forceinline__ void load(const unsigned char *from) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            of[step] = *reinterpret_cast<const uint2 *>(from + step * STEP_BYTES);
        }
    }
};

// Fragments of steps 2 half and 2 half + 1.
__device__ __forceinline__ void dequantize(unsigned (&a)[2][4], const StageCodes &codes, int half, Zeros &zeros,
                                           unsigned stage) {
    using Dequantizer = Codes8<CodeType{CODES}, true>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int step = 2 * half + i;
        if (GROUPS > 0 && step % PART_STEPS == 0) {
            zeros.load(stage * GROUPS + step / PART_STEPS);
        }
        const uint2 words = codes.of[step];
        a[i][0] = Dequantizer::numbers<0>(words.x, zeros.of[0]);
        a[i][1] = Dequantizer::numbers<0>(words.y, zeros.of[1]);
        a[i][2] = Dequantizer::numbers<1>(words.x, zeros.of[0]);
        a[i][3] = Dequantizer::numbers<1>(words.y, zeros.of[1]);
    }
}

// Adds a part, which is complete, to the totals.
__device__ __forceinline__ void promote(float (&total)[ROWS / 2], const float (&part)[ROWS / 2],
                                        const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        if constexpr (GROUPS > 0) {
            total[i] = __fmaf_rn(part[i], scale[i / 2 % 2], total[i]);
        } else {
            total[i] = __fadd_rn(total[i], part[i]);
        }
    }
}

// Issues the products of steps 2 half and 2 half + 1. Parts that end there are promoted, but not the stage's last one.
__device__ __forceinline__ void multiply(float (&total)[ROWS / 2], float (&part)[ROWS / 2], const unsigned (&a)[2][4],
                                         unsigned long long x, int half, const unsigned char *scales,
                                         const WarpTile &warp) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int step = 2 * half + i;
        wgmma_fp8<ROWS>(part, a[i], x + 2 * step, step % PART_STEPS);
        if ((step + 1) % PART_STEPS == 0 && step + 1 < STEPS) {
            wgmma_commit();
            float scale[2];
            load_scales(scale, scales + step / PART_STEPS * (N_TILE * SCALE_SIZE), warp);
            wgmma_wait<0>();
            promote(total, part, scale);
            wgmma_fence();
        }
    }
    wgmma_commit();
}

// Adds the parts of a tile to the totals, k ascending.
__device__ __forceinline__ void add_parts(const Product &p, const Tile &tile, const WarpTile &warp, const Memory &memory,
                                          const unsigned char *pointer, Place &place, float (&total)[ROWS / 2]) {
    const unsigned k_stages = p.k_stages();
    const unsigned char *weights = pointer + memory.weights_at + warp.n / 32 * 512 + warp.lane * 16 + warp.n % 32 / 2;
    Zeros zeros(p, tile, warp);
    if constexpr (GROUPS == 0) {
        zeros.load(0);
    }
    float part[ROWS / 2];
    unsigned first[2][4], second[2][4];
    StageCodes codes;
    barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
    codes.load(weights + place.slot * WEIGHT_BYTES);
    dequantize(first, codes, 0, zeros, 0);
    for (unsigned stage = 0; stage < k_stages; ++stage) {
        const unsigned slot = place.slot;
        const unsigned long long x = matrix_descriptor(memory.start + slot * X_BYTES);
        const unsigned char *scales = pointer + memory.scales_at + slot * SCALE_BYTES;
        multiply(total, part, first, x, 0, scales, warp);
        dequantize(second, codes, 1, zeros, stage);
        multiply(total, part, second, x, 1, scales, warp);
        float scale[2] = {};
        if constexpr (GROUPS > 0) {
            load_scales(scale, scales + (GROUPS - 1) * (N_TILE * SCALE_SIZE), warp);
        }
        place.next(p.stages);
        if (stage + 1 < k_stages) {
            barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
            codes.load(weights + place.slot * WEIGHT_BYTES);
            wgmma_wait<1>();
            dequantize(first, codes, 0, zeros, stage + 1);
        }
        wgmma_wait<0>();
        release(memory.start + memory.empty_at + slot * 8, warp.lane);
        promote(total, part, scale);
    }
}

// Scales, bias and router weights, in f32.
__device__ __forceinline__ void finish(const Product &p, const Tile &tile, const WarpTile &warp,
                                       float (&total)[ROWS / 2]) {
    float w_scale[2], bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned n = min(tile.n0 + warp.n + half * 8 + warp.lane / 4, p.size_n - 1);
        const size_t at = static_cast<size_t>(tile.expert) * p.size_n + single_position(n);
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
            const float x_scale = p.x_scales[m];
            const bool is_weighted = IS_MOE && p.row_weights;
            const float row_weight = is_weighted ? p.row_weights[m] : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &value = total[i + half * 2 + r];
                if constexpr (GROUPS == 0) {
                    value = __fmul_rn(value, w_scale[half]);
                }
                value = p.bias ? __fmaf_rn(value, x_scale, bias[half]) : __fmul_rn(value, x_scale);
                value = is_weighted ? __fmul_rn(value, row_weight) : value;
            }
        }
    }
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128;
    const WarpTile warp = {threadIdx.x % 32, group, (threadIdx.x - PRODUCERS) / 32 * 16};
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns();
    const unsigned box = memory.y_at + group * BOX_BYTES;
    Place place;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index, blocks);
        if (tile.expert < 0) {
            continue;
        }
        float total[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[i] = 0.0f;
        }
        add_parts(p, tile, warp, memory, pointer, place, total);
        finish(p, tile, warp, total);
        write_tile(p, y_map, tile, warp, memory.start + box, pointer + box, total);
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    marlin_gemm_a8_wgmma(const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap y_map,
        const unsigned char *__restrict__ qweight,
        const unsigned char *__restrict__ scales,
        const unsigned *__restrict__ zeros,
        const unsigned short *__restrict__ bias,
        const float *__restrict__ x_scales,
        unsigned short *__restrict__ y,
        unsigned size_m,
        unsigned size_n,
        unsigned size_k,
        unsigned tile_n,
        unsigned stages,
        unsigned raster,
        // With experts:
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const float *__restrict__ row_weights) {
    const Product p = {qweight, scales, zeros,  bias,   x_scales,   y,
                       size_m,  size_n, size_k, tile_n, stages,     raster,
                       expert_ids, num_tokens_post_padded, row_weights};
    extern __shared__ __align__(1024) unsigned char pointer[];
    const Memory memory(p, shared_address(pointer));
    if (threadIdx.x == 0) {
        for (unsigned slot = 0; slot < stages; ++slot) {
            barrier_init(memory.start + memory.full_at + slot * 8, 1);
            barrier_init(memory.start + memory.empty_at + slot * 8, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCERS) {
        if constexpr (WARPS > 4) {
            release_registers<PRODUCER_REGISTERS>();
        }
        if (threadIdx.x % 32 == 0) {
            const unsigned part = threadIdx.x / 32;
            // No kernel writes weights: producers that copy nothing else start at once.
            if (IS_MOE || part == 0) {
                wait_for_last_kernel();
            }
            produce(p, x_map, memory, part);
        }
    } else {
        if constexpr (WARPS > 4) {
            claim_registers<CONSUMER_REGISTERS>();
        }
        wait_for_last_kernel();
        let_next_kernel_start();
        consume(p, y_map, memory, pointer);
    }
}
