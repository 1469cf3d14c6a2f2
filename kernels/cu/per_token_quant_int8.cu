// Activations to int8 with one scale per row. Upstream function: vLLM `per_token_quant_int8`.
//
//   x       16-bit [rows, size_k]
//   q       int8 [rows, size_k]
//   scales  f32 [rows]; of a row that is not all finite: NaN, with any codes
//
// Parameters: IS_BF16 (half.cuh), and
//   IS_PRODUCT  0: scale = max * fl(1/127), q = x / scale, halves to even
//               1: scale = max / 127, q = x * (127 / max), halves away from zero
// where max is the row's largest magnitude, at least 1e-10.
//
// One block of whole warps works on one row. Launch with a grid of `rows` blocks.

#include "block_max.cuh"
#include "half.cuh"

extern "C" __global__ void per_token_quant_int8(const unsigned short *__restrict__ x,
                                                signed char *__restrict__ q,
                                                float *__restrict__ scales,
                                                unsigned size_k) {
    const unsigned long long row = static_cast<unsigned long long>(blockIdx.x) * size_k;
    float max = 0.0f;
    for (unsigned k = threadIdx.x; k < size_k; k += blockDim.x) {
        max = fmaxf(max, finite_or_infinite(widen(x[row + k])));
    }
    max = fmaxf(block_max(max), 1e-10f);
    const float scale = IS_PRODUCT ? __fdiv_rn(max, 127.0f) : __fmul_rn(max, 1.0f / 127.0f);
    [[maybe_unused]] const float factor = __fdiv_rn(127.0f, max);
    for (unsigned k = threadIdx.x; k < size_k; k += blockDim.x) {
        const float value = widen(x[row + k]);
        const float rounded =
            IS_PRODUCT ? roundf(__fmul_rn(value, factor)) : rintf(__fdiv_rn(value, scale));
        q[row + k] = static_cast<signed char>(fminf(fmaxf(rounded, -128.0f), 127.0f));
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = or_nan(scale, max);
    }
}
