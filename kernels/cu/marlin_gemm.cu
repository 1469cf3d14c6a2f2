// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, by the canonical schedule:
//
//   1. A weight is its code's number, q - z or a float, exactly, times its scale, rounded once to the
//      16-bit type.
//   2. k is cut into at most 8 chunks of chunk_k. A chunk is one chain of m16n8k16 products in f32, k
//      ascending, from zero.
//   3. The chunks' sums are added in ascending order in f32; then times the global scale; then the
//      bias; then (experts) times the router weight; then one rounding.
//
// So an output depends on its row, its column and K alone: neither on M nor on the macros below that
// only say how work is dealt out. Upstream operators: `marlin_gemm`, `moe_wna16_marlin_gemm`.
//
//   qweight  uint32 [E, K/16, N*16/PACK]   Marlin's weight layout for 16-bit activations
//   scales   [E, G, N]                     Marlin's order: grouped, or single where G = 1; 16-bit, those
//                                          of e4m3 codes times 2^8 (f16) or 2^120 (bf16); or 8-bit as
//                                          in the checkpoint, of each four columns 0, 2, 1, 3
//   zeros    uint32 [E, G, N/8]            Marlin's order (HAS_ZERO only)
//   bias     16-bit [E, N]                 Marlin's order: single; null: none
//   global_scale  f32 [E]                  null: none
//   x        16-bit [rows, K]
//   y        16-bit [rows, N]
// With IS_MOE, of `moe_align_block_size` with blocks of M_TILES * 8:
//   sorted_token_ids      int32 [blocks * M_TILES * 8]; entry t reads row t / top_k of x, writes row
//                         t of y; entries of size_m and above are padding
//   expert_ids            int32 [blocks]; negative: no product, its rows of y stay as they are
//   num_tokens_post_padded  int32 [1]
//   topk_weights          f32 [size_m]; null: none
//
// Compile-time parameters, all required:
//   IS_BF16   0: f16, 1: bf16
//   BITS      4: uint4b8, or uint4 with HAS_ZERO; 8: uint8b128
//   HAS_ZERO  0 or 1
//   IS_FLOAT  1: codes are e2m1 (BITS 4) or finite e4m3 (BITS 8)
//   SCALE_TYPE  0: 16-bit; of floats also 2: positive e4m3; with bf16 1: e8m0 up to 2 (BITS 4) or 2^7,
//             3: e8m0 up to 2^126
//   GROUPS    scale groups in 64 k: 0 one group for all k, 1 groups of 64 or more, 2 groups of 32, 4
//             groups of 16
//   IS_MOE    0 or 1
//   M_TILES   1, 2, 4, 8: eights of rows that a thread block computes
//   N_TILE    64 or 128: columns that a thread block computes; N is a multiple of it
//   COLUMNS   32 or 64: columns that a warp computes
//   TEAMS     1, 2, 4 or 8: chunks that a thread block computes
//   RANKS     thread blocks that share the chunks; more than one form a cluster (from sm_90 on)
//   STAGES    stages of 64 k that are kept in flight, with the one that is worked on
//
// A chunk belongs to a team of N_TILE / COLUMNS warps. Teams share nothing until the end: each streams
// its own weights, scales and rows of x through its own ring of stages. The weights are the m16 side
// of the instruction, the rows of x its n8 side, so that one row costs as little as eight. In Marlin's
// layout a lane's 16 bytes (BITS 4) are just its fragments of 64 columns x 16 k.
//
// Launch: grid (RANKS, N / N_TILE, blocks of rows), TEAMS * N_TILE / COLUMNS * 32 threads, dynamic
// shared memory as at the end of this file. K is a multiple of 64, chunk_k too, K <= TEAMS * RANKS * chunk_k.

#if !defined(GROUPS) || !defined(IS_MOE) || \
    !defined(M_TILES) || !defined(N_TILE) || !defined(COLUMNS) || !defined(TEAMS) || \
    !defined(RANKS) || !defined(STAGES)
#error "a parameter is missing"
#endif

