// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, for many rows: the operands
// and the bits of marlin_gemm.cu, computed by Hopper's warpgroup instructions. For sm_90a alone.
//
// A thread block computes tiles of N_TILE columns x ROWS rows, whole in k, one after another. A
// warpgroup of producers keeps a ring of stages of 64 k filled. Of the warpgroups of consumers each
// takes its own columns: weights are dequantized to registers, the 64-row side of wgmma, while earlier
// products run; rows of x are its other side, read from shared memory. A chunk of k is one chain of
// instructions from zero; its sums join the totals in ascending order.
//
// Operands as in marlin_gemm.cu; with IS_MOE, blocks of block_rows entries.
//   block_rows  rows of a tile, at most ROWS
//   raster      blocks of rows whose tiles are computed side by side, so that what they read of W
//               and x stays in the L2 cache
//
// Compile-time parameters, all required:
//   IS_BF16, BITS, HAS_ZERO, GROUPS, IS_MOE  as in marlin_gemm.cu
//   COLUMNS  16 or 32: columns that a warp computes
//   ROWS     rows that a thread block computes at once, a width of wgmma (parts/wgmma.cuh)
//
// Launch: any number of thread blocks of THREADS threads, dynamic shared memory as at the end of this
// file. K is a multiple of 64, chunk_k of 128, N of 64, M * K below 2^35.

#if !defined(BITS) || !defined(HAS_ZERO) || !defined(GROUPS) || !defined(IS_MOE) || \
    !defined(COLUMNS) || !defined(ROWS)
#error "a parameter is missing"
#endif

#define PRODUCERS 128
#ifndef GROUPS_OF_WARPS
#define GROUPS_OF_WARPS 2
#endif
#define WARPS (GROUPS_OF_WARPS * 4)  // of consumers
#define THREADS (PRODUCERS + WARPS * 32)
#define N_TILE (WARPS * COLUMNS)
#define STAGE_K 64
// Products that a warpgroup issues at once; while they run the next ones' weights are dequantized.
#ifndef BATCH
#define BATCH 2
#endif
#define BATCHES (4 * FRAGMENTS / BATCH)  // of a stage
#ifndef STAGES
#define STAGES 6
#endif
// Stages whose copies a producer lets fly before it waits for the first of them.
#ifndef FLIGHT
#define FLIGHT 3
#endif
#ifndef CREGS
#if GROUPS_OF_WARPS == 2
#define CREGS 232
#define PREGS 40
#else
#define CREGS 160
#define PREGS 32
#endif
#endif

// 16-byte pieces of 16 k of one column tile, and of all of them: neighbours in memory.
#define TILE_PIECES (32 * (BITS / 4))
#define ROW_PIECES (N_TILE / 64 * TILE_PIECES)

// Shared memory: rings of x, weights, scales and zeros; what consumers turn round; barriers.
#define X_BYTES (ROWS * 128)
#define WEIGHT_BYTES (4 * ROW_PIECES * 16)
#define SCALE_BYTES (GROUPS * N_TILE * 2)
#define ZERO_BYTES (HAS_ZERO * GROUPS * N_TILE / 2)
#define WEIGHTS_AT (STAGES * X_BYTES)
#define SCALES_AT (WEIGHTS_AT + STAGES * WEIGHT_BYTES)
#define ZEROS_AT (SCALES_AT + STAGES * SCALE_BYTES)
#define TURN_AT (ZEROS_AT + STAGES * ZERO_BYTES)
#define TURN_BYTES (16 * COLUMNS * 2)  // of a warp: 16 rows
#define FULL_AT (TURN_AT + WARPS * TURN_BYTES)
#define EMPTY_AT (FULL_AT + STAGES * 8)

// What of a product a tile is: `rows` rows from `row` on, columns from n0 on, of a matrix of weights.
struct Tile {
    unsigned row, rows, n0, expert;
};

// The operands, as the kernel takes them.
struct Product {
    const uint4 *qweight;
    const unsigned short *scales;
    const unsigned *zeros;
    const unsigned short *bias;
    unsigned short *y;
    unsigned size_m, size_n, size_k, chunk_k, group_size;
#if IS_MOE
    const int *sorted_token_ids;
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const float *topk_weights;
    unsigned top_k;
#endif
    unsigned block_rows, raster;

