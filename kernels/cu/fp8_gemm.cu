// y[M, N] = x[M, K] * W[N, K] with both operands e4m3fn, by Hopper's warpgroup instructions. Upstream operators:
// vLLM `cutlass_scaled_mm`, `cutlass_moe_mm`; DeepGEMM `fp8_gemm_nt`. For sm_90a alone.
//
// A thread block computes tiles of `tile_n` columns x ROWS rows, one after another. A producer thread keeps a ring of
// `stages` stages of 128 k filled. Warpgroups of consumers take 64 columns each: weights are the 64-row side of wgmma,
// rows of x its other side, both in shared memory. The sum over a stage is one chain of four instructions from zero.
// It joins the total in f32, k ascending: by an addition (scales of channels and tokens follow the last one), or with
// HAS_BLOCKS by total = fma(sum, rn(x scale * w scale), total). This order depends on nothing but K.
//
//   w_map       W [experts * N, K]; boxes of 128 k x tile_n columns of y, 128-byte swizzle
//   x_map       x [rows, K]; boxes of 128 k x ROWS / CLUSTER_SIZE rows, 128-byte swizzle. With IS_MOE the rows are
//               those of the blocks of ROWS entries (gathered), padding included
//   y_map       y; boxes of 64 columns x ROWS rows, 128-byte swizzle
//   w_scales    f32 [experts, N]; with HAS_BLOCKS [experts, N / 128, K / 128], both rounded up
//   x_scales    f32 [rows], or one for all rows where x_scale_step is 0; with HAS_BLOCKS [K / 128, x_scale_step],
//               x_scale_step a multiple of 4 and at least the number of rows
//   bias        16-bit [experts, N]; null: none
//   y           16-bit [rows, N]; with IS_MOE rows of padding hold anything
//   raster      blocks of rows whose tiles are computed concurrently, so that the parts of W and x that they read stay
//               in the L2 cache
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//
// Parameters, all required:
//   IS_BF16     half.cuh
//   HAS_BLOCKS  0 or 1: scales for 128 x 128 of W and 1 x 128 of x, else of columns and rows
//   IS_MOE      0 or 1: experts
//   WARPS       4, 8, 12 or 16 warps of consumers
//   ROWS        8, 16, 32, 64, 96, 128, 160 or 192, for which registers are left
//   BATCH       stages whose sums a warpgroup has in flight at once
//   RANKS       1, or 2 thread blocks of a cluster, which compute neighbouring tiles and copy half of x each to both
//
// Launch: a multiple of RANKS of thread blocks of THREADS threads; dynamic shared memory of stages * (tile_n * 128 +
// STAGE_BYTES) + END_BYTES bytes (fp8_gemm_sizes.cuh). K is a multiple of 16, N of 8, tile_n of 16 and at most MOST_N.

#include "barrier.cuh"
#include "cluster.cuh"
#include "depend.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "fp8_gemm_sizes.cuh"
#include "wgmma_fp8.cuh"

// Registers of a thread: consumers claim those that producers release. Together they are those of the launch: more
// would never be granted.
constexpr int PRODUCER_REGISTERS = WARPS <= 8 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = WARPS <= 8 ? 232 : WARPS == 12 ? 160 : 112;

// Stages whose weights are copied before the last kernel is over: more would delay the first rows of x.
constexpr unsigned EARLY_STAGES = 4;

// The operands, as the kernel takes them.
struct Product {
    const float *w_scales, *x_scales;
    const unsigned short *bias;
    unsigned short *y;
    unsigned size_m, size_n, size_k, x_scale_step, tile_n, stages, raster;
    // With experts:
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const float *row_weights;

    __device__ unsigned k_stages() const { return (size_k + STAGE_K - 1) / STAGE_K; }

    __device__ unsigned blocks() const {
        if constexpr (IS_MOE) {
            return static_cast<unsigned>(__ldcg(num_tokens_post_padded)) / ROWS;
        } else {
            return (size_m + ROWS - 1) / ROWS;
        }
    }

    // Tiles of all thread blocks of a cluster side by side.
    __device__ unsigned columns() const { return (size_n + RANKS * tile_n - 1) / (RANKS * tile_n); }
};

struct Tile {
    unsigned row, n0;
    int expert;  // negative: no product
};

// Tile `index` of this thread block. Tiles are numbered by groups of `raster` blocks of rows, through all columns of a
// group.
__device__ __forceinline__ Tile tile_at(const Product &p, unsigned index, unsigned blocks, unsigned rank) {
    const unsigned columns = p.columns();
    const unsigned first = index / (p.raster * columns) * p.raster;
    const unsigned side = min(p.raster, blocks - first), in = index % (p.raster * columns);
    const unsigned block = first + in % side;
    const int expert = IS_MOE ? __ldcg(p.expert_ids + block) : 0;
    return {block * ROWS, (in / side * RANKS + rank) * p.tile_n, expert};
}

