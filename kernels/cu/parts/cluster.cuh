// Thread blocks of one cluster, from sm_90 on. Barriers are for all threads, together or not.

// What this thread did before is seen by whoever waits for this arrival.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
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

__device__ __forceinline__ void store_to_rank(unsigned mapped, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(mapped), "f"(value) : "memory");
}
