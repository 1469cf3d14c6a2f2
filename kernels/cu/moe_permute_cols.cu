// Columns of the activations in the order of each expert's act-order weight. Upstream does this inside
// `moe_wna16_marlin_gemm`.
//
//   x           16-bit [entries / top_k, size_k]
//   perm        uint32 [experts, size_k]
//   topk_ids    int32 [entries]
//   expert_of   int32 [num_experts]: the expert's row of perm; -1: not here; null: all are here
//   out         16-bit [entries, size_k]: out[t, k] = x[t / top_k, perm[expert, k]] for the expert of entry t;
//               rows without an expert keep their contents
//
// One thread writes two elements. Launch with a 1-D grid of as many threads; size_k is even.

extern "C" __global__ void moe_permute_cols(const unsigned short *__restrict__ x,
                                            const uint2 *__restrict__ perm,
                                            const int *__restrict__ topk_ids,
                                            const int *__restrict__ expert_of,
                                            unsigned *__restrict__ out,
                                            unsigned long long pairs,
                                            unsigned num_experts,
                                            unsigned size_k,
                                            unsigned top_k) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= pairs) {
        return;
    }
    const unsigned of_row = size_k / 2;
    const unsigned long long entry = at / of_row;
    const unsigned id = static_cast<unsigned>(topk_ids[entry]);
    const int expert = id >= num_experts ? -1 : expert_of ? expert_of[id] : static_cast<int>(id);
    if (expert < 0) {
        return;
    }
    const uint2 from = perm[static_cast<size_t>(expert) * of_row + at % of_row];
    const unsigned short *row = x + entry / top_k * size_k;
    out[at] = static_cast<unsigned>(row[from.y]) << 16 | row[from.x];
}
