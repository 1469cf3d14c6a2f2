#pragma once
// The activation of eight columns by one thread.

#include "activation.cuh"
#include "half.cuh"

// Eight 16-bit values.
union Eight {
    uint4 all;
    unsigned words[4];
    unsigned short of[8];
};

// SiLU of a gate between 2^-100 and 80 in magnitude: the bits of `gate_function`, without its branches. There e^-g
// needs no special case, and its exponent is added as an integer. The division is the compiler's own sequence for
// operands and quotients far from the ends of f32's range.
__device__ __forceinline__ float usual_silu(float g) {
    const unsigned series[8] = {0x39500d01u, 0x3ab60b61u, 0x3c088889u, 0x3d2aaaabu,
                                0x3e2aaaabu, 0x3f000000u, 0x3f800000u, 0x3f800000u};
    // Its last bits are the whole number nearest to -g log2(e).
    const float shift = 12582912.0f;
    const float shifted = __fadd_rn(__fmul_rn(-g, __uint_as_float(0x3fb8aa3bu)), shift);
    const float n = __fsub_rn(shifted, shift);
    float r = __fmaf_rn(-n, __uint_as_float(0x3f317000u), -g);
    r = __fmaf_rn(-n, __uint_as_float(0x3805fdf4u), r);
    const unsigned power = __float_as_uint(horner(series, r)) + (__float_as_uint(shifted) << 23);
    const float d = __fadd_rn(1.0f, __uint_as_float(power));
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-d, reciprocal, 1.0f), reciprocal);
    float q = __fmul_rn(g, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-d, q, g), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-d, q, g), reciprocal, q);
}

// Whether the activation is SiLU of gate times up, without limits or shifts.
__device__ __forceinline__ bool is_plain_silu(const Activation &a) {
    const float infinity = __uint_as_float(0x7f800000u);
    return a.function == SILU && a.columns != GATE_ALONE && a.alpha == 1.0f && a.gate_limit == infinity &&
           a.value_limit == infinity && a.up_limit == infinity && a.up_shift == 0.0f;
}

// The activation of eight gates (`first`) and eight ups (`second`); where gate and up alternate, of the sixteen in
// their order; of a gate alone, of `first`.
__device__ __forceinline__ uint4 activate_eight(const Activation &a, const uint4 &first,
                                                const uint4 &second) {
    Eight left = {first}, right = {second}, out;
    if (a.columns == GATE_ALONE) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            out.of[i] = narrow(activate(a, a.function, widen(left.of[i])));
        }
        return out.all;
    }
    if (a.columns == INTERLEAVED) {
        const unsigned pairs[8] = {first.x,  first.y,  first.z,  first.w,
                                   second.x, second.y, second.z, second.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            left.words[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x5410);
            right.words[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7632);
        }
    }
    if (is_plain_silu(a)) {
        Eight gates, ups;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            gates.words[i] = a.exchanged ? right.words[i] : left.words[i];
            ups.words[i] = a.exchanged ? left.words[i] : right.words[i];
        }
        bool usual = true;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float size = fabsf(widen(gates.of[i]));
            usual = usual && size >= 0x1p-100f && size <= 80.0f;
        }
        if (usual) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                out.of[i] = narrow(__fmul_rn(usual_silu(widen(gates.of[i])), widen(ups.of[i])));
            }
            return out.all;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        out.of[i] = narrow(activate(a, a.function, widen(left.of[i]), widen(right.of[i])));
    }
    return out.all;
}

// Piece `piece` of the activation of a row of gate_up, where a row of the result has `pieces`. Reads past the L1
// cache, which is not cleared for a kernel that starts early.
__device__ __forceinline__ uint4 activate_piece(const Activation &a, const uint4 *gate_up,
                                                size_t row, unsigned pieces, unsigned piece) {
    const bool gate_alone = a.columns == GATE_ALONE, halves = a.columns == HALVES;
    const uint4 *of = gate_up + row * (gate_alone ? pieces : 2 * pieces);
    const uint4 first = __ldcg(of + (gate_alone || halves ? piece : 2 * piece));
    uint4 second = {};
    if (!gate_alone) {
        second = __ldcg(of + (halves ? pieces + piece : 2 * piece + 1));
    }
    return activate_eight(a, first, second);
}
