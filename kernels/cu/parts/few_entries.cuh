#pragma once
// The first tile of a thread block of a product with experts, found from a few entries before the kernel that places them
// (`moe_gather` with PLACES) is over: the weights of the tile can be copied meanwhile. The blocks are those of
// place_entries.cuh.

#include "tiles.cuh"

// Entries that a tile is found from: one for each lane.
constexpr unsigned MOST_FOUND = 32;

struct FewEntries {
    const int *topk_ids;  // [entries], not written by the kernel before this one; likewise run_of
    const int *run_of;    // [num_experts], as place_entries.cuh takes it
    unsigned entries;     // up to MOST_FOUND; 0: the tile is not looked for
    unsigned num_experts, num_runs;
};

// A tile, and its rows that have entries.
struct FilledTile {
    Tile tile;
    unsigned rows;
};

// Tile blockIdx.x; its expert is negative where there is none. For whole warps.
template <class Product>
__device__ __forceinline__ FilledTile tile_of_entries(const Product &p, const FewEntries &few) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned id = lane < few.entries ? static_cast<unsigned>(__ldcg(few.topk_ids + lane)) : ~0u;
    const int of_id = id < few.num_experts ? __ldcg(few.run_of + id) : 0xffff;
    const unsigned run = of_id & 0xffff, key = run * MOST_FOUND + lane;
    const unsigned of_run = __match_any_sync(~0u, run), before = __popc(of_run & ((1u << lane) - 1));
    // Every ROWS-th entry of a run begins a block; blocks are in the order of runs.
    const bool begins = run < few.num_runs && before % ROWS == 0;
    const unsigned all = __ballot_sync(~0u, begins), blocks = __popc(all);
    if (blockIdx.x >= blocks * p.columns()) {
        return {{0, 0, -1}, 0};
    }
    unsigned block = 0;
#pragma unroll 1
    for (unsigned left = all; left != 0; left &= left - 1) {
        block += __shfl_sync(~0u, key, __ffs(left) - 1) < key;
    }
    Tile tile = place_of_tile(p, blockIdx.x, blocks);
    const int first = __ffs(__ballot_sync(~0u, begins && block == tile.row / ROWS)) - 1;
    tile.expert = __shfl_sync(~0u, of_id, first) >> 16;
    return {tile, __shfl_sync(~0u, min(ROWS, __popc(of_run) - before), first)};
}
