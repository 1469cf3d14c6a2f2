#pragma once
// Dequantizers of products with 8-bit activations: four codes, in the low (0) or high (1) halves of a word's bytes, as
// 8-bit numbers times the PRODUCT_UNIT of marlin_gemm_a8.cu. `zeros` is the column's zero point in each byte.

#include "formats/types.cuh"

template <CodeType CODE_TYPE, bool TO_E4M3>
struct Codes8;

// e2m1 to e4m3: sign to bit 7, magnitude to bits 4..2.
template <>
struct Codes8<E2M1, true> {
    template <int HIGH>
    __device__ __forceinline__ static unsigned numbers(unsigned word, unsigned) {
        const unsigned sign = HIGH ? word : word << 4, magnitude = HIGH ? word >> 2 : word << 2;
        return (sign & 0x80808080u) | (magnitude & 0x1C1C1C1Cu);
    }
};

// Integers, rewritten by `marlin_int4_fp8_preprocess`, to e4m3: q >= z is stored as q - z, q < z as 15 - q. In bits of
// e4m3, 0 to 15 are 0 to 15 times 2^-9; the negative ones are c > 15 - z, of magnitude c - 15 + z.
struct IntegersToE4m3 {
    template <int HIGH>
    __device__ __forceinline__ static unsigned numbers(unsigned word, unsigned zeros) {
        const unsigned c = (HIGH ? word >> 4 : word) & 0x0F0F0F0Fu;
        const unsigned negative = (c + zeros) >> 4 & 0x01010101u;
        return c + negative * (0x71u + (zeros & 15u));
    }
};

// The bits of `mask` from `first`, the others from `second`, in one instruction: the compiler would take two.
__device__ __forceinline__ unsigned select_bits(unsigned first, unsigned second, unsigned mask) {
    unsigned selected;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(selected) : "r"(first), "r"(second), "r"(mask));
    return selected;
}

// Likewise with 8 as the zero point: c > 7 is bit 3, and the magnitude is then c - 7. Signs and magnitudes are those of all
// eight codes of a word at once.
template <>
struct Codes8<UINT4B8, true> {
    template <int HIGH>
    __device__ __forceinline__ static unsigned numbers(unsigned word, unsigned) {
        const unsigned signs = select_bits(word, 0, 0x88888888u), magnitudes = word - signs + (signs >> 3);
        return select_bits(HIGH ? magnitudes >> 4 : magnitudes, HIGH ? signs : signs << 4, 0x0F0F0F0Fu);
    }
};

template <>
struct Codes8<UINT4, true> : IntegersToE4m3 {};

// uint4 with zero points to int8: no byte of 128 + q - z borrows.
template <>
struct Codes8<UINT4, false> {
    template <int HIGH>
    __device__ __forceinline__ static unsigned numbers(unsigned word, unsigned zeros) {
        const unsigned c = (HIGH ? word >> 4 : word) & 0x0F0F0F0Fu;
        return ((c | 0x80808080u) - zeros) ^ 0x80808080u;
    }
};

// uint4b8 to int8: 16 (q - 8).
template <>
struct Codes8<UINT4B8, false> {
    template <int HIGH>
    __device__ __forceinline__ static unsigned numbers(unsigned word, unsigned) {
        return ((HIGH ? word : word << 4) & 0xF0F0F0F0u) ^ 0x80808080u;
    }
};
