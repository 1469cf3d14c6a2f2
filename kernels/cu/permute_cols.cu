// Columns of the activations in the order of an act-order weight. Upstream operator: vLLM
// `permute_cols`.
//
//   x, out  16-bit [rows, size_k]
//   perm    uint32 [size_k]: out[m, k] = x[m, perm[k]]
//
// One thread writes one element. Launch with a 1-D grid of as many threads.

extern "C" __global__ void permute_cols(const unsigned short *__restrict__ x,
                                        const unsigned *__restrict__ perm,
                                        unsigned short *__restrict__ out,
                                        unsigned long long elements,
                                        unsigned size_k) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < elements) {
        const unsigned long long k = at % size_k;
        out[at] = x[at - k + perm[k]];
    }
}
