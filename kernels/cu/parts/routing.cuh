// The blocks of rows of a product with experts: of `moe_align_block_size`, or for few entries made here
// by each thread block for itself, which saves that kernel. Which block an entry stands in changes no
// bit of its row. What the kernels before wrote is read past the L1 cache, which nobody clears for a
// kernel that starts early (depend.cuh).
//
//   M_TILES   eights of rows in a block

// Blocks are made here of eight rows each, of as many entries at most.
#define DIRECT_ENTRIES 128
#define IS_DIRECT (IS_MOE && M_TILES == 1)

struct Routing {
    // Of `moe_align_block_size`, or null:
    const int *sorted_token_ids;        // [blocks * M_TILES * 8]; size_m and above: padding
    const int *expert_ids;              // [blocks]; negative: no product
    const int *num_tokens_post_padded;  // [1]
    // What else blocks are made of, where those are null:
    const int *topk_ids;    // [size_m]
    const int *expert_of;   // [num_experts]; -1: not here
    unsigned num_experts;
    // 1: the kernel before this one on the stream did not write any of these.
    unsigned is_early;
};

#if IS_DIRECT
// Blocks in shared memory, in the order of their first entries.
struct DirectBlocks {
    unsigned short entries[DIRECT_ENTRIES][8];  // ascending, padded with 65535
    short expert[DIRECT_ENTRIES];
    short expert_of_entry[DIRECT_ENTRIES];
    unsigned char is_first[DIRECT_ENTRIES];  // of a block
    unsigned count, unused[3];
};

// By all threads of the block, of at most DIRECT_ENTRIES entries.
__device__ __forceinline__ void make_blocks(DirectBlocks &blocks, const Routing &routing,
                                            unsigned entries) {
    for (unsigned i = threadIdx.x; i < entries; i += blockDim.x) {
        const unsigned id = static_cast<unsigned>(__ldcg(routing.topk_ids + i));
        blocks.expert_of_entry[i] =
            static_cast<short>(id < routing.num_experts ? routing.expert_of[id] : -1);
    }
    __syncthreads();
    // Every eighth entry of an expert is the first of a block.
    for (unsigned i = threadIdx.x; i < entries; i += blockDim.x) {
        const short expert = blocks.expert_of_entry[i];
        unsigned before = 0;
#pragma unroll 8
        for (unsigned j = 0; j < i; ++j) {
            before += blocks.expert_of_entry[j] == expert;
        }
        blocks.is_first[i] = expert >= 0 && before % 8 == 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < entries; i += blockDim.x) {
        unsigned block = 0;
#pragma unroll 8
        for (unsigned j = 0; j < i; ++j) {
            block += blocks.is_first[j];
        }
        if (blocks.is_first[i]) {
            const short expert = blocks.expert_of_entry[i];
            blocks.expert[block] = expert;
            unsigned rows = 0;
            for (unsigned j = i; j < entries && rows < 8; ++j) {
                if (blocks.expert_of_entry[j] == expert) {
                    blocks.entries[block][rows++] = static_cast<unsigned short>(j);
                }
            }
            for (; rows < 8; ++rows) {
                blocks.entries[block][rows] = 65535;
            }
        }
        if (i == entries - 1) {
            blocks.count = block + blocks.is_first[i];
        }
    }
    __syncthreads();
}
#define DIRECT_BYTES sizeof(DirectBlocks)
#else
#define DIRECT_BYTES 0
#endif
