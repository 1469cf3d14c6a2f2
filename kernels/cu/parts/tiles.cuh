#pragma once
// Tiles of a product whose weights are the 64-row side of Hopper's warpgroup instructions, and the ring of stages that a
// thread block passes through for them.

#include "barrier.cuh"
#include "fragments.cuh"
#include "half.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

struct Tile {
    unsigned row, n0;
    int expert;  // negative: no product
};

// The place of tile `index`, as one of expert 0. Tiles are numbered by groups of `raster` blocks of rows, through all columns
// of a group.
template <class Product>
__device__ __forceinline__ Tile place_of_tile(const Product &p, unsigned index, unsigned blocks) {
    const unsigned columns = p.columns();
    const unsigned first = index / (p.raster * columns) * p.raster;
    const unsigned side = min(p.raster, blocks - first), in = index % (p.raster * columns);
    const unsigned block = first + in % side;
    return {block * ROWS, in / side * p.tile_n, 0};
}

// Tile `index`.
template <class Product>
__device__ __forceinline__ Tile tile_at(const Product &p, unsigned index, unsigned blocks) {
    Tile tile = place_of_tile(p, index, blocks);
    if constexpr (IS_MOE) {
        tile.expert = __ldcg(p.expert_ids + tile.row / ROWS);
    }
    return tile;
}

// Calls `each` with the tiles of this thread block that have products, in turn.
template <class Product, class Each>
__device__ __forceinline__ void for_each_tile(const Product &p, Each each) {
    const unsigned blocks = p.blocks(), count = blocks * p.columns();
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const Tile tile = tile_at(p, index, blocks);
        if (tile.expert >= 0) {
            each(tile);
        }
    }
}

// A slot of the ring, and the parity of the passes over it.
struct Place {
    unsigned slot = 0, phase = 0;
    __device__ __forceinline__ void next(unsigned stages) {
        if (++slot == stages) {
            slot = 0;
            phase ^= 1;
        }
    }
    // At most one pass further.
    __device__ __forceinline__ Place after(unsigned count, unsigned stages) const {
        const unsigned at = slot + count, is_past = at >= stages;
        return {is_past ? at - stages : at, phase ^ is_past};
    }
};

// Releases a slot to the producer.
__device__ __forceinline__ void release(unsigned empty, unsigned lane) {
    if (lane == 0) {
        barrier_arrive(empty);
    }
}
