// Columns of scales, or of a bias, in Marlin's order. Upstream function: vLLM `marlin_permute_scales`.
//
//   scales, out  16-bit [rows, size_n]; size_n a multiple of 64
//
// Parameter:
//   IS_SINGLE  0: of each 64 columns, position p takes column (p % 8) * 8 + p / 8
//              1: of each 32 columns, position 8i + t takes 2i + {0, 1, 8, 9, 16, 17, 24, 25}[t]
//
// One thread writes one element. Launch with a 1-D grid of as many threads.

extern "C" __global__ void marlin_permute_scales(const unsigned short *__restrict__ scales,
                                                 unsigned short *__restrict__ out,
                                                 unsigned long long elements) {
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    // Rows are whole runs, so that a run begins at a multiple of its length.
    const unsigned p = static_cast<unsigned>(at % (IS_SINGLE ? 32 : 64));
    const unsigned column =
        IS_SINGLE ? p / 8 * 2 + p % 2 + p % 8 / 2 * 8 : p % 8 * 8 + p / 8;
    out[at] = scales[at - p + column];
}
