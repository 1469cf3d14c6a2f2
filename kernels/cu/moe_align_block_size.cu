// Tokens cut into blocks of one expert. Upstream operator: vLLM `moe_align_block_size`.
//
//   topk_ids          int32 [numel]: the global expert of each entry; others are left out
//   run_of            int32 [num_experts]: which run an expert's entries form; -1: left out
//   label_of          int32 [num_runs]: what expert_ids holds for a run's blocks
//   sorted_token_ids  int32 [...]: the entries of each run, ascending, padded to whole blocks with
//                     numel
//   expert_ids        int32 [... / block_size]
//   num_tokens_post_padded  int32 [1]
//
// One block of whole warps works on one run: it counts all runs' entries, which says where its own
// begins, then gives its entries their places in order. Launch with num_runs blocks of at most 1024
// threads and num_runs ints of dynamic shared memory.

// Neighbouring entries that a thread looks at together.
#define ITEMS 8

extern "C" __global__ void __launch_bounds__(1024)
    moe_align_block_size(const int *__restrict__ topk_ids,
                         const int *__restrict__ run_of,
                         const int *__restrict__ label_of,
                         int *__restrict__ sorted_token_ids,
                         int *__restrict__ expert_ids,
                         int *__restrict__ num_tokens_post_padded,
                         unsigned numel,
                         unsigned num_experts,
                         unsigned num_runs,
                         unsigned block_size) {
    wait_for_last_kernel();
    let_next_kernel_start();
    extern __shared__ unsigned counts[];
    __shared__ unsigned of_warp[32], before_run;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = blockIdx.x;
    // Runs of the ITEMS entries from i on, all of them on their way at once; -1: none.
    const auto runs_at = [&](unsigned i, int(&runs)[ITEMS]) {
        unsigned ids[ITEMS];
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            ids[j] = i + j < numel ? static_cast<unsigned>(topk_ids[i + j]) : num_experts;
        }
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            runs[j] = ids[j] < num_experts ? run_of[ids[j]] : -1;
        }
    };
    const unsigned step = blockDim.x * ITEMS;

    for (unsigned r = threadIdx.x; r < num_runs; r += blockDim.x) {
        counts[r] = 0;
    }
    if (threadIdx.x == 0) {
        before_run = 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x * ITEMS; i < numel; i += step) {
        int runs[ITEMS];
        runs_at(i, runs);
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            if (runs[j] >= 0) {
                atomicAdd(&counts[runs[j]], 1u);
            }
        }
    }
    __syncthreads();
    const auto padded = [&](unsigned r) {
        return (counts[r] + block_size - 1) / block_size * block_size;
    };
    // A sum of integers: in whichever order.
    for (unsigned r = threadIdx.x; r < run; r += blockDim.x) {
        if (counts[r] > 0) {
            atomicAdd(&before_run, padded(r));
        }
    }
    __syncthreads();
    const unsigned start = before_run, count = counts[run], end = start + padded(run);
    if (run + 1 == num_runs && threadIdx.x == 0) {
        *num_tokens_post_padded = static_cast<int>(end);
    }
    if (count == 0) {
        return;
    }
    for (unsigned block = start / block_size + threadIdx.x; block < end / block_size;
         block += blockDim.x) {
        expert_ids[block] = label_of[run];
    }
    for (unsigned i = start + count + threadIdx.x; i < end; i += blockDim.x) {
        sorted_token_ids[i] = static_cast<int>(numel);
    }

    // A place is how many of the run's entries come before: in earlier rounds, warps, lanes, of this lane.
    unsigned before = start;
    for (unsigned first = 0; first < numel; first += step) {
        const unsigned i = first + threadIdx.x * ITEMS;
        int runs[ITEMS];
        runs_at(i, runs);
        unsigned mine = 0;
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            mine += runs[j] == static_cast<int>(run);
        }
        unsigned until = mine;  // of the lanes before and of this one
#pragma unroll
        for (unsigned of = 1; of < 32; of *= 2) {
            const unsigned more = __shfl_up_sync(0xffffffffu, until, of);
            until += lane >= of ? more : 0;
        }
        if (lane == 31) {
            of_warp[warp] = until;
        }
        __syncthreads();
        unsigned place = before + until - mine, all = 0;
        for (unsigned w = 0; w < blockDim.x / 32; ++w) {
            place += w < warp ? of_warp[w] : 0;
            all += of_warp[w];
        }
#pragma unroll
        for (unsigned j = 0; j < ITEMS; ++j) {
            if (runs[j] == static_cast<int>(run)) {
                sorted_token_ids[place++] = static_cast<int>(i + j);
            }
        }
        before += all;
        __syncthreads();
    }
}
