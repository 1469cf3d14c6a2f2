#pragma once
// Adds the chunks' partial sums of marlin_gemm.cu: in shared memory, in a cluster in that of the rank that adds them
// up (gemm_sizes.cuh).

#include "barrier.cuh"
#include "cluster.cuh"
#include "fragments.cuh"
#include "gemm_sizes.cuh"
#include "mma.cuh"

// A lane's partial sums of its chunk: an accumulator for each fragment of the warp's columns, which begin at warp_n in
// the tile.
struct ChunkSums {
    unsigned memory;  // of the thread block
    unsigned chunks, run, rows, team, warp_n, lane;

    // Prepares the barrier for pushed sums; every rank does so before any pushes.
    static __device__ __forceinline__ void prepare(unsigned memory) {
        if (threadIdx.x == 0) {
            barrier_init(memory + BARRIER_AT, 1);
            fence_barrier_init();
        }
        cluster_arrive_relaxed();
    }

    // Pushes the sums of chunk `own_chunk` to the ranks that add them up, and waits for those pushed here.
    __device__ __forceinline__ void push(const float (&sum)[FRAGMENTS][M_TILES][4],
                                         unsigned own_chunk) const {
        const unsigned row_0 = Accumulator::row(lane, 0), sums = memory + SUMS_AT;
        // Barriers of all ranks are ready.
        cluster_wait();
        if (own_chunk < chunks) {
            // A rank adds up all of a warp's columns, or a warp has columns of several ranks.
            const unsigned first = row_0 * SUM_ROW + own_chunk * SUM_CHUNK +
                                   warp_n / 64 * RANK_COLUMNS + warp_n % 64 % RANK_COLUMNS +
                                   Accumulator::column(lane, 0);
#pragma unroll
            for (int i = 0; i < 2 * FRAGMENTS; ++i) {
                const unsigned to_rank = warp_n % 64 / RANK_COLUMNS + i * 8 / RANK_COLUMNS;
                const unsigned to = of_rank(sums + first * 4, to_rank) + i * 8 % RANK_COLUMNS * 4;
                const unsigned barrier = of_rank(memory + BARRIER_AT, to_rank);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        if (m * 8 + row_0 + r < rows) {
                            store_to_rank(to + (m * 8 + r) * (SUM_ROW * 4),
                                          sum[i / 2][m][i % 2 * 2 + r], barrier);
                        }
                    }
                }
            }
        }
        if (threadIdx.x == 0) {
            barrier_expect(memory + BARRIER_AT, chunks * rows * (N_TILE / RANKS * 4));
        }
        barrier_wait_for_cluster(memory + BARRIER_AT, 0);
    }

    // Stores the sums in the rings' memory, which has been read, and waits for all threads' sums.
    __device__ __forceinline__ void store(const float (&sum)[FRAGMENTS][M_TILES][4],
                                          unsigned char *pointer) const {
        // From the row and the column of an accumulator's element 0.
        float *first = reinterpret_cast<float *>(pointer) + team * SUM_CHUNK +
                       lane % 4 * 2 * SUM_ROW + warp_n + lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * FRAGMENTS; ++i) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                float *to = first + m * 8 * SUM_ROW + i * 8;
                to[0] = sum[i / 2][m][i % 2 * 2];
                to[SUM_ROW] = sum[i / 2][m][i % 2 * 2 + 1];
            }
        }
        if constexpr (RANKS > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }

    // The total of all chunks, for a row and columns n and n + 1 of the tile, which this rank adds up.
    __device__ __forceinline__ float2 total(unsigned row, unsigned n) const {
        const unsigned sums = memory + SUMS_AT;
        float2 of_chunk[CHUNKS];
#pragma unroll
        for (unsigned c = 0; c < CHUNKS; ++c) {
            // Beyond the last chunk the memory is undefined.
            if constexpr (PUSHES_SUMS) {
                const unsigned at = row * SUM_ROW + c * SUM_CHUNK + n / 64 * RANK_COLUMNS + n % RANK_COLUMNS;
                of_chunk[c] = load_shared(sums + at * 4);
            } else {
                const unsigned from = sums + (row * SUM_ROW + c % TEAMS * SUM_CHUNK + n) * 4;
                of_chunk[c] = RANKS > 1 ? load_from_rank(of_rank(from, c / TEAMS)) : load_shared(from);
            }
        }
        return added(of_chunk);
    }

    // The sum of the chunks' sums, in the order of the cut. Values beyond the last chunk are not used.
    __device__ __forceinline__ float2 added(float2 (&of_chunk)[CHUNKS]) const {
        float2 sum = of_chunk[0];
        if (run >= chunks) {
#pragma unroll
            for (unsigned c = 1; c < CHUNKS; ++c) {
                sum.x = c < chunks ? __fadd_rn(sum.x, of_chunk[c].x) : sum.x;
                sum.y = c < chunks ? __fadd_rn(sum.y, of_chunk[c].y) : sum.y;
            }
            return sum;
        }
        if (run == 2) {
            // Two, four or eight chunks.
#pragma unroll
            for (unsigned step = 1; step < CHUNKS; step *= 2) {
#pragma unroll
                for (unsigned c = 0; c + step < CHUNKS; c += 2 * step) {
                    float2 &left = of_chunk[c];
                    const float2 right = of_chunk[c + step];
                    left.x = c + step < chunks ? __fadd_rn(left.x, right.x) : left.x;
                    left.y = c + step < chunks ? __fadd_rn(left.y, right.y) : left.y;
                }
            }
            return of_chunk[0];
        }
        // Two runs.
        float2 second = of_chunk[0];
#pragma unroll
        for (unsigned c = 1; c < CHUNKS; ++c) {
            const float2 next = of_chunk[c];
            sum.x = c < run ? __fadd_rn(sum.x, next.x) : sum.x;
            sum.y = c < run ? __fadd_rn(sum.y, next.y) : sum.y;
            // Up to the second run's first chunk, what is added does not count.
            second.x = c <= run ? next.x : c < chunks ? __fadd_rn(second.x, next.x) : second.x;
            second.y = c <= run ? next.y : c < chunks ? __fadd_rn(second.y, next.y) : second.y;
        }
        return make_float2(__fadd_rn(sum.x, second.x), __fadd_rn(sum.y, second.y));
    }
};
