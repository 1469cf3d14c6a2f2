// Activations to e4m3fn with one scale for each 128 k of a row. Upstream operator: vLLM `per_token_group_fp8_quant`.
//
//   x       16-bit [rows, size_k]; size_k a multiple of 128
//   q       e4m3fn [rows, size_k]
//   scales  f32 [size_k / 128, scale_step]: a row's scale is in its column; scale_step is at least the number of rows.
//           Of a group that is not all finite: NaN, with any codes
//   groups  rows * (size_k / 128)
//
// scale = max(max, 1e-10) / 448; q = x / scale, to nearest even, saturating.
// Parameters: IS_BF16 (half.cuh); IS_UE8M0 (0 or 1): scales are rounded up to powers of two.
// One warp works on one group. Launch with a thread for each four values.

#include "block_max.cuh"
#include "half.cuh"
#include "to_e4m3fn.cuh"

// The smallest power of two that is not below `scale`, from 2^-126 to 2^127.
__device__ __forceinline__ float ceil_to_power(float scale) {
    const unsigned bits = __float_as_uint(scale);
    const unsigned exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    return __uint_as_float(min(max(exponent, 1u), 254u) << 23);
}

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
    const uint2 words = x[at];
    float value[4], largest = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        value[i] = widen(static_cast<unsigned short>((i < 2 ? words.x : words.y) >> i % 2 * 16));
        largest = fmaxf(largest, finite_or_infinite(value[i]));
    }
#pragma unroll
    for (unsigned step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    float scale = __fdiv_rn(fmaxf(largest, 1e-10f), 448.0f);
    if constexpr (IS_UE8M0) {
        scale = ceil_to_power(fmaxf(scale, 1e-10f));
    }
    unsigned codes = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        codes |= static_cast<unsigned>(to_e4m3fn(__fdiv_rn(value[i], scale))) << 8 * i;
    }
    q[at] = codes;
    if (lane == 0) {
        const unsigned row_groups = size_k / 128;
        scales[static_cast<size_t>(group % row_groups) * scale_step + group / row_groups] = or_nan(scale, largest);
    }
}
