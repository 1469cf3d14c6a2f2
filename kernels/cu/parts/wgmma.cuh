#pragma once
// Hopper's warpgroup products, the copy engine, and register reallocation between warpgroups. For sm_90a alone.

#include "half.cuh"

// Copies `bytes`, a multiple of 16, of contiguous memory; the barrier counts them.
__device__ __forceinline__ void copy_bulk(unsigned to, const void *from, unsigned bytes,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The copy engine's descriptor of a matrix in global memory, made by the driver.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// Copies the map's box whose first element is in that column and row; zeros where the matrix ends.
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap &map, unsigned column,
                                         unsigned row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Writes shared memory at `from` to the map's box whose first element is in that column and row; elements outside
// the matrix are not written. This thread's next `commit_stores` covers it.
__device__ __forceinline__ void store_box(const TensorMap &map, unsigned column, unsigned row,
                                          unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                     &map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last PENDING of this thread's groups of stores have read their shared memory. Their writes are
// complete when the kernel is.
template <int PENDING = 0>
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// A barrier of the warpgroup of that number: barrier 0 is the whole block's.
__device__ __forceinline__ void warpgroup_sync(unsigned warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Makes this thread's writes to shared memory visible to later reads of the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Other thread blocks of the device see the value only after earlier writes.
__device__ __forceinline__ void store_release(unsigned *to, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned *from) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Lowers or raises the registers of each thread of this warpgroup; raising waits until others have released them.
template <int COUNT>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Orders earlier register writes before the products issued next.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last PENDING groups of products are done.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of SwizzledRows (fragments.cuh) of 64 16-bit values. The first row is at a multiple of 1024 bytes.
// Add 2 to advance by 16 values.
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 1024 / 16;
    return SWIZZLE_128 | EIGHT_ROWS << 32 | 1ull << 16 | (address & 0x3FFFFu) / 16;
}

#define WGMMA_D8(i)                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_1 WGMMA_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_2 WGMMA_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_3 WGMMA_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_4 WGMMA_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_5 WGMMA_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_6 WGMMA_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_7 WGMMA_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_8 WGMMA_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_9 WGMMA_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_10 WGMMA_9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_11 WGMMA_10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_12 WGMMA_11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_13 WGMMA_12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_14 WGMMA_13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_15 WGMMA_14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_ASM(N, TYPES, D, A, B, ADD, ...)                                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" TYPES " {" D "}, {" A "}, "    \
                 B ", add, 1, 1, 0;\n}"                                                      \
                 : __VA_ARGS__                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define WGMMA(...)                                  \
    if constexpr (IS_BF16) {                        \
        WGMMA_OF(".f32.bf16.bf16", __VA_ARGS__);    \
    } else {                                        \
        WGMMA_OF(".f32.f16.f16", __VA_ARGS__);      \
    }
#define WGMMA_OF(TYPES, N, ...) WGMMA_ASM(N, TYPES, __VA_ARGS__)

// d[64 x N] (+)= a[64 x 16] * b[16 x N], f32 sums: one fused sum for each element, without d where
// `add` is 0. Warp w of the group has rows 16 w of a and d: a lane's fragment of a is that of
// m16n8k16, and so is its d for each eight columns. Asynchronous: neither a nor d may be touched
// until wgmma_wait.
template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const unsigned (&a)[4],
                                      unsigned long long b, unsigned add) {
    if constexpr (N == 16) {
        WGMMA(16, WGMMA_0, "%8, %9, %10, %11", "%12", "%13", WGMMA_D8(0));
    } else if constexpr (N == 32) {
        WGMMA(32, WGMMA_1, "%16, %17, %18, %19", "%20", "%21", WGMMA_D8(0), WGMMA_D8(8));
    } else if constexpr (N == 48) {
        WGMMA(48, WGMMA_2, "%24, %25, %26, %27", "%28", "%29", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16));
    } else if constexpr (N == 64) {
        WGMMA(64, WGMMA_3, "%32, %33, %34, %35", "%36", "%37", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24));
    } else if constexpr (N == 80) {
        WGMMA(80, WGMMA_4, "%40, %41, %42, %43", "%44", "%45", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32));
    } else if constexpr (N == 96) {
        WGMMA(96, WGMMA_5, "%48, %49, %50, %51", "%52", "%53", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40));
    } else if constexpr (N == 112) {
        WGMMA(112, WGMMA_6, "%56, %57, %58, %59", "%60", "%61", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48));
    } else if constexpr (N == 128) {
        WGMMA(128, WGMMA_7, "%64, %65, %66, %67", "%68", "%69", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56));
    } else if constexpr (N == 144) {
        WGMMA(144, WGMMA_8, "%72, %73, %74, %75", "%76", "%77", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64));
    } else if constexpr (N == 160) {
        WGMMA(160, WGMMA_9, "%80, %81, %82, %83", "%84", "%85", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72));
    } else if constexpr (N == 176) {
        WGMMA(176, WGMMA_10, "%88, %89, %90, %91", "%92", "%93", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80));
    } else {
        static_assert(N == 192);
        WGMMA(192, WGMMA_11, "%96, %97, %98, %99", "%100", "%101", WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56), WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88));
    }
}

// Four 8 x 8 matrices of 16-bit values, each stored transposed; lane i gives the address of row i % 8
// of matrix i / 8.
__device__ __forceinline__ void store_matrices_transposed(unsigned address,
                                                          const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
