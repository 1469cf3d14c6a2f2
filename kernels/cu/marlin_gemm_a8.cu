// y[M, N] = x[M, K] * W[K, N] with 8-bit activations and 4-bit weights in Marlin's layout for them, by
// the canonical schedule:
//
//   1. A weight is its code's number, q - z or a float, exactly; so is an activation.
//   2. k is cut into at most 8 chunks of chunk_k, and a chunk into groups. A group is one chain of
//      m16n8k32 products from zero, k ascending: exact integers, or f32. With several groups, the group's
//      sum times its scale is added to the chunk's f32 by one fused multiply-add.
//   3. The chunks' sums are added in ascending order in f32; then times the row's scale; with one group
//      times the column's scale; then the bias; then (experts) times the router weight; then one rounding.
//
// So an output depends on its row, its column and K alone: neither on M nor on the macros below that
// only say how work is dealt out. Upstream operators: `marlin_gemm`, `moe_wna16_marlin_gemm`.
//
//   qweight  uint32 [E, K/16, N*2]    Marlin's weight layout for 8-bit activations; under e4m3 integers
//                                     as `marlin_int4_fp8_preprocess` writes them
//   scales   [E, G, N]                Marlin's order: single. G > 1: int8: 16-bit integers; e4m3: 16-bit
//                                     floats times 512, e8m0 plus 6. G = 1: 16-bit floats, times 512 under e4m3
//   zeros    uint32 [E, G, N/8]       Marlin's order for 8-bit activations (HAS_ZERO only)
//   bias     16-bit [E, N]            Marlin's order: single; null: none
//   x        int8 or e4m3 [rows, K]
//   x_scales f32 [rows]; each is multiplied with x_factor first
//   y        16-bit [rows, N]
// With IS_MOE, of `moe_align_block_size` with blocks of M_TILES * 8: as in marlin_gemm.cu.
//
// Compile-time parameters, all required:
//   IS_FP8    activations 0: int8, 1: e4m3 (from sm_89 on)
//   IS_BF16   y, bias and 16-bit scales 0: f16, 1: bf16
//   IS_FLOAT  codes 0: uint4b8, or uint4 with HAS_ZERO; 1: e2m1 with e8m0 scales (IS_FP8 alone)
//   HAS_ZERO  0 or 1
//   GROUPS    scale groups in 128 k: 0 one group for all k, 1, 2 or 4
//   IS_MOE    0 or 1
//   M_TILES   1, 2, 4, 8: eights of rows that a thread block computes
//   STAGES    stages of 128 k that are kept in flight, with the one that is worked on
//
// A warp computes a chunk for 32 columns: it streams its own weights, scales and rows of x through its
// own ring of stages. The weights are the m16 side of the instruction, the rows of x its n8 side. In
// Marlin's layout a lane's 16 bytes are just its fragments of 32 columns x 32 k.
//
// Launch: grid (N / 32, blocks of rows), a warp for each chunk, dynamic shared memory as at the end of
// this file. K is a multiple of 128, chunk_k too, K < 2^19.

#if !defined(IS_FP8) || !defined(IS_FLOAT) || !defined(HAS_ZERO) || !defined(GROUPS) || \
    !defined(IS_MOE) || !defined(M_TILES) || !defined(STAGES)
#error "a parameter is missing"
#endif
#if IS_FLOAT && (!IS_FP8 || HAS_ZERO || GROUPS != 4)
#error "e2m1 has e4m3 activations and groups of 32"
#endif

#define COLUMNS 32
#define ROWS (M_TILES * 8)
#define STAGE_K 128
#define SCALE_SIZE (IS_FLOAT ? 1 : 2)  // bytes

// A warp's stage in shared memory.
#define WEIGHT_BYTES (STAGE_K * COLUMNS / 2)
#define SCALE_BYTES (GROUPS * COLUMNS * SCALE_SIZE)
#define ZERO_BYTES (HAS_ZERO * GROUPS * 32)  // of 64 columns, which share words
#define X_BYTES (ROWS * STAGE_K)
#define STAGE_BYTES (WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES + X_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)

// A row of partial sums in shared memory: 4 more than it holds, which spreads a fragment over all banks.
#define PITCH (COLUMNS + 4)
#define SUM_BYTES (ROWS * PITCH * 4)

