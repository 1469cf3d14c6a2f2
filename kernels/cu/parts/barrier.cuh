#pragma once
// Barriers in shared memory, from sm_90 on.

// A barrier in shared memory that opens when `arrivals` threads have arrived. It then starts over, and its phase
// changes between 0 and 1.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers are ready for the copy engine and for the cluster.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores of that scope in a phase are visible after the phase.
#define WAIT_FOR_PHASE(SCOPE)                                                \
    "{\n"                                                                    \
    ".reg .pred over;\n"                                                     \
    "again:\n"                                                               \
    "mbarrier.try_wait.parity.acquire." SCOPE ".shared::cta.b64 over, [%0], %1;\n" \
    "@!over bra again;\n"                                                    \
    "}"

// Waits until the phase of that parity is over.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(WAIT_FOR_PHASE("cta")::"r"(barrier), "r"(parity) : "memory");
}

// Likewise, with stores of other blocks of the cluster visible.
__device__ __forceinline__ void barrier_wait_for_cluster(unsigned barrier, unsigned parity) {
    asm volatile(WAIT_FOR_PHASE("cluster")::"r"(barrier), "r"(parity) : "memory");
}

// Arrives, and extends the phase until `bytes` more have been copied.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
