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
// So an output depends on its row, its column and K alone: neither on M nor on the parameters below that
// only divide the work. Upstream operators: `marlin_gemm`, `moe_wna16_marlin_gemm`.
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
// Parameters, all required:
//   IS_FP8    activations 0: int8, 1: e4m3 (from sm_89 on)
//   IS_BF16   y, bias and 16-bit scales 0: f16, 1: bf16
//   CODES     UINT4B8, UINT4, or E2M1 with e8m0 scales (IS_FP8 alone) (formats/types.cuh)
//   GROUPS    scale groups in 128 k: 0 one group for all k, 1, 2 or 4
//   IS_MOE    0 or 1
//   M_TILES   1, 2, 4, 8: eights of rows that a thread block computes
//   STAGES    pipeline stages of 128 k, including the one in use
//
// A warp computes a chunk for 32 columns: it streams its own weights, scales and rows of x through its
// own ring of stages. The weights are the m16 side of the instruction, the rows of x its n8 side. In
// Marlin's layout a lane's 16 bytes are exactly its fragments of 32 columns x 32 k.
//
// Launch: grid (N / 32, blocks of rows), a warp for each chunk, WARP_BYTES of dynamic shared memory for each warp. K is a
// multiple of 128, chunk_k too, K < 2^19.

#include "formats/a8.cuh"
#include "fragments.cuh"
#include "half.cuh"
#include "mma.cuh"

constexpr unsigned IS_FLOAT = CODES == E2M1;
constexpr unsigned HAS_ZERO = CODES == UINT4;
static_assert(!IS_FLOAT || (IS_FP8 && GROUPS == 4), "e2m1 has e4m3 activations and groups of 32");

constexpr unsigned COLUMNS = 32;
constexpr unsigned ROWS = M_TILES * 8;
constexpr unsigned STAGE_K = 128;
constexpr unsigned SCALE_SIZE = IS_FLOAT ? 1 : 2;  // bytes

// A warp's stage in shared memory: weights, scales, zero points (of 64 columns, which share words), rows of x.
constexpr unsigned WEIGHT_BYTES = STAGE_K * COLUMNS / 2;
constexpr unsigned SCALE_BYTES = GROUPS * COLUMNS * SCALE_SIZE;
constexpr unsigned ZERO_BYTES = HAS_ZERO * GROUPS * 32;
constexpr unsigned X_BYTES = ROWS * STAGE_K;
constexpr unsigned SCALES_AT = WEIGHT_BYTES;
constexpr unsigned ZEROS_AT = SCALES_AT + SCALE_BYTES;
constexpr unsigned X_AT = ZEROS_AT + ZERO_BYTES;
constexpr unsigned STAGE_BYTES = X_AT + X_BYTES;
constexpr unsigned RING_BYTES = STAGES * STAGE_BYTES;
// Floats from one row of partial sums to the next: 4 of padding spread a fragment over all banks.
constexpr unsigned PITCH = COLUMNS + 4;
constexpr unsigned SUM_BYTES = ROWS * PITCH * 4;
// Shared memory of a warp: its ring, which its partial sums replace.
constexpr unsigned WARP_BYTES = RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES;

constexpr unsigned SCALE_PIECES = COLUMNS * SCALE_SIZE / 16;
constexpr unsigned STAGE_GROUPS = GROUPS > 0 ? GROUPS : 1;
constexpr int X_COPIES = ROWS / 4;

// Partial sums of a group: exact integers, or f32.
using GroupSum = Choose<IS_FP8, float, int>::Type;
// Integer sums of a group stay below 2^22: added to the bits of 1.5 * 2^23, they give the f32 1.5 * 2^23 plus the
// sum.
constexpr int INTEGER_ZERO_BITS = 0x4B400000;
constexpr float INTEGER_ZERO = 12582912.0f;
constexpr GroupSum NO_SUM = IS_FP8 || GROUPS == 0 ? 0 : INTEGER_ZERO_BITS;
// Products are this multiple of the products of weights and activations.
constexpr float PRODUCT_UNIT = IS_FLOAT ? 0x1p-6f : IS_FP8 ? 0x1p-9f : HAS_ZERO ? 1.0f : 16.0f;