#if IS_FP8
typedef float Part;
#define NOTHING 0.0f
#else
typedef int Part;
// Sums of a group of int8 products stay below 2^22, so that the integer added to the bits of 1.5 * 2^23
// is that f32 plus the integer.
#define NOTHING (GROUPS > 0 ? 0x4B400000 : 0)
#endif

// Products are so many times what they stand for.
#if IS_FLOAT
#define UNIT 0.015625f  // 2^-6
#elif IS_FP8
#define UNIT 0.001953125f  // 2^-9
#else
#define UNIT (HAS_ZERO ? 1.0f : 16.0f)
#endif

// d[16 x 8] += a[16 x 32] * b[32 x 8].
__device__ __forceinline__ void multiply_add_8(Part (&d)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
#if IS_FP8
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
#endif
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four codes, in the low (0) or high (1) halves of a word's bytes, as numbers times UNIT. `zeros` is the
// column's zero point in each byte.
template <int HIGH>
__device__ __forceinline__ unsigned dequantize(unsigned word, unsigned zeros) {
#if IS_FLOAT
    // Sign to bit 7, magnitude to bits 4..2.
    const unsigned sign = HIGH ? word : word << 4, magnitude = HIGH ? word >> 2 : word << 2;
    return (sign & 0x80808080u) | (magnitude & 0x1C1C1C1Cu);
#elif IS_FP8
    // q >= z is stored as q - z, q < z as 15 - q. In bits of e4m3, 0 to 15 are 0 to 15 times 2^-9, and
    // the negative ones are c > 15 - z, of magnitude c - 15 + z.
    const unsigned c = (HIGH ? word >> 4 : word) & 0x0F0F0F0Fu;
    const unsigned negative = (c + zeros) >> 4 & 0x01010101u;
    return c + negative * (0x71u + (zeros & 15u));
#elif HAS_ZERO
    // No byte of 128 + q - z borrows.
    const unsigned c = (HIGH ? word >> 4 : word) & 0x0F0F0F0Fu;
    return ((c | 0x80808080u) - zeros) ^ 0x80808080u;
#else
    // 16 (q - 8).
    return ((HIGH ? word : word << 4) & 0xF0F0F0F0u) ^ 0x80808080u;
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    marlin_gemm_a8(const uint4 *__restrict__ qweight,
                   const unsigned char *__restrict__ scales,
                   const unsigned *__restrict__ zeros,
                   const unsigned short *__restrict__ bias,
                   const unsigned char *__restrict__ x,
                   const float *__restrict__ x_scales,
                   unsigned short *__restrict__ y,
                   float x_factor,
                   unsigned size_m,
                   unsigned size_n,
                   unsigned size_k,
                   unsigned chunk_k
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
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned n0 = blockIdx.x * COLUMNS;
#if IS_MOE
    if (blockIdx.y * ROWS >= static_cast<unsigned>(*num_tokens_post_padded)) {
        return;
    }
    const int expert = expert_ids[blockIdx.y];
    if (expert < 0) {
        return;
    }
    const unsigned groups = GROUPS == 0 ? 1 : size_k / STAGE_K * GROUPS;
    sorted_token_ids += static_cast<size_t>(blockIdx.y) * ROWS;
    qweight += static_cast<size_t>(expert) * (size_k / 32) * size_n;
    scales += static_cast<size_t>(expert) * groups * size_n * SCALE_SIZE;
#if HAS_ZERO
    zeros += static_cast<size_t>(expert) * groups * (size_n / 8);
#endif
    bias = bias ? bias + static_cast<size_t>(expert) * size_n : bias;
    const auto entry = [&](unsigned row) { return static_cast<unsigned>(sorted_token_ids[row]); };
    const auto x_row = [&](unsigned entry) { return entry / top_k; };
#else
    const auto entry = [&](unsigned row) { return blockIdx.y * ROWS + row; };
    const auto x_row = [&](unsigned entry) { return entry; };
#endif

    // This warp's chunk of k.
    const unsigned begin = warp * chunk_k;
    const unsigned stages = (min(begin + chunk_k, size_k) - begin) / STAGE_K;

    // What a lane copies of each stage. Rows of x: 8 pieces of 16 bytes, piece p stored at
    // p ^ (row % 8), so that fragments are read without bank conflicts. Rows that there are not hold
    // anything: they only reach sums that nobody reads.
    const unsigned ring = shared_address(memory) + warp * RING_BYTES;
    const uint4 *weight_from = qweight + static_cast<size_t>(begin / 32) * size_n + n0 + lane;
#if GROUPS > 0
    const size_t group = begin / STAGE_K * GROUPS;
    constexpr unsigned SCALE_PIECES = COLUMNS * SCALE_SIZE / 16;
    const unsigned char *scale_from =
        scales + ((group + lane / SCALE_PIECES) * size_n + n0) * SCALE_SIZE +
        lane % SCALE_PIECES * 16;
#if HAS_ZERO
    const unsigned *zero_from =
        zeros + (group + lane / 2) * (size_n / 8) + n0 / 64 * 8 + lane % 2 * 4;
#endif
#endif
    constexpr int X_COPIES = ROWS / 4;
    const unsigned char *x_from[X_COPIES];
    unsigned x_exists = 0;  // bit i: copy i is of a row that there is
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
        const unsigned e = entry(i * 4 + lane / 8);
        const bool exists = e < size_m;
        x_exists |= static_cast<unsigned>(exists) << i;
        x_from[i] =
            x + static_cast<size_t>(exists ? x_row(e) : 0) * size_k + begin + lane % 8 * 16;
    }
    const auto issue = [&](unsigned stage) {
        if (stage < stages) {
            unsigned to = ring + stage % STAGES * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < STAGE_K / 32; ++i) {
                copy_async(to + (i * 32 + lane) * 16, weight_from);
                weight_from += size_n;
            }
            to += WEIGHT_BYTES;
#if GROUPS > 0
            if (lane < GROUPS * SCALE_PIECES) {
                copy_async(to + lane * 16, scale_from);
            }
            scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * size_n;
#if HAS_ZERO
            if (lane < GROUPS * 2) {
                copy_async(to + SCALE_BYTES + lane * 16, zero_from);
            }
            zero_from += GROUPS * (size_n / 8);
#endif
#endif
            to += SCALE_BYTES + ZERO_BYTES;
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i) {
                const unsigned row = i * 4 + lane / 8;
                if (x_exists >> i & 1u) {
                    copy_async(to + row * 128 + (lane % 8 ^ row % 8) * 16, x_from[i]);
                }
                x_from[i] += STAGE_K;
            }
        }
        copy_commit();
    };

    // A lane's columns are 8c + lane / 4 for c = 0..3; fragment j holds those of c = 2j and 2j + 1.
    unsigned zero[4] = {0x08080808u, 0x08080808u, 0x08080808u, 0x08080808u};
