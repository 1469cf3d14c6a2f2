// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, for many rows: the operands
// and the bits of marlin_gemm.cu, computed by Hopper's warpgroup instructions. For sm_90a alone.
//
// A thread block computes tiles of WARPS * COLUMNS columns x ROWS rows, one after another. A warpgroup of
// producers keeps a ring of stages of 64 k filled. Warpgroups of consumers take an equal part of the
// columns each: weights are dequantized to registers, the 64-row side of wgmma, while earlier products
// run; rows of x are its other side, read from shared memory. A chunk of k is one chain of instructions
// from zero; its sums join the totals in the order of the cut (cut.cuh).
//
// Operands as in marlin_gemm.cu, except
//   x_map, y_map  x and y as the copy engine takes them: boxes of 64 columns x ROWS rows, 128-byte
//               swizzle. With IS_MOE rows of both are those of the blocks of ROWS entries (x gathered by
//               moe_gather.cu); rows of padding are not used, and those of y hold anything
//   size_m      rows of x and y, without IS_MOE alone: with it num_tokens_post_padded has the number
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//   raster      blocks of rows whose tiles are computed concurrently, so that the parts of W and x that they
//               read stay in the L2 cache
//   totals, totals_ready  memory for the totals of TOTALS_PLACES tiles of each thread block, which wait for other
//               chunks (WaitingTotals), and for each of its warps a zero, which the kernel restores
//   part        f32 [M, N], with IS_PART: the sums before the global scale, instead of y
//
// Parameters, all required:
//   IS_BF16, CODES, SCALES, GROUPS, HAS_G_IDX  as in marlin_gemm.cu; HAS_G_IDX is 0
//   IS_MOE   0 or 1: experts
//   IS_PART  0 or 1: f32 sums of a rank's part of k, without experts
//   WAITS    0 or 1: totals of runs wait for other runs (cut.cuh): more runs than one
//   WARPS    8 or 12 warps of consumers
//   COLUMNS  16 or 32: columns that a warp computes
//   ROWS     a multiple of 16 from 16 to 192 for which registers are left
//   STAGES   stages of the ring
//
// Launch: thread blocks of THREADS threads, no more than run at once, so that one can wait for the totals of the
// one before it; SHARED_BYTES of dynamic shared memory (wgmma_sizes.cuh). K and all chunks are
// multiples of 64, N too; M * K is below 2^35.

#include "depend.cuh"
#include "dequantize.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "wgmma_ring.cuh"
#include "wgmma_totals.cuh"

// Products that a warpgroup issues at once. While they run, the weights of the next batch are dequantized to the
// other of two buffers: a stage has an even number of batches.
constexpr int BATCH = ROWS <= 80 ? 2 * FRAGMENTS : 2;
constexpr int BATCHES = 4 * FRAGMENTS / BATCH;  // of a stage
// Registers of a thread: consumers claim those that producers release.
constexpr int PRODUCER_REGISTERS = WARPS == 8 ? 40 : 24;
constexpr int CONSUMER_REGISTERS = WARPS == 8 ? 232 : 160;

// A consumer warp's columns: from warp_n on, part `part` of their 64.
struct WarpColumns {
    unsigned lane, warp_n, part;
};

// Releases a slot to the producers.
__device__ __forceinline__ void release(unsigned memory, unsigned slot, unsigned lane) {
    if (lane == 0) {
        barrier_arrive(memory + EMPTY_AT + slot * 8);
    }
}

// Loads group `row` of the stage in that slot: in 64 columns the lane's eight are neighbours.
template <class Group>
__device__ __forceinline__ void load_group(Group &group, const WarpColumns &warp, const unsigned char *pointer,
                                           unsigned slot, int row) {
    const unsigned char *from = pointer + SCALES_AT + slot * SCALE_BYTES +
                                (row * N_TILE + warp.warp_n / 64 * 64 + warp.lane / 4 * 8) * SCALE_SIZE;
    load_scales(group, from, warp.part);
    if constexpr (HAS_ZERO) {
        from = pointer + ZEROS_AT + slot * ZERO_BYTES + row * (N_TILE / 2) + warp.warp_n / 64 * 32 +
               warp.lane / 4 * 4;
        load_zeros(group, from, warp.part);
    }
}

__device__ __forceinline__ void clear(float (&total)[FRAGMENTS][ROWS / 2]) {
    // -0 + s is s, also where s is -0.
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            total[j][i] = -0.0f;
        }
    }
}

