// One call of a KleidiAI micro-kernel on packed buffers of zeros: the executed instructions depend
// only on the shape.
//
// KERNEL: the function; GROUP: defined if it takes a group size. Arguments: M N K group.
#include <float.h>
#include <stddef.h>
#include <stdlib.h>

#ifdef GROUP
void KERNEL(size_t m, size_t n, size_t k, size_t bl, const void *lhs, const void *rhs, float *dst,
            size_t stride_row, size_t stride_col, float min, float max);
#else
void KERNEL(size_t m, size_t n, size_t k, const void *lhs, const void *rhs, float *dst,
            size_t stride_row, size_t stride_col, float min, float max);
#endif

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    size_t m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]);
    // An upper bound of the packed sizes: a byte for each activation and half of one for each weight,
    // scales, sums and biases.
    void *lhs = calloc((m + 16) * (k + 64), 1), *rhs = calloc((n + 16) * (k + 64), 1);
    float *dst = calloc((m + 16) * (n + 16), sizeof *dst);
    if (!lhs || !rhs || !dst) return 1;
#ifdef GROUP
    KERNEL(m, n, k, atoi(argv[4]), lhs, rhs, dst, n * sizeof *dst, sizeof *dst, -FLT_MAX, FLT_MAX);
#else
    KERNEL(m, n, k, lhs, rhs, dst, n * sizeof *dst, sizeof *dst, -FLT_MAX, FLT_MAX);
#endif
    return 0;
}
