#pragma once
// Writes tiles of products whose weights are the 64-row side of Hopper's warpgroup instructions: a warpgroup has 64 columns.

#include "tiles.cuh"

// Columns that a warpgroup computes.
constexpr unsigned GROUP_N = 64;

// Two 8 x 8 matrices of 16-bit values, each stored transposed; lane i below 16 gives the address of row i % 8 of
// matrix i / 8.
__device__ __forceinline__ void store_two_matrices_transposed(unsigned address, unsigned first,
                                                              unsigned second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(first), "r"(second)
                 : "memory");
}

// Rounds a tile, and writes it through shared memory: by the copy engine, which continues during the next tile, or, where
// a tile ends within a warpgroup's columns, in pieces of 16 bytes.
template <class Product, class WarpTile>
__device__ __forceinline__ void write_tile(const Product &p, const TensorMap &y_map, const Tile &tile,
                                           const WarpTile &warp, unsigned box,
                                           const unsigned char *box_pointer,
                                           const float (&total)[ROWS / 2]) {
    const bool is_whole = p.tile_n % GROUP_N == 0, is_writer = threadIdx.x % 128 == 0;
    if (is_whole && is_writer) {
        wait_for_stores();
    }
    // The last tile has been read from shared memory.
    warpgroup_sync(warp.group);
    const unsigned piece_0 = warp.n % GROUP_N / 8, row_in_8 = warp.lane % 8, matrix = warp.lane / 8;
    if constexpr (ROWS == 8) {
        const unsigned at = SwizzledRows::at(row_in_8, piece_0 + matrix % 2);
        store_two_matrices_transposed(box + at, narrow2(total[0], total[1]), narrow2(total[2], total[3]));
    } else {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 8) {
            unsigned packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                packed[j] = narrow2(total[i + j * 2], total[i + j * 2 + 1]);
            }
            const unsigned at = SwizzledRows::at(row_in_8, piece_0 + matrix % 2);
            store_matrices_transposed(box + (i * 2 + matrix / 2 * 8) * 128 + at, packed);
        }
    }
    if (is_whole) {
        fence_async_proxy();
        warpgroup_sync(warp.group);
        if (is_writer && warp.n < p.tile_n) {
            store_box(y_map, tile.n0 + warp.n, tile.row, box);
            commit_stores();
        }
        __syncwarp();
        return;
    }
    warpgroup_sync(warp.group);
    const unsigned thread = threadIdx.x % 128, piece = thread % 8;
    const unsigned in_tile = warp.group * GROUP_N + piece * 8, n = tile.n0 + in_tile;
    if (in_tile < p.tile_n && n < p.size_n) {
#pragma unroll 4
        for (unsigned row = thread / 8; row < ROWS; row += 16) {
            if (IS_MOE || tile.row + row < p.size_m) {
                const uint4 eight = *reinterpret_cast<const uint4 *>(box_pointer + SwizzledRows::at(row, piece));
                *reinterpret_cast<uint4 *>(p.y + static_cast<size_t>(tile.row + row) * p.size_n + n) = eight;
            }
        }
    }
    __syncwarp();
}
