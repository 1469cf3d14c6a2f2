// Tokens cut into blocks of one expert. Upstream operator: vLLM `moe_align_block_size`.
//
//   topk_ids          int32 [numel]: the global expert of each entry; others are left out
//   run_of            int32 [num_experts]: in the lower half the run of an expert's entries, num_runs or more
//                     where they are left out; in the upper half, signed, the mark of its blocks
//   sorted_token_ids  int32 [room]: the entries of each run, ascending, padded to whole blocks with
//                     numel; behind them numel. Null: left out
//   expert_ids        int32 [room / block_size]: the marks
//   num_tokens_post_padded  int32 [1]
//   block_rows        int32 [room / block_size]: entries of a block
//   place_of          int32 [numel]: the place of an entry in sorted_token_ids; -1: left out
//
// Warps take equal parts of the entries, in order. Each counts its entries of each run. The counts of all warps give
// the place where each warp's entries of a run begin; then each entry is written to its place.
//
// Parameter: RANKS: thread blocks, which form one cluster; more than 1 from sm_90 on.
// Launch: RANKS blocks of whole warps, at most 1024 threads; as dynamic shared memory num_runs + 1 ints for
// each warp, and with several blocks as many more.

#include "cluster.cuh"
#include "depend.cuh"

// Entries that a lane holds at once.
constexpr unsigned ITEMS = 4;

// The entries of a warp, [first, last): ITEMS of each lane at a time, each 32 after the other.
struct WarpEntries {
    const int *topk_ids, *run_of;
    unsigned num_experts, num_runs, first, last, lane;

    __device__ __forceinline__ unsigned chunks() const { return (last - first + 32 * ITEMS - 1) / (32 * ITEMS); }

    // Values of run_of for the entries of a chunk; beyond `last`: no run.
    __device__ __forceinline__ void load(unsigned chunk, int (&runs)[ITEMS]) const {
        const unsigned begin = first + chunk * (32 * ITEMS);
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            const unsigned entry = begin + 32 * j + lane;
            runs[j] = entry < last ? __ldcg(topk_ids + entry) : -1;
        }
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            const unsigned id = static_cast<unsigned>(runs[j]);
            runs[j] = id < num_experts ? run_of[id] : 0xffff;
        }
    }

    // The run's number; num_runs where the entry is left out.
    __device__ __forceinline__ unsigned column(int run) const { return min(run & 0xffff, num_runs); }
};

// Counts the warp's entries of each run in `mine`. Chunks are counted from the last to the first, so that `runs` holds
// the first afterwards.
__device__ __forceinline__ void count_entries(const WarpEntries &entries, unsigned *mine, int (&runs)[ITEMS]) {
#pragma unroll 1
    for (unsigned chunk = entries.chunks(); chunk-- > 0;) {
        entries.load(chunk, runs);
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            atomicAdd(mine + entries.column(runs[j]), 1u);
        }
    }
}

// The counts of a thread block in shared memory: a row of num_runs + 1 columns for each warp and, in a cluster, a row
// for all warps.
struct Counts {
    unsigned *rows;
    unsigned num_runs, warps;

    __device__ __forceinline__ unsigned *of_warp(unsigned warp) const { return rows + warp * (num_runs + 1); }

    // Entries of a run in the thread block.
    __device__ __forceinline__ unsigned sum(unsigned run) const {
        unsigned count = 0;
#pragma unroll 4
        for (unsigned w = 0; w < warps; ++w) {
            count += of_warp(w)[run];
        }
        return count;
    }

    // Stores the sums where other ranks of the cluster read them.
    __device__ __forceinline__ void share() const {
        for (unsigned r = threadIdx.x; r < num_runs; r += blockDim.x) {
            of_warp(warps)[r] = sum(r);
        }
        cluster_arrive();
        cluster_wait();
    }

    // Entries of a run in all thread blocks; `before`: in those of lower rank.
    __device__ __forceinline__ unsigned sum_of_ranks(unsigned run, unsigned rank, unsigned &before) const {
        if constexpr (RANKS == 1) {
            return sum(run);
        } else {
            unsigned rank_counts[RANKS], count = 0;
#pragma unroll
            for (unsigned k = 0; k < RANKS; ++k) {
                rank_counts[k] = load_from_rank(of_warp(warps) + run, k);
            }
#pragma unroll
            for (unsigned k = 0; k < RANKS; ++k) {
                before += k < rank ? rank_counts[k] : 0;
                count += rank_counts[k];
            }
            return count;
        }
    }
};

// The sum of `value` over the lanes up to this one.
__device__ __forceinline__ unsigned inclusive_sum(unsigned value, unsigned lane) {
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
        const unsigned more = __shfl_up_sync(~0u, value, distance);
        value += lane >= distance ? more : 0;
    }
    return value;
}