// d[16 x 8] += a[16 x 32] * b[32 x 8].
__device__ __forceinline__ void multiply_add_8(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add_8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The scales of a lane's four columns. In Marlin's single order the scales of columns 8c + 2t and 8c + 2t + 1 are
// neighbours, and those of one t follow each other.
__device__ __forceinline__ void load_scales(float (&scale)[4], const unsigned char *group_scales, unsigned lane) {
    const unsigned t = lane / 8, odd = lane / 4 % 2;
    if constexpr (IS_FLOAT) {
        const uint2 pairs = *reinterpret_cast<const uint2 *>(group_scales + t * 8);
        const unsigned words[2] = {pairs.x >> odd * 8, pairs.y >> odd * 8};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            scale[c] = __uint_as_float((words[c / 2] >> c % 2 * 16 & 0xFFu) << 23);
        }
    } else {
        const uint4 pairs = *reinterpret_cast<const uint4 *>(group_scales + t * 16);
        const unsigned words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const unsigned short bits = words[c] >> odd * 16;
            if constexpr (IS_FP8) {
                scale[c] = widen(bits);
            } else {
                scale[c] = static_cast<float>(static_cast<short>(bits)) * (1.0f / PRODUCT_UNIT);
            }
        }
    }
}

__device__ __forceinline__ float group_value(float sum) { return sum; }
__device__ __forceinline__ float group_value(int sum) { return __int_as_float(sum) - INTEGER_ZERO; }

// The zero points of a lane's four columns, each in every byte.
__device__ __forceinline__ void load_zeros(unsigned (&zero)[4], unsigned word, unsigned n0) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        zero[c] = (word >> (n0 % 64 / 8 + c) * 4 & 15u) * 0x01010101u;
    }
}

// The operands of an expert, as the kernel takes them.
struct Operands {
    const uint4 *qweight;
    const unsigned char *scales;
    const unsigned *zeros;
    const unsigned short *bias;
    const unsigned char *x;
    const float *x_scales;
    unsigned short *y;
    float x_factor;
    unsigned size_m, size_n, size_k, chunk_k;
    const int *sorted_token_ids;  // of the thread block's rows
    const float *topk_weights;
    unsigned top_k;

    // Advances to the weight of an expert.
    __device__ __forceinline__ void select(size_t expert) {
        const unsigned groups = GROUPS == 0 ? 1 : size_k / STAGE_K * GROUPS;
        qweight += expert * (size_k / 32) * size_n;
        scales += expert * groups * size_n * SCALE_SIZE;
        if constexpr (HAS_ZERO) {
            zeros += expert * groups * (size_n / 8);
        }
        bias = bias ? bias + expert * size_n : bias;
    }

    // The row of y that is row `row` of the thread block; size_m and above: none.
    __device__ __forceinline__ unsigned entry(unsigned row) const {
        return IS_MOE ? static_cast<unsigned>(sorted_token_ids[row]) : blockIdx.y * ROWS + row;
    }

    __device__ __forceinline__ unsigned x_row(unsigned entry) const { return IS_MOE ? entry / top_k : entry; }
};

// A lane's copies of each stage's weights, scales and zero points.
struct WeightStream {
    unsigned lane, size_n;
    const uint4 *weight_from;
    const unsigned char *scale_from;
    const unsigned *zero_from;

    __device__ __forceinline__ WeightStream(const Operands &p, unsigned n0, unsigned begin, unsigned lane)
        : lane(lane), size_n(p.size_n) {
        weight_from = p.qweight + static_cast<size_t>(begin / 32) * size_n + n0 + lane;
        if constexpr (GROUPS > 0) {
            const size_t group = begin / STAGE_K * GROUPS;
            scale_from = p.scales + ((group + lane / SCALE_PIECES) * size_n + n0) * SCALE_SIZE +
                         lane % SCALE_PIECES * 16;
            if constexpr (HAS_ZERO) {
                zero_from = p.zeros + (group + lane / 2) * (size_n / 8) + n0 / 64 * 8 + lane % 2 * 4;
            }
        }
    }

    // Copies the next stage to `to`.
    __device__ __forceinline__ void copy(unsigned to) {
#pragma unroll
        for (int i = 0; i < STAGE_K / 32; ++i) {
            copy_async(to + (i * 32 + lane) * 16, weight_from);
            weight_from += size_n;
        }
        if constexpr (GROUPS > 0) {
            if (lane < GROUPS * SCALE_PIECES) {
                copy_async(to + SCALES_AT + lane * 16, scale_from);
            }
            scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * size_n;
            if constexpr (HAS_ZERO) {
                if (lane < GROUPS * 2) {
                    copy_async(to + ZEROS_AT + lane * 16, zero_from);
                }
                zero_from += GROUPS * (size_n / 8);
            }
        }
    }
};

