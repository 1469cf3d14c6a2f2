// The sum over a token's experts that are spread over ranks, as moe_sum.cu adds them: f32 from the first slot to the last,
// one rounding. No order depends on the ranks.
//
//   ranks     shared memory (ranks.cuh): at turn * capacity the rows of slots, 16-bit [share or tokens, top_k, size_n]
//   down      16-bit [tokens, top_k, size_n], or [places, size_n] with place_of
//   y         16-bit [tokens, size_n], of this rank
//   topk_ids  int32 [tokens, top_k], the same on all ranks
//   rank_of   int32 [num_experts]: the rank of each expert
//   place_of  int32 [tokens, top_k] of `moe_align_block_size`, or null
//
// The tokens of rank r, their owner, are the share from r * share on; share is tokens / RANKS, rounded up.
//
// Parameters: IS_BF16 (half.cuh); RANKS: 1, 2, 4 or 8; SHOTS. ONE: a rank puts the rows of its experts' slots into its own
// memory, and every rank reads the slots of all tokens where they are. TWO: a rank stores the rows into the memory of the
// token's owner, which adds them, and the other ranks read its sums. The bits are the same.
//
// size_n is a multiple of 8; a piece is eight values. top_k is at most 32, a lane of a warp for each slot.
// Launch: as add_ranks.cu, in blocks of whole warps.

#include "depend.cuh"
#include "half.cuh"
#include "ranks.cuh"

enum Shots : unsigned { ONE = 1, TWO = 2 };

static_assert(RANKS == 1 || RANKS == 2 || RANKS == 4 || RANKS == 8, "RANKS must be 1, 2, 4 or 8");

// Pieces that a thread reads at once.
constexpr unsigned AT_ONCE = RANKS == 8 ? 2 : 4;
// The rank of a slot whose expert no rank has.
constexpr unsigned NO_RANK = ~0u;
constexpr unsigned WARP = 32, ALL_LANES = ~0u;

union Piece {
    uint4 all;
    unsigned short values[8];
};

// A lane's slot of a token.
struct Slot {
    unsigned rank;  // that has its expert
    unsigned row;   // of `down`
};

// Tokens in parts of a row, one for each warp. A warp takes the same ones on all ranks, so that thread blocks of equal
// index wait for each other only.
struct Units {
    unsigned width, segments;  // pieces of a part, parts of a row
    unsigned count, first, step;

    // Few tokens are cut into as many parts as give every warp one.
    __device__ __forceinline__ Units(unsigned tokens, unsigned pieces) {
        const unsigned warps = blockDim.x / WARP, all = gridDim.x * warps, widest = (pieces + WARP - 1) / WARP;
        const unsigned wanted = min(max(all / max(tokens, 1u), 1u), widest);
        width = (widest + wanted - 1) / wanted * WARP;
        segments = (pieces + width - 1) / width;
        count = tokens * segments;
        first = threadIdx.x / WARP * gridDim.x + blockIdx.x;
        step = all;
    }
};

struct Slots {
    const Ranks &ranks;
    const int *topk_ids, *rank_of, *place_of;
    size_t first;  // of this turn's rows
    unsigned tokens, top_k, pieces, num_experts;

    __device__ __forceinline__ unsigned share() const { return (tokens + RANKS - 1) / RANKS; }
    __device__ __forceinline__ unsigned first_token(unsigned rank) const { return min(rank * share(), tokens); }
    __device__ __forceinline__ unsigned count(unsigned rank) const { return first_token(rank + 1) - first_token(rank); }

    __device__ __forceinline__ uint4 *rows(unsigned rank) const {
        return reinterpret_cast<uint4 *>(ranks.parts[rank] + first);
    }

    // This lane's slot of a token.
    __device__ __forceinline__ Slot find(unsigned token) const {
        const unsigned lane = threadIdx.x % WARP;
        Slot found = {NO_RANK, 0};
        if (lane < top_k) {
            const unsigned slot = token * top_k + lane, id = static_cast<unsigned>(topk_ids[slot]);
            found.row = place_of ? place_of[slot] : slot;
            found.rank = id < num_experts ? static_cast<unsigned>(rank_of[id]) : NO_RANK;
        }
        return found;
    }

    // Stores the rows of this rank's slots of a share's tokens: at the share's first token in `to`.
    __device__ __forceinline__ void store(unsigned token, unsigned count, uint4 *to, const uint4 *down) const {
        const Units units(count, pieces);
        const unsigned lane = threadIdx.x % WARP;
        Slot next = {NO_RANK, 0};
        if (units.first < units.count) {
            next = find(token + units.first / units.segments);
        }
        for (unsigned unit = units.first; unit < units.count; unit += units.step) {
            const Slot slot = next;
            if (unit + units.step < units.count) {
                next = find(token + (unit + units.step) / units.segments);
            }
            const unsigned begin = unit % units.segments * units.width, end = min(begin + units.width, pieces);
            uint4 *const row = to + static_cast<size_t>(unit / units.segments) * top_k * pieces;
            for (unsigned own = __ballot_sync(ALL_LANES, slot.rank == ranks.rank); own; own &= own - 1) {
                const unsigned j = __ffs(own) - 1;
                const size_t from = static_cast<size_t>(__shfl_sync(ALL_LANES, slot.row, j)) * pieces;
                copy(row + j * pieces, down + from, begin + lane, end);
            }
        }
    }

