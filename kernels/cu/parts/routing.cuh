// The blocks of rows of a product with experts: of `moe_align_block_size`, or for few entries found by
// each thread block for itself, which saves that kernel. Which block an entry stands in changes no bit
// of its row. What kernels before wrote is read past the L1 cache, which nobody clears for a kernel that
// starts early (depend.cuh).

// Blocks are found here of eight rows each, of as many entries at most.
#define DIRECT_ENTRIES 128

struct Routing {
    // Of `moe_align_block_size`, or null:
    const int *sorted_token_ids;        // [blocks * rows]; size_m and above: padding
    const int *expert_ids;              // [blocks]; negative: no product
    const int *num_tokens_post_padded;  // [1]
    // What blocks are found in, where those are null:
    const int *topk_ids;   // [size_m]
    const int *expert_of;  // [num_experts]; -1: not here
    unsigned num_experts;
    // 1: the kernel before this one on the stream did not write any of these.
    unsigned is_early;
};

// The block that entry `first` begins: every eighth entry of an expert begins one. Returns its expert, -1
// where there is none or the entry begins no block; lane r gets its row r, `size_m` where there is none.
// For whole warps.
__device__ __forceinline__ int find_block(const Routing &routing, unsigned size_m, unsigned first,
                                          unsigned &row_of_lane) {
    constexpr int WORDS = DIRECT_ENTRIES / 32;
    const unsigned lane = threadIdx.x % 32;
    const int mine = __ldcg(routing.topk_ids + first);
    int ids[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const unsigned i = w * 32 + lane;
        ids[w] = i < size_m ? __ldcg(routing.topk_ids + i) : -1;
    }
    // The expert's entries as bits: those before, and from this one on.
    unsigned before = 0, bits[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const unsigned i = w * 32;
        const unsigned all = __ballot_sync(0xffffffffu, ids[w] == mine && i + lane < size_m);
        const unsigned below = first <= i ? 0 : first >= i + 32 ? ~0u : (1u << (first - i)) - 1;
        before += __popc(all & below);
        bits[w] = all & ~below;
    }
    if (static_cast<unsigned>(mine) >= routing.num_experts || before % 8 != 0) {
        return -1;
    }
    row_of_lane = size_m;
#pragma unroll
    for (unsigned row = 0; row < 8; ++row) {
        unsigned entry = size_m;
#pragma unroll
        for (int w = WORDS - 1; w >= 0; --w) {
            entry = bits[w] ? w * 32 + __ffs(bits[w]) - 1 : entry;
        }
        row_of_lane = lane == row ? entry : row_of_lane;
        bool taken = false;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            bits[w] = taken ? bits[w] : bits[w] & (bits[w] - 1);
            taken = taken || entry / 32 == w;
        }
    }
    return routing.expert_of[mine];
}
