// GPTQ weights to Marlin's weight layout: a pure permutation of b-bit values.
// Upstream operators: vLLM `gptq_marlin_repack`, and of a stack of experts `gptq_marlin_moe_repack`.
//
//   qweight  uint32 [E, size_k / PACK, size_n]; value i of a word sits in bits [i*BITS, (i+1)*BITS)
//            and the values of a word are consecutive rows k of one column n
//   perm     uint32 [E, size_k]; row k of the result is row perm[k] of the checkpoint (HAS_PERM)
//   out      uint32 [E, size_k / 16, size_n * 16 / PACK]
//
// Parameters: BITS and IS_A_8BIT (marlin_tile.cuh), and
//   HAS_PERM  0 or 1
//
// One thread writes one output word and reads the PACK words that hold its values; simple, and the
// write is coalesced. Launch with a grid [words / threads, E]; a matrix has fewer than 2^32 words.

#include "marlin_tile.cuh"

extern "C" __global__ void gptq_marlin_repack(const unsigned *__restrict__ qweight,
                                              const unsigned *__restrict__ perm,
                                              unsigned *__restrict__ out,
                                              unsigned size_k,
                                              unsigned size_n) {
    const unsigned long long word =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned long long words = static_cast<unsigned long long>(size_k / PACK) * size_n;
    if (word >= words) {
        return;
    }
    const unsigned *from = qweight + blockIdx.y * words;
    [[maybe_unused]] const unsigned *rows =
        HAS_PERM ? perm + static_cast<unsigned long long>(blockIdx.y) * size_k : nullptr;
    const auto code = [&](unsigned k, unsigned n) {
        if constexpr (HAS_PERM) {
            k = rows[k];
        }
        const unsigned source = from[static_cast<unsigned long long>(k / PACK) * size_n + n];
        return source >> (k % PACK * BITS) & MASK;
    };
    out[blockIdx.y * words + word] = marlin_word(static_cast<unsigned>(word), size_n, code);
}
