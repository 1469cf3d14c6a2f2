#pragma once
// The largest of all threads' values, in any order; for blocks of whole warps.

__device__ __forceinline__ float warp_max(float value) {
    for (unsigned step = 16; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

__device__ __forceinline__ float block_max(float value) {
    __shared__ float of_warp[32];
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = of_warp[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
        value = fmaxf(value, of_warp[warp]);
    }
    __syncthreads();
    return value;
}

// A magnitude for `fmaxf`, which ignores a NaN.
__device__ __forceinline__ float finite_or_infinite(float value) {
    const float infinity = __uint_as_float(0x7F800000u);
    return fabsf(value) < infinity ? fabsf(value) : infinity;
}

// `value`, or NaN where the largest magnitude is infinite.
__device__ __forceinline__ float or_nan(float value, float largest) {
    return largest < __uint_as_float(0x7F800000u) ? value : __uint_as_float(0x7FFFFFFFu);
}