    __device__ unsigned groups() const { return GROUPS == 0 ? 1 : size_k / group_size; }

    __device__ unsigned blocks() const {
#if IS_MOE
        return static_cast<unsigned>(*num_tokens_post_padded) / block_rows;
#else
        return (size_m + block_rows - 1) / block_rows;
#endif
    }

    // The row of y that a row of tiles is; size_m or above: none.
    __device__ unsigned entry(unsigned row) const {
#if IS_MOE
        return static_cast<unsigned>(sorted_token_ids[row]);
#else
        return row;
#endif
    }

    __device__ unsigned x_row(unsigned entry) const {
#if IS_MOE
        return entry / top_k;
#else
        return entry;
#endif
    }

    __device__ unsigned tiles(unsigned blocks) const {
        return blocks * ((size_n + N_TILE - 1) / N_TILE);
    }

    // Tile `index` of all; false where there is nothing to compute. `raster` blocks of rows, all
    // their columns, then the next ones.
    __device__ bool tile(unsigned index, unsigned blocks, Tile &tile) const {
        const unsigned columns = (size_n + N_TILE - 1) / N_TILE;
        const unsigned first = index / (raster * columns) * raster;
        const unsigned side = min(raster, blocks - first), in = index % (raster * columns);
        const unsigned block = first + in % side;
        tile.n0 = in / side * N_TILE;
        tile.row = block * block_rows;
        tile.rows = block_rows;
#if IS_MOE
        const int expert = expert_ids[block];
        if (expert < 0) {
            return false;
        }
        tile.expert = static_cast<unsigned>(expert);
#else
        tile.expert = 0;
#endif
        return true;
    }
};

// A place in the ring, and how often the ring was gone round, mod 2.
struct Place {
    unsigned slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Fills the ring with the stages of all tiles of this thread block. One lane of each of four warps:
// what a stage needs is several copies, and starting one takes as long as a few products.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &x_map, unsigned memory,
                                        unsigned part) {
    const unsigned blocks = p.blocks(), tiles = p.tiles(blocks);
    const size_t weight_step = static_cast<size_t>(p.size_n / 64) * TILE_PIECES;
    Place place;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        Tile tile;
        if (!p.tile(index, blocks, tile)) {
            continue;
        }
        const unsigned columns = min(p.size_n - tile.n0, N_TILE);
        const uint4 *weight_from = p.qweight + (tile.expert * (p.size_k / 16) + part) * weight_step +
                                   tile.n0 / 64 * TILE_PIECES;
#if GROUPS > 0
        unsigned group_left = p.group_size / STAGE_K;  // stages, with this one
        const size_t first_group = static_cast<size_t>(tile.expert) * p.groups();
        const unsigned short *scale_from =
            p.scales + (first_group + (part == 2)) * p.size_n + tile.n0;
#if HAS_ZERO
        const unsigned *zero_from = p.zeros + (first_group * p.size_n + tile.n0) / 8;
#endif
#endif
        const unsigned bytes =
            X_BYTES + columns * (STAGE_K * BITS / 8 + GROUPS * 2) + HAS_ZERO * GROUPS * columns / 2;
        for (unsigned stage = 0; stage < p.size_k / STAGE_K; ++stage) {
            const unsigned full = memory + FULL_AT + place.slot * 8;
            barrier_wait(memory + EMPTY_AT + place.slot * 8, place.phase ^ 1);
            if (part == 0) {
                barrier_expect(full, bytes);
                copy_box(memory + place.slot * X_BYTES, x_map, stage * STAGE_K, tile.row, full);
            }
            copy_bulk(memory + WEIGHTS_AT + place.slot * WEIGHT_BYTES + part * (ROW_PIECES * 16),
                      weight_from, columns * (BITS * 2), full);
            weight_from += 4 * weight_step;
#if GROUPS > 0
            if (part == 1 || part == GROUPS) {
                copy_bulk(memory + SCALES_AT + place.slot * SCALE_BYTES + (part - 1) * (N_TILE * 2),
                          scale_from, columns * 2, full);
            }
#if HAS_ZERO
            if (part == 3) {
#pragma unroll
                for (int row = 0; row < GROUPS; ++row) {
                    copy_bulk(memory + ZEROS_AT + place.slot * ZERO_BYTES + row * (N_TILE / 2),
                              zero_from + row * (p.size_n / 8), columns / 2, full);
                }
            }
#endif
            if (GROUPS == 2 || --group_left == 0) {
                scale_from += GROUPS * p.size_n;
#if HAS_ZERO
                zero_from += GROUPS * (p.size_n / 8);
#endif
                group_left = p.group_size / STAGE_K;
            }
#endif
            place.next();
        }
    }
}

