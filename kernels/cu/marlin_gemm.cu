// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, by the canonical schedule:
//
//   1. A weight is its code's number, q - z or a float, exactly, times its scale, rounded once to the
//      16-bit type.
//   2. k is cut into at most 8 chunks of chunk_k. A chunk is one chain of m16n8k16 products in f32, k
//      ascending, from zero.
//   3. The chunks' sums are added in ascending order in f32; then times the global scale; then the
//      bias; then (experts) times the router weight; then one rounding; then (IS_MOE 2, 3) the activation.
//
// So an output depends on its row, its column and K alone: neither on M nor on the macros below that
// only say how work is dealt out. Upstream operators: `marlin_gemm`, `moe_wna16_marlin_gemm`.
//
//   qweight  uint32 [E, K/16, N*16/PACK]   Marlin's weight layout for 16-bit activations
//   scales   [E, G, N]                     Marlin's order: grouped, or single where G = 1; 16-bit, those
//                                          of e4m3 codes times 2^8 (f16) or 2^120 (bf16); or 8-bit as
//                                          in the checkpoint, of each four columns 0, 2, 1, 3
//   zeros    uint32 [E, G, N/8]            Marlin's order (HAS_ZERO only)
//   g_idx    uint32 [E, K]                 group of each k, as the weight's rows stand (HAS_G_IDX only)
//   bias     16-bit [E, N]                 Marlin's order: single; null: none
//   global_scale  f32 [E]                  null: none
//   x        16-bit [rows, K]
//   y        16-bit [rows, N], or what the activation makes of it
// With experts, blocks of M_TILES * 8 rows are those of routing.cuh. Entry t reads row t / top_k of x
// and writes row t of y; rows without an expert stay as they are.
//   topk_weights  f32 [size_m]; null: none
//
// Compile-time parameters, all required:
//   IS_BF16   0: f16, 1: bf16
//   BITS      4: uint4b8, or uint4 with HAS_ZERO; 8: uint8b128
//   HAS_ZERO  0 or 1
//   IS_FLOAT  1: codes are e2m1 (BITS 4) or finite e4m3 (BITS 8)
//   SCALE_TYPE  0: 16-bit; of floats also 2: positive e4m3; with bf16 1: e8m0 up to 2 (BITS 4) or 2^7,
//             3: e8m0 up to 2^126; of integers without zero points in bf16 also 4: 16-bit below 1/2 in
//             magnitude (BITS 4), 5: below 1/32
//   GROUPS    scale groups in 64 k: 0 one group for all k, 1 groups of 64 or more, 2 groups of 32, 4
//             groups of 16
//   HAS_G_IDX 1: groups of any k, of integers without zero points; GROUPS is 0 then, and group_size
//             the number of groups
//   IS_MOE    0; 1: experts; 2: experts, and the activation of gate and up halves; 3: of gate in even
//             columns and up in odd ones. Function 0 alone: others would make it long to load.
//   M_TILES   1, 2, 4, 8: eights of rows that a thread block computes
//   N_TILE    64, 128 or 256: columns that a thread block computes; N is a multiple of it
//   COLUMNS   32 or 64: columns that a warp computes
//   TEAMS     1 to 8: chunks that a thread block computes
//   RANKS     1, 2, 4 or 8: thread blocks that share the chunks; more than one form a cluster (from
//             sm_90 on)
//   STAGES    stages of 64 k that are kept in flight, with the one that is worked on
//   BRINGS    0; 1, of clusters and few sums alone: sums are brought to who adds them (chunk_sums.cuh)
//
// A chunk belongs to a team of N_TILE / COLUMNS warps. Teams share nothing until the end: each streams
// its own weights, scales and rows of x through its own ring of stages. The weights are the m16 side of
// the instruction, the rows of x its n8 side, so that one row costs as little as eight. In Marlin's
// layout a lane's 16 bytes (BITS 4) are just its fragments of 64 columns x 16 k.
//
// With halves a thread block computes 64 columns of gate and the same 64 of up: N_TILE is 128, and N / 2
// a multiple of 64.
//
// The chunks' sums meet in shared memory: chunk_sums.cuh.
//
// Launch: a 1-D grid of RANKS thread blocks for each N_TILE columns of each block of rows that there may
// be; TEAMS * N_TILE / COLUMNS * 32 threads, dynamic shared memory as at the end of this file. K is a
// multiple of 64, chunk_k too, K <= TEAMS * RANKS * chunk_k.

