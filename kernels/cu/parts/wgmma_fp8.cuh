#pragma once
// Hopper's warpgroup products of e4m3 matrices in shared memory. For sm_90a alone.

#include "wgmma.cuh"

// Fetches a cache line ahead of its use.
__device__ __forceinline__ void prefetch(const void *from) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}

// Fetches a descriptor ahead of its use.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define WGMMA_FP8(N, D, A, B, ADD, ...)                                                          \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" D "}, " A ", " B    \
                 ", add, 1, 1;\n}"                                                               \
                 : __VA_ARGS__                                                                   \
                 : "l"(a), "l"(b), "r"(add))

// d[64 x N] (+)= a[64 x 32] * b[32 x N] of e4m3fn, f32 sums: one fused sum for each element, without d where `add` is
// 0. Both matrices are K-major rows of 128 bytes in shared memory (`matrix_descriptor`, plus 2 for each 32 k). Warp w
// of the group has rows 16 w of d. Asynchronous: neither a, b nor d may be touched until wgmma_wait.
template <int N>
__device__ __forceinline__ void wgmma_fp8(float (&d)[N / 2], unsigned long long a, unsigned long long b,
                                          unsigned add) {
    if constexpr (N == 8) {
        WGMMA_FP8(8, "%0, %1, %2, %3", "%4", "%5", "%6", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
    } else if constexpr (N == 16) {
        WGMMA_FP8(16, WGMMA_0, "%8", "%9", "%10", WGMMA_D8(0));
    } else if constexpr (N == 32) {
        WGMMA_FP8(32, WGMMA_1, "%16", "%17", "%18", WGMMA_D8(0), WGMMA_D8(8));
    } else if constexpr (N == 48) {
        WGMMA_FP8(48, WGMMA_2, "%24", "%25", "%26", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16));
    } else if constexpr (N == 64) {
        WGMMA_FP8(64, WGMMA_3, "%32", "%33", "%34", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24));
    } else if constexpr (N == 128) {
        WGMMA_FP8(128, WGMMA_7, "%64", "%65", "%66", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56));
    } else {
        static_assert(N == 256);
        WGMMA_FP8(256, WGMMA_15, "%128", "%129", "%130", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88), WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120));
    }
}

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
