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

// Tile `index`. Tiles are numbered by groups of `raster` blocks of rows, through all columns of a group.
template <class Product>
__device__ __forceinline__ Tile tile_at(const Product &p, unsigned index, unsigned blocks) {
    const unsigned columns = p.columns();
    const unsigned first = index / (p.raster * columns) * p.raster;
    const unsigned side = min(p.raster, blocks - first), in = index % (p.raster * columns);
    const unsigned block = first + in % side;
    const int expert = IS_MOE ? __ldcg(p.expert_ids + block) : 0;
    return {block * ROWS, in / side * p.tile_n, expert};
}

// The tiles of this thread block, in turn. Each is looked up one tile ahead, since its expert must be read from memory.
template <class Product>
struct Tiles {
    const Product &p;
    const unsigned blocks, count;
    unsigned index;
    Tile now, next;

    __device__ __forceinline__ explicit Tiles(const Product &p)
        : p(p), blocks(p.blocks()), count(blocks * p.columns()), index(blockIdx.x), now(at(index)), next(at(index + gridDim.x)) {}

    __device__ __forceinline__ Tile at(unsigned index) const {
        return index < count ? tile_at(p, index, blocks) : Tile{0, 0, -1};
    }

    __device__ __forceinline__ bool is_over() const { return index >= count; }

    __device__ __forceinline__ void advance() {
        index += gridDim.x;
        now = next;
        next = at(index + gridDim.x);
    }
};

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