// A barrier of one team's warps.
__device__ __forceinline__ void team_sync(unsigned team) {
#if LANES == 32
    __syncwarp();
#else
    // Barrier 0 is the whole block's.
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(LANES) : "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if RANKS > 1
    __cluster_dims__(RANKS, 1, 1)
#endif
        marlin_gemm(const unsigned char *__restrict__ qweight,
                    const unsigned char *__restrict__ scales,
                    const unsigned *__restrict__ zeros,
                    const unsigned *__restrict__ g_idx,
                    const unsigned short *__restrict__ bias,
                    const float *__restrict__ global_scale,
                    const unsigned short *__restrict__ x,
                    unsigned short *__restrict__ y,
                    unsigned size_m,
                    unsigned size_n,
                    unsigned size_k,
                    unsigned chunk_k,
                    unsigned group_size
#if IS_MOE
                    ,
                    const Routing routing,
                    const float *__restrict__ topk_weights,
                    unsigned top_k
#endif
#if IS_MOE > 1
                    ,
                    const Activation activation
#endif
        ) {
    extern __shared__ __align__(16) unsigned char memory[];
    // A thread is one of LANES of its team, and one of 32 of its warp.
    const unsigned team = threadIdx.x / LANES, member = threadIdx.x % LANES;
    const unsigned lane = threadIdx.x % 32;
    // The warp's columns: `warp_n` in the tile, `part` of their 64.
    const unsigned warp_n = member / 32 * COLUMNS, part = warp_n % 64 / COLUMNS;
    const unsigned rank = blockIdx.x % RANKS, tile = blockIdx.x / RANKS;

    // Which columns: from n0 on, every 64 `next_64` after those before. Neighbours read on in a weight.
#if IS_MOE == 2
    constexpr unsigned tile_step = 64;
    const unsigned next_64 = size_n / 2;
#else
    constexpr unsigned tile_step = N_TILE, next_64 = 64;
#endif
    const unsigned n0 = tile % (size_n / N_TILE) * tile_step, block = tile / (size_n / N_TILE);
#if IS_MOE
    if (!routing.is_early) {
        wait_for_last_kernel();
        let_next_kernel_start();
    }
    // The entry of row i * 32 + lane; size_m and above: no row.
    unsigned entries[(ROWS + 31) / 32];
    int found;
#if M_TILES == 1
    if (!routing.sorted_token_ids) {
        found = find_block(routing, size_m, block, entries[0]);
    } else
#endif
    {
        // All at once: each is long in coming. There is room for every block that there may be.
        const int padded = __ldcg(routing.num_tokens_post_padded);
        found = __ldcg(routing.expert_ids + block);
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
            entries[i / 32] = i + lane < ROWS
                                  ? __ldcg(routing.sorted_token_ids + block * ROWS + i + lane)
                                  : size_m;
        }
        found = block * ROWS < static_cast<unsigned>(padded) ? found : -1;
    }
    if (found < 0) {
        // Whoever comes next must not start before this kernel has waited.
        wait_for_last_kernel();
        return;
    }
    const size_t expert = found;
    const auto entry = [&](unsigned row) {
        return __shfl_sync(0xffffffffu, entries[row / 32], row % 32);
    };
    const auto x_row = [&](unsigned entry) { return entry / top_k; };
#else
    constexpr size_t expert = 0;
    const auto entry = [&](unsigned row) { return block * ROWS + row; };
    const auto x_row = [&](unsigned entry) { return entry; };
#endif
    const unsigned groups = HAS_G_IDX ? group_size : GROUPS == 0 ? 1 : size_k / group_size;
    qweight += expert * (size_k / 16) * (size_n / 64) * (TILE_PIECES * 16);
    scales += expert * groups * size_n * SCALE_SIZE;
#if HAS_ZERO
    zeros += expert * groups * (size_n / 8);
#endif

#if BRINGS
    ChunkSums::expect(shared_address(memory));
#endif

    // This team's chunk of k: empty where K has fewer chunks.
    const unsigned own_chunk = rank * TEAMS + team, begin = min(own_chunk * chunk_k, size_k);
    const unsigned stages = (min(begin + chunk_k, size_k) - begin) / STAGE_K;
    const unsigned ring = shared_address(memory) + team * RING_BYTES;

    // What this thread copies of a stage's weights, scales and zero points. Of weights each next piece is
    // LANES further in the stage, in a later row or in the same one. Steps count bytes.
    const unsigned weight_step = size_n / 64 * (TILE_PIECES * 16);
    const unsigned weight_64 = next_64 / 64 * (TILE_PIECES * 16);
    const unsigned copy_to = ring + member * 16;
    const unsigned char *weight_from =
        qweight + static_cast<size_t>(begin / 16 + member / ROW_PIECES) * weight_step +
        n0 / 64 * (TILE_PIECES * 16) + member % ROW_PIECES / TILE_PIECES * weight_64 +
        member % TILE_PIECES * 16;
#if GROUPS > 0
    // In 64 columns there are so many pieces of scales.
    constexpr unsigned SCALES_64 = 4 * SCALE_SIZE, SCALE_PIECES = N_TILE / 64 * SCALES_64;
    unsigned group_left = (group_size - begin % group_size) / STAGE_K;  // stages, with this one
    const size_t first_scale =
        static_cast<size_t>(begin / group_size + member / SCALE_PIECES) * size_n + n0 +
        member % SCALE_PIECES / SCALES_64 * next_64;
    const unsigned char *scale_from =
        scales + first_scale * SCALE_SIZE + member % SCALES_64 * 16;
#if HAS_ZERO
    constexpr unsigned ZERO_PIECES = N_TILE / 32;
    const unsigned *zero_from =
        zeros + static_cast<size_t>(begin / group_size + member / ZERO_PIECES) * (size_n / 8) +
        n0 / 8 + member % ZERO_PIECES / 2 * (next_64 / 8) + member % 2 * 4;
#endif
#endif
    // Further blocks of rows read the same weights.
    const unsigned long long policy = cache_policy(IS_MOE ? M_TILES == 1 : size_m <= ROWS);
    const auto copy_weights = [&](unsigned slot) {
        const unsigned to = copy_to + slot;
#pragma unroll
        for (int i = 0; i < 4 * ROW_PIECES / LANES; ++i) {
            const int row = i * LANES / ROW_PIECES, in_row = i * LANES % ROW_PIECES;
            const unsigned char *from = weight_from + static_cast<size_t>(weight_step) * row;
            from += in_row / TILE_PIECES * weight_64 + in_row % TILE_PIECES * 16;
            copy_async(to + i * LANES * 16, from, policy);
        }
        weight_from += static_cast<size_t>(weight_step) * 4;
#if GROUPS > 0
        if (member < GROUPS * SCALE_PIECES) {
            copy_async(to + WEIGHT_BYTES, scale_from);
        }
#if HAS_ZERO
        if (member < GROUPS * ZERO_PIECES) {
            copy_async(to + WEIGHT_BYTES + SCALE_BYTES, zero_from);
        }
#endif
        if (GROUPS > 1 || --group_left == 0) {
            scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * size_n;
#if HAS_ZERO
            zero_from += GROUPS * (size_n / 8);
#endif
            group_left = group_size / STAGE_K;
        }
#endif
    };

    // Weights are no kernel's output, but x may be the last one's.
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < stages) {
            copy_weights(stage * STAGE_BYTES);
        }
        copy_commit();
    }
    wait_for_last_kernel();
    let_next_kernel_start();

    // Of x, likewise: rows are 8 pieces of 16 bytes, piece p stored at p ^ (row % 8), so that fragments are
    // read without bank conflicts. X_THREADS threads copy a row, each from one pointer: of few rows all at
    // once; of many, eight rows or more at a time, since each row that a warp reads from costs it a step.
    // Rows that there are not hold anything: they only reach sums that nobody reads.
    constexpr int X_FEW = LANES >= ROWS * 8 ? 8 : LANES / ROWS, X_MANY = LANES >= 64 ? 8 : 4;
    constexpr int X_THREADS = ROWS <= 16 ? X_FEW : X_MANY;
    constexpr int X_PASSES = ROWS * X_THREADS > LANES ? ROWS * X_THREADS / LANES : 1;
    const unsigned x_row_0 = member / X_THREADS, x_piece = member % X_THREADS;
    const unsigned x_to = x_row_0 * 128 + (x_piece ^ x_row_0 % 8) * 16;
    const unsigned short *x_from[X_PASSES];
    bool x_exists[X_PASSES];