#define WARPS (N_TILE / COLUMNS)  // of a team
#define LANES (WARPS * 32)
#define THREADS (TEAMS * LANES)
#define ROWS (M_TILES * 8)
#define STAGE_K 64
// 16-byte pieces of 16 k of one column tile, and of all of them: neighbours in memory.
#define TILE_PIECES (32 * (BITS / 4))
#define ROW_PIECES (N_TILE / 64 * TILE_PIECES)

// A team's stage in shared memory.
#define WEIGHT_BYTES (4 * ROW_PIECES * 16)
#define SCALE_BYTES (GROUPS * N_TILE * SCALE_SIZE)
#define ZERO_BYTES (HAS_ZERO * GROUPS * N_TILE / 2)
#define X_BYTES (ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES + X_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)

// A row of partial sums in shared memory: 4 more than it holds, which spreads a fragment over all banks.
#define PITCH (N_TILE + 4)
#define SUM_BYTES (ROWS * PITCH * 4)

// A barrier of one team's warps.
__device__ __forceinline__ void team_sync(unsigned team) {
#if WARPS == 1
    __syncwarp();
#else
    // Barrier 0 is the whole block's.
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(LANES) : "memory");
#endif
}

#if RANKS > 1
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

// Two neighbouring partial sums of chunk c, which a warp of this or of the other block keeps.
__device__ __forceinline__ float2 partial(unsigned sums, unsigned c, unsigned offset) {
    unsigned address = sums + c % TEAMS * SUM_BYTES + offset;
    float2 value;
#if RANKS > 1
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(c / TEAMS));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
#else
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
#endif
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
#if RANKS > 1
    __cluster_dims__(RANKS, 1, 1)
#endif
        marlin_gemm(const uint4 *__restrict__ qweight,
                    const unsigned char *__restrict__ scales,
                    const unsigned *__restrict__ zeros,
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
                    const int *__restrict__ sorted_token_ids,
                    const int *__restrict__ expert_ids,
                    const int *__restrict__ num_tokens_post_padded,
                    const float *__restrict__ topk_weights,
                    unsigned top_k
#endif
        ) {
    extern __shared__ __align__(16) unsigned char memory[];
    // A thread is one of LANES of its team, and one of 32 of its warp.
    const unsigned team = threadIdx.x / LANES, member = threadIdx.x % LANES;
    const unsigned lane = threadIdx.x % 32;
    // The warp's columns: `warp_n` in the block, `part` of a tile's 64 when it has 32.
    const unsigned warp_n = member / 32 * COLUMNS, part = COLUMNS == 64 ? 0 : member / 32 % 2;
    const unsigned n0 = blockIdx.y * N_TILE;
#if IS_MOE
    if (blockIdx.z * ROWS >= static_cast<unsigned>(*num_tokens_post_padded)) {
        return;
    }
    const int expert = expert_ids[blockIdx.z];
    if (expert < 0) {
        return;
    }
    const unsigned groups = GROUPS == 0 ? 1 : size_k / group_size;
    sorted_token_ids += static_cast<size_t>(blockIdx.z) * ROWS;
    qweight += static_cast<size_t>(expert) * (size_k / 16) * (size_n / 64) * TILE_PIECES;
    scales += static_cast<size_t>(expert) * groups * size_n * SCALE_SIZE;
#if HAS_ZERO
    zeros += static_cast<size_t>(expert) * groups * (size_n / 8);
#endif
    bias = bias ? bias + static_cast<size_t>(expert) * size_n : bias;
    global_scale = global_scale ? global_scale + expert : global_scale;
    const auto entry = [&](unsigned row) { return static_cast<unsigned>(sorted_token_ids[row]); };
    const auto x_row = [&](unsigned entry) { return entry / top_k; };
#else
    const auto entry = [&](unsigned row) { return blockIdx.z * ROWS + row; };
    const auto x_row = [&](unsigned entry) { return entry; };
#endif

    // This team's chunk of k: empty where K has fewer chunks.
    const unsigned begin = min((blockIdx.x * TEAMS + team) * chunk_k, size_k);
    const unsigned stages = (min(begin + chunk_k, size_k) - begin) / STAGE_K;

    // What a thread copies of each stage. Rows of x: 8 pieces of 16 bytes, piece p stored at
    // p ^ (row % 8), so that fragments are read without bank conflicts.
    const unsigned ring = shared_address(memory) + team * RING_BYTES;
    const size_t weight_step = static_cast<size_t>(size_n / 64) * TILE_PIECES;
    const uint4 *weight_from = qweight + (begin / 16 + member / ROW_PIECES) * weight_step +
                               blockIdx.y * ROW_PIECES + member % ROW_PIECES;
#if GROUPS > 0
    constexpr unsigned SCALE_PIECES = N_TILE * SCALE_SIZE / 16;
    unsigned group_left = (group_size - begin % group_size) / STAGE_K;  // stages, with this one
    const unsigned char *scale_from =
        scales +
        (static_cast<size_t>(begin / group_size + member / SCALE_PIECES) * size_n + n0) * SCALE_SIZE +
        member % SCALE_PIECES * 16;
#if HAS_ZERO
    constexpr unsigned ZERO_PIECES = N_TILE / 32;
    const unsigned *zero_from =
        zeros + static_cast<size_t>(begin / group_size + member / ZERO_PIECES) * (size_n / 8) +
        n0 / 8 + member % ZERO_PIECES * 4;
#endif
#endif
    constexpr int X_COPIES = ROWS * 8 / LANES;
    const unsigned short *x_from[X_COPIES];
    unsigned x_exists = 0;  // bit i: copy i is of a row that there is
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
        const unsigned e = entry(i * (LANES / 8) + member / 8);
        const bool exists = e < size_m;
        x_exists |= static_cast<unsigned>(exists) << i;
        x_from[i] =
            x + static_cast<size_t>(exists ? x_row(e) : 0) * size_k + begin + member % 8 * 8;
    }
    const auto issue = [&](unsigned stage) {
        if (stage < stages) {
            unsigned to = ring + stage % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < 4 * ROW_PIECES / LANES; ++i) {
                copy_async(to + (i * LANES + member) * 16,
                           weight_from + i * LANES / ROW_PIECES * weight_step +
                               i * LANES % ROW_PIECES);
            }
            weight_from += 4 * weight_step;
            to += WEIGHT_BYTES;
#if GROUPS > 0
            if (member < GROUPS * SCALE_PIECES) {
                copy_async(to + member * 16, scale_from);
            }
#if HAS_ZERO
            if (member < GROUPS * ZERO_PIECES) {
                copy_async(to + SCALE_BYTES + member * 16, zero_from);
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
            to += SCALE_BYTES + ZERO_BYTES;
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i) {
                const unsigned row = i * (LANES / 8) + member / 8;
                copy_async(to + row * 128 + (member % 8 ^ row % 8) * 16, x_from[i],
                           (x_exists >> i & 1u) * 16);
                x_from[i] += STAGE_K;
            }
        }
        copy_commit();
    };

    Group group;