#if HAS_ZERO
    const auto spread_zeros = [&](unsigned word) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            zero[c] = (word >> (n0 % 64 / 8 + c) * 4 & 15u) * 0x01010101u;
        }
    };
#if GROUPS == 0
    spread_zeros(zeros[n0 / 64 * 8 + lane / 4]);
#endif
#endif

    float sum[2][M_TILES][4];
    Part part[2][M_TILES][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[j][m][i] = 0.0f;
                part[j][m][i] = NOTHING;
            }
        }
    }
#if GROUPS > 0
    // The group's sums, times its scales, to the chunk's sums. In Marlin's single order the scales of
    // columns 8c + 2t and 8c + 2t + 1 are neighbours, and those of one t stand side by side.
    const auto end_group = [&](const unsigned char *group_scales) {
        float scale[4];
        const unsigned t = lane / 8, odd = lane / 4 % 2;
#if IS_FLOAT
        const uint2 of = *reinterpret_cast<const uint2 *>(group_scales + t * 8);
        const unsigned words[2] = {of.x >> odd * 8, of.y >> odd * 8};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            scale[c] = __uint_as_float((words[c / 2] >> c % 2 * 16 & 0xFFu) << 23);
        }
#else
        const uint4 of = *reinterpret_cast<const uint4 *>(group_scales + t * 16);
        const unsigned words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const unsigned short bits = words[c] >> odd * 16;
#if IS_FP8
            scale[c] = widen(bits);
#else
            scale[c] = static_cast<float>(static_cast<short>(bits)) * (1.0f / UNIT);
#endif
        }
#endif
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#if IS_FP8
                    const float value = part[j][m][i];
#else
                    const float value = __int_as_float(part[j][m][i]) - 12582912.0f;
#endif
                    sum[j][m][i] = __fmaf_rn(value, scale[2 * j + i / 2], sum[j][m][i]);
                    part[j][m][i] = NOTHING;
                }
            }
        }
    };
