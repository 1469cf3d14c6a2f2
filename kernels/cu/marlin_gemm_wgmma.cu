// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, for many rows: the operands
// and the bits of marlin_gemm.cu, computed by Hopper's warpgroup instructions. For sm_90a alone.
//
// A thread block computes tiles of WARPS * COLUMNS columns x ROWS rows, one after another. A warpgroup of
// producers keeps a ring of stages of 64 k filled. Warpgroups of consumers take an equal part of the
// columns each: weights are dequantized to registers, the 64-row side of wgmma, while earlier products
// run; rows of x are its other side, read from shared memory. A chunk of k is one chain of instructions
// from zero; its sums join the totals in ascending order.
//
// Operands as in marlin_gemm.cu, except
//   x_map, y_map  x and y as the copy engine takes them: boxes of 64 columns x ROWS rows, 128-byte
//               swizzle. With IS_MOE rows of both are those of the blocks of ROWS entries (x gathered by
//               moe_gather.cu); what stands in padding is not used, and rows of y there hold anything
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//   raster      blocks of rows whose tiles are computed side by side, so that what they read of W and x
//               stays in the L2 cache
//   totals, are_there  room for the totals of a tile of each thread block, and for each of its warps 0, left
//               as it was found: where thread blocks share a tile (Share in wgmma_ring.cuh)
//
// Compile-time parameters, all required:
//   IS_BF16, BITS, HAS_ZERO, IS_FLOAT, SCALE_TYPE, GROUPS  as in marlin_gemm.cu; HAS_G_IDX 0
//   IS_MOE   0 or 1: experts
//   WARPS    8 or 12 warps of consumers
//   COLUMNS  16 or 32: columns that a warp computes
//   ROWS     a multiple of 16 from 16 to 192 for which registers are left
//   STAGES   stages of the ring
//
// Launch: thread blocks of (WARPS + 4) * 32 threads, no more than run at once, so that one can wait for what
// the one before it hands over; dynamic shared memory as at the end of this file. K is a multiple of 64,
// chunk_k of 128, N of 64, M * K below 2^35.

#if HAS_G_IDX
#error "groups are in order"
#endif

// Products that a warpgroup issues at once; while they run the next ones' weights are dequantized, to the
// other of two places: a stage has an even number of batches.
#define BATCH (ROWS <= 80 ? 2 * FRAGMENTS : 2)
#define BATCHES (4 * FRAGMENTS / BATCH)  // of a stage
// Registers of a thread; what producers leave, consumers take.
#define PRODUCER_REGISTERS (WARPS == 8 ? 40 : 24)
#define CONSUMER_REGISTERS (WARPS == 8 ? 232 : 160)

// Where a consumer's warp stands: columns from warp_n on, `part` of their 64.
struct Seat {
    unsigned lane, warp_n, part;
};

// Gives a slot back to the producers.
__device__ __forceinline__ void release(unsigned memory, unsigned slot, unsigned lane) {
    if (lane == 0) {
        barrier_arrive(memory + EMPTY_AT + slot * 8);
    }
}

// The scales of group `row` of the stage in that slot.
__device__ __forceinline__ void load_group(Group &group, const Seat &seat,
                                           const unsigned char *pointer, unsigned slot, int row) {
    const unsigned char *of =
        pointer + SCALES_AT + slot * SCALE_BYTES +
        (row * N_TILE + seat.warp_n / 64 * 64 + seat.lane / 4 * 8) * SCALE_SIZE;
    spread(group, of, seat.part);
#if HAS_ZERO
    of = pointer + ZEROS_AT + slot * ZERO_BYTES + row * (N_TILE / 2) + seat.warp_n / 64 * 32 +
         seat.lane / 4 * 4;
    spread_zeros(group, *reinterpret_cast<const unsigned *>(of), seat.part * (2 * FRAGMENTS));
#endif
}

// A warp's totals of a piece, for the thread block that goes on with the tile: where they are, and
// whether.
struct Handover {
    float4 *totals;
    unsigned *is_there;

    // Between thread block `from` and the one after it.
    __device__ Handover(const Product &p, unsigned from) {
        const unsigned warp = from * WARPS + (threadIdx.x - PRODUCERS) / 32;
        totals = p.totals + static_cast<size_t>(warp) * (FRAGMENTS * ROWS / 8 * 32) + threadIdx.x % 32;
        is_there = p.are_there + warp;
    }
};

__device__ __forceinline__ void hand_over(const Handover &to,
                                          const float (&total)[FRAGMENTS][ROWS / 2]) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 4) {
            __stcg(to.totals + (j * (ROWS / 2) + i) / 4 * 32,
                   make_float4(total[j][i], total[j][i + 1], total[j][i + 2], total[j][i + 3]));
        }
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        store_release(to.is_there, 1);
    }
}