#if GROUPS == 0
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS; ++i) {
        const unsigned n = warp_n + i * 8 + lane / 4;
        const unsigned at = n0 + n / 64 * 64 + single_position(n % 64);
        group.scale[i] = reinterpret_cast<const unsigned short *>(scales)[at] * 0x10001u;
    }
#if HAS_ZERO
    spread_zeros(group, zeros[n0 / 8 + warp_n / 64 * 8 + lane / 4], part * 4);
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

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        issue(stage);
    }
    for (unsigned stage = 0; stage < stages; ++stage) {
        copy_wait<STAGES - 2>();
        // All copies of the team have landed, and all its threads are done with the stage refilled next.
        team_sync(team);
        issue(stage + STAGES - 1);

        const unsigned offset = team * RING_BYTES + stage % STAGES * STAGE_BYTES;
        const unsigned *weights = reinterpret_cast<const unsigned *>(memory + offset) +
                                  warp_n / 64 * (TILE_PIECES * 4) + lane * BITS + part * (BITS / 2);
        const unsigned char *about = memory + offset + WEIGHT_BYTES;
        const unsigned x_at = ring + stage % STAGES * STAGE_BYTES + WEIGHT_BYTES + SCALE_BYTES +
                              ZERO_BYTES + lane % 8 * 128;
        // The stage's group of that number, for the lane's columns: their scales stand side by side.
        const auto take_group = [&](int row) {
            spread(group, about + row * N_TILE * SCALE_SIZE +
                              (warp_n / 64 * 64 + lane / 4 * 8 + part * 4) * SCALE_SIZE);
#if HAS_ZERO
            const unsigned *of_zeros = reinterpret_cast<const unsigned *>(about + SCALE_BYTES);
            spread_zeros(group, of_zeros[row * (N_TILE / 8) + warp_n / 64 * 8 + lane / 4],
                         part * 4);
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
                const unsigned piece = half * 4 + lane / 8;
                load_matrices(b[m], x_at + m * 1024 + (piece ^ lane % 8) * 16);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                if (GROUPS == 4) {
                    take_group(half * 2 + step);
                }
                // BITS / 4 words for each fragment.
                constexpr int WORDS = FRAGMENTS * BITS / 4;
                unsigned words[WORDS];
                const unsigned *of = weights + (half * 2 + step) * (ROW_PIECES * 4);
                if (WORDS == 2) {
                    *reinterpret_cast<uint2 *>(words) = *reinterpret_cast<const uint2 *>(of);
                } else {
#pragma unroll
                    for (int i = 0; i < WORDS; i += 4) {
                        *reinterpret_cast<uint4 *>(words + i) =
                            *reinterpret_cast<const uint4 *>(of + i);
                    }
                }
#pragma unroll
                for (int j = 0; j < FRAGMENTS; ++j) {
                    unsigned a[4];
#if BITS == 4
                    dequantize(a, words[j], group, j);
#else
                    dequantize(a, words[2 * j], words[2 * j + 1], group, j);
#endif
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        multiply_add(sum[j][m], a, b[m][2 * step], b[m][2 * step + 1]);
                    }
                }
            }
        }
    }

    // Every ring is read: the sums take their place.
    copy_wait<0>();
    __syncthreads();
    float *sums = reinterpret_cast<float *>(memory) + team * (SUM_BYTES / 4) + warp_n;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            // Fragment i: column lane / 4 (+ 8), row 2 (lane % 4) (+ 1).
            float *to = sums + (m * 8 + lane % 4 * 2) * PITCH + j * 16 + lane / 4;
            to[0] = sum[j][m][0];
            to[PITCH] = sum[j][m][1];
            to[8] = sum[j][m][2];
            to[PITCH + 8] = sum[j][m][3];
        }
    }
