// The sum over a token's experts, canonically: f32 from the first slot to the last, one rounding.
// Upstream operator: vLLM `moe_sum`.
//
//   down  16-bit [rows, top_k, size_n]
//   y     16-bit [rows, size_n]
//
// Compile-time parameter: IS_BF16 (half.cuh). One thread writes one element; 1-D grid.

extern "C" __global__ void moe_sum(const unsigned short *__restrict__ down,
                                   unsigned short *__restrict__ y,
                                   unsigned long long elements,
                                   unsigned top_k,
                                   unsigned size_n) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    const unsigned short *slot = down + at / size_n * top_k * size_n + at % size_n;
    float sum = 0.0f;
    for (unsigned j = 0; j < top_k; ++j, slot += size_n) {
        sum = __fadd_rn(sum, widen(*slot));
    }
    y[at] = narrow(sum);
}
