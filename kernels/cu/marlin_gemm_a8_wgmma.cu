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
//   SPLITS      1, or 2 or 4 warpgroups that share columns and take turns by stages
//
// Launch: thread blocks of THREADS threads; dynamic shared memory of stages * STAGE_BYTES + END_BYTES bytes
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
// Whether registers are left for the fragments of two stages.
constexpr bool HAS_TWO_STAGES = ROWS <= 128;
// Two warpgroups issue the products of their stages in turns, so that one promotes while the other one multiplies.
constexpr bool TAKES_TURNS = WARPS == 8 && SPLITS == 1 && GROUPS <= 1 && ROWS > 64;

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

// A total with a part added.
__device__ __forceinline__ float promoted(float total, float part, float scale) {
    return GROUPS > 0 ? __fmaf_rn(part, scale, total) : __fadd_rn(total, part);
}

// Adds a part, which is complete, to the totals.
__device__ __forceinline__ void promote(float (&total)[ROWS / 2], const float (&part)[ROWS / 2],
                                        const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        total[i] = promoted(total[i], part[i], scale[i / 2 % 2]);
    }
}

// Barriers of several warpgroups, apart from those of one (`warpgroup_sync`).
template <int THREAD_COUNT>
__device__ __forceinline__ void named_sync(unsigned barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREAD_COUNT) : "memory");
}

template <int THREAD_COUNT>
__device__ __forceinline__ void named_arrive(unsigned barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREAD_COUNT) : "memory");
}

// Barrier 3 + i opens when it is the turn of warpgroup i of two.
__device__ __forceinline__ void wait_for_turn(unsigned group) { named_sync<256>(3 + group); }
__device__ __forceinline__ void pass_turn(unsigned group) { named_arrive<256>(3 + (group ^ 1)); }

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

// The fragments of a stage.
struct Fragments {
    unsigned first[2][4], second[2][4];
};

// Keeps fragments in their registers up to here: products that run may still read them.
__device__ __forceinline__ void keep(const Fragments &of) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        asm volatile("" ::"r"(of.first[i][0]), "r"(of.first[i][1]), "r"(of.first[i][2]), "r"(of.first[i][3]),
                     "r"(of.second[i][0]), "r"(of.second[i][1]), "r"(of.second[i][2]), "r"(of.second[i][3]));
    }
}

// The ring's stages as a consumer warp reads them.
struct Reader {
    const Product &p;
    const Memory &memory;
    const unsigned char *pointer, *weights;

    __device__ __forceinline__ Reader(const Product &p, const Memory &memory, const WarpTile &warp,
                                      const unsigned char *pointer)
        : p(p), memory(memory), pointer(pointer) {
        weights = pointer + memory.weights_at + warp.n / 32 * 512 + warp.lane * 16 + warp.n % 32 / 2;
    }

    // Waits for a stage and loads its codes.
    __device__ __forceinline__ void load(StageCodes &codes, const Place &place) const {
        barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
        codes.load(weights + place.slot * WEIGHT_BYTES);
    }

    __device__ __forceinline__ unsigned long long x(unsigned slot) const {
        return matrix_descriptor(memory.start + slot * X_BYTES);
    }

    __device__ __forceinline__ const unsigned char *scales(unsigned slot) const {
        return pointer + memory.scales_at + slot * SCALE_BYTES;
    }

    __device__ __forceinline__ void release(unsigned slot, unsigned lane) const {
        ::release(memory.start + memory.empty_at + slot * 8, lane);
    }
};

// The scales of the stage's last part.
__device__ __forceinline__ void load_last_scales(float (&scale)[2], const unsigned char *scales, const WarpTile &warp) {
    if constexpr (GROUPS > 0) {
        load_scales(scale, scales + (GROUPS - 1) * (N_TILE * SCALE_SIZE), warp);
    }
}

// Adds the parts of a tile to the totals, k ascending.
__device__ __forceinline__ void add_parts(const Product &p, const Tile &tile, const WarpTile &warp, const Reader &reader,
                                          Place &place, float (&total)[ROWS / 2]) {
    const unsigned k_stages = p.k_stages();
    Zeros zeros(p, tile, warp);
    if constexpr (GROUPS == 0) {
        zeros.load(0);
    }
    float part[ROWS / 2];
    Fragments now;
    StageCodes codes;
    reader.load(codes, place);
    dequantize(now.first, codes, 0, zeros, 0);
    dequantize(now.second, codes, 1, zeros, 0);
    for (unsigned stage = 0; stage < k_stages; ++stage) {
        const unsigned slot = place.slot;
        if constexpr (TAKES_TURNS) {
            wait_for_turn(warp.group);
        }
        multiply(total, part, now.first, reader.x(slot), 0, reader.scales(slot), warp);
        multiply(total, part, now.second, reader.x(slot), 1, reader.scales(slot), warp);
        if constexpr (TAKES_TURNS) {
            pass_turn(warp.group);
        }
        float scale[2] = {};
        load_last_scales(scale, reader.scales(slot), warp);
        place.next(p.stages);
        const bool has_next = stage + 1 < k_stages;
        if constexpr (HAS_TWO_STAGES) {
            Fragments next;
            if (has_next) {
                reader.load(codes, place);
                dequantize(next.first, codes, 0, zeros, stage + 1);
                dequantize(next.second, codes, 1, zeros, stage + 1);
            }
            wgmma_wait<0>();
            keep(now);
            reader.release(slot, warp.lane);
            promote(total, part, scale);
            now = next;
        } else {
            if (has_next) {
                reader.load(codes, place);
                wgmma_wait<1>();
                dequantize(now.first, codes, 0, zeros, stage + 1);
            }
            wgmma_wait<0>();
            reader.release(slot, warp.lane);
            if (has_next) {
                dequantize(now.second, codes, 1, zeros, stage + 1);
            }
            promote(total, part, scale);
        }
    }
}

