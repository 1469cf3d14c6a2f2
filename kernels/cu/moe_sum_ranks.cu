// The sum over a token's experts that are spread over ranks: each rank stores the rows of its experts' slots into the
// memory of the token's owner, which adds them as moe_sum.cu does, f32 from the first slot to the last, one rounding, and
// gives the sum to all ranks. No order depends on the ranks.
//
//   ranks     shared memory (ranks.cuh): at turn * capacity the rows of slots, 16-bit [share, top_k, size_n]
//   down      16-bit [tokens, top_k, size_n], or [places, size_n] with place_of
//   y         16-bit [tokens, size_n], of this rank
//   topk_ids  int32 [tokens, top_k], the same on all ranks
//   rank_of   int32 [num_experts]: the rank of each expert
//   place_of  int32 [tokens, top_k] of `moe_align_block_size`, or null
//
// The tokens of rank r are the share from r * share on; share is tokens / RANKS, rounded up.
//
// Parameters: IS_BF16 (half.cuh); RANKS: 1, 2, 4 or 8. size_n is a multiple of 8; a piece is eight values.
// Launch: as add_ranks.cu.

#include "depend.cuh"
#include "half.cuh"
#include "ranks.cuh"

static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "RANKS must be 1, 2, 4 or 8");

union Piece {
    uint4 all;
    unsigned short values[8];
};

struct Slots {
    const Ranks &ranks;
    const int *topk_ids, *rank_of, *place_of;
    size_t first;  // of this turn's rows
    unsigned tokens, top_k, pieces, num_experts;

    // The rank that has a slot's expert; another number if none has it.
    __device__ __forceinline__ unsigned rank_of_slot(size_t slot) const {
        const unsigned id = static_cast<unsigned>(topk_ids[slot]);
        return id < num_experts ? static_cast<unsigned>(rank_of[id]) : ~0u;
    }

    __device__ __forceinline__ unsigned share() const { return (tokens + RANKS - 1) / RANKS; }
    __device__ __forceinline__ size_t first_token(unsigned rank) const { return min(rank * share(), tokens); }

    // Pieces of y of a rank's tokens. A thread block's threads take the same ones on all ranks.
    __device__ __forceinline__ size_t count(unsigned rank) const {
        return (first_token(rank + 1) - first_token(rank)) * pieces;
    }

    __device__ __forceinline__ uint4 *rows(unsigned rank) const {
        return reinterpret_cast<uint4 *>(ranks.parts[rank] + first);
    }

    // Stores the slots of a piece whose experts are on this rank into the owner's memory.
    __device__ __forceinline__ void store(unsigned owner, size_t at, const uint4 *down) const {
        const size_t token = at / pieces, piece = at % pieces;
        for (unsigned j = 0; j < top_k; ++j) {
            const size_t slot = (first_token(owner) + token) * top_k + j;
            if (rank_of_slot(slot) == ranks.rank) {
                const size_t row = place_of ? place_of[slot] : slot;
                rows(owner)[(token * top_k + j) * pieces + piece] = __ldcg(down + row * pieces + piece);
            }
        }
    }

    // The sum of a piece of one of this rank's tokens.
    __device__ __forceinline__ uint4 sum(size_t at) const {
        const size_t token = at / pieces, piece = at % pieces, slots = (first_token(ranks.rank) + token) * top_k;
        float sum[8] = {};
        for (unsigned j = 0; j < top_k; ++j) {
            if (rank_of_slot(slots + j) < RANKS) {
                Piece slot;
                slot.all = __ldcg(rows(ranks.rank) + (token * top_k + j) * pieces + piece);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum[i] = __fadd_rn(sum[i], widen(slot.values[i]));
                }
            }
        }
        return make_uint4(narrow2(sum[0], sum[1]), narrow2(sum[2], sum[3]), narrow2(sum[4], sum[5]),
                          narrow2(sum[6], sum[7]));
    }
};

extern "C" __global__ void moe_sum_ranks(const __grid_constant__ Ranks ranks,
                                         const uint4 *__restrict__ down,
                                         uint4 *__restrict__ y,
                                         const int *__restrict__ topk_ids,
                                         const int *__restrict__ rank_of,
                                         const int *__restrict__ place_of,
                                         unsigned tokens,
                                         unsigned top_k,
                                         unsigned size_n,
                                         unsigned num_experts,
                                         unsigned long long capacity,
                                         unsigned limit_ms) {
    wait_for_last_kernel();
    unsigned call;
    if (tokens == 0 || !begin_call(ranks, call)) {
        return;
    }
    const unsigned pieces = size_n / 8;
    const Slots slots = {ranks,  topk_ids, rank_of, place_of,   ranks.turn * capacity,
                         tokens, top_k,    pieces,  num_experts};
    const size_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (unsigned r = 0; r < RANKS; ++r) {
        for (size_t at = thread; at < slots.count(r); at += threads) {
            slots.store(r, at, down);
        }
    }
    if (!wait_for_ranks(ranks, 0, call, limit_ms)) {
        return;
    }
    // As in add_ranks.cu.
    let_next_kernel_start();
    const size_t own = slots.first_token(ranks.rank) * pieces;
    for (size_t at = thread; at < slots.count(ranks.rank); at += threads) {
        const uint4 made = slots.sum(at);
#pragma unroll
        for (unsigned r = 0; r < RANKS; ++r) {
            reinterpret_cast<uint4 *>(ranks.outputs[r])[own + at] = made;
        }
    }
    if (!wait_for_ranks(ranks, 1, call, limit_ms)) {
        return;
    }
    const uint4 *outputs = reinterpret_cast<const uint4 *>(ranks.outputs[ranks.rank]);
    for (unsigned r = 0; r < RANKS; ++r) {
        const size_t first = slots.first_token(r) * pieces;
        for (size_t at = thread; at < slots.count(r); at += threads) {
            y[first + at] = __ldcg(outputs + first + at);
        }
    }
}
