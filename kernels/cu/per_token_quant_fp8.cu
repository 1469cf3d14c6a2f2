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
#include "to_e4m3fn.cuh"

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