// A lane's copies of each stage's rows of x. Rows that do not exist are not copied: the old contents of the stage
// reach only sums that are never read.
struct RowStream {
    unsigned lane;
    const unsigned char *from[X_COPIES];
    unsigned exists;  // bit i: the row of copy i

    __device__ __forceinline__ RowStream(const Operands &p, unsigned begin, unsigned lane) : lane(lane), exists(0) {
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            const unsigned e = p.entry(i * 4 + lane / 8);
            const bool is_row = e < p.size_m;
            exists |= static_cast<unsigned>(is_row) << i;
            from[i] = p.x + static_cast<size_t>(is_row ? p.x_row(e) : 0) * p.size_k + begin + lane % 8 * 16;
        }
    }

    // Copies the next stage to `to`.
    __device__ __forceinline__ void copy(unsigned to) {
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            if (exists >> i & 1u) {
                copy_async(to + SwizzledRows::at(i * 4 + lane / 8, lane % 8), from[i]);
            }
            from[i] += STAGE_K;
        }
    }
};

// A lane's sums: of fragment j, eight rows m, and element i of an accumulator.
struct Sums {
    float chunk[2][M_TILES][4];
    GroupSum group[2][M_TILES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    chunk[j][m][i] = 0.0f;
                    group[j][m][i] = NO_SUM;
                }
            }
        }
    }

    // Adds the group's sums times its scales to the chunk's sums, and clears them.
    __device__ __forceinline__ void end_group(const unsigned char *group_scales, unsigned lane) {
        float scale[4];
        load_scales(scale, group_scales, lane);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    chunk[j][m][i] = __fmaf_rn(group_value(group[j][m][i]), scale[2 * j + i / 2], chunk[j][m][i]);
                    group[j][m][i] = NO_SUM;
                }
            }
        }
    }

    // Stores the chunk's sums in shared memory.
    __device__ __forceinline__ void store(float *to, unsigned lane) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float value = GROUPS > 0 ? chunk[j][m][i]
                                                   : static_cast<float>(group[j][m][i]) * (1.0f / PRODUCT_UNIT);
                    to[(m * 8 + Accumulator::row(lane, i)) * PITCH + j * 16 + Accumulator::column(lane, i)] = value;
                }
            }
        }
    }
};

// Adds the products of a stage, which is at `stage`. A lane's columns are 8c + lane / 4 for c = 0..3; fragment j holds
// those of c = 2j and 2j + 1.
__device__ __forceinline__ void add_stage(Sums &sums, unsigned (&zero)[4], const unsigned char *stage, unsigned x_at,
                                          unsigned n0, unsigned lane) {
    constexpr int GROUP_STEPS = 4 / STAGE_GROUPS;
    const uint4 *stage_codes = reinterpret_cast<const uint4 *>(stage) + lane;
    unsigned b[M_TILES][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if (step % 2 == 0) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                load_matrices(b[m], x_at + m * 1024 + SwizzledRows::at(lane % 8, step * 2 + lane / 8));
            }
        }
        if constexpr (HAS_ZERO && GROUPS > 0) {
            if (step % GROUP_STEPS == 0) {
                const unsigned *group_zeros = reinterpret_cast<const unsigned *>(stage + ZEROS_AT);
                load_zeros(zero, group_zeros[step / GROUP_STEPS * 8 + lane / 4], n0);
            }
        }
        const uint4 codes = stage_codes[step * 32];
        const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            using Dequantizer = Codes8<CodeType{CODES}, IS_FP8>;
            const unsigned a[4] = {
                Dequantizer::numbers<0>(words[2 * j], zero[2 * j]),
                Dequantizer::numbers<0>(words[2 * j + 1], zero[2 * j + 1]),
                Dequantizer::numbers<1>(words[2 * j], zero[2 * j]),
                Dequantizer::numbers<1>(words[2 * j + 1], zero[2 * j + 1]),
            };
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                multiply_add_8(sums.group[j][m], a, b[m][step % 2 * 2], b[m][step % 2 * 2 + 1]);
            }
        }
        if constexpr (GROUPS > 0) {
            if ((step + 1) % GROUP_STEPS == 0) {
                sums.end_group(stage + SCALES_AT + step / GROUP_STEPS * COLUMNS * SCALE_SIZE, lane);
            }
        }
    }
}

