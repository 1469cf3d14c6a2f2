#pragma once
// Hopper's warpgroup products of e4m3 matrices, the first one in registers. For sm_90a alone.

#include "wgmma.cuh"

#define WGMMA_FP8_REGISTERS(N, D, A, B, ADD, ...)                                                  \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" D "}, {" A "}, " B    \
                 ", add, 1, 1;\n}"                                                                 \
                 : __VA_ARGS__                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

// d[64 x N] (+)= a[64 x 32] * b[32 x N] of e4m3fn, f32 sums: one fused sum for each element, without d where `add` is 0.
// Warp w of the group has rows 16 w of a and d: a lane's fragment of a is that of m16n8k32, and so is its d for each eight
// columns. b is K-major rows of 128 bytes in shared memory (`matrix_descriptor`, plus 2 for each 32 k). Asynchronous:
// neither a, b nor d may be touched until wgmma_wait.
template <int N>
__device__ __forceinline__ void wgmma_fp8(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, unsigned add) {
    if constexpr (N == 8) {
        WGMMA_FP8_REGISTERS(8, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", "%9", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
    } else if constexpr (N == 16) {
        WGMMA_FP8_REGISTERS(16, WGMMA_0, "%8, %9, %10, %11", "%12", "%13", WGMMA_D8(0));
    } else if constexpr (N == 32) {
        WGMMA_FP8_REGISTERS(32, WGMMA_1, "%16, %17, %18, %19", "%20", "%21", WGMMA_D8(0), WGMMA_D8(8));
    } else if constexpr (N == 64) {
        WGMMA_FP8_REGISTERS(64, WGMMA_3, "%32, %33, %34, %35", "%36", "%37", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24));
    } else if constexpr (N == 96) {
        WGMMA_FP8_REGISTERS(96, WGMMA_5, "%48, %49, %50, %51", "%52", "%53", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40));
    } else if constexpr (N == 128) {
        WGMMA_FP8_REGISTERS(128, WGMMA_7, "%64, %65, %66, %67", "%68", "%69", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56));
    } else if constexpr (N == 160) {
        WGMMA_FP8_REGISTERS(160, WGMMA_9, "%80, %81, %82, %83", "%84", "%85", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72));
    } else if constexpr (N == 176) {
        WGMMA_FP8_REGISTERS(176, WGMMA_10, "%88, %89, %90, %91", "%92", "%93", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80));
    } else {
        static_assert(N == 192);
        WGMMA_FP8_REGISTERS(192, WGMMA_11, "%96, %97, %98, %99", "%100", "%101", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88));
    }
}