    // Copies the pieces from `at` on, a warp apart.
    __device__ __forceinline__ static void copy(uint4 *to, const uint4 *from, unsigned at, unsigned end) {
        for (; at < end; at += AT_ONCE * WARP) {
            uint4 copies[AT_ONCE];
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                if (at + i * WARP < end) {
                    copies[i] = __ldcg(from + at + i * WARP);
                }
            }
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                if (at + i * WARP < end) {
                    to[at + i * WARP] = copies[i];
                }
            }
        }
    }

    // The sum of a piece over the slots of a token, whose rows begin at `row` in the memory of the owner or, in one shot,
    // of the slot's rank.
    __device__ __forceinline__ uint4 sum(const Slot &slot, size_t row, unsigned piece) const {
        const unsigned here = __ballot_sync(ALL_LANES, slot.rank < RANKS);
        float sum[8] = {};
        for (unsigned j = 0; j < top_k; j += AT_ONCE) {
            Piece of_slot[AT_ONCE];
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                const unsigned rank = __shfl_sync(ALL_LANES, slot.rank, (j + i) % WARP);
                if (here >> j >> i & 1) {
                    const uint4 *from = rows(SHOTS == ONE ? rank : ranks.rank) + row;
                    of_slot[i].all = __ldcg(from + static_cast<size_t>(j + i) * pieces + piece);
                }
            }
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                if (here >> j >> i & 1) {
#pragma unroll
                    for (int v = 0; v < 8; ++v) {
                        sum[v] = __fadd_rn(sum[v], widen(of_slot[i].values[v]));
                    }
                }
            }
        }
        return make_uint4(narrow2(sum[0], sum[1]), narrow2(sum[2], sum[3]), narrow2(sum[4], sum[5]),
                          narrow2(sum[6], sum[7]));
    }

    // The sums of a share's tokens, to both.
    __device__ __forceinline__ void add(unsigned token, unsigned count, uint4 *y, uint4 *outputs) const {
        const Units units(count, pieces);
        const unsigned lane = threadIdx.x % WARP;
        for (unsigned unit = units.first; unit < units.count; unit += units.step) {
            const unsigned of_share = unit / units.segments, begin = unit % units.segments * units.width;
            const Slot slot = find(token + of_share);
            const size_t row = static_cast<size_t>(of_share) * top_k * pieces;
            for (unsigned at = begin; at < min(begin + units.width, pieces); at += WARP) {
                // Past the row's end a lane adds its last piece again.
                const unsigned piece = min(at + lane, pieces - 1);
                const uint4 made = sum(slot, row, piece);
                const size_t to = static_cast<size_t>(token + of_share) * pieces + piece;
                y[to] = made;
                if constexpr (SHOTS == TWO) {
                    outputs[to] = made;
                }
            }
        }
    }

    // Copies the sums of all other owners.
    __device__ __forceinline__ void copy_shares(uint4 *y) const {
        const unsigned lane = threadIdx.x % WARP;
        for (unsigned i = 1; i < RANKS; ++i) {
            // Each rank begins with another one, so that all wires are in use.
            const unsigned owner = (ranks.rank + i) % RANKS;
            const uint4 *const outputs = reinterpret_cast<const uint4 *>(ranks.outputs[owner]);
            const Units units(count(owner), pieces);
            for (unsigned unit = units.first; unit < units.count; unit += units.step) {
                const unsigned begin = unit % units.segments * units.width, end = min(begin + units.width, pieces);
                const size_t row = static_cast<size_t>(first_token(owner) + unit / units.segments) * pieces;
                copy(y + row, outputs + row, begin + lane, end);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(RANK_THREADS, RANKS == 8 ? 3 : 2)
    moe_sum_ranks(const __grid_constant__ Ranks ranks,
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
    const Slots slots = {ranks,  topk_ids, rank_of,    place_of,   ranks.turn * capacity,
                         tokens, top_k,    size_n / 8, num_experts};
    if constexpr (SHOTS == ONE) {
        // Without work a thread block only counts the call. The first always waits.
        if (blockIdx.x >= Units(tokens, slots.pieces).count) {
            return;
        }
        slots.store(0, tokens, slots.rows(ranks.rank), down);
    } else {
        for (unsigned i = 0; i < RANKS; ++i) {
            const unsigned owner = (ranks.rank + i) % RANKS;
            slots.store(slots.first_token(owner), slots.count(owner), slots.rows(owner), down);
        }
    }
    if (!wait_for_ranks(ranks, 0, call, limit_ms)) {
        return;
    }
    // As in add_ranks.cu.
    let_next_kernel_start();
    if constexpr (SHOTS == ONE) {
        slots.add(0, tokens, y, nullptr);
    } else {
        uint4 *const outputs = reinterpret_cast<uint4 *>(ranks.outputs[ranks.rank]);
        slots.add(slots.first_token(ranks.rank), slots.count(ranks.rank), y, outputs);
        if (wait_for_ranks(ranks, 1, call, limit_ms)) {
            slots.copy_shares(y);
        }
    }
}
