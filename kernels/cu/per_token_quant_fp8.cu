// Activations to e4m3fn with one scale per row. Upstream operator: vLLM
// `dynamic_per_token_scaled_fp8_quant`.
//
//   x       16-bit [rows, size_k]
//   q       e4m3fn [rows, size_k]
//   scales  f32 [rows]; of a row that is not all finite: NaN, with any codes
//   upper   bound of the largest magnitude that the scale counts; infinity: none
//
// scale = max(min(max, upper) / 448, 1 / (448 * 512)); q = x / scale, to nearest even, saturating.
// Parameter: IS_BF16 (half.cuh).
// One block of whole warps works on one row. Launch with a grid of `rows` blocks.

#include "block_max.cuh"
#include "half.cuh"

// In integer arithmetic: the instruction exists only from sm_89 on.
__device__ __forceinline__ unsigned char to_e4m3fn(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    unsigned code;
    if (magnitude < 0x3c800000u) {
        // Below 2^-6: multiples of 2^-9. The product is exact; 8 of them are the least normal number.
        code = static_cast<unsigned>(rintf(__fmul_rn(__uint_as_float(magnitude), 512.0f)));
    } else {
        // Adds half a unit of the last place kept, less one where that place is even; then the exponent's bias.
        const unsigned rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
        code = min((rounded >> 20) - (120u << 3), 0x7eu);
    }
    return static_cast<unsigned char>(sign | code);
}

extern "C" __global__ void per_token_quant_fp8(const unsigned short *__restrict__ x,
                                               unsigned char *__restrict__ q,
                                               float *__restrict__ scales,
                                               unsigned size_k,
                                               float upper) {
    const unsigned long long row = static_cast<unsigned long long>(blockIdx.x) * size_k;
    float max = 0.0f;
    for (unsigned k = threadIdx.x; k < size_k; k += blockDim.x) {
        max = fmaxf(max, finite_or_infinite(widen(x[row + k])));
    }
    const float largest = block_max(max);
    max = fminf(largest, upper);
    const float scale = fmaxf(__fdiv_rn(max, 448.0f), 1.0f / (448.0f * 512.0f));
    for (unsigned k = threadIdx.x; k < size_k; k += blockDim.x) {
        q[row + k] = to_e4m3fn(__fdiv_rn(widen(x[row + k]), scale));
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = or_nan(scale, largest);
    }
}
