#pragma once
// The activation between an expert's two products, canonically: everything in f32, one rounding.

#include "math.cuh"

// Functions of a gate g.
enum GateFunction : unsigned {
    SILU = 0,       // g / (1 + e^-(alpha g))
    GELU = 1,       // by erf
    GELU_TANH = 2,  // by tanh
    RELU2 = 3,      // max(g, 0)^2
};

// Columns that hold gate and up.
enum GateColumns : unsigned {
    HALVES = 0,       // gate, then up
    INTERLEAVED = 1,  // gate in even columns, up in odd ones
    GATE_ALONE = 2,
};

// value = F(min(gate, gate_limit)), at most value_limit; with up: times (up within +-up_limit, plus
// up_shift). An absent limit is infinity. Limits let a NaN pass.
struct Activation {
    unsigned function;   // a GateFunction
    unsigned columns;    // a GateColumns
    unsigned exchanged;  // 1: gate and up are in each other's columns
    float alpha, gate_limit, value_limit, up_limit, up_shift;
};

__device__ __forceinline__ float gate_function(unsigned function, float g, float alpha) {
    if (function == SILU) {
        return __fdiv_rn(g, __fadd_rn(1.0f, exp_f32(-__fmul_rn(alpha, g))));
    }
    if (function == GELU) {
        const float root_half = __uint_as_float(0x3f3504f3u);
        return __fmul_rn(__fmul_rn(0.5f, g), __fadd_rn(1.0f, erf_f32(__fmul_rn(g, root_half))));
    }
    if (function == GELU_TANH) {
        const float beta = 0.7978846f, kappa = 0.044715f;
        const float cube = __fmul_rn(__fmul_rn(g, g), g);
        const float inner = __fmul_rn(beta, __fmaf_rn(kappa, cube, g));
        return __fmul_rn(__fmul_rn(0.5f, g), __fadd_rn(1.0f, tanh_f32(inner)));
    }
    const float m = g > 0.0f || g != g ? g : 0.0f;
    return __fmul_rn(m, m);
}

__device__ __forceinline__ float at_most(float x, float limit) {
    return x > limit ? limit : x;
}

// The activation of a gate alone. `function` is a.function, or the only one that the caller supports.
__device__ __forceinline__ float activate(const Activation &a, unsigned function, float gate) {
    return at_most(gate_function(function, at_most(gate, a.gate_limit), a.alpha), a.value_limit);
}

// The activation of a gate and an up, in the columns' order.
__device__ __forceinline__ float activate(const Activation &a, unsigned function, float first,
                                          float second) {
    float up = a.exchanged ? first : second;
    up = up < -a.up_limit ? -a.up_limit : at_most(up, a.up_limit);
    up = a.up_shift == 0.0f ? up : __fadd_rn(up, a.up_shift);
    return __fmul_rn(activate(a, function, a.exchanged ? second : first), up);
}