#endif

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        issue(stage);
    }
    for (unsigned stage = 0; stage < stages; ++stage) {
        copy_wait<STAGES - 2>();
        // All copies of the warp have landed, and its lanes are done with the stage refilled next.
        __syncwarp();
        issue(stage + STAGES - 1);

        const unsigned offset = warp * RING_BYTES + stage % STAGES * STAGE_BYTES;
        const uint4 *weights = reinterpret_cast<const uint4 *>(memory + offset) + lane;
        const unsigned char *about = memory + offset + WEIGHT_BYTES;
        const unsigned x_at = ring + stage % STAGES * STAGE_BYTES + WEIGHT_BYTES + SCALE_BYTES +
                              ZERO_BYTES + lane % 8 * 128;
        unsigned b[M_TILES][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (step % 2 == 0) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    const unsigned piece = step * 2 + lane / 8;
                    load_matrices(b[m], x_at + m * 1024 + (piece ^ lane % 8) * 16);
                }
            }
#if HAS_ZERO && GROUPS > 0
            if (step % (4 / GROUPS) == 0) {
                const unsigned *of = reinterpret_cast<const unsigned *>(about + SCALE_BYTES);
                spread_zeros(of[step / (4 / GROUPS) * 8 + lane / 4]);
            }
#endif
            const uint4 of = weights[step * 32];
            const unsigned words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned a[4] = {
                    dequantize<0>(words[2 * j], zero[2 * j]),
                    dequantize<0>(words[2 * j + 1], zero[2 * j + 1]),
                    dequantize<1>(words[2 * j], zero[2 * j]),
                    dequantize<1>(words[2 * j + 1], zero[2 * j + 1]),
                };
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    multiply_add_8(part[j][m], a, b[m][step % 2 * 2], b[m][step % 2 * 2 + 1]);
                }
            }
#if GROUPS > 0
            if ((step + 1) % (4 / GROUPS) == 0) {
                end_group(about + step / (4 / GROUPS) * COLUMNS * SCALE_SIZE);
            }
#endif
        }
    }

    // Every ring is read: the sums take their place.
    copy_wait<0>();
    __syncthreads();
    float *sums = reinterpret_cast<float *>(memory) + warp * (SUM_BYTES / 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#if GROUPS > 0
                const float value = sum[j][m][i];
#else
                const float value = static_cast<float>(part[j][m][i]) * (1.0f / UNIT);
#endif
                // Column lane / 4 (+ 8), row 2 (lane % 4) (+ 1).
                sums[(m * 8 + lane % 4 * 2 + i % 2) * PITCH + j * 16 + i / 2 * 8 + lane / 4] = value;
            }
        }
    }
    __syncthreads();

    const float *of_chunks = reinterpret_cast<const float *>(memory);
    for (unsigned pair = threadIdx.x; pair < ROWS * COLUMNS / 2; pair += blockDim.x) {
        const unsigned row = pair / (COLUMNS / 2), n = pair % (COLUMNS / 2) * 2, e = entry(row);
        if (e >= size_m) {
            continue;
        }
        const float x_scale = __fmul_rn(x_scales[x_row(e)], x_factor);
        float total[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] = of_chunks[row * PITCH + n + i];
            for (unsigned c = 1; c < blockDim.x / 32; ++c) {
                const float more = of_chunks[c * (SUM_BYTES / 4) + row * PITCH + n + i];
                total[i] = __fadd_rn(total[i], more);
            }
            total[i] = __fmul_rn(total[i], x_scale);
            // Marlin's single order.
            const unsigned at = n0 + n % 8 / 2 * 8 + n / 8 * 2 + i;
#if GROUPS == 0
            const float scale = widen(reinterpret_cast<const unsigned short *>(scales)[at]);
            total[i] = __fmul_rn(total[i], IS_FP8 ? scale * UNIT : scale);
#endif
            if (bias) {
                total[i] = __fadd_rn(total[i], widen(bias[at]));
            }
#if IS_MOE
            if (topk_weights) {
                total[i] = __fmul_rn(total[i], topk_weights[e]);
            }
#endif
        }
        const unsigned packed = static_cast<unsigned>(narrow(total[1])) << 16 | narrow(total[0]);
        *reinterpret_cast<unsigned *>(y + static_cast<size_t>(e) * size_n + n0 + n) = packed;
    }
}

// Dynamic shared memory: the rings, or the sums that take their place: for each warp
// max(RING_BYTES, SUM_BYTES).
