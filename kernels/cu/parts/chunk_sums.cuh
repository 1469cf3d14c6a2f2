// The shared memory of a thread block of marlin_gemm.cu, whose macros these are: teams' rings of stages, and the
// chunks' sums, which meet there. Where thread blocks share the chunks, each adds up its part of the columns. Few
// sums are brought to it by those who have them (BRINGS): a barrier of that block counts the bytes, so that nobody
// waits for memory to settle. Many are fetched, which takes fewer instructions.

#if !defined(GROUPS) || !defined(IS_MOE) || !defined(M_TILES) || !defined(N_TILE) || \
    !defined(TEAMS) || !defined(RANKS) || !defined(STAGES) || !defined(BRINGS)
#error "a parameter is missing"
#endif

#define LANES (N_TILE / COLUMNS * 32)  // of a team
#define THREADS (TEAMS * LANES)
#define CHUNKS (TEAMS * RANKS)
#define ROWS (M_TILES * 8)
// With few rows, warps enough to wait for memory are worth more than registers for each.
#define RESIDENT ((M_TILES == 1 ? 1024 : M_TILES == 2 ? 768 : 512) / THREADS)
#define STAGE_K 64
// 16-byte pieces of 16 k of one column tile of 64, and of all that a thread block computes.
#define TILE_PIECES (32 * (BITS / 4))
#define ROW_PIECES (N_TILE / 64 * TILE_PIECES)

// A team's stage in shared memory.
#define WEIGHT_BYTES (4 * ROW_PIECES * 16)
#define SCALE_BYTES (GROUPS * N_TILE * SCALE_SIZE)
#define ZERO_BYTES (HAS_ZERO * GROUPS * N_TILE / 2)
#define X_BYTES (ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES + X_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)

// Of each 64 columns every rank adds up its part.
#define PART (64 / RANKS)
// Rows of sums in shared memory have 4 more than they hold, which spreads a fragment over all banks.
#if BRINGS
// Behind the rings, which may still be read when another rank's sums come; no room for rows that there are not.
#define BARRIER_AT (TEAMS * RING_BYTES)
#define SUMS_AT (BARRIER_AT + 16)
#define SUM_CHUNK (N_TILE / RANKS + 4)
#define SUM_ROW (CHUNKS * SUM_CHUNK)
#else
// In the place of the rings.
#define SUMS_AT 0
#define SUM_ROW (N_TILE + 4)
#define SUM_CHUNK (ROWS * SUM_ROW)
#endif

// What a lane has of its chunk: column lane / 4 (+ 8), row 2 (lane % 4) (+ 1) of each fragment of the warp's
// columns, which begin at warp_n in the tile.
struct ChunkSums {
    unsigned memory;  // of the thread block
    unsigned chunks, rows, team, warp_n, lane;

#if BRINGS
    // Makes the barrier ready; done before anything is brought.
    static __device__ __forceinline__ void expect(unsigned memory) {
        if (threadIdx.x == 0) {
            barrier_init(memory + BARRIER_AT, 1);
            fence_barrier_init();
        }
        cluster_arrive_relaxed();
    }

    // Brings the sums of chunk `own_chunk` to who adds them, and waits for those to be added here.
    __device__ __forceinline__ void bring(const float (&sum)[FRAGMENTS][M_TILES][4],
                                          unsigned own_chunk) const {
        const unsigned row_0 = lane % 4 * 2, sums = memory + SUMS_AT;
        // Barriers of all ranks are ready.
        cluster_wait();
        if (own_chunk < chunks) {
            // A rank has a warp's columns, or the warp several ranks'.
            const unsigned first = row_0 * SUM_ROW + own_chunk * SUM_CHUNK + warp_n / 64 * PART +
                                   warp_n % 64 % PART + lane / 4;
#pragma unroll
            for (int i = 0; i < 2 * FRAGMENTS; ++i) {
                const unsigned to_rank = warp_n % 64 / PART + i * 8 / PART;
                const unsigned to = of_rank(sums + first * 4, to_rank) + i * 8 % PART * 4;
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
#else
    // Puts the sums in the place of the rings, which nobody reads any more, and waits until all are there.
    __device__ __forceinline__ void place(const float (&sum)[FRAGMENTS][M_TILES][4],
                                          unsigned char *pointer) const {
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
#if RANKS > 1
        cluster_arrive();
        cluster_wait();
#else
        __syncthreads();
#endif
    }
#endif

    // All chunks' of a row and columns n and n + 1 of the tile, which this rank adds up.
    __device__ __forceinline__ float2 total(unsigned row, unsigned n) const {
        const unsigned sums = memory + SUMS_AT;
        float2 of_chunk[CHUNKS];
#pragma unroll
        for (unsigned c = 0; c < CHUNKS; ++c) {
            // Behind the last chunk stands anything.
#if BRINGS
            const unsigned at = row * SUM_ROW + c * SUM_CHUNK + n / 64 * PART + n % PART;
            of_chunk[c] = load_shared(sums + at * 4);
#else
            const unsigned from = sums + (row * SUM_ROW + c % TEAMS * SUM_CHUNK + n) * 4;
            of_chunk[c] = RANKS > 1 ? load_from_rank(of_rank(from, c / TEAMS)) : load_shared(from);
#endif
        }
        float2 sum = of_chunk[0];
#pragma unroll
        for (unsigned c = 1; c < CHUNKS; ++c) {
            sum.x = c < chunks ? __fadd_rn(sum.x, of_chunk[c].x) : sum.x;
            sum.y = c < chunks ? __fadd_rn(sum.y, of_chunk[c].y) : sum.y;
        }
        return sum;
    }
};