#pragma unroll
    for (int i = 0; i < X_PASSES; ++i) {
        const unsigned row = i * (LANES / X_THREADS) + x_row_0, e = entry(row % ROWS);
        x_exists[i] = row < ROWS && e < size_m;
        x_from[i] =
            x + static_cast<size_t>(x_exists[i] ? x_row(e) : 0) * size_k + begin + x_piece * 8;
    }
    const auto copy_x = [&](unsigned slot) {
        const unsigned to = ring + slot + (WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES);
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i) {
            if (x_exists[i]) {
#pragma unroll
                for (int j = 0; j < 8; j += X_THREADS) {
                    // A pass has a multiple of 8 rows, so that the next one's stand as this one's.
                    const unsigned row_0 = i * (LANES / X_THREADS);
                    copy_async(to + row_0 * 128 + (x_to ^ j * 16), x_from[i] + j * 8);
                }
            }
            x_from[i] += STAGE_K;
        }
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < stages) {
            copy_x(stage * STAGE_BYTES);
        }
        copy_commit();
    }

    Group group;
    [[maybe_unused]] const unsigned warp_n0 = n0 + warp_n / 64 * next_64;
#if HAS_G_IDX
    // The lane's columns, and its k of 16: 2 (lane % 4) + {0, 1, 8, 9}.
    const unsigned char *row_scales = scales + (warp_n0 + lane / 4 * 8 + part * (2 * FRAGMENTS)) * SCALE_SIZE;
    const unsigned *row_groups = g_idx + expert * size_k + begin + lane % 4 * 2;
