// Measures the bytes per second that a device reads: each word of a buffer larger than its caches, once.
//
//   words   uint4 [count], count a multiple of 8 * gridDim.x * blockDim.x
//   result  uint32 [gridDim.x * blockDim.x]: the exclusive or of the words that a thread has read
//
// Parameter:
//   FILL  0: read; 1: fill the buffer with a hash of each word's place
//
// A thread keeps several independent loads of 16 bytes in flight.

__device__ __forceinline__ unsigned hash(unsigned long long at) {
    unsigned h = static_cast<unsigned>(at) * 2654435761u + static_cast<unsigned>(at >> 32);
    h ^= h >> 15;
    h *= 2246822519u;
    return h ^ h >> 13;
}

extern "C" __global__ void __launch_bounds__(256)
    read_limit(uint4 *__restrict__ words, unsigned *__restrict__ result, unsigned long long count) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned all = 0;
    for (unsigned long long at = thread; at < count; at += 8 * step) {
        if constexpr (FILL) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const unsigned long long first = 4 * (at + i * step);
                words[at + i * step] =
                    make_uint4(hash(first), hash(first + 1), hash(first + 2), hash(first + 3));
            }
        } else {
            uint4 read[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint4 *from = words + at + i * step;
                asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(read[i].x), "=r"(read[i].y), "=r"(read[i].z), "=r"(read[i].w)
                             : "l"(from));
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                all ^= read[i].x ^ read[i].y ^ read[i].z ^ read[i].w;
            }
        }
    }
    result[thread] = all;
}
