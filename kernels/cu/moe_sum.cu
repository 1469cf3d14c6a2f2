// The sum over a token's experts, canonically: f32 from the first slot to the last, one rounding.
// Upstream operator: vLLM `moe_sum`.
//
//   down  16-bit [rows, top_k, size_n]
//   y     16-bit [rows, size_n]
//
// With HAS_IDS slots without an expert of this rank do not count, so that nobody need clear them:
//   topk_ids  int32 [rows, top_k]
//   expert_of int32 [num_experts]: -1 where an expert is not here; null: all are
//
// Compile-time parameters: IS_BF16 (half.cuh), and HAS_IDS: 0 or 1.
// One thread writes one element. Launch with a 1-D grid of as many threads.

#if !defined(HAS_IDS)
#error "HAS_IDS must be 0 or 1"
#endif

extern "C" __global__ void moe_sum(const unsigned short *__restrict__ down,
                                   unsigned short *__restrict__ y,
                                   unsigned long long elements,
                                   unsigned top_k,
                                   unsigned size_n
#if HAS_IDS
                                   ,
                                   const int *__restrict__ topk_ids,
                                   const int *__restrict__ expert_of,
                                   unsigned num_experts
#endif
) {
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    const unsigned long long first = at / size_n * top_k;
    float sum = 0.0f;
    // Absent slots add +0, which changes no sum that began with it; their values are read all the same,
    // so that no read waits for another.
#pragma unroll 8
    for (unsigned j = 0; j < top_k; ++j) {
        float value = widen(down[(first + j) * size_n + at % size_n]);
#if HAS_IDS
        const unsigned id = static_cast<unsigned>(topk_ids[first + j]);
        const bool is_here = id < num_experts && (!expert_of || expert_of[id] >= 0);
        value = is_here ? value : 0.0f;
#endif
        sum = __fadd_rn(sum, value);
    }
    y[at] = narrow(sum);
}
