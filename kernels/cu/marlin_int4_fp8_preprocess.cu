// Int4 codes rewritten for fp8 activations: v >= z becomes v - z, else 15 - v.
// Upstream operator: vLLM `marlin_int4_fp8_preprocess`.
//
//   qweight, out  uint32 [rows, words]; eight codes to a word, in any order
//   qzeros        uint32 [rows / group_rows, words], in the same order (HAS_ZERO); else z is 8
//
// Parameter: HAS_ZERO, 0 or 1. One thread writes one word; 1-D grid.

extern "C" __global__ void marlin_int4_fp8_preprocess(const unsigned *__restrict__ qweight,
                                                      const unsigned *__restrict__ qzeros,
                                                      unsigned *__restrict__ out,
                                                      unsigned long long elements,
                                                      unsigned words,
                                                      unsigned group_rows) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    const unsigned zeros =
        HAS_ZERO ? qzeros[at / words / group_rows * words + at % words] : 0x88888888u;
    const unsigned codes = qweight[at];
    unsigned rewritten = 0;
    for (unsigned shift = 0; shift < 32; shift += 4) {
        const unsigned v = codes >> shift & 15u, z = zeros >> shift & 15u;
        rewritten |= (v >= z ? v - z : 15u - v) << shift;
    }
    out[at] = rewritten;
}