// Places in shared memory: the ring, a finished tile, scales of x, barriers.
struct Memory {
    unsigned start, stage_bytes, y_at, x_scales_at, full_at, empty_at;

    __device__ Memory(const Product &p, unsigned start)
        : start(start), stage_bytes(p.tile_n * STAGE_K + X_BYTES) {
        y_at = p.stages * stage_bytes;
        x_scales_at = y_at + END_BYTES;
        full_at = x_scales_at + p.stages * X_SCALE_BYTES;
        empty_at = full_at + p.stages * 8;
    }
};

// A slot of the ring, and the parity of the passes over it.
struct Place {
    unsigned slot = 0, phase = 0;
    __device__ __forceinline__ void next(unsigned stages) {
        if (++slot == stages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Fills the ring with the stages of all tiles of this thread block.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &w_map, const TensorMap &x_map,
                                        const Memory &memory, unsigned rank) {
    const unsigned k_stages = p.k_stages();
    // No kernel writes weights: those of the first stages are copied before the last kernel is over. Which expert's they
    // are, that kernel may say.
    unsigned early = 0;
    if constexpr (!IS_MOE) {
        early = min(min(p.stages, k_stages), EARLY_STAGES);
        const Tile tile = tile_at(p, blockIdx.x / RANKS, p.blocks(), rank);
        const unsigned scale_bytes = HAS_BLOCKS ? min(ROWS, p.x_scale_step - tile.row) * 4 : 0;
        for (unsigned stage = 0; stage < early; ++stage) {
            const unsigned full = memory.start + memory.full_at + stage * 8;
            barrier_expect(full, memory.stage_bytes + scale_bytes);
            copy_box(memory.start + stage * memory.stage_bytes, w_map, stage * STAGE_K, tile.n0, full);
        }
    }
    wait_for_last_kernel();
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns();
    Place place;
    for (unsigned index = blockIdx.x / RANKS; index < tiles; index += gridDim.x / RANKS) {
        const Tile tile = tile_at(p, index, blocks, rank);
        if (tile.expert < 0) {
            continue;
        }
        const unsigned w_row = tile.expert * p.size_n + tile.n0;
        const unsigned scale_bytes = HAS_BLOCKS ? min(ROWS, p.x_scale_step - tile.row) * 4 : 0;
        for (unsigned stage = 0; stage < k_stages; ++stage) {
            const unsigned full = memory.start + memory.full_at + place.slot * 8;
            const unsigned to = memory.start + place.slot * memory.stage_bytes;
            if (early > 0) {
                --early;
            } else {
                barrier_wait(memory.start + memory.empty_at + place.slot * 8, place.phase ^ 1);
                barrier_expect(full, memory.stage_bytes + scale_bytes);
                copy_box(to, w_map, stage * STAGE_K, w_row, full);
            }
            const unsigned x_to = to + p.tile_n * STAGE_K;
            if constexpr (RANKS == 1) {
                copy_box(x_to, x_map, stage * STAGE_K, tile.row, full);
            } else {
                constexpr unsigned PART = ROWS / RANKS;
                copy_box_to_cluster(x_to + rank * PART * STAGE_K, x_map, stage * STAGE_K,
                                    tile.row + rank * PART, full, (1u << RANKS) - 1);
            }
            if constexpr (HAS_BLOCKS) {
                copy_bulk(memory.start + memory.x_scales_at + place.slot * X_SCALE_BYTES,
                          p.x_scales + static_cast<size_t>(stage) * p.x_scale_step + tile.row,
                          scale_bytes, full);
            }
            place.next(p.stages);
        }
    }
}

// Releases a slot to the producers that copy to it.
__device__ __forceinline__ void release(unsigned empty, unsigned lane) {
    if constexpr (RANKS == 1) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    } else {
        if (lane < RANKS) {
            barrier_arrive_at_rank(of_rank(empty, lane));
        }
    }
}

// A consumer warp's view of its tile.
struct WarpTile {
    unsigned lane, group;
    unsigned n;       // its first column in the tile
    unsigned read_n;  // its group's first column, or one of another group past the tile
};

// The scales of W of a warp's 16 columns: a lane has that of one of 32 stages.
struct BlockScales {
    const float *from;
    unsigned count;
    float now, next;