// After chunk next - 1: adds the totals of runs that waited for its run, if that is complete, and has the sum wait if
// other runs follow.
__device__ __forceinline__ void end_chunk(const Product &p, const Piece &piece, unsigned next, unsigned chunks,
                                          unsigned char *memory, WaitingTotals &waiting,
                                          float (&total)[FRAGMENTS][ROWS / 2]) {
    if constexpr (!WAITS) {
        // One run.
        if (next == piece.end && next < chunks) {
            waiting.push(0, memory, total);
        }
        return;
    }
    const unsigned run = p.cut.run, index = (next - 1) / run;
    const bool is_complete = next % run == 0;
    if (!is_complete && next != piece.end) {
        return;
    }
    unsigned level = __popc(index);
    if (is_complete) {
        for (unsigned ones = index; ones & 1; ones >>= 1) {
            waiting.pop(--level, memory, total);
        }
    }
    if (next < chunks) {
        waiting.push(level, memory, total);
        clear(total);
    }
}

// Adds the sums of a piece's chunks, in the order of the cut: the totals of the last run, with those of all runs
// before if it is the tile's last.
template <class Group>
__device__ __forceinline__ void add_chunks(const Product &p, const WarpColumns &warp, const Piece &piece,
                                           unsigned memory, unsigned char *pointer,
                                           Group &group, Place &place, unsigned chunks, WaitingTotals &waiting,
                                           float (&total)[FRAGMENTS][ROWS / 2]) {
    float sum[FRAGMENTS][ROWS / 2];
    unsigned fragments[2][BATCH][4];
    const unsigned weights_at = WEIGHTS_AT + warp.warp_n / 64 * (TILE_PIECES * 16) +
                                warp.lane * (BITS * 4) + warp.part * (BITS * COLUMNS / 16);
    for (unsigned chunk = piece.begin; chunk < piece.end; ++chunk) {
        const unsigned stages = (p.cut.begins[chunk + 1] - p.cut.begins[chunk]) / STAGE_K;
        for (unsigned stage = 0; stage < stages; ++stage) {
            const unsigned slot = place.slot;
            barrier_wait(memory + FULL_AT + slot * 8, place.phase);
            const unsigned char *weights = pointer + weights_at + slot * WEIGHT_BYTES;
            const unsigned long long x = matrix_descriptor(memory + slot * X_BYTES);
            Words words[4];
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                words[step] = load_words(weights + step * (ROW_PIECES * 16));
            }
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                unsigned(&a)[BATCH][4] = fragments[batch % 2];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int step = (batch * BATCH + i) / FRAGMENTS, j = i % FRAGMENTS;
                    if constexpr (GROUPS > 0) {
                        constexpr int GROUP_STEPS = 4 / PieceStream::STAGE_GROUPS;
                        if (j == 0 && step % GROUP_STEPS == 0) {
                            load_group(group, warp, pointer, slot, step / GROUP_STEPS);
                        }
                    }
                    dequantize(a[i], words[step], group, j);
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int step = (batch * BATCH + i) / FRAGMENTS, j = i % FRAGMENTS;
                    wgmma<ROWS>(sum[j], a[i], x + 2 * step, stage + step);
                }
                wgmma_commit();
                // The previous batch is complete, so its fragments are free.
                wgmma_wait<1>();
                if (batch == 0 && stage > 0) {
                    release(memory, (slot == 0 ? STAGES : slot) - 1, warp.lane);
                }
            }
            place.next();
        }
        wgmma_wait<0>();
        release(memory, (place.slot == 0 ? STAGES : place.slot) - 1, warp.lane);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
            }
        }
        end_chunk(p, piece, chunk + 1, chunks, pointer, waiting, total);
    }
}

// The router weights of a tile's rows: row 32 i + lane.
struct RowWeights {
    float weight[IS_MOE ? (ROWS + 31) / 32 : 1];

    // Loads them from the piece's first slot, before that is released.
    __device__ __forceinline__ void load([[maybe_unused]] const Product &p,
                                         [[maybe_unused]] const unsigned char *slot_weights,
                                         [[maybe_unused]] unsigned lane) {
        if constexpr (IS_MOE) {
#pragma unroll
            for (int i = 0; i < (ROWS + 31) / 32; ++i) {
                const unsigned row = i * 32 + lane;
                weight[i] = p.row_weights && row < ROWS
                                ? reinterpret_cast<const float *>(slot_weights)[row]
                                : 1.0f;
            }
        }
    }
};