__device__ __forceinline__ void take_over(const Handover &from,
                                          float (&total)[FRAGMENTS][ROWS / 2]) {
    // The whole warp waits: if one lane did, the compiler would take loops that follow for loops that
    // lanes leave one by one, and keep addresses of matrices in registers of each lane.
    while (__any_sync(~0u, load_acquire(from.is_there) == 0)) {
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        // For the next product.
        *from.is_there = 0;
    }
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 4) {
            const float4 four = __ldcg(from.totals + (j * (ROWS / 2) + i) / 4 * 32);
            total[j][i] = four.x;
            total[j][i + 1] = four.y;
            total[j][i + 2] = four.z;
            total[j][i + 3] = four.w;
        }
    }
}

// Adds the sums of a piece's chunks to the totals.
__device__ __forceinline__ void add_chunks(const Product &p, const Seat &seat, const Piece &piece,
                                           unsigned memory, const unsigned char *pointer,
                                           Group &group, Place &place,
                                           float (&total)[FRAGMENTS][ROWS / 2]) {
    float sum[FRAGMENTS][ROWS / 2];
    unsigned fragments[2][BATCH][4];
    const unsigned weights_at = WEIGHTS_AT + seat.warp_n / 64 * (TILE_PIECES * 16) +
                                seat.lane * (BITS * 4) + seat.part * (BITS * COLUMNS / 16);
    for (unsigned chunk = piece.begin; chunk < piece.end; ++chunk) {
        const unsigned begin = chunk * p.chunk_k;
        const unsigned stages = (min(begin + p.chunk_k, p.size_k) - begin) / STAGE_K;
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
                    constexpr int OF_GROUP = GROUPS > 0 ? 4 / GROUPS : 5;
                    if (GROUPS > 0 && j == 0 && step % OF_GROUP == 0) {
                        load_group(group, seat, pointer, slot, step / OF_GROUP);
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
                    wgmma<ROWS>(sum[j], a[i], x + 2 * step, stage + step);
                }
                wgmma_commit();
                // The batch before is done, and its fragments are free.
                wgmma_wait<1>();
                if (batch == 0 && stage > 0) {
                    release(memory, (slot == 0 ? STAGES : slot) - 1, seat.lane);
                }
            }
            place.next();
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

// What multiplies a tile's rows: row 32 i + lane.
struct Weights {
    float of[IS_MOE ? (ROWS + 31) / 32 : 1];
};

// Before the piece's first slot is given back: the weights stand there.
__device__ __forceinline__ void load_row_weights([[maybe_unused]] Weights &weights,
                                                 [[maybe_unused]] const Product &p,
                                                 [[maybe_unused]] const unsigned char *of_slot,
                                                 [[maybe_unused]] unsigned lane) {
#if IS_MOE
#pragma unroll
    for (int i = 0; i < (ROWS + 31) / 32; ++i) {
        const unsigned row = i * 32 + lane;
        weights.of[i] = p.row_weights && row < ROWS
                            ? reinterpret_cast<const float *>(of_slot)[row]
                            : 1.0f;
    }
#endif
}

// Finishes a tile's totals and has the copy engine write them to y, a warpgroup its own columns. It goes on
// meanwhile: the tile has a place in shared memory until the next one is finished.
__device__ __forceinline__ void write_tile(const Product &p, const TensorMap &y_map, const Seat &seat,
                                           const Piece &piece,
                                           [[maybe_unused]] const Weights &weights, unsigned memory,
                                           float (&total)[FRAGMENTS][ROWS / 2]) {
    constexpr unsigned EIGHTHS = 2 * FRAGMENTS;  // eights of columns: 16 bytes of a row each
    const bool exists = piece.n0 + seat.warp_n < p.size_n;
    const unsigned n0 = exists ? piece.n0 + seat.warp_n : 0, lane = seat.lane;
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
    // The warpgroup's boxes stand one after another, piece i of a row stored at i ^ (row % 8).
    constexpr unsigned WARPGROUP_N = 4 * COLUMNS;
    const unsigned group_n = seat.warp_n / WARPGROUP_N * WARPGROUP_N;
    const bool is_writer = seat.warp_n == group_n && lane == 0;
    if (is_writer) {
        // The last tile has left the memory.
        wait_for_stores();
    }
    warpgroup_sync(seat.warp_n / WARPGROUP_N);
    const unsigned box = memory + Y_AT + seat.warp_n / 64 * BOX_BYTES;
#pragma unroll
    for (int first = 0; first < ROWS; first += 16) {
#if IS_MOE
        // Of the lane's four rows.
        float router[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned of = first % 32 + i / 2 * 8 + lane % 4 * 2 + i % 2;
            router[i / 2][i % 2] = __shfl_sync(~0u, weights.of[first / 32], of);
        }
#endif
        unsigned packed[2 * EIGHTHS];
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; ++i) {
            const int eight = i / EIGHTHS, c = i % EIGHTHS;
            float value[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                value[r] = total[c / 2][(first / 8 + eight) * 4 + c % 2 * 2 + r];
#if IS_MOE
                value[r] = __fmul_rn(value[r], router[eight][r]);
#endif
            }
            packed[i] = static_cast<unsigned>(narrow(value[1])) << 16 | narrow(value[0]);
        }
#pragma unroll
        for (int i = 0; i < 2 * EIGHTHS; i += 4) {
            const unsigned matrix = i + lane / 8, row = first + matrix / EIGHTHS * 8 + lane % 8;
            const unsigned at = (seat.warp_n % 64 / 8 + matrix % EIGHTHS) ^ lane % 8;
            const unsigned four[4] = {packed[i], packed[i + 1], packed[i + 2], packed[i + 3]};
            store_matrices_transposed(box + row * 128 + at * 16, four);
        }
    }
    fence_async_proxy();
    warpgroup_sync(seat.warp_n / WARPGROUP_N);
    if (is_writer) {
#pragma unroll
        for (unsigned n = 0; n < WARPGROUP_N; n += 64) {
            store_box(y_map, piece.n0 + group_n + n, piece.row, box + n / 64 * BOX_BYTES);
        }
        commit_stores();
    }
}

