// y[M, N] = x[M, K] * W[K, N] with quantized weights in Marlin's layout, by the canonical schedule:
//
//   1. A weight is its code's number, q - z or a float, exactly, times its scale, rounded once to the
//      16-bit type.
//   2. k is cut into at most 8 chunks (cut.cuh). A chunk is one chain of m16n8k16 products in f32, k
//      ascending, from zero.
//   3. The chunks' sums are added in f32, in the order of the cut; then times the global scale; then the
//      bias; then (experts) times the router weight; then one rounding; then the activation, if any.
//
// So an output depends on its row, its column and K alone: neither on M nor on the parameters below that
// only divide the work. Upstream operators: `marlin_gemm`, `moe_wna16_marlin_gemm`.
//
//   qweight  uint32 [E, K/16, N*16/PACK]   Marlin's weight layout for 16-bit activations
//   scales   [E, G, N]                     Marlin's order: grouped, or single where G = 1; 16-bit, those
//                                          of e4m3 codes times 2^8 (f16) or 2^120 (bf16); or 8-bit as
//                                          in the checkpoint, of each four columns 0, 2, 1, 3
//   zeros    uint32 [E, G, N/8]            Marlin's order (UINT4 only)
//   g_idx    uint32 [E, K]                 group of each k, in the order of the weight's rows (HAS_G_IDX only)
//   bias     16-bit [E, N]                 Marlin's order: single; null: none
//   global_scale  f32 [E]                  null: none
//   x        16-bit [rows, K]
//   y        16-bit [rows, N], or what the activation makes of it; DENSE_PART: f32 [rows, N], the sums of 2.
//            and 3. alone
// With experts, blocks of M_TILES * 8 rows are those of routing.cuh. Entry t reads row t / top_k of x
// and writes row t of y; rows without an expert keep their contents.
//   topk_weights  f32 [size_m]; null: none
//
// Parameters, all required:
//   IS_BF16   0: f16, 1: bf16
//   CODES, SCALES  the weight's format (formats/codes.cuh)
//   GROUPS    scale groups in 64 k: 0 one group for all k, 1 groups of 64 or more, 2 groups of 32, 4
//             groups of 16
//   HAS_G_IDX 1: groups of any k, of integers without zero points; GROUPS is 0 then, and group_size
//             the number of groups
//   PRODUCT   dense or with experts, with or without the activation (gemm_sizes.cuh). The only
//             activation is SILU: others would make the module slow to load.
//   M_TILES   1, 2, 4, 8: eights of rows that a thread block computes
//   N_TILE    64, 128 or 256: columns that a thread block computes; N is a multiple of it
//   COLUMNS   32 or 64: columns that a warp computes
//   TEAMS     1 to 8: chunks that a thread block computes
//   RANKS     1, 2, 4 or 8: thread blocks that share the chunks; more than one form a cluster (from
//             sm_90 on)
//   STAGES    pipeline stages of 64 k, including the one in use
//
// A chunk belongs to a team of N_TILE / COLUMNS warps. Teams share nothing until the end: each streams
// its own weights, scales and rows of x through its own ring of stages. The weights are the m16 side of
// the instruction, the rows of x its n8 side, so that one row costs as little as eight. In Marlin's
// layout a lane's 16 bytes (BITS 4) are exactly its fragments of 64 columns x 16 k.
//
// With EXPERTS_GATE_UP_HALVES a thread block computes 64 columns of gate and the same 64 of up: N_TILE is 128, and
// N / 2 a multiple of 64.
//
// Launch: a 1-D grid of RANKS thread blocks for each N_TILE columns of each block of rows that there may
// be; THREADS threads and the shared memory of gemm_sizes.cuh. K and all chunks are multiples of 64; there
// are at most TEAMS * RANKS chunks.

#include "chunk_sums.cuh"
#include "dequantize.cuh"
#include "gemm_operands.cuh"
#include "gemm_streams.cuh"

// A barrier of one team's warps.
__device__ __forceinline__ void team_sync(unsigned team) {
    if constexpr (LANES == 32) {
        __syncwarp();
    } else {
        // Barrier 0 is the whole block's.
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(LANES) : "memory");
    }
}

