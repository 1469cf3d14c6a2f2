// Tokens cut into blocks of one expert. Upstream operator: vLLM `moe_align_block_size`.
//
//   topk_ids          int32 [numel]: the global expert of each entry; others are left out
//   run_of            int32 [num_experts]: in the lower half which run an expert's entries form, num_runs or
//                     more where they are left out; in the upper half, signed, what marks its blocks
//   sorted_token_ids  int32 [room]: the entries of each run, ascending, padded to whole blocks with
//                     numel; behind them numel
//   expert_ids        int32 [room / block_size]: the marks
//   num_tokens_post_padded  int32 [1]
//   place_of          int32 [numel]: where an entry stands in sorted_token_ids; -1: left out
//
// Warps take equal parts of the entries, in order. Each counts how many of its own are of each run; from all
// counts follows where each warp's entries of each run begin; then every entry takes its place.
//
// Parameter: RANKS: thread blocks, which form one cluster; more than 1 from sm_90 on.
// Launch: RANKS blocks of whole warps, at most 1024 threads; as dynamic shared memory num_runs + 1 ints for
// each warp, and with several blocks as many more.

#include "cluster.cuh"
#include "depend.cuh"

// Entries that a lane holds at once.
constexpr unsigned ITEMS = 4;

// Into the L2 cache, for later.
__device__ __forceinline__ void prefetch(const int *from, unsigned count) {
    for (unsigned i = threadIdx.x * 32; i < count; i += blockDim.x * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
    }
}

extern "C" __global__ void __launch_bounds__(1024) CLUSTER
        moe_align_block_size(const int *__restrict__ topk_ids,
                             const int *__restrict__ run_of,
                             int *__restrict__ sorted_token_ids,
                             int *__restrict__ expert_ids,
                             int *__restrict__ num_tokens_post_padded,
                             int *__restrict__ place_of,
                             unsigned numel,
                             unsigned num_experts,
                             unsigned num_runs,
                             unsigned block_size,
                             unsigned room) {
    extern __shared__ unsigned shared[];
    __shared__ unsigned of_warps[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned rank = RANKS > 1 ? blockIdx.x : 0;
    // For each warp its entries of each run, then the place of the next one; in column num_runs those that
    // are left out.
    const unsigned columns = num_runs + 1;
    unsigned *mine = shared + warp * columns;
    for (unsigned r = lane; r < columns; r += 32) {
        mine[r] = 0;
    }
    prefetch(run_of, num_experts);  // older than the last kernel
    wait_for_last_kernel();
    let_next_kernel_start();

    // Entries overwrite what is no padding, after a barrier.
    for (unsigned i = rank * blockDim.x + threadIdx.x; i < room; i += RANKS * blockDim.x) {
        sorted_token_ids[i] = static_cast<int>(numel);
    }
    const unsigned part = (numel + RANKS * warps * 32 - 1) / (RANKS * warps * 32) * 32;
    const unsigned first = min((rank * warps + warp) * part, numel), last = min(first + part, numel);
    // What run_of says of ITEMS entries of a lane, each 32 after the other; beyond `last` no run.
    const auto load = [&](unsigned begin, int(&runs)[ITEMS]) {
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
    };
    const auto column = [&](int run) { return min(run & 0xffff, num_runs); };

    __syncwarp();
    // Backwards, so that the first entries of all are at hand afterwards.
    int runs[ITEMS];
    const unsigned chunks = (last - first + 32 * ITEMS - 1) / (32 * ITEMS);
#pragma unroll 1
    for (unsigned chunk = chunks; chunk-- > 0;) {
        load(first + chunk * (32 * ITEMS), runs);
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            atomicAdd(mine + column(runs[j]), 1u);
        }
    }
    __syncthreads();

    const auto of_all_warps = [&](unsigned r) {
        unsigned count = 0;
#pragma unroll 4
        for (unsigned w = 0; w < warps; ++w) {
            count += shared[w * columns + r];
        }
        return count;
    };
    [[maybe_unused]] unsigned *counts = shared + warps * columns;  // this block's entries of each run
    if constexpr (RANKS > 1) {
        for (unsigned r = threadIdx.x; r < num_runs; r += blockDim.x) {
            counts[r] = of_all_warps(r);
        }
        cluster_arrive();
        cluster_wait();
    }
    unsigned start = 0;
    for (unsigned begin = 0; begin < num_runs; begin += blockDim.x) {
        const unsigned r = begin + threadIdx.x;
        unsigned before = 0, count = 0;  // entries of ranks before and of all
        if (r < num_runs) {
            if constexpr (RANKS > 1) {
                unsigned rank_counts[RANKS];
#pragma unroll
                for (unsigned k = 0; k < RANKS; ++k) {
                    rank_counts[k] = load_from_rank(counts + r, k);
                }
#pragma unroll
                for (unsigned k = 0; k < RANKS; ++k) {
                    before += k < rank ? rank_counts[k] : 0;
                    count += rank_counts[k];
                }
            } else {
                count = of_all_warps(r);
            }
        }
        const unsigned padded = (count + block_size - 1) / block_size * block_size;
        unsigned until = padded;  // of the lanes before and of this one
#pragma unroll
        for (unsigned of = 1; of < 32; of *= 2) {
            const unsigned more = __shfl_up_sync(~0u, until, of);
            until += lane >= of ? more : 0;
        }
        if (lane == 31) {
            of_warps[warp] = until;
        }
        __syncthreads();
        unsigned place = start + until - padded + before;
#pragma unroll 4
        for (unsigned w = 0; w < warps; ++w) {
            place += w < warp ? of_warps[w] : 0;
            start += of_warps[w];
        }
        if (r < num_runs) {
#pragma unroll 4
            for (unsigned w = 0; w < warps; ++w) {
                const unsigned entries = shared[w * columns + r];
                shared[w * columns + r] = place;
                place += entries;
            }
        }
        __syncthreads();
    }
    if (rank == 0 && threadIdx.x == 0) {
        *num_tokens_post_padded = static_cast<int>(start);
    }
    if constexpr (RANKS > 1) {
        // This block has read the others' counts; nothing else needs ordering.
        cluster_arrive_relaxed();
    }

    const unsigned bits = 32 - __clz(num_runs);
#pragma unroll 1
    for (unsigned chunk = 0; chunk < chunks; ++chunk) {
        const unsigned begin = first + chunk * (32 * ITEMS);
        if (chunk > 0) {
            load(begin, runs);
        }
        // The lanes whose entry is of the same run.
        unsigned same[ITEMS];
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            same[j] = ~0u;
        }
#pragma unroll 1
        for (unsigned bit = 0; bit < bits; ++bit) {
#pragma unroll
            for (unsigned j = 0; j < ITEMS; ++j) {
                const bool is_set = column(runs[j]) >> bit & 1;
                const unsigned set = __ballot_sync(~0u, is_set);
                same[j] &= is_set ? set : ~set;
            }
        }
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            const unsigned entry = begin + 32 * j + lane, run = column(runs[j]);
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
                sorted_token_ids[place] = static_cast<int>(entry);
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