#elif GROUPS == 0
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS; ++i) {
        const unsigned at = warp_n0 + single_position(warp_n % 64 + i * 8 + lane / 4);
        group.scale[i] = reinterpret_cast<const unsigned short *>(scales)[at] * 0x10001u;
    }
#if HAS_ZERO
    spread_zeros(group, zeros[warp_n0 / 8 + lane / 4], part * (2 * FRAGMENTS));
#endif
#endif

    float sum[FRAGMENTS][M_TILES][4];
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[j][m][i] = 0.0f;
            }
        }
    }

    // What this lane reads of a stage.
    const unsigned weights_at =
        ring + warp_n / 64 * (TILE_PIECES * 16) + lane * (BITS * 4) + part * (BITS * COLUMNS / 16);
    const unsigned group_at = ring + WEIGHT_BYTES + (warp_n / 64 * 64 + lane / 4 * 8) * SCALE_SIZE;
    const unsigned x_at = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;

    unsigned slot = 0, free_slot = (STAGES - 1) * STAGE_BYTES;
    for (unsigned left = stages; left != 0; --left) {
        copy_wait<STAGES - 2>();
        // All copies of the team have landed, and all its threads are done with the stage refilled next.
        team_sync(team);
        if (left >= STAGES) {
            copy_weights(free_slot);
            copy_x(free_slot);
        }
        copy_commit();

        const unsigned char *weights = shared_pointer(weights_at + slot);
        const unsigned char *scales_here = shared_pointer(group_at + slot);
        [[maybe_unused]] const unsigned zeros_here = ring + slot + (WEIGHT_BYTES + SCALE_BYTES);
        const unsigned x_here = ring + slot + (WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES);
        free_slot = slot;
        slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
        // The stage's group of that number: in 64 columns the lane's eight scales stand side by side.
        [[maybe_unused]] const auto take_group = [&](int row) {
            spread(group, scales_here + row * N_TILE * SCALE_SIZE, part);
#if HAS_ZERO
            const unsigned at = (row * (N_TILE / 8) + warp_n / 64 * 8 + lane / 4) * 4;
            const unsigned char *of = shared_pointer(zeros_here + at);
            spread_zeros(group, *reinterpret_cast<const unsigned *>(of), part * (2 * FRAGMENTS));
#endif
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (GROUPS == 2 || (GROUPS == 1 && half == 0)) {
                take_group(half);
            }
            unsigned b[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                load_matrices(b[m], x_here + m * 1024 + (x_at ^ half * 64));
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                if (GROUPS == 4) {
                    take_group(half * 2 + step);
                }
#if HAS_G_IDX
                const uint2 low = __ldg(reinterpret_cast<const uint2 *>(row_groups));
                const uint2 high = __ldg(reinterpret_cast<const uint2 *>(row_groups + 8));
                spread_rows(group, row_scales, static_cast<size_t>(size_n) * SCALE_SIZE,
                            make_uint4(low.x, low.y, high.x, high.y));
                row_groups += 16;
#endif
                const Words words = load_words(weights + (half * 2 + step) * (ROW_PIECES * 16));
#pragma unroll
                for (int j = 0; j < FRAGMENTS; ++j) {
                    unsigned a[4];
#if BITS == 4
                    dequantize(a, words.of[j], group, j);
#else
                    dequantize(a, words.of[2 * j], words.of[2 * j + 1], group, j);
#endif
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        multiply_add(sum[j][m], a, b[m][2 * step], b[m][2 * step + 1]);
                    }
                }
            }
        }
    }

    // How many rows there are: they come first.