    __device__ __forceinline__ BlockScales(const Product &p, const Tile &tile, const WarpTile &warp) {
        if constexpr (HAS_BLOCKS) {
            count = p.k_stages();
            const unsigned rows = (p.size_n + STAGE_K - 1) / STAGE_K;
            const unsigned row = min((tile.n0 + warp.n) / STAGE_K, rows - 1);
            from = p.w_scales + (static_cast<size_t>(tile.expert) * rows + row) * count;
            now = from[min(warp.lane, count - 1)];
            next = from[min(32 + warp.lane, count - 1)];
        }
    }

    // The scale of that stage; stages ascend.
    __device__ __forceinline__ float at(unsigned stage, unsigned lane) {
        if (stage % 32 == 0 && stage > 0) {
            now = next;
            next = from[min(stage + 32 + lane, count - 1)];
        }
        return __shfl_sync(~0u, now, stage % 32);
    }
};

// Adds a stage's sums to the totals. With blocks, a lane's rows have a scale each, its columns one.
__device__ __forceinline__ void promote(const float (&sum)[ROWS / 2], float (&total)[ROWS / 2],
                                        [[maybe_unused]] const float *x_scales,
                                        [[maybe_unused]] float w_scale, [[maybe_unused]] unsigned lane) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        if constexpr (HAS_BLOCKS) {
            const float2 x_scale = *reinterpret_cast<const float2 *>(x_scales + i * 2 + lane % 4 * 2);
            const float scale[2] = {__fmul_rn(x_scale.x, w_scale), __fmul_rn(x_scale.y, w_scale)};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[i + j] = __fmaf_rn(sum[i + j], scale[j % 2], total[i + j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[i + j] = __fadd_rn(total[i + j], sum[i + j]);
            }
        }
    }
}

// Adds COUNT stages from `stage` on to the totals: all products are issued before the first sum is used.
template <int COUNT>
__device__ __forceinline__ void add_stages(const Product &p, const Memory &memory,
                                           [[maybe_unused]] const unsigned char *pointer,
                                           const WarpTile &warp, BlockScales &scales, unsigned stage,
                                           Place &place, float (&total)[ROWS / 2]) {
    float sum[COUNT][ROWS / 2];
    unsigned slots[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        slots[i] = place.slot;
        barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
        const unsigned at = memory.start + place.slot * memory.stage_bytes;
        const unsigned long long w = matrix_descriptor(at + warp.read_n * STAGE_K);
        const unsigned long long x = matrix_descriptor(at + p.tile_n * STAGE_K);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma_fp8<ROWS>(sum[i], w + 2 * step, x + 2 * step, step);
        }
        wgmma_commit();
        place.next(p.stages);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float w_scale = 1.0f;
        if constexpr (HAS_BLOCKS) {
            w_scale = scales.at(stage + i, warp.lane);
        }
        if (i == 0) {
            wgmma_wait<COUNT - 1>();
        } else if (i == 1) {
            wgmma_wait<(COUNT > 1 ? COUNT - 2 : 0)>();
        } else if (i == 2) {
            wgmma_wait<(COUNT > 2 ? COUNT - 3 : 0)>();
        } else {
            wgmma_wait<0>();
        }
        if constexpr (HAS_BLOCKS) {
            const unsigned char *x_scales = pointer + memory.x_scales_at + slots[i] * X_SCALE_BYTES;
            promote(sum[i], total, reinterpret_cast<const float *>(x_scales), w_scale, warp.lane);
            __syncwarp();
            release(memory.start + memory.empty_at + slots[i] * 8, warp.lane);
        } else {
            release(memory.start + memory.empty_at + slots[i] * 8, warp.lane);
            promote(sum[i], total, nullptr, w_scale, warp.lane);
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

// Rounds a tile, and writes it through shared memory: by the copy engine, which continues during the next tile, or, where
// a tile ends within a warpgroup's columns, in pieces of 16 bytes.
__device__ __forceinline__ void write_tile(const Product &p, const TensorMap &y_map, const Tile &tile,
                                           const WarpTile &warp, unsigned box,
                                           const unsigned char *box_pointer,
                                           const float (&total)[ROWS / 2]) {
    const bool is_whole = p.tile_n % GROUP_N == 0, is_writer = threadIdx.x % 128 == 0;
    if (is_whole && is_writer) {
        wait_for_stores();
    }
    // The last tile has been read from shared memory.
    warpgroup_sync(warp.group);
    const unsigned piece_0 = warp.n % GROUP_N / 8, row_in_8 = warp.lane % 8, matrix = warp.lane / 8;
    if constexpr (ROWS == 8) {
        const unsigned at = SwizzledRows::at(row_in_8, piece_0 + matrix % 2);
        store_two_matrices_transposed(box + at, narrow2(total[0], total[1]), narrow2(total[2], total[3]));
    } else {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 8) {
            unsigned packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                packed[j] = narrow2(total[i + j * 2], total[i + j * 2 + 1]);
            }
            const unsigned at = SwizzledRows::at(row_in_8, piece_0 + matrix % 2);
            store_matrices_transposed(box + (i * 2 + matrix / 2 * 8) * 128 + at, packed);
        }
    }
    if (is_whole) {
        fence_async_proxy();
        warpgroup_sync(warp.group);
        if (is_writer && warp.n < p.tile_n) {
            store_box(y_map, tile.n0 + warp.n, tile.row, box);
            commit_stores();
        }
        __syncwarp();
        return;
    }
    warpgroup_sync(warp.group);
    const unsigned thread = threadIdx.x % 128, piece = thread % 8;
    const unsigned in_tile = warp.group * GROUP_N + piece * 8, n = tile.n0 + in_tile;
    if (in_tile < p.tile_n && n < p.size_n) {
#pragma unroll 4
        for (unsigned row = thread / 8; row < ROWS; row += 16) {
            if (IS_MOE || tile.row + row < p.size_m) {
                const uint4 eight = *reinterpret_cast<const uint4 *>(box_pointer + SwizzledRows::at(row, piece));
                *reinterpret_cast<uint4 *>(p.y + static_cast<size_t>(tile.row + row) * p.size_n + n) = eight;
            }
        }
    }
    __syncwarp();
}

