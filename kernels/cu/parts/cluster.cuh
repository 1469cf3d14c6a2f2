#pragma once
// Thread blocks of one cluster, from sm_90 on. All threads of a cluster take part in its barriers.

// Writes before the arrival are visible to threads that wait for it.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Orders only the arrival and the barriers initialized before `fence_barrier_init`.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address that shared memory at `address` has in block `rank` of the cluster.
__device__ __forceinline__ unsigned of_rank(unsigned address, unsigned rank) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Stores at an address from `of_rank`.
__device__ __forceinline__ float2 load_from_rank(unsigned mapped) {
    float2 value;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y) : "r"(mapped) : "memory");
    return value;
}

// Stores to shared memory of a block of the cluster. A barrier of that block, which must `barrier_expect` the bytes,
// counts them when they have arrived. Both addresses come from `of_rank`.
__device__ __forceinline__ void store_to_rank(unsigned mapped, float value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     mapped),
                 "f"(value), "r"(barrier)
                 : "memory");
}

// The value of block `rank` at the place that `here` has in this block.
__device__ __forceinline__ unsigned load_from_rank(const unsigned *here, unsigned rank) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(here));
    unsigned value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(of_rank(address, rank)) : "memory");
    return value;
}