// Finishes a tile's totals; each warpgroup then has the copy engine write its columns to y. The warpgroup continues
// meanwhile, since the tile stays in shared memory until the next one is finished.
__device__ __forceinline__ void write_tile(const Product &p, const TensorMap &y_map, const WarpColumns &warp,
                                           const Piece &piece,
                                           [[maybe_unused]] const RowWeights &row_weights, unsigned memory,
                                           float (&total)[FRAGMENTS][ROWS / 2]) {
    constexpr unsigned EIGHTHS = 2 * FRAGMENTS;  // eights of columns: 16 bytes of a row each
    const bool exists = piece.n0 + warp.warp_n < p.size_n;
    const unsigned n0 = exists ? piece.n0 + warp.warp_n : 0, lane = warp.lane;
    if (p.global_scale) {
        const float scale = p.global_scale[piece.expert];
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                total[j][i] = __fmul_rn(total[j][i], scale);
            }
        }
    }
    if (p.bias) {
        const unsigned short *of =
            p.bias + static_cast<size_t>(piece.expert) * p.size_n + n0 / 64 * 64;
#pragma unroll
        for (int c = 0; c < 2 * FRAGMENTS; ++c) {
            const float bias = widen(of[single_position(n0 % 64 + c * 8 + lane / 4)]);
#pragma unroll
            for (int i = c % 2 * 2; i < ROWS / 2; i += 4) {
                total[c / 2][i] = __fadd_rn(total[c / 2][i], bias);
                total[c / 2][i + 1] = __fadd_rn(total[c / 2][i + 1], bias);
            }
        }
    }
    // The warpgroup's boxes of swizzled rows follow each other.
    constexpr unsigned WARPGROUP_N = 4 * COLUMNS;
    const unsigned group_n = warp.warp_n / WARPGROUP_N * WARPGROUP_N;
    const bool is_writer = warp.warp_n == group_n && lane == 0;
    if (is_writer) {
        // The last tile has been copied from shared memory.
        wait_for_stores();
    }
    warpgroup_sync(warp.warp_n / WARPGROUP_N);
    const unsigned box = memory + Y_AT + warp.warp_n / 64 * BOX_STEP;
#pragma unroll
    for (int first = 0; first < ROWS; first += 16) {
        // The router weights of the lane's four rows.
        [[maybe_unused]] float router[2][2];
        if constexpr (IS_MOE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned row = first % 32 + i / 2 * 8 + lane % 4 * 2 + i % 2;
                router[i / 2][i % 2] = __shfl_sync(~0u, row_weights.weight[first / 32], row);
            }
        }
        unsigned packed[2 * EIGHTHS];
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; ++i) {
            const int eight = i / EIGHTHS, c = i % EIGHTHS;
            float value[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                value[r] = total[c / 2][(first / 8 + eight) * 4 + c % 2 * 2 + r];
                if constexpr (IS_MOE) {
                    value[r] = __fmul_rn(value[r], router[eight][r]);
                }
            }
            packed[i] = narrow2(value[0], value[1]);
        }
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; i += 4) {
            const unsigned matrix = i + lane / 8, row_0 = first + matrix / EIGHTHS * 8;
            const unsigned at = SwizzledRows::at(lane % 8, warp.warp_n % 64 / 8 + matrix % EIGHTHS);
            const unsigned four[4] = {packed[i], packed[i + 1], packed[i + 2], packed[i + 3]};
            store_matrices_transposed(box + row_0 * 128 + at, four);
        }
    }
    fence_async_proxy();
    warpgroup_sync(warp.warp_n / WARPGROUP_N);
    if (is_writer) {
#pragma unroll
        for (unsigned n = 0; n < WARPGROUP_N; n += 64) {
            store_box(y_map, piece.n0 + group_n + n, piece.row, box + n / 64 * BOX_STEP);
        }
        commit_stores();
    }
}