// What a lane reads of a stage, and of groups that are not part of stages.
struct StageReader {
    unsigned weights_at, group_at, x_at;
    unsigned warp_n, lane, part;
    const unsigned char *row_scales;  // with g_idx: of group 0
    const unsigned *row_groups;       // and the groups of the lane's next k: 2 (lane % 4) + {0, 1, 8, 9}

    __device__ __forceinline__ StageReader(const Operands &p, const Thread &thread, const Columns &columns,
                                           unsigned ring, size_t expert, unsigned begin)
        : warp_n(thread.warp_n), lane(thread.lane), part(thread.part) {
        if constexpr (HAS_G_IDX) {
            row_scales = p.scales +
                         (columns.of_64(warp_n) + lane / 4 * 8 + part * (2 * FRAGMENTS)) * SCALE_SIZE;
            row_groups = p.g_idx + expert * p.size_k + begin + lane % 4 * 2;
        }
        weights_at = ring + warp_n / 64 * (TILE_PIECES * 16) + lane * (BITS * 4) + part * (BITS * COLUMNS / 16);
        group_at = ring + SCALES_AT + (warp_n / 64 * 64 + lane / 4 * 8) * SCALE_SIZE;
        x_at = SwizzledRows::at(lane % 8, lane / 8);
    }

    // Group `row` of the stage: `scales` are the lane's of group 0, `zeros` the stage's.
    template <class Group>
    __device__ __forceinline__ void load_group(Group &group, const unsigned char *scales,
                                               [[maybe_unused]] unsigned zeros, int row) const {
        load_scales(group, scales + row * N_TILE * SCALE_SIZE, part);
        if constexpr (HAS_ZERO) {
            const unsigned at = (row * (N_TILE / 8) + warp_n / 64 * 8 + lane / 4) * 4;
            load_zeros(group, shared_pointer(zeros + at), part);
        }
    }

    // With g_idx: the groups of the next 16 k.
    template <class Group>
    __device__ __forceinline__ void load_row_groups(Group &group, unsigned size_n) {
        const uint2 low = __ldg(reinterpret_cast<const uint2 *>(row_groups));
        const uint2 high = __ldg(reinterpret_cast<const uint2 *>(row_groups + 8));
        group.load_rows(row_scales, static_cast<size_t>(size_n) * SCALE_SIZE,
                        make_uint4(low.x, low.y, high.x, high.y));
        row_groups += 16;
    }
};

// The epilogue of marlin_gemm.cu: global scale, bias, router weight, rounding, activation.
struct Epilogue {
    const Operands &p;
    const Columns &columns;
    const ChunkSums &sums;
    const float *topk_weights;
    size_t expert;

    // The f32 product of a row and two neighbouring columns; `n` is the first one's place in the tile.
    __device__ __forceinline__ float2 total(unsigned row, [[maybe_unused]] unsigned entry, unsigned n) const {
        float2 sum = sums.total(row, n);
        if constexpr (PRODUCT == DENSE_PART) {
            return sum;
        }
        if (p.global_scale) {
            const float scale = p.global_scale[expert];
            sum.x = __fmul_rn(sum.x, scale);
            sum.y = __fmul_rn(sum.y, scale);
        }
        if (p.bias) {
            const unsigned short *bias =
                p.bias + expert * p.size_n + columns.n0 + n / 64 * columns.next_64 + single_position(n % 64);
            sum.x = __fadd_rn(sum.x, widen(bias[0]));
            sum.y = __fadd_rn(sum.y, widen(bias[1]));
        }
        if constexpr (HAS_EXPERTS) {
            if (topk_weights) {
                const float weight = topk_weights[entry];
                sum.x = __fmul_rn(sum.x, weight);
                sum.y = __fmul_rn(sum.y, weight);
            }
        }
        return sum;
    }