#if IS_MOE
    unsigned rows = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += 32) {
        rows += __popc(__ballot_sync(0xffffffffu, i + lane < ROWS && entries[i / 32] < size_m));
    }
#else
    const unsigned rows = min(size_m - block * ROWS, static_cast<unsigned>(ROWS));
#endif

    const unsigned chunks = (size_k + chunk_k - 1) / chunk_k;
    // This lane's: column lane / 4 (+ 8), row 2 (lane % 4) (+ 1) of each fragment.
    const ChunkSums sums = {shared_address(memory), chunks, rows, team, warp_n, lane};
#if BRINGS
    sums.bring(sum, own_chunk);
#else
    // Every ring is read.
    copy_wait<0>();
    __syncthreads();
    sums.place(sum, memory);
#endif

    // Two neighbouring columns at a time, of this rank's part of each 64: `n` counts in the tile.
    const auto total = [&](unsigned row, unsigned e, unsigned n) {
        float2 sum = sums.total(row, n);
        if (global_scale) {
            const float scale = global_scale[expert];
            sum.x = __fmul_rn(sum.x, scale);
            sum.y = __fmul_rn(sum.y, scale);
        }
        if (bias) {
            const unsigned short *of =
                bias + expert * size_n + n0 + n / 64 * next_64 + single_position(n % 64);
            sum.x = __fadd_rn(sum.x, widen(of[0]));
            sum.y = __fadd_rn(sum.y, widen(of[1]));
        }
#if IS_MOE
        if (topk_weights) {
            const float weight = topk_weights[e];
            sum.x = __fmul_rn(sum.x, weight);
            sum.y = __fmul_rn(sum.y, weight);
        }
#endif
        return sum;
    };
    // With halves only those of gate: up's stand behind them.
    constexpr unsigned PAIRS = N_TILE / RANKS / (IS_MOE == 2 ? 4 : 2);
    // Warps stay together, so that lanes can ask each other for entries.
#pragma unroll 1
    for (unsigned before = threadIdx.x - lane; before < rows * PAIRS; before += THREADS) {
        const unsigned row = (before + lane) / PAIRS, at = (before + lane) % PAIRS * 2;
        const unsigned n = at / PART * 64 + rank * PART + at % PART;
        const size_t e = entry(min(row, rows - 1));
        if (row >= rows) {
            continue;
        }
        const float2 sum = total(row, e, n);
#if IS_MOE == 2
        const float2 up = total(row, e, n + 64);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const float gate_i = i == 0 ? sum.x : sum.y, up_i = i == 0 ? up.x : up.y;
            y[e * (size_n / 2) + n0 + n + i] =
                narrow(activate(activation, 0, widen(narrow(gate_i)), widen(narrow(up_i))));
        }
#elif IS_MOE == 3
        y[e * (size_n / 2) + (n0 + n) / 2] =
            narrow(activate(activation, 0, widen(narrow(sum.x)), widen(narrow(sum.y))));
#else
        *reinterpret_cast<unsigned *>(y + e * size_n + n0 + n) =
            static_cast<unsigned>(narrow(sum.y)) << 16 | narrow(sum.x);
#endif
    }
#if RANKS > 1 && !BRINGS
    // Nobody leaves while its sums are being read.
    cluster_arrive_relaxed();
    cluster_wait();
#endif
}

// Dynamic shared memory: the rings, or the sums that take their place: TEAMS * max(RING_BYTES, SUM_CHUNK * 4);
// where sums are brought both, for the most rows that a block may have: SUMS_AT + rows * SUM_ROW * 4.
