// y[M, N] from the ranks' f32 sums of a row-parallel product: a balanced tree over ranks, then times the global scale,
// then the bias, then one rounding: the upper levels of version 2 of the canonical schedule
// (`Schedule::add_ranks`).
//
//   ranks     shared memory (ranks.cuh): parts of [M, N] at turn * capacity
//   bias      16-bit [N], Marlin's order: single; null: none
//   global_scale  f32 [1]; null: none
//   y         16-bit [M, N], of this rank
//
// Parameters:
//   IS_BF16   0: f16, 1: bf16
//   RANKS     1, 2, 4 or 8
//   SHOTS     ONE: every rank adds everything; TWO: a rank adds its share of the elements, and reads the other shares
//             from their ranks; GATHERED: all parts are in this rank's memory, and no rank waits. The bits are the same.
//
// Launch: up to RANK_BLOCKS thread blocks of RANK_THREADS threads, the same number on every rank, with the same sizes;
// all at once, since they wait for each other; with GATHERED any number of blocks. N is a multiple of 64. Without
// elements the kernel does not wait.

#include "depend.cuh"
#include "half.cuh"
#include "ranks.cuh"
#include "single_order.cuh"

enum Shots : unsigned { GATHERED = 0, ONE = 1, TWO = 2 };

static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "RANKS must be 1, 2, 4 or 8");

// Pieces of every rank that a thread reads at once: as many as 64 registers of a thread hold.
constexpr unsigned BATCH = RANKS == 1 ? 4 : 8 / RANKS;

struct Sums {
    const Ranks &ranks;
    const unsigned short *bias;
    const float *global_scale;
    size_t first;  // of this turn's parts
    unsigned size_n;

    // Adds up to BATCH pieces of four neighbouring columns, `step` apart and below `end`; `write` takes the outputs. All
    // parts are read before the first is added: the bytes in flight cover the latency of the wire.
    template <class Write>
    __device__ __forceinline__ void add(size_t piece, size_t step, size_t end, Write write) const {
        float4 parts[BATCH][RANKS];
#pragma unroll
        for (unsigned b = 0; b < BATCH; ++b) {
#pragma unroll
            for (unsigned r = 0; r < RANKS; ++r) {
                if (piece + b * step < end) {
                    parts[b][r] = __ldcg(reinterpret_cast<const float4 *>(ranks.parts[r] + first) + piece + b * step);
                }
            }
        }
#pragma unroll
        for (unsigned b = 0; b < BATCH; ++b) {
            if (piece + b * step < end) {
                write(piece + b * step, tree(parts[b], piece + b * step));
            }
        }
    }

    // The outputs of a piece.
    __device__ __forceinline__ uint2 tree(float4 (&sum)[RANKS], size_t piece) const {
#pragma unroll
        for (unsigned step = 1; step < RANKS; step *= 2) {
#pragma unroll
            for (unsigned r = 0; r + step < RANKS; r += 2 * step) {
                sum[r].x = __fadd_rn(sum[r].x, sum[r + step].x);
                sum[r].y = __fadd_rn(sum[r].y, sum[r + step].y);
                sum[r].z = __fadd_rn(sum[r].z, sum[r + step].z);
                sum[r].w = __fadd_rn(sum[r].w, sum[r + step].w);
            }
        }
        const unsigned n = bias ? piece * 4 % size_n : 0;
        return make_uint2(finished(sum[0].x, sum[0].y, n), finished(sum[0].z, sum[0].w, n + 2));
    }

    // Two neighbouring outputs.
    __device__ __forceinline__ unsigned finished(float low, float high, unsigned n) const {
        if (global_scale) {
            low = __fmul_rn(low, *global_scale);
            high = __fmul_rn(high, *global_scale);
        }
        if (bias) {
            const unsigned short *of = bias + n / 64 * 64 + single_position(n % 64);
            low = __fadd_rn(low, widen(of[0]));
            high = __fadd_rn(high, widen(of[1]));
        }
        return narrow2(low, high);
    }
};

// The pieces of a share that this thread block adds, tile after tile. The blocks of equal index on other ranks read
// them, in pieces of eight outputs.
struct Tiles {
    size_t share;  // pieces, a multiple of two
    unsigned each;  // pieces of a tile for a thread, a multiple of two: as few as spread the share over all blocks

