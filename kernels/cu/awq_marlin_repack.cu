// AWQ weights to Marlin's weight layout. Upstream operator: vLLM `awq_marlin_repack`.
//
//   qweight  uint32 [size_k, size_n / PACK]; a word holds PACK columns of one row, position p that
//            of column {0,2,4,6,1,3,5,7}[p] (4 bits) or {0,2,1,3}[p] (8 bits)
//   out      uint32 [size_k / 16, size_n * 16 / PACK]
//
// Parameters: BITS and IS_A_8BIT (marlin_tile.cuh).
// One thread writes one output word. Launch with a 1-D grid of as many threads.

#include "marlin_tile.cuh"

// Position of column c of a word: the inverse of the order above.
__device__ __forceinline__ unsigned awq_position(unsigned c) {
    return c % 2 * (PACK / 2) + c / 2;
}

extern "C" __global__ void awq_marlin_repack(const unsigned *__restrict__ qweight,
                                             unsigned *__restrict__ out,
                                             unsigned size_k,
                                             unsigned size_n) {
    const unsigned long long word =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (word >= static_cast<unsigned long long>(size_k / PACK) * size_n) {
        return;
    }
    const auto code = [&](unsigned k, unsigned n) {
        const unsigned source =
            qweight[static_cast<unsigned long long>(k) * (size_n / PACK) + n / PACK];
        return source >> (awq_position(n % PACK) * BITS) & MASK;
    };
    out[word] = marlin_word(static_cast<unsigned>(word), size_n, code);
}
