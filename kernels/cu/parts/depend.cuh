#pragma once
// Programmatic dependent launch, from sm_90 on: a kernel may start while the previous one on the stream still runs.
//
// The rule for all kernels: every block waits for the previous kernel before it lets the next one start. So when a
// kernel starts, all earlier kernels except the previous one are complete. Until it has waited, it writes nothing,
// and reads only what the previous kernel does not write.

__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Fetches the lines of an array to the L2 cache, by all threads of a block.
__device__ __forceinline__ void prefetch_to_l2(const int *from, unsigned count) {
    for (unsigned i = threadIdx.x * 32; i < count; i += blockDim.x * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
    }
}
