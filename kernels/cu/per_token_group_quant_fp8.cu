// Activations to e4m3fn with one scale for each 128 k of a row. Upstream operator: vLLM `per_token_group_fp8_quant`.
//
//   x       16-bit [rows, size_k]; size_k a multiple of 128
//   q       e4m3fn [rows, size_k]
//   scales  f32 [size_k / 128, scale_step]: a row's scale is in its column; scale_step is at least the number of rows.
//   groups  rows * (size_k / 128)
//
// Parameters: IS_BF16 (half.cuh); IS_UE8M0 (fp8_groups.cuh).
// One warp works on one group. Launch with a thread for each four values.

#include "fp8_groups.cuh"

extern "C" __global__ void per_token_group_quant_fp8(const uint2 *__restrict__ x,
                                                     unsigned *__restrict__ q,
                                                     float *__restrict__ scales,
                                                     unsigned groups,
                                                     unsigned size_k,
                                                     unsigned scale_step) {
    const unsigned group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (group >= groups) {
        return;
    }
    const size_t at = static_cast<size_t>(group) * 32 + lane;
    const uint2 four = x[at];
    const unsigned words[2] = {four.x, four.y};
    unsigned codes[1];
    const float scale = quantize_group(words, codes);
    q[at] = codes[0];
    if (lane == 0) {
        const unsigned row_groups = size_k / FP8_GROUP;
        scales[static_cast<size_t>(group % row_groups) * scale_step + group / row_groups] = scale;
    }
}