// Writes a tile's f32 totals.
__device__ __forceinline__ void write_part(const Product &p, const WarpColumns &warp, const Piece &piece,
                                           const float (&total)[FRAGMENTS][ROWS / 2]) {
    const unsigned n0 = piece.n0 + warp.warp_n, row_0 = piece.row + warp.lane % 4 * 2;
    if (n0 >= p.size_n) {
        return;
    }
    // Lanes of equal remainder by 4 have eight neighbouring columns: 32 bytes.
    float *to = p.part + static_cast<size_t>(row_0) * p.size_n + n0 + warp.lane / 4;
#pragma unroll
    for (unsigned eight = 0; eight < ROWS / 8; ++eight) {
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
            if (row_0 + eight * 8 + r < p.size_m) {
#pragma unroll
                for (unsigned c = 0; c < 2 * FRAGMENTS; ++c) {
                    to[static_cast<size_t>(eight * 8 + r) * p.size_n + c * 8] =
                        total[c / 2][eight * 4 + c % 2 * 2 + r];
                }
            }
        }
    }
}

// Computes the tiles of this thread block from the ring's stages, and writes them.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, unsigned memory,
                                        unsigned char *pointer) {
    const unsigned warp_n = (threadIdx.x - PRODUCERS) / 32 * COLUMNS;
    const WarpColumns warp = {threadIdx.x % 32, warp_n, warp_n % 64 / COLUMNS};
    const unsigned chunks = p.chunks();
    Place place;
    for (;;) {
        barrier_wait(memory + FULL_AT + place.slot * 8, place.phase);
        const Piece piece = reinterpret_cast<const Piece *>(pointer + PIECES_AT)[place.slot];
        if (piece.end == 0) {
            // The copy engine may still be reading here.
            wait_for_stores();
            return;
        }
        Group group;
        if constexpr (GROUPS == 0) {
            const unsigned n0 = piece.n0 + warp.warp_n < p.size_n ? piece.n0 + warp.warp_n : 0;
            load_single_scales(group, p.scales, [&](unsigned column) {
                const unsigned n = n0 + column + warp.lane / 4;
                return static_cast<size_t>(piece.expert) * p.size_n + n / 64 * 64 + single_position(n % 64);
            });
            load_single_zeros(group, p.zeros + static_cast<size_t>(piece.expert) * (p.size_n / 8) +
                                         n0 / 64 * 8 + warp.lane / 4, warp.part);
        }
        float total[FRAGMENTS][ROWS / 2];
        clear(total);
        WaitingTotals waiting(p, piece, chunks);
        if (piece.begin > 0) {
            waiting.take_over(p);
            if (!WAITS || piece.begin % p.cut.run > 0) {
                waiting.pop(WAITS ? waiting.inherited - 1 : 0, pointer, total);
            }
        }
        RowWeights row_weights;
        row_weights.load(p, pointer + ROW_WEIGHTS_AT + place.slot * ROW_WEIGHT_BYTES, warp.lane);
        add_chunks(p, warp, piece, memory, pointer, group, place, chunks, waiting, total);
        if (piece.end < chunks) {
            waiting.hand_over(p);
        } else if constexpr (IS_PART) {
            write_part(p, warp, piece, total);
        } else {
            write_tile(p, y_map, warp, piece, row_weights, memory, total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    marlin_gemm_wgmma(const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap y_map,
        const uint4 *__restrict__ qweight,
        const unsigned char *__restrict__ scales,
        const unsigned *__restrict__ zeros,
        const unsigned short *__restrict__ bias,
        const float *__restrict__ global_scale,
        unsigned size_m,
        unsigned size_n,
        unsigned size_k,
        const __grid_constant__ Cut cut,
        unsigned group_size,
        unsigned raster,
        float4 *__restrict__ totals,
        unsigned *__restrict__ totals_ready,
        // With experts:
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const float *__restrict__ row_weights,
        // With IS_PART:
        float *__restrict__ part) {
    const Product p = {qweight, scales,     zeros,  bias,         global_scale, size_m,
                       size_n,  size_k,     group_size, cut,      raster,       totals,
                       totals_ready, expert_ids, num_tokens_post_padded, row_weights, part};
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
        release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x % 32 == 0) {
            const unsigned part = threadIdx.x / 32;
            // No kernel writes weights: producers that copy nothing else start at once.
            if (IS_MOE || part == 0) {
                wait_for_last_kernel();
            }
            produce(p, x_map, memory, reinterpret_cast<Piece *>(pointer + PIECES_AT), part);
        }
    } else {
        claim_registers<CONSUMER_REGISTERS>();
        wait_for_last_kernel();
        let_next_kernel_start();
        consume(p, y_map, memory, pointer);
    }
}