    __device__ __forceinline__ explicit Tiles(size_t pieces) : share(pieces / RANKS) {
        const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
        each = share > threads * BATCH ? (BATCH + 1) / 2 * 2 : (share + 2 * threads - 1) / (2 * threads) * 2;
    }

    __device__ __forceinline__ size_t first() const { return blockIdx.x * size(); }
    __device__ __forceinline__ size_t step() const { return gridDim.x * size(); }
    __device__ __forceinline__ size_t size() const { return static_cast<size_t>(each) * blockDim.x; }
    __device__ __forceinline__ size_t end(size_t tile) const { return min(tile + size(), share); }
};

// Copies what other ranks have added.
__device__ __forceinline__ void copy_shares(const Ranks &ranks, const Tiles &tiles, uint2 *y) {
    // A single rank copies its own.
    constexpr unsigned OTHERS = RANKS == 1 ? 1 : RANKS - 1, ROWS = (BATCH + 1) / 2;
    for (size_t tile = tiles.first(); tile < tiles.share; tile += tiles.step()) {
        const size_t end = tiles.end(tile) / 2, at = tile / 2 + threadIdx.x;
        uint4 copies[ROWS][OTHERS];
#pragma unroll
        for (unsigned row = 0; row < ROWS; ++row) {
#pragma unroll
            for (unsigned i = 0; i < OTHERS; ++i) {
                // Each rank begins with another one, so that all wires are in use.
                const unsigned other = (ranks.rank + 1 + i) % RANKS;
                if (at + row * blockDim.x < end) {
                    const uint4 *from = reinterpret_cast<const uint4 *>(ranks.outputs[other]) + other * tiles.share / 2;
                    copies[row][i] = __ldcg(from + at + row * blockDim.x);
                }
            }
        }
#pragma unroll
        for (unsigned row = 0; row < ROWS; ++row) {
#pragma unroll
            for (unsigned i = 0; i < OTHERS; ++i) {
                const unsigned other = (ranks.rank + 1 + i) % RANKS;
                if (at + row * blockDim.x < end) {
                    reinterpret_cast<uint4 *>(y)[other * tiles.share / 2 + at + row * blockDim.x] = copies[row][i];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(RANK_THREADS, RANKS == 8 ? 3 : 2)
    add_ranks(const __grid_constant__ Ranks ranks,
              const unsigned short *__restrict__ bias,
              const float *__restrict__ global_scale,
              uint2 *__restrict__ y,
              unsigned size_m,
              unsigned size_n,
              unsigned long long capacity,
              unsigned limit_ms) {
    wait_for_last_kernel();
    const size_t pieces = static_cast<size_t>(size_m) * size_n / 4;
    if (pieces == 0) {
        return;
    }
    unsigned call;
    if constexpr (SHOTS != GATHERED) {
        if (!begin_call(ranks, call)) {
            return;
        }
        // Without work a thread block only counts the call. The first always waits.
        const size_t share = SHOTS == TWO ? pieces / RANKS : pieces;
        if (static_cast<size_t>(blockIdx.x) * blockDim.x >= share) {
            return;
        }
        if (!wait_for_ranks(ranks, 0, call, limit_ms)) {
            return;
        }
    }
    // Not before: where ranks share a GPU, the next kernel would take the room of what is waited for.
    let_next_kernel_start();
    const Sums sums = {ranks, bias, global_scale, ranks.turn * capacity, size_n};
    if constexpr (SHOTS != TWO) {
        const size_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
        for (size_t piece = thread; piece < pieces; piece += BATCH * threads) {
            sums.add(piece, threads, pieces, [&](size_t at, uint2 made) { y[at] = made; });
        }
    } else {
        const Tiles tiles(pieces);
        const size_t own = tiles.share * ranks.rank;
        uint2 *const outputs = reinterpret_cast<uint2 *>(ranks.outputs[ranks.rank]);
        for (size_t tile = tiles.first(); tile < tiles.share; tile += tiles.step()) {
            const size_t end = own + tiles.end(tile);
            for (size_t piece = own + tile + threadIdx.x; piece < end; piece += BATCH * blockDim.x) {
                sums.add(piece, blockDim.x, end, [&](size_t at, uint2 made) {
                    y[at] = made;
                    outputs[at] = made;
                });
            }
        }
        if (wait_for_ranks(ranks, 1, call, limit_ms)) {
            copy_shares(ranks, tiles, y);
        }
    }
}