// Computes the tiles of this thread block from what the ring holds, and writes them.
__device__ __forceinline__ void consume(const Product &p, const TensorMap &y_map, unsigned memory,
                                        unsigned char *pointer) {
    const unsigned warp_n = (threadIdx.x - PRODUCERS) / 32 * COLUMNS;
    const Seat seat = {threadIdx.x % 32, warp_n, warp_n % 64 / COLUMNS};
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
#if GROUPS == 0
        const unsigned n0 = piece.n0 + seat.warp_n < p.size_n ? piece.n0 + seat.warp_n : 0;
#pragma unroll
        for (int i = 0; i < 2 * FRAGMENTS; ++i) {
            const unsigned n = n0 + i * 8 + seat.lane / 4;
            const size_t at = static_cast<size_t>(piece.expert) * p.size_n + n / 64 * 64 +
                              single_position(n % 64);
            group.scale[i] = reinterpret_cast<const unsigned short *>(p.scales)[at] * 0x10001u;
        }
#if HAS_ZERO
        const size_t at =
            static_cast<size_t>(piece.expert) * (p.size_n / 8) + n0 / 64 * 8 + seat.lane / 4;
        spread_zeros(group, p.zeros[at], seat.part * (2 * FRAGMENTS));
#endif
#endif
        float total[FRAGMENTS][ROWS / 2];
        if (piece.begin > 0) {
            take_over(Handover(p, blockIdx.x - 1), total);
        } else {
            // -0 + s is s, also where s is -0.
#pragma unroll
            for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) {
                    total[j][i] = -0.0f;
                }
            }
        }
        Weights weights;
        load_row_weights(weights, p, pointer + ROW_WEIGHTS_AT + place.slot * ROW_WEIGHT_BYTES,
                         seat.lane);
        add_chunks(p, seat, piece, memory, pointer, group, place, total);
        if (piece.end < chunks) {
            hand_over(Handover(p, blockIdx.x), total);
            continue;
        }
        write_tile(p, y_map, seat, piece, weights, memory, total);
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
        unsigned chunk_k,
        unsigned group_size,
#if IS_MOE
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const float *__restrict__ row_weights,
#endif
        unsigned raster,
        float4 *__restrict__ totals,
        unsigned *__restrict__ are_there) {
    const Product p = {
        qweight, scales, zeros, bias, global_scale, size_m, size_n, size_k, chunk_k, group_size,
#if IS_MOE
        expert_ids, num_tokens_post_padded, row_weights,
#endif
        raster, totals, are_there};
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
        keep_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x % 32 == 0) {
            const unsigned part = threadIdx.x / 32;
            // Weights are no kernel's output: the parts that copy nothing else go on.
            if (IS_MOE || part == 0) {
                wait_for_last_kernel();
            }
            produce(p, x_map, memory, reinterpret_cast<Piece *>(pointer + PIECES_AT), part);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        wait_for_last_kernel();
        let_next_kernel_start();
        consume(p, y_map, memory, pointer);
    }
}

// Dynamic shared memory: ROW_WEIGHTS_AT + STAGES * ROW_WEIGHT_BYTES.
