#pragma once
// Places of a lane's elements in shared memory and in the fragments of the matrix units.

// Rows of 128 bytes in shared memory, swizzled as Hopper's copy engine does it: 16-byte piece p of a row is stored at
// p ^ (row % 8), so that the rows of a fragment lie in different banks.
struct SwizzledRows {
    __device__ __forceinline__ static unsigned at(unsigned row, unsigned piece) {
        return row * 128 + (piece ^ row % 8) * 16;
    }
};

// Element i of a lane's four of an m16n8 accumulator. The weights are the instruction's m side and the rows of x its n
// side.
struct Accumulator {
    // Column of the weight, of 16.
    __device__ __forceinline__ static unsigned column(unsigned lane, unsigned i) { return lane / 4 + i / 2 * 8; }

    // Row of x, of 8.
    __device__ __forceinline__ static unsigned row(unsigned lane, unsigned i) { return lane % 4 * 2 + i % 2; }
};
