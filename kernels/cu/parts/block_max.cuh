// The largest of all threads' values, which no order changes; for blocks of whole warps.

__device__ __forceinline__ float block_max(float value) {
    __shared__ float of_warp[32];
    for (unsigned step = 16; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
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