// Replaces each warp's count of a run by the place of its first entry; rank 0 writes the entries of each block. Returns the
// number of places.
__device__ __forceinline__ unsigned place_runs(const Counts &counts, unsigned rank, unsigned block_size,
                                               int *block_rows) {
    __shared__ unsigned of_warps[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned start = 0;
    for (unsigned begin = 0; begin < counts.num_runs; begin += blockDim.x) {
        const unsigned r = begin + threadIdx.x;
        unsigned before = 0, count = 0;
        if (r < counts.num_runs) {
            count = counts.sum_of_ranks(r, rank, before);
        }
        const unsigned padded = (count + block_size - 1) / block_size * block_size;
        const unsigned until = inclusive_sum(padded, lane);
        if (lane == 31) {
            of_warps[warp] = until;
        }
        __syncthreads();
        unsigned place = start + until - padded + before;
#pragma unroll 4
        for (unsigned w = 0; w < counts.warps; ++w) {
            place += w < warp ? of_warps[w] : 0;
            start += of_warps[w];
        }
        if (rank == 0) {
            unsigned block = place / block_size;
#pragma unroll 1
            for (unsigned left = count; left > 0; ++block) {
                const unsigned rows = min(left, block_size);
                block_rows[block] = static_cast<int>(rows);
                left -= rows;
            }
        }
        if (r < counts.num_runs) {
#pragma unroll 4
            for (unsigned w = 0; w < counts.warps; ++w) {
                const unsigned entries = counts.of_warp(w)[r];
                counts.of_warp(w)[r] = place;
                place += entries;
            }
        }
        __syncthreads();
    }
    return start;
}

// For each of a lane's entries, the lanes whose entry is of the same run.
__device__ __forceinline__ void match_runs(const WarpEntries &entries, const int (&runs)[ITEMS],
                                           unsigned (&same)[ITEMS]) {
    const unsigned bits = 32 - __clz(entries.num_runs);
#pragma unroll
    for (unsigned j = 0; j < ITEMS; ++j) {
        same[j] = ~0u;
    }
#pragma unroll 1
    for (unsigned bit = 0; bit < bits; ++bit) {
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            const bool is_set = entries.column(runs[j]) >> bit & 1;
            const unsigned set = __ballot_sync(~0u, is_set);
            same[j] &= is_set ? set : ~set;
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024) CLUSTER
        moe_align_block_size(const int *__restrict__ topk_ids,
                             const int *__restrict__ run_of,
                             int *__restrict__ sorted_token_ids,
                             int *__restrict__ expert_ids,
                             int *__restrict__ num_tokens_post_padded,
                             int *__restrict__ block_rows,
                             int *__restrict__ place_of,
                             unsigned numel,
                             unsigned num_experts,
                             unsigned num_runs,
                             unsigned block_size,
                             unsigned room) {
    extern __shared__ unsigned shared[];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned rank = RANKS > 1 ? blockIdx.x : 0;
    // For each warp its entries of each run, then the place of the next one; in column num_runs those that
    // are left out.
    const Counts counts = {shared, num_runs, warps};
    unsigned *mine = counts.of_warp(warp);
    for (unsigned r = lane; r <= num_runs; r += 32) {
        mine[r] = 0;
    }
    prefetch_to_l2(run_of, num_experts);  // older than the last kernel
    wait_for_last_kernel();
    let_next_kernel_start();

    // Everything is filled with padding, as upstream does, since the number of places is not known yet. Entries
    // overwrite it after a barrier.
    const unsigned filled = sorted_token_ids ? room : 0;
    for (unsigned i = rank * blockDim.x + threadIdx.x; i < filled; i += RANKS * blockDim.x) {
        sorted_token_ids[i] = static_cast<int>(numel);
    }
    const unsigned part = (numel + RANKS * warps * 32 - 1) / (RANKS * warps * 32) * 32;
    const unsigned first = min((rank * warps + warp) * part, numel), last = min(first + part, numel);
    const WarpEntries entries = {topk_ids, run_of, num_experts, num_runs, first, last, lane};
    __syncwarp();
    int runs[ITEMS];
    count_entries(entries, mine, runs);
    __syncthreads();
    if constexpr (RANKS > 1) {
        counts.share();
    }
    const unsigned places = place_runs(counts, rank, block_size, block_rows);
    if (rank == 0 && threadIdx.x == 0) {
        *num_tokens_post_padded = static_cast<int>(places);
    }
    if constexpr (RANKS > 1) {
        // The other blocks' counts have been read; nothing else needs ordering.
        cluster_arrive_relaxed();
    }

#pragma unroll 1
    for (unsigned chunk = 0; chunk < entries.chunks(); ++chunk) {
        if (chunk > 0) {
            entries.load(chunk, runs);
        }
        unsigned same[ITEMS];
        match_runs(entries, runs, same);
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            const unsigned entry = first + (chunk * ITEMS + j) * 32 + lane, run = entries.column(runs[j]);
            const unsigned lower = __popc(same[j] & ((1u << lane) - 1));
            const unsigned place = mine[run] + lower;
            __syncwarp();
            if (lower == 0) {
                mine[run] = place + __popc(same[j]);
            }
            __syncwarp();
            if (entry < last) {
                place_of[entry] = run < num_runs ? static_cast<int>(place) : -1;
            }
            if (run < num_runs) {
                if (sorted_token_ids) {
                    sorted_token_ids[place] = static_cast<int>(entry);
                }
                // Each block begins with an entry.
                if (place % block_size == 0) {
                    expert_ids[place / block_size] = runs[j] >> 16;
                }
            }
        }
    }
    if constexpr (RANKS > 1) {
        cluster_wait();
    }
}