// Where a consumer's warp stands: columns from warp_n on, `part` of their 64.
struct Seat {
    unsigned lane, warp_n, part;
};

// A lane's codes of COLUMNS columns x 16 k.
struct Words {
    unsigned of[FRAGMENTS * BITS / 4];
};

__device__ __forceinline__ Words load_words(const unsigned char *from) {
    Words words;
    constexpr int COUNT = FRAGMENTS * BITS / 4;
    if (COUNT == 1) {
        words.of[0] = *reinterpret_cast<const unsigned *>(from);
    } else if (COUNT == 2) {
        *reinterpret_cast<uint2 *>(words.of) = *reinterpret_cast<const uint2 *>(from);
    } else {
        *reinterpret_cast<uint4 *>(words.of) = *reinterpret_cast<const uint4 *>(from);
    }
    return words;
}

// Gives a slot back to the producers.
__device__ __forceinline__ void release(unsigned memory, unsigned slot, unsigned lane) {
    if (lane == 0) {
        barrier_arrive(memory + EMPTY_AT + slot * 8);
    }
}

// The scales of group `row` of the stage in that slot.
__device__ __forceinline__ void load_group(Group &group, const Seat &seat,
                                           const unsigned char *pointer, unsigned slot, int row) {
    const unsigned char *of = pointer + SCALES_AT + slot * SCALE_BYTES + row * N_TILE * 2 +
                              seat.warp_n / 64 * 128 + seat.lane / 4 * 16 +
                              seat.part * (COLUMNS / 4);
    spread(group, reinterpret_cast<const unsigned *>(of));
#if HAS_ZERO
    of = pointer + ZEROS_AT + slot * ZERO_BYTES + row * (N_TILE / 2) + seat.warp_n / 64 * 32 +
         seat.lane / 4 * 4;
    spread_zeros(group, *reinterpret_cast<const unsigned *>(of), seat.part * (2 * FRAGMENTS));
#endif
}

// A stage's codes and the scales of its first group, once they have landed.
__device__ __forceinline__ void load_stage(Words (&words)[4], Group &group, const Seat &seat,
                                           unsigned memory, const unsigned char *pointer,
                                           const Place &place) {
    barrier_wait(memory + FULL_AT + place.slot * 8, place.phase);
    const unsigned char *from = pointer + WEIGHTS_AT + place.slot * WEIGHT_BYTES +
                                seat.warp_n / 64 * (TILE_PIECES * 16) + seat.lane * (BITS * 4) +
                                seat.part * (BITS * COLUMNS / 16);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        words[step] = load_words(from + step * (ROW_PIECES * 16));
    }
#if GROUPS > 0
    load_group(group, seat, pointer, place.slot, 0);
#endif
}

