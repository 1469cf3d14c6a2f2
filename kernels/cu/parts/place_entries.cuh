#pragma once
// The places of the entries of one row of x among all entries, sorted into blocks of one expert as `moe_align_block_size`
// sorts them. Every thread block counts all entries, which saves a kernel where they are few.

#include "depend.cuh"

// Entries that thread blocks sort on their own, and experts of all ranks.
constexpr unsigned MOST_PLACED = 1024;
constexpr unsigned MOST_EXPERTS = 1024;

struct Placing {
    const int *topk_ids;  // [entries]
    const int *run_of;    // [num_experts], as moe_align_block_size takes it
    int *place_of;        // [entries]
    int *expert_ids;      // [blocks]
    int *block_rows;      // [blocks]: entries of a block
    int *num_tokens_post_padded;
    unsigned num_experts, num_runs, block_size;
};

// Entries and experts in shared memory. All threads of the block take part in each function.
struct PlacedEntries {
    const Placing &placing;
    unsigned entries, thread, threads;
    int *runs;         // [entries]: of run_of; beyond the runs: left out
    unsigned *counts;  // [num_runs]: entries of each
    unsigned *places;  // [num_runs]: entries of each, padded to whole blocks
    int *table;        // [num_experts]: run_of

    __device__ __forceinline__ PlacedEntries(const Placing &placing, unsigned entries)
        : placing(placing), entries(entries), thread(threadIdx.x), threads(blockDim.x) {
        __shared__ int shared_runs[MOST_PLACED], shared_table[MOST_EXPERTS];
        __shared__ unsigned shared_counts[MOST_EXPERTS], shared_places[MOST_EXPERTS];
        runs = shared_runs;
        counts = shared_counts;
        places = shared_places;
        table = shared_table;
    }

    // The last kernel may write run_of: its lines are fetched, and read by `load_table` after the wait for that kernel.
    __device__ __forceinline__ void prefetch_table() const { prefetch_to_l2(placing.run_of, placing.num_experts); }

    __device__ __forceinline__ void load_table() const {
        for (unsigned i = thread; i < placing.num_experts; i += threads) {
            table[i] = __ldcg(placing.run_of + i);
        }
        for (unsigned r = thread; r < placing.num_runs; r += threads) {
            counts[r] = 0;
        }
        __syncthreads();
    }

    __device__ __forceinline__ void count() const {
        for (unsigned i = thread; i < entries; i += threads) {
            const unsigned id = static_cast<unsigned>(__ldcg(placing.topk_ids + i));
            const int of_id = id < placing.num_experts ? table[id] : 0xffff;
            runs[i] = of_id;
            if (run(of_id) < placing.num_runs) {
                atomicAdd(counts + run(of_id), 1u);
            }
        }
        __syncthreads();
        for (unsigned r = thread; r < placing.num_runs; r += threads) {
            places[r] = (counts[r] + placing.block_size - 1) / placing.block_size * placing.block_size;
        }
        __syncthreads();
    }

    __device__ __forceinline__ static unsigned run(int of_id) { return of_id & 0xffff; }

    // Places of the runs below `end`, for a whole warp.
    __device__ __forceinline__ unsigned places_of_runs(unsigned end) const {
        unsigned sum = 0;
        for (unsigned r = threadIdx.x % 32; r < end; r += 32) {
            sum += places[r];
        }
        return __reduce_add_sync(~0u, sum);
    }

    // The place of an entry, negative if it has none: the same for all lanes of a warp. `writes`: also writes what a product
    // reads of a block that the entry begins.
    __device__ __forceinline__ int place(unsigned entry, bool writes) const {
        const unsigned lane = threadIdx.x % 32, own = run(runs[entry]);
        if (own >= placing.num_runs) {
            return -1;
        }
        unsigned before = 0;
        for (unsigned i = lane; i < entry; i += 32) {
            before += run(runs[i]) == own;
        }
        before = __reduce_add_sync(~0u, before);
        const unsigned place = places_of_runs(own) + before;
        if (writes && lane == 0 && before % placing.block_size == 0) {
            const unsigned block = place / placing.block_size;
            placing.expert_ids[block] = runs[entry] >> 16;
            placing.block_rows[block] = min(placing.block_size, counts[own] - before);
        }
        return static_cast<int>(place);
    }
};