// Likewise of SPLITS warpgroups that share their columns. In each round every one computes the part of a stage; then each
// promotes its share of the sums, all parts in the order of k. At last the first warpgroup has all totals.
__device__ __forceinline__ void add_parts_in_rounds(const Product &p, const Tile &tile, const WarpTile &warp,
                                                    const Reader &reader, unsigned split, Place &place,
                                                    float (&total)[ROWS / 2]) {
    constexpr int SHARE = ROWS / 2 / SPLITS;
    const unsigned k_stages = p.k_stages(), thread = threadIdx.x % 128, barrier = 1 + WARPS / 4 + warp.group;
    float *const parts = reinterpret_cast<float *>(const_cast<unsigned char *>(reader.pointer) + reader.memory.parts_at) +
                         warp.group * (2 * SPLITS * PART_FLOATS) + thread;
    Zeros zeros(p, tile, warp);
    if constexpr (GROUPS == 0) {
        zeros.load(0);
    }
    Fragments now;
    StageCodes codes;
    Place mine = place.after(split, p.stages);
    if (split < k_stages) {
        reader.load(codes, mine);
        dequantize(now.first, codes, 0, zeros, split);
        dequantize(now.second, codes, 1, zeros, split);
    }
    for (unsigned round = 0; round * SPLITS < k_stages; ++round) {
        const unsigned stage = round * SPLITS + split, slot = mine.slot;
        float *const buffer = parts + round % 2 * (SPLITS * PART_FLOATS);
        if (stage < k_stages) {
            float part[ROWS / 2];
            multiply(total, part, now.first, reader.x(slot), 0, reader.scales(slot), warp);
            multiply(total, part, now.second, reader.x(slot), 1, reader.scales(slot), warp);
            float scale[2] = {1.0f, 1.0f};
            load_last_scales(scale, reader.scales(slot), warp);
            mine = mine.after(SPLITS, p.stages);
            Fragments next;
            if (stage + SPLITS < k_stages) {
                reader.load(codes, mine);
                dequantize(next.first, codes, 0, zeros, stage + SPLITS);
                dequantize(next.second, codes, 1, zeros, stage + SPLITS);
            }
            wgmma_wait<0>();
            keep(now);
            reader.release(slot, warp.lane);
            now = next;
            float *const to = buffer + split * PART_FLOATS;
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                to[i * 128] = part[i];
            }
            to[ROWS / 2 * 128] = scale[0];
            to[(ROWS / 2 + 1) * 128] = scale[1];
        }
        named_sync<SPLITS * 128>(barrier);
#pragma unroll
        for (unsigned from = 0; from < SPLITS; ++from) {
            if (round * SPLITS + from < k_stages) {
                const float *of = buffer + from * PART_FLOATS;
                const float scale[2] = {of[ROWS / 2 * 128], of[(ROWS / 2 + 1) * 128]};
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    const unsigned at = split * SHARE + i;
                    total[i] = promoted(total[i], of[at * 128], at / 2 % 2 ? scale[1] : scale[0]);
                }
            }
        }
    }
    const unsigned end = place.slot + k_stages;
    place = {end % p.stages, place.phase ^ (end / p.stages & 1)};
    // The buffers are free when all have read the last round.
    named_sync<SPLITS * 128>(barrier);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        parts[(split * SHARE + i) * 128] = total[i];
    }
    named_sync<SPLITS * 128>(barrier);
    if (split == 0) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[i] = parts[i * 128];
        }
    }
    named_sync<SPLITS * 128>(barrier);
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
    const unsigned warpgroup = (threadIdx.x - PRODUCERS) / 128, split = warpgroup % SPLITS;
    const unsigned group = warpgroup / SPLITS;
    const WarpTile warp = {threadIdx.x % 32, group, group * GROUP_N + threadIdx.x / 32 % 4 * 16};
    const Reader reader(p, memory, warp, pointer);
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns();
    const unsigned box = memory.y_at + group * BOX_BYTES;
    if (TAKES_TURNS && group == 1) {
        // The first turn is that of warpgroup 0.
        pass_turn(group);
    }
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
        if constexpr (SPLITS > 1) {
            add_parts_in_rounds(p, tile, warp, reader, split, place, total);
        } else {
            add_parts(p, tile, warp, reader, place, total);
        }
        if (split == 0) {
            finish(p, tile, warp, total);
            write_tile(p, y_map, tile, warp, memory.start + box, pointer + box, total);
        }
    }
    // Turns end as they began.
    if (TAKES_TURNS && group == 0) {
        wait_for_turn(group);
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
            barrier_init(memory.start + memory.empty_at + slot * 8, WARPS / SPLITS);
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