    // Writes the rows of y, or what the activation makes of them.
    template <class Rows>
    __device__ __forceinline__ void write(const Thread &thread, const Rows &rows_of_block, unsigned rows,
                                          const Activation &activation) const {
        // A lane takes two neighbouring columns of this rank's part of each 64; where gate and up are halves, columns
        // of gate.
        [[maybe_unused]] unsigned short *y = static_cast<unsigned short *>(p.y);
        constexpr unsigned PAIRS = N_TILE / RANKS / (PRODUCT == EXPERTS_GATE_UP_HALVES ? 4 : 2);
        // Warps do not diverge here, since lanes read entries from each other.
#pragma unroll 1
        for (unsigned before = threadIdx.x - thread.lane; before < rows * PAIRS; before += THREADS) {
            const unsigned row = (before + thread.lane) / PAIRS, at = (before + thread.lane) % PAIRS * 2;
            const unsigned n = at / RANK_COLUMNS * 64 + thread.rank * RANK_COLUMNS + at % RANK_COLUMNS;
            const size_t e = rows_of_block.entry(min(row, rows - 1));
            if (row >= rows) {
                continue;
            }
            const float2 sum = total(row, e, n);
            if constexpr (PRODUCT == EXPERTS_GATE_UP_HALVES) {
                const float2 up = total(row, e, n + 64);
#pragma unroll 1
                for (int i = 0; i < 2; ++i) {
                    const float gate_i = i == 0 ? sum.x : sum.y, up_i = i == 0 ? up.x : up.y;
                    y[e * (p.size_n / 2) + columns.n0 + n + i] =
                        narrow(activate(activation, SILU, widen(narrow(gate_i)), widen(narrow(up_i))));
                }
            } else if constexpr (PRODUCT == EXPERTS_GATE_UP_PAIRS) {
                y[e * (p.size_n / 2) + (columns.n0 + n) / 2] =
                    narrow(activate(activation, SILU, widen(narrow(sum.x)), widen(narrow(sum.y))));
            } else if constexpr (PRODUCT == DENSE_PART) {
                *reinterpret_cast<float2 *>(static_cast<float *>(p.y) + e * p.size_n + columns.n0 + n) = sum;
            } else {
                *reinterpret_cast<unsigned *>(y + e * p.size_n + columns.n0 + n) = narrow2(sum.x, sum.y);
            }
        }
    }
};

