#pragma once
// The blocks of rows of a product with experts: made by `moe_align_block_size`, or for few entries found by
// each thread block itself, which saves that kernel. The block of an entry does not affect the bits of its row. What
// earlier kernels wrote is read past the L1 cache, which is not cleared for a kernel that starts early
// (depend.cuh).

// Most entries that blocks, of eight rows each, are found for here: one for each lane.
constexpr unsigned DIRECT_ENTRIES = 32;

struct Routing {
    // Of `moe_align_block_size`, or null:
    const int *sorted_token_ids;        // [blocks * rows]; size_m and above: padding
    const int *expert_ids;              // [blocks]; negative: no product
    const int *num_tokens_post_padded;  // [1]
    // Where those are null, what blocks are found from:
    const int *topk_ids;   // [size_m]
    const int *expert_of;  // [num_experts]; -1: not here; null: all are here
    unsigned num_experts;
    // 1: the kernel before this one on the stream did not write any of these.
    unsigned is_early;
};

// The block that entry `first` begins: every eighth entry of an expert begins one. Returns its expert, -1
// where there is none or the entry begins no block; lane r gets its row r, `size_m` where there is none.
// For whole warps.
__device__ __forceinline__ int find_block(const Routing &routing, unsigned size_m, unsigned first,
                                          unsigned &row_of_lane) {
    const unsigned lane = threadIdx.x % 32;
    const int id = __ldcg(routing.topk_ids + min(lane, size_m - 1));
    const int mine = __shfl_sync(0xffffffffu, id, first);
    // The expert's entries as bits.
    const unsigned all = __ballot_sync(0xffffffffu, id == mine && lane < size_m);
    unsigned left = all >> first << first;
    if (static_cast<unsigned>(mine) >= routing.num_experts || __popc(all ^ left) % 8 != 0) {
        return -1;
    }
    row_of_lane = size_m;
#pragma unroll 1
    for (unsigned row = 0; row < 8 && left != 0; ++row) {
        row_of_lane = lane == row ? __ffs(left) - 1 : row_of_lane;
        left &= left - 1;
    }
    return routing.expert_of ? routing.expert_of[mine] : mine;
}