// The sums of one tile.
__device__ __forceinline__ void sum_tile(const Product &p, const Seat &seat, unsigned memory,
                                         const unsigned char *pointer, Group &group, Place &place,
                                         float (&total)[FRAGMENTS][ROWS / 2]) {
    float sum[FRAGMENTS][ROWS / 2];
    unsigned fragments[2][BATCH][4];
    Words words[4];
    // -0 + s is s, also where s is -0.
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[j][i] = -0.0f;
        }
    }
    load_stage(words, group, seat, memory, pointer, place);
    for (unsigned begin = 0; begin < p.size_k; begin += p.chunk_k) {
        const unsigned end = min(begin + p.chunk_k, p.size_k);
        for (unsigned k = begin; k < end; k += STAGE_K) {
            const unsigned slot = place.slot;
            const unsigned long long x = matrix_descriptor(memory + slot * X_BYTES);
            place.next();
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                unsigned(&a)[BATCH][4] = fragments[batch % 2];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int step = (batch * BATCH + i) / FRAGMENTS, j = i % FRAGMENTS;
                    if (GROUPS == 2 && step == 2 && j == 0) {
                        load_group(group, seat, pointer, slot, 1);
                    }
#if BITS == 4
                    dequantize(a[i], words[step].of[j], group, j);
#else
                    dequantize(a[i], words[step].of[2 * j], words[step].of[2 * j + 1], group, j);
#endif
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int step = (batch * BATCH + i) / FRAGMENTS, j = i % FRAGMENTS;
                    wgmma<ROWS>(sum[j], a[i], x + 2 * step, k - begin + step);
                }
                wgmma_commit();
                if (batch == BATCHES - 1 && k + STAGE_K < p.size_k) {
                    load_stage(words, group, seat, memory, pointer, place);
                }
                // The batch before is done, and its fragments are free.
                wgmma_wait<1>();
                if (batch == 0 && k > begin) {
                    release(memory, (slot == 0 ? STAGES : slot) - 1, seat.lane);
                }
            }
        }
        wgmma_wait<0>();
        release(memory, (place.slot == 0 ? STAGES : place.slot) - 1, seat.lane);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
            }
        }
    }
}

// Finishes a tile's totals and writes them to y.
__device__ __forceinline__ void write_tile(const Product &p, const Seat &seat, const Tile &tile,
                                           unsigned memory, unsigned char *pointer,
                                           const float (&total)[FRAGMENTS][ROWS / 2]) {
    constexpr unsigned EIGHTHS = 2 * FRAGMENTS;  // eights of columns: 16 bytes of a row each
    const bool exists = tile.n0 + seat.warp_n < p.size_n;
    const unsigned n0 = exists ? tile.n0 + seat.warp_n : 0, lane = seat.lane;
    float bias[EIGHTHS];
    if (p.bias) {
        const unsigned short *of =
            p.bias + static_cast<size_t>(tile.expert) * p.size_n + n0 / 64 * 64;
#pragma unroll
        for (unsigned i = 0; i < EIGHTHS; ++i) {
            bias[i] = widen(of[single_position(n0 % 64 + i * 8 + lane / 4)]);
        }
    }
    // 16 rows at a time are turned round in the warp's own memory, piece i of a row stored where no
    // banks collide.
    const unsigned turn = TURN_AT + seat.warp_n / COLUMNS * TURN_BYTES;
    const auto place = [&](unsigned row, unsigned piece) {
        return turn + (row * EIGHTHS + (piece ^ row / (8 / EIGHTHS) % EIGHTHS)) * 16;
    };
#pragma unroll
    for (int first = 0; first < ROWS; first += 16) {
        const unsigned own = first + lane % 16;
        const unsigned e = own < tile.rows ? p.entry(tile.row + own) : p.size_m;
#if IS_MOE
        const float weight = p.topk_weights && e < p.size_m ? p.topk_weights[e] : 1.0f;
#endif
        __syncwarp();
        unsigned packed[2 * EIGHTHS];
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; ++i) {
            const int eight = i / EIGHTHS, c = i % EIGHTHS;
            float value[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                value[r] = total[c / 2][(first / 8 + eight) * 4 + c % 2 * 2 + r];
                if (p.bias) {
                    value[r] = __fadd_rn(value[r], bias[c]);
                }
#if IS_MOE
                if (p.topk_weights) {
                    const unsigned of = eight * 8 + lane % 4 * 2 + r;
                    value[r] = __fmul_rn(value[r], __shfl_sync(~0u, weight, of));
                }
#endif
            }
            packed[i] = static_cast<unsigned>(narrow(value[1])) << 16 | narrow(value[0]);
        }
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; i += 4) {
            const unsigned matrix = i + lane / 8;
            const unsigned four[4] = {packed[i], packed[i + 1], packed[i + 2], packed[i + 3]};
            store_matrices_transposed(
                memory + place(matrix / EIGHTHS * 8 + lane % 8, matrix % EIGHTHS), four);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i += 32 / EIGHTHS) {
            const unsigned row = i + lane / EIGHTHS, piece = lane % EIGHTHS;
            const unsigned of = __shfl_sync(~0u, e, row);
            const uint4 value = *reinterpret_cast<const uint4 *>(pointer + place(row, piece));
            if (exists && of < p.size_m) {
                *reinterpret_cast<uint4 *>(p.y + static_cast<size_t>(of) * p.size_n + n0 +
                                           piece * 8) = value;
            }
        }
    }
}