// Computes the thread block's tile.
template <class Rows>
__device__ __forceinline__ void compute_tile(const Operands &p, const Thread &thread, const Columns &columns,
                                             const Rows &rows_of_block, size_t expert, unsigned char *memory,
                                             const float *topk_weights, const Activation &activation) {
    if constexpr (PUSHES_SUMS) {
        ChunkSums::prepare(shared_address(memory));
    }
    // This team's chunk of k: empty where K has fewer chunks.
    const unsigned chunks = p.cut.chunks, own_chunk = thread.rank * TEAMS + thread.team;
    const unsigned begin = p.cut.begins[min(own_chunk, chunks)];
    const unsigned stages = (p.cut.begins[min(own_chunk + 1, chunks)] - begin) / STAGE_K;
    const unsigned ring = shared_address(memory) + thread.team * RING_BYTES;

    // No kernel writes weights, but x may be the previous kernel's output.
    WeightStream weights(p, thread, columns, ring, begin);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < stages) {
            weights.copy(stage * STAGE_BYTES);
        }
        copy_commit();
    }
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned x_row_0 = thread.member / X_THREADS, x_piece = thread.member % X_THREADS;
    const unsigned x_to = SwizzledRows::at(x_row_0, x_piece);
    RowPointers x_from;
    RowsExist x_exists;
    find_rows(x_from, x_exists, p, rows_of_block, x_row_0, x_piece, begin);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < stages) {
            copy_rows(ring + stage * STAGE_BYTES + X_AT, x_to, x_from, x_exists);
        }
        copy_commit();
    }

    Group group;
    if constexpr (GROUPS == 0 && !HAS_G_IDX) {
        const unsigned column_64 = columns.of_64(thread.warp_n);
        load_single_scales(group, p.scales, [&](unsigned column) {
            return column_64 + single_position(thread.warp_n % 64 + column + thread.lane / 4);
        });
        load_single_zeros(group, p.zeros + column_64 / 8 + thread.lane / 4, thread.part);
    }
    StageReader reader(p, thread, columns, ring, expert, begin);
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
    unsigned slot = 0, free_slot = (STAGES - 1) * STAGE_BYTES;
    for (unsigned left = stages; left != 0; --left) {
        copy_wait<STAGES - 2>();
        team_sync(thread.team);  // all copies have arrived, and the stage refilled next has been read
        if (left >= STAGES) {
            weights.copy(free_slot);
            copy_rows(ring + free_slot + X_AT, x_to, x_from, x_exists);
        }
        copy_commit();
        const unsigned char *weights_here = shared_pointer(reader.weights_at + slot);
        [[maybe_unused]] const unsigned char *scales_here = shared_pointer(reader.group_at + slot);
        [[maybe_unused]] const unsigned zeros_here = ring + slot + ZEROS_AT;
        const unsigned x_here = ring + slot + X_AT;
        free_slot = slot;
        slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (GROUPS == 1 || GROUPS == 2) {
                if (GROUPS == 2 || half == 0) {
                    reader.load_group(group, scales_here, zeros_here, half);
                }
            }
            unsigned b[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                load_matrices(b[m], x_here + m * 1024 + (reader.x_at ^ half * 64));
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                if constexpr (GROUPS == 4) {
                    reader.load_group(group, scales_here, zeros_here, half * 2 + step);
                }
                if constexpr (HAS_G_IDX) {
                    reader.load_row_groups(group, p.size_n);
                }
                const Words codes = load_words(weights_here + (half * 2 + step) * (ROW_PIECES * 16));
#pragma unroll
                for (int j = 0; j < FRAGMENTS; ++j) {
                    unsigned a[4];
                    dequantize(a, codes, group, j);
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        multiply_add(sum[j][m], a, b[m][2 * step], b[m][2 * step + 1]);
                    }
                }
            }
        }
    }

    const unsigned rows = rows_of_block.count(p.size_m, thread.lane);
    const ChunkSums sums = {shared_address(memory), chunks,        p.cut.run, rows,
                            thread.team,            thread.warp_n, thread.lane};
    if constexpr (PUSHES_SUMS) {
        sums.push(sum, own_chunk);
    } else {
        copy_wait<0>();  // all rings have been read
        __syncthreads();
        sums.store(sum, memory);
    }

    const Epilogue epilogue = {p, columns, sums, topk_weights, expert};
    epilogue.write(thread, rows_of_block, rows, activation);
    if constexpr (RANKS > 1 && !PUSHES_SUMS) {
        // No block exits while another block reads its sums.
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) CLUSTER
    marlin_gemm(const unsigned char *__restrict__ qweight,
                const unsigned char *__restrict__ scales,
                const unsigned *__restrict__ zeros,
                const unsigned *__restrict__ g_idx,
                const unsigned short *__restrict__ bias,
                const float *__restrict__ global_scale,
                const unsigned short *__restrict__ x,
                void *__restrict__ y,
                unsigned size_m,
                unsigned size_n,
                unsigned size_k,
                const __grid_constant__ Cut cut,
                unsigned group_size,
                // With experts:
                const Routing routing,
                const float *__restrict__ topk_weights,
                unsigned top_k,
                // With an activation:
                const Activation activation) {
    extern __shared__ __align__(16) unsigned char memory[];
    Operands p = {qweight, scales, zeros,  g_idx,  bias,       global_scale, x,
                  y,       size_m, size_n, size_k, group_size, cut};
    const Thread thread;
    const Columns columns(thread.tile, size_n);
    if constexpr (HAS_EXPERTS) {
        if (!routing.is_early) {
            wait_for_last_kernel();
            let_next_kernel_start();
        }
        Entries entries;
        const int expert = find_entries(entries, routing, size_m, columns.block, thread.lane);
        if (expert < 0) {
            // The next kernel must not start before this one has waited.
            wait_for_last_kernel();
            return;
        }
        p.select(expert);
        const ExpertRows rows = {entries, top_k};
        compute_tile(p, thread, columns, rows, expert, memory, topk_weights, activation);
    } else {
        const DenseRows rows = {columns.block};
        compute_tile(p, thread, columns, rows, 0, memory, nullptr, activation);
    }
}
