#pragma once
// Programmatic dependent launch, from sm_90 on: a kernel launched so may start while the one before it
// on the stream still runs.
//
// The rule of all kernels here: each waits for the kernel before it, in every block, before it lets
// the next one start. So when a kernel starts, every kernel but the last before it is complete; until
// it has waited itself it may read what that last one does not write, and writes nothing.

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
