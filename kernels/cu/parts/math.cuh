#pragma once
// Transcendental functions as sequences of IEEE operations, each rounded to nearest even: the bits of
// the reference's `moe::math`, where each sequence is derived and its error stated.

// Horner's rule over coefficients given as bits, highest power first.
template <int COUNT>
__device__ __forceinline__ float horner(const unsigned (&coefficients)[COUNT], float x) {
    float p = __uint_as_float(coefficients[0]);
#pragma unroll
    for (int i = 1; i < COUNT; ++i) {
        p = __fmaf_rn(p, x, __uint_as_float(coefficients[i]));
    }
    return p;
}

// e^x.
__device__ __forceinline__ float exp_f32(float x) {
    // 1/7!, 1/6!, ..., 1/0!.
    const unsigned series[8] = {0x39500d01u, 0x3ab60b61u, 0x3c088889u, 0x3d2aaaabu,
                                0x3e2aaaabu, 0x3f000000u, 0x3f800000u, 0x3f800000u};
    if (x > 89.0f) {
        return __uint_as_float(0x7f800000u);
    }
    if (x < -104.0f) {
        return 0.0f;
    }
    if (x != x) {
        return x;
    }
    const float n = rintf(__fmul_rn(x, __uint_as_float(0x3fb8aa3bu)));  // log2(e)
    float r = __fmaf_rn(-n, __uint_as_float(0x3f317000u), x);           // ln 2, high part
    r = __fmaf_rn(-n, __uint_as_float(0x3805fdf4u), r);                 // and low
    const float p = horner(series, r);
    const int whole = static_cast<int>(n), first = whole >> 1;
    const float low = __uint_as_float(static_cast<unsigned>(first + 127) << 23);
    const float high = __uint_as_float(static_cast<unsigned>(whole - first + 127) << 23);
    return __fmul_rn(__fmul_rn(p, low), high);
}

__device__ __forceinline__ float sigmoid_f32(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_f32(-x)));
}

__device__ __forceinline__ float tanh_f32(float x) {
    const unsigned coefficients[6] = {0x3af51453u, 0xbc009abcu, 0x3cb09390u,
                                      0xbd5cd88cu, 0x3e088788u, 0xbeaaaaa7u};
    const float a = fabsf(x);
    float magnitude;
    if (a < 0.7f) {
        const float s = __fmul_rn(a, a);
        magnitude = __fmaf_rn(__fmul_rn(horner(coefficients, s), s), a, a);
    } else {
        const float e = exp_f32(__fadd_rn(a, a));
        magnitude = __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(e, 1.0f)));
    }
    return copysignf(magnitude, x);
}

__device__ __forceinline__ float erf_f32(float x) {
    const unsigned near_zero[7] = {0x38b71955u, 0xba579101u, 0x3baaa5a9u, 0xbcdc0d9bu,
                                   0x3de7174bu, 0xbec093a3u, 0x3e0375d4u};
    // ln(erfc x), each with the sign that it has in the polynomial.
    const unsigned far[9] = {0xb5a259f6u, 0xb6a21ec0u, 0x39b2b3e5u, 0xbb7d9a8fu, 0x3cc8ea28u,
                             0xbddc418du, 0xbf22475eu, 0xbf908c3eu, 0x390a5602u};
    float a = fabsf(x), magnitude;
    if (a < 0.87f) {
        magnitude = __fmaf_rn(horner(near_zero, __fmul_rn(a, a)), a, a);
    } else {
        a = a > 4.0f ? 4.0f : a;  // not fminf, which would swallow a NaN
        magnitude = __fsub_rn(1.0f, exp_f32(horner(far, a)));
    }
    return copysignf(magnitude, x);
}
