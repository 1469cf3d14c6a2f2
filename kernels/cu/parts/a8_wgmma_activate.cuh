#pragma once
// Rows of x that consumers of marlin_gemm_a8_wgmma.cu make themselves, of few entries: the activation of rows of gate_up, each
// quantized as a whole. All tiles of a block make the same rows, which takes less time than a kernel of its own if no thread
// block has two tiles.

#include "a8_wgmma_ring.cuh"
#include "activate_eight.cuh"
#include "fp8_rows.cuh"

struct GateUp {
    const uint4 *rows;
    const Activation &activation;
};

// A barrier of the consumers.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// Makes the `rows` rows of x from `first` on, and their scales.
__device__ __forceinline__ void activate_rows(const Product &p, const GateUp &from, unsigned first, unsigned rows,
                                              const Memory &memory, unsigned char *pointer, float *scales) {
    const unsigned thread = threadIdx.x - PRODUCERS, lane = thread % 32;
    // Eight columns each; a warp takes 32 of a row, a part.
    const unsigned pieces = p.size_k / 8, parts = (pieces + 31) / 32;
    uint4 *const halves = reinterpret_cast<uint4 *>(pointer + memory.halves_at);
    float *const largest_of_parts = reinterpret_cast<float *>(halves + ROWS * MOST_K / 8);
    // The last tile's products have read its rows.
    consumers_sync();
#pragma unroll 1
    for (unsigned part = thread / 32; part < rows * parts; part += WARPS) {
        const unsigned row = part / parts, piece = part % parts * 32 + lane;
        float largest = 0.0f;
        if (piece < pieces) {
            const uint4 values = activate_piece(from.activation, from.rows, first + row, pieces, piece);
            largest = largest_of_piece(values);
            halves[row * pieces + piece] = values;
        }
        largest = warp_max(largest);
        if (lane == 0) {
            largest_of_parts[part] = largest;
        }
    }
    consumers_sync();
#pragma unroll 1
    for (unsigned part = thread / 32; part < rows * parts; part += WARPS) {
        const unsigned row = part / parts, piece = part % parts * 32 + lane;
        float largest = 0.0f;
        for (unsigned i = 0; i < parts; ++i) {
            largest = fmaxf(largest, largest_of_parts[row * parts + i]);
        }
        const Divisor of_row(scale_of_row(largest));
        if (piece < pieces) {
            const uint4 values = halves[row * pieces + piece];
            const uint2 codes = make_uint2(four_codes(values.x, values.y, of_row), four_codes(values.z, values.w, of_row));
            unsigned char *const to = pointer + piece / 16 * X_BOX + SwizzledRows::at(row, piece % 16 / 2) + piece % 2 * 8;
            *reinterpret_cast<uint2 *>(to) = codes;
        }
        if (piece == 0) {
            scales[row] = or_nan(of_row.divisor, largest);
        }
    }
    fence_async_proxy();
    consumers_sync();
}