// Computes the tiles of this thread block from what the ring holds, and writes them.
__device__ __forceinline__ void consume(const Product &p, unsigned memory,
                                        unsigned char *pointer) {
    const unsigned warp_n = (threadIdx.x - PRODUCERS) / 32 * COLUMNS;
    const Seat seat = {threadIdx.x % 32, warp_n, warp_n % 64 / COLUMNS};
    const unsigned blocks = p.blocks(), tiles = p.tiles(blocks);
    Place place;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        Tile tile;
        if (!p.tile(index, blocks, tile)) {
            continue;
        }
        Group group;
#if GROUPS == 0
        const unsigned n0 = tile.n0 + seat.warp_n < p.size_n ? tile.n0 + seat.warp_n : 0;
#pragma unroll
        for (int i = 0; i < 2 * FRAGMENTS; ++i) {
            const unsigned n = n0 + i * 8 + seat.lane / 4;
            const size_t at = static_cast<size_t>(tile.expert) * p.size_n + n / 64 * 64 +
                              single_position(n % 64);
            group.scale[i] = p.scales[at] * 0x10001u;
        }
#if HAS_ZERO
        const size_t at =
            static_cast<size_t>(tile.expert) * (p.size_n / 8) + n0 / 64 * 8 + seat.lane / 4;
        spread_zeros(group, p.zeros[at], seat.part * (2 * FRAGMENTS));
#endif
#endif
        float total[FRAGMENTS][ROWS / 2];
        sum_tile(p, seat, memory, pointer, group, place, total);
        write_tile(p, seat, tile, memory, pointer, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    marlin_gemm_wgmma(const __grid_constant__ TensorMap x_map,
                      const uint4 *__restrict__ qweight,
                      const unsigned short *__restrict__ scales,
                      const unsigned *__restrict__ zeros,
                      const unsigned short *__restrict__ bias,
                      unsigned short *__restrict__ y,
                      unsigned size_m,
                      unsigned size_n,
                      unsigned size_k,
                      unsigned chunk_k,
                      unsigned group_size,
#if IS_MOE
                      const int *__restrict__ sorted_token_ids,
                      const int *__restrict__ expert_ids,
                      const int *__restrict__ num_tokens_post_padded,
                      const float *__restrict__ topk_weights,
                      unsigned top_k,
#endif
                      unsigned block_rows,
                      unsigned raster) {
    const Product p = {
        qweight, scales, zeros, bias, y, size_m, size_n, size_k, chunk_k, group_size,
#if IS_MOE
        sorted_token_ids, expert_ids, num_tokens_post_padded, topk_weights, top_k,
#endif
        block_rows, raster};
    extern __shared__ __align__(1024) unsigned char pointer[];
    const unsigned memory = shared_address(pointer);
    if (threadIdx.x == 0) {
        for (unsigned slot = 0; slot < STAGES; ++slot) {
            barrier_init(memory + FULL_AT + slot * 8, 1);
            barrier_init(memory + EMPTY_AT + slot * 8, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCERS) {
        keep_registers<PREGS>();
        if (threadIdx.x % 32 == 0) {
            produce(p, x_map, memory, threadIdx.x / 32);
        }
    } else {
        take_registers<CREGS>();
        consume(p, memory, pointer);
    }
}

// Dynamic shared memory: EMPTY_AT + STAGES * 8.