// Adds the products of a warp's chunk of k, from `begin` on, through the warp's ring in shared memory.
__device__ __forceinline__ void add_chunk(Sums &sums, const Operands &p, const unsigned char *ring, unsigned begin,
                                          unsigned n0, unsigned lane) {
    const unsigned stages = (min(begin + p.chunk_k, p.size_k) - begin) / STAGE_K;
    const unsigned ring_at = shared_address(ring);
    WeightStream weights(p, n0, begin, lane);
    RowStream rows(p, begin, lane);
    const auto issue = [&](unsigned stage) {
        if (stage < stages) {
            const unsigned to = ring_at + stage % STAGES * STAGE_BYTES;
            weights.copy(to);
            rows.copy(to + X_AT);
        }
        copy_commit();
    };
    unsigned zero[4] = {0x08080808u, 0x08080808u, 0x08080808u, 0x08080808u};
    if constexpr (HAS_ZERO && GROUPS == 0) {
        load_zeros(zero, p.zeros[n0 / 64 * 8 + lane / 4], n0);
    }
    sums.clear();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        issue(stage);
    }
    for (unsigned stage = 0; stage < stages; ++stage) {
        copy_wait<STAGES - 2>();
        // All copies of the warp have arrived, and its lanes have read the stage refilled next.
        __syncwarp();
        issue(stage + STAGES - 1);
        const unsigned slot = stage % STAGES * STAGE_BYTES;
        add_stage(sums, zero, ring + slot, ring_at + slot + X_AT, n0, lane);
    }
}

// Adds the chunks' sums for row `row` and columns n and n + 1 of the thread block, finishes them and writes them to y.
__device__ __forceinline__ void write_pair(const Operands &p, const float *sums, unsigned entry, unsigned row,
                                           unsigned n0, unsigned n) {
    const float x_scale = __fmul_rn(p.x_scales[p.x_row(entry)], p.x_factor);
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] = sums[row * PITCH + n + i];
        for (unsigned c = 1; c < blockDim.x / 32; ++c) {
            const float more = sums[c * (SUM_BYTES / 4) + row * PITCH + n + i];
            total[i] = __fadd_rn(total[i], more);
        }
        total[i] = __fmul_rn(total[i], x_scale);
        // Marlin's single order.
        const unsigned at = n0 + n % 8 / 2 * 8 + n / 8 * 2 + i;
        if constexpr (GROUPS == 0) {
            const float scale = widen(reinterpret_cast<const unsigned short *>(p.scales)[at]);
            total[i] = __fmul_rn(total[i], IS_FP8 ? scale * PRODUCT_UNIT : scale);
        }
        if (p.bias) {
            total[i] = __fadd_rn(total[i], widen(p.bias[at]));
        }
        if constexpr (IS_MOE) {
            if (p.topk_weights) {
                total[i] = __fmul_rn(total[i], p.topk_weights[entry]);
            }
        }
    }
    *reinterpret_cast<unsigned *>(p.y + static_cast<size_t>(entry) * p.size_n + n0 + n) = narrow2(total[0], total[1]);
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
                   unsigned chunk_k,
                   // With experts:
                   const int *__restrict__ sorted_token_ids,
                   const int *__restrict__ expert_ids,
                   const int *__restrict__ num_tokens_post_padded,
                   const float *__restrict__ topk_weights,
                   unsigned top_k) {
    extern __shared__ __align__(16) unsigned char memory[];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned n0 = blockIdx.x * COLUMNS;
    Operands p = {qweight, scales, zeros,  bias,    x,                x_scales,     y,    x_factor,
                  size_m,  size_n, size_k, chunk_k, sorted_token_ids, topk_weights, top_k};
    if constexpr (IS_MOE) {
        if (blockIdx.y * ROWS >= static_cast<unsigned>(*num_tokens_post_padded)) {
            return;
        }
        const int expert = expert_ids[blockIdx.y];
        if (expert < 0) {
            return;
        }
        p.sorted_token_ids += static_cast<size_t>(blockIdx.y) * ROWS;
        p.select(expert);
    }
    Sums sums;
    add_chunk(sums, p, memory + warp * RING_BYTES, warp * chunk_k, n0, lane);

    // All rings have been read; the sums replace them.
    copy_wait<0>();
    __syncthreads();
    float *sums_of_chunks = reinterpret_cast<float *>(memory);
    sums.store(sums_of_chunks + warp * (SUM_BYTES / 4), lane);
    __syncthreads();
    for (unsigned pair = threadIdx.x; pair < ROWS * COLUMNS / 2; pair += blockDim.x) {
        const unsigned row = pair / (COLUMNS / 2), n = pair % (COLUMNS / 2) * 2, entry = p.entry(row);
        if (entry < size_m) {
            write_pair(p, sums_of_chunks, entry, row, n0, n);
        }
    }
}
