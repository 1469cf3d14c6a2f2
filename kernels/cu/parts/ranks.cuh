#pragma once
// Memory that tensor-parallel ranks share, and their barrier. A rank reads and writes the memory of all others by plain
// addresses: of peers in one process, or mapped from other processes.

// Ranks at most, and thread blocks and threads of a block at most of a kernel that waits for other ranks. All run at once
// on every device.
constexpr unsigned MOST_RANKS = 8, RANK_BLOCKS = 64, RANK_THREADS = 512;

struct Ranks {
    float *parts[MOST_RANKS];              // [2, capacity]: sums of this call and of the one before
    unsigned short *outputs[MOST_RANKS];   // [capacity]
    unsigned *flags[MOST_RANKS];           // [2, RANK_BLOCKS, MOST_RANKS]: the last call that a rank came to
    unsigned *calls;                       // [RANK_BLOCKS], of this rank: calls so far
    unsigned *status;                      // of this rank: 0, or what went wrong: see below
    unsigned rank, turn;                   // turn: the call's number modulo 2
};

// Bit r: rank r did not come in time. Further:
constexpr unsigned ODD_CALLS = 1u << MOST_RANKS;  // the call had the other turn: an odd number was recorded

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Counts a call. False after an error, and where the call's turn is not the one that was launched.
__device__ __forceinline__ bool begin_call(const Ranks &p, unsigned &call) {
    // Both reads are in flight at once.
    const unsigned status = *static_cast<volatile unsigned *>(p.status);
    call = *static_cast<volatile unsigned *>(p.calls + blockIdx.x) + 1;
    // After an error the ranks no longer count alike.
    if (__syncthreads_or(status != 0)) {
        return false;
    }
    if (threadIdx.x == 0) {
        p.calls[blockIdx.x] = call;
        if (call % 2 != p.turn) {
            atomicOr(p.status, ODD_CALLS);
        }
    }
    return call % 2 == p.turn;
}

// Waits until the thread blocks of this index on all ranks have come to `stage` (0 or 1) of call `call`; what their
// threads, and kernels before theirs, have written is visible then. False if a rank does not come in time.
__device__ __forceinline__ bool wait_for_ranks(const Ranks &p, unsigned stage, unsigned call, unsigned limit_ms) {
    __syncthreads();
    bool is_here = true;
    if (threadIdx.x < RANKS) {
        const unsigned other = threadIdx.x, at = (stage * RANK_BLOCKS + blockIdx.x) * MOST_RANKS;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.flags[other] + at + p.rank), "r"(call)
                     : "memory");
        const unsigned long long begin = nanoseconds();
        for (;;) {
            unsigned seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(p.flags[p.rank] + at + other)
                         : "memory");
            if (static_cast<int>(seen - call) >= 0) {
                break;
            }
            if (nanoseconds() - begin > limit_ms * 1000000ull) {
                atomicOr(p.status, 1u << other);
                is_here = false;
                break;
            }
        }
    }
    return __syncthreads_and(is_here);
}