#if RANKS > 1
    cluster_sync();
#else
    __syncthreads();
#endif

    // A warp's 32 pairs are of one row, so that its lanes stay together until the last barrier.
    const unsigned chunks = (size_k + chunk_k - 1) / chunk_k;
    const unsigned base = shared_address(memory);
    for (unsigned pair = blockIdx.x * THREADS + threadIdx.x; pair < ROWS * N_TILE / 2;
         pair += RANKS * THREADS) {
        const unsigned row = pair / (N_TILE / 2), n = pair % (N_TILE / 2) * 2, e = entry(row);
        if (e >= size_m) {
            continue;
        }
        const unsigned at = (row * PITCH + n) * 4;
        float2 total = partial(base, 0, at);
        for (unsigned c = 1; c < chunks; ++c) {
            const float2 more = partial(base, c, at);
            total.x = __fadd_rn(total.x, more.x);
            total.y = __fadd_rn(total.y, more.y);
        }
        if (global_scale) {
            total.x = __fmul_rn(total.x, *global_scale);
            total.y = __fmul_rn(total.y, *global_scale);
        }
        if (bias) {
            const unsigned short *of = bias + n0 + n / 64 * 64 + single_position(n % 64);
            total.x = __fadd_rn(total.x, widen(of[0]));
            total.y = __fadd_rn(total.y, widen(of[1]));
        }
#if IS_MOE
        if (topk_weights) {
            total.x = __fmul_rn(total.x, topk_weights[e]);
            total.y = __fmul_rn(total.y, topk_weights[e]);
        }
#endif
        const unsigned packed = static_cast<unsigned>(narrow(total.y)) << 16 | narrow(total.x);
        *reinterpret_cast<unsigned *>(y + static_cast<size_t>(e) * size_n + n0 + n) = packed;
    }
#if RANKS > 1
    // Nobody leaves while its sums are being read.
    cluster_sync();
#endif
}

// Dynamic shared memory: the rings, or the sums that take their place:
// TEAMS * max(RING_BYTES, SUM_BYTES).
