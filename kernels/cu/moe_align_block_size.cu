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
    const auto run_at = [&](unsigned i) {
        const unsigned id = static_cast<unsigned>(topk_ids[i]);
        return id < num_experts ? run_of[id] : -1;
    };

    for (unsigned r = threadIdx.x; r < num_runs; r += blockDim.x) {
        counts[r] = 0;
    }
    if (threadIdx.x == 0) {
        before_run = 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < numel; i += blockDim.x) {
        const int r = run_at(i);
        if (r >= 0) {
            atomicAdd(&counts[r], 1u);
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

    // A place is how many of the run's entries come before: in earlier rounds, warps, lanes.
    unsigned before = start;
    for (unsigned first = 0; first < numel; first += blockDim.x) {
        const unsigned i = first + threadIdx.x;
        const bool mine = i < numel && run_at(i) == static_cast<int>(run);
        const unsigned mask = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) {
            of_warp[warp] = __popc(mask);
        }
        __syncthreads();
        unsigned place = before, all = 0;
        for (unsigned w = 0; w < blockDim.x / 32; ++w) {
            place += w < warp ? of_warp[w] : 0;
            all += of_warp[w];
        }
        if (mine) {
            sorted_token_ids[place + __popc(mask & ((1u << lane) - 1u))] = static_cast<int>(i);
        }
        before += all;
        __syncthreads();
    }
}