// Computes the tiles of this thread block from the ring's stages.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, const Memory &memory,
                                        const unsigned char *pointer, unsigned rank) {
    const unsigned group = (threadIdx.x - PRODUCERS) / 128;
    const WarpTile warp = {threadIdx.x % 32, group, (threadIdx.x - PRODUCERS) / 32 * 16,
                           min(group, (p.tile_n - 1) / GROUP_N) * GROUP_N};
    const unsigned blocks = p.blocks(), tiles = blocks * p.columns(), k_stages = p.k_stages();
    const unsigned box = memory.y_at + group * (ROWS * GROUP_N * 2);
    Place place;
    for (unsigned index = blockIdx.x / RANKS; index < tiles; index += gridDim.x / RANKS) {
        const Tile tile = tile_at(p, index, blocks, rank);
        if (tile.expert < 0) {
            continue;
        }
        BlockScales scales(p, tile, warp);
        float total[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[i] = 0.0f;
        }
        unsigned stage = 0;
        for (; stage + BATCH <= k_stages; stage += BATCH) {
            add_stages<BATCH>(p, memory, pointer, warp, scales, stage, place, total);
        }
        if constexpr (BATCH > 1) {
            for (; stage < k_stages; ++stage) {
                add_stages<1>(p, memory, pointer, warp, scales, stage, place, total);
            }
        }
        finish(p, tile, warp, total);
        write_tile(p, y_map, tile, warp, memory.start + box, pointer + box, total);
    }
    // The copy engine may still be reading here.
    wait_for_stores();
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    fp8_gemm(const __grid_constant__ TensorMap w_map,
        const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap y_map,
        const float *__restrict__ w_scales,
        const float *__restrict__ x_scales,
        const unsigned short *__restrict__ bias,
        unsigned short *__restrict__ y,
        unsigned size_m,
        unsigned size_n,
        unsigned size_k,
        unsigned x_scale_step,
        unsigned tile_n,
        unsigned stages,
        unsigned raster,
        // With experts:
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const float *__restrict__ row_weights) {
    const Product p = {w_scales, x_scales,     bias,   y,      size_m, size_n,     size_k,
                       x_scale_step, tile_n, stages, raster, expert_ids, num_tokens_post_padded,
                       row_weights};
    extern __shared__ __align__(1024) unsigned char pointer[];
    const Memory memory(p, shared_address(pointer));
    const unsigned rank = RANKS == 1 ? 0 : blockIdx.x % RANKS;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            prefetch_map(w_map);
            prefetch_map(x_map);
        }
        for (unsigned slot = threadIdx.x; slot < stages; slot += 32) {
            barrier_init(memory.start + memory.full_at + slot * 8, 1);
            barrier_init(memory.start + memory.empty_at + slot * 8, WARPS * RANKS);
        }
        fence_barrier_init();
        __syncwarp();
    }
    if constexpr (RANKS > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (threadIdx.x < PRODUCERS) {
        if constexpr (WARPS > 4) {
            release_registers<PRODUCER_REGISTERS>();
        }
        if (threadIdx.x == 0) {
            produce(p, w_map, x_map, memory, rank);
        }
    } else {
        if constexpr (WARPS > 4) {
            claim_registers<CONSUMER_REGISTERS>();
        }
        wait_for_last_kernel();
        let_next_kernel_start();
        consume(p, y_map, memory, pointer, rank);
    }
    if constexpr (RANKS > 1) {
        // The other thread block's copies and arrivals come here.
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}
