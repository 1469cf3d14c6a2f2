#pragma once
// Instructions without a C++ operator: copies that bypass registers, matrix fragments, and 16-bit arithmetic
// in pairs.

#include "half.cuh"

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A pointer that the compiler knows to point to shared memory.
__device__ __forceinline__ const unsigned char *shared_pointer(unsigned address) {
    return static_cast<const unsigned char *>(__cvta_shared_to_generic(address));
}

// 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The L2 cache's policy for what a copy reads: data read only once is evicted first.
__device__ __forceinline__ unsigned long long cache_policy(bool is_read_once) {
    unsigned long long first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return is_read_once ? first : normal;
}

// 16 bytes to shared memory, under an L2 cache policy.
__device__ __forceinline__ void copy_async(unsigned to, const void *from,
                                           unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float2 load_shared(unsigned address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// d[16 x 8] += a[16 x 16] * b[16 x 8], f32 sums: one fused sum for each element.
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    if constexpr (IS_BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Pairs of 16-bit values, each result rounded once. bf16 has a fused instruction alone before sm_90,
// and a product is one with -0 added.
__device__ __forceinline__ unsigned fma2(unsigned x, unsigned y, unsigned z) {
    unsigned r;
    if constexpr (IS_BF16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    }
    return r;
}

__device__ __forceinline__ unsigned mul2(unsigned x, unsigned y) {
    if constexpr (IS_BF16) {
        return fma2(x, y, Half::negative(0));
    } else {
        unsigned r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
        return r;
    }
}

// A multiplication that the compiler does not turn into a shift: shifts compete with masks for a pipe.
__device__ __forceinline__ unsigned sixteen_times(unsigned x) {
    unsigned r;
    asm("mul.lo.u32 %0, %1, 16;" : "=r"(r) : "r"(x));
    return r;
}

// (x & mask) | bits in one instruction.
template <unsigned MASK, unsigned BITS_SET>
__device__ __forceinline__ unsigned mask_or(unsigned x) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(x), "n"(MASK), "n"(BITS_SET));
    return r;
}

// The low (0) or high (1) half of a word, twice.
template <int HIGH>
__device__ __forceinline__ unsigned twice(unsigned x) {
    return __byte_perm(x, 0, HIGH ? 0x3232 : 0x1010);
}

// Likewise, without an instruction of its own where the consuming one can read halves of a word.
template <int HIGH>
__device__ __forceinline__ unsigned half_of(unsigned x) {
    unsigned r;
    if (HIGH) {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, b}; }" : "=r"(r) : "r"(x));
    } else {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {a, a}; }" : "=r"(r) : "r"(x));
    }
    return r;
}
