// The activation between an expert's two products, canonically: everything in f32, one rounding.
// Upstream operators: vLLM `silu_and_mul`, `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul`.
//
//   gate_up    16-bit [rows, width]: width is size_i (gate alone) or 2 * size_i
//   activated  16-bit [rows, size_i]
//
// value = F(min(gate, gate_limit)), at most value_limit; with up: times (up within +-up_limit, plus
// up_shift). A limit that there is not is infinity. Limits let a NaN pass.
//
// Compile-time parameters: IS_BF16 (half.cuh), and
//   FUNCTION  0 g / (1 + e^-(alpha g)), 1 GELU by erf, 2 GELU by tanh, 3 max(g, 0)^2
//   COLUMNS   0 gate, then up; 1 gate in even columns, up in odd ones; 2 gate alone
//   EXCHANGED 1: gate and up stand in each other's place
//
// One thread writes one element. Launch with a 1-D grid of as many threads.

#if !defined(FUNCTION) || !defined(COLUMNS) || !defined(EXCHANGED)
#error "a parameter is missing"
#endif

__device__ __forceinline__ float function(float g, float alpha) {
#if FUNCTION == 0
    return __fdiv_rn(g, __fadd_rn(1.0f, exp_f32(-__fmul_rn(alpha, g))));
#elif FUNCTION == 1
    const float root_half = __uint_as_float(0x3f3504f3u);
    return __fmul_rn(__fmul_rn(0.5f, g), __fadd_rn(1.0f, erf_f32(__fmul_rn(g, root_half))));
#elif FUNCTION == 2
    const float beta = 0.7978846f, kappa = 0.044715f;
    const float cube = __fmul_rn(__fmul_rn(g, g), g);
    const float inner = __fmul_rn(beta, __fmaf_rn(kappa, cube, g));
    return __fmul_rn(__fmul_rn(0.5f, g), __fadd_rn(1.0f, tanh_f32(inner)));
#else
    const float m = g > 0.0f || g != g ? g : 0.0f;
    return __fmul_rn(m, m);
#endif
}

__device__ __forceinline__ float at_most(float x, float limit) {
    return x > limit ? limit : x;
}

extern "C" __global__ void moe_activation(const unsigned short *__restrict__ gate_up,
                                          unsigned short *__restrict__ activated,
                                          unsigned long long elements,
                                          unsigned size_i,
                                          float alpha,
                                          float gate_limit,
                                          float value_limit,
                                          float up_limit,
                                          float up_shift) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    const unsigned long long row = at / size_i;
    const unsigned i = static_cast<unsigned>(at % size_i);
#if COLUMNS == 0
    const unsigned long long gate_at = row * 2 * size_i + i, up_at = gate_at + size_i;
#elif COLUMNS == 1
    const unsigned long long gate_at = 2 * at, up_at = gate_at + 1;
#else
    const unsigned long long gate_at = at, up_at = at;
#endif
    const float gate = widen(gate_up[EXCHANGED ? up_at : gate_at]);
    float value = at_most(function(at_most(gate, gate_limit), alpha), value_limit);
#if COLUMNS != 2
    float up = widen(gate_up[EXCHANGED ? gate_at : up_at]);
    up = up < -up_limit ? -up_limit : at_most(up, up_limit);
    value = __fmul_rn(value, up_shift == 0.0f ? up : __fadd_rn(up, up_shift));
#endif
    activated[at] = narrow(value);
}
