// Rows in the order of a product's blocks: row i is made for entry sorted_token_ids[i], of row entry / top_k
// of x, or of row entry of gate_up by the activation. Rows of padding stay as they are.
//
//   from      16-bit x [size_m / top_k, size_k]; with ACTIVATES gate_up [size_m, width], whose width is
//             size_k (gate alone) or 2 * size_k
//   gathered  16-bit [room for num_tokens_post_padded, size_k]
//   sorted_token_ids, num_tokens_post_padded  of `moe_align_block_size`; size_m and above: padding
//
// Compile-time parameters: IS_BF16 (half.cuh), and ACTIVATES: 0 or 1.
// Launch: threads (x, y) of a block work on y rows; rows for all that there is room for. size_k is a multiple
// of 8.

#if !defined(ACTIVATES)
#error "ACTIVATES must be 0 or 1"
#endif

// Eight 16-bit values.
union Eight {
    uint4 all;
    unsigned short of[8];
};

extern "C" __global__ void moe_gather(const uint4 *__restrict__ from,
                                      uint4 *__restrict__ gathered,
                                      const int *__restrict__ sorted_token_ids,
                                      const int *__restrict__ num_tokens_post_padded,
                                      unsigned size_m,
                                      unsigned size_k,
#if ACTIVATES
                                      Activation activation
#else
                                      unsigned top_k
#endif
) {
    wait_for_last_kernel();
    const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= static_cast<unsigned>(__ldcg(num_tokens_post_padded))) {
        return;
    }
    const unsigned entry = static_cast<unsigned>(__ldcg(sorted_token_ids + row));
    if (entry >= size_m) {
        return;
    }
    const unsigned pieces = size_k / 8;
    uint4 *to = gathered + static_cast<size_t>(row) * pieces;
#if ACTIVATES
    const bool gate_alone = activation.columns == 2, halves = activation.columns == 0;
    const uint4 *of = from + static_cast<size_t>(entry) * (gate_alone ? pieces : 2 * pieces);
    for (unsigned i = threadIdx.x; i < pieces; i += blockDim.x) {
        Eight first, second, out;
        if (gate_alone) {
            first.all = __ldcg(of + i);
        } else {
            first.all = __ldcg(of + (halves ? i : 2 * i));
            second.all = __ldcg(of + (halves ? pieces + i : 2 * i + 1));
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float value;
            if (gate_alone) {
                value = activate(activation, activation.function, widen(first.of[j]));
            } else if (halves) {
                value = activate(activation, activation.function, widen(first.of[j]),
                                 widen(second.of[j]));
            } else {
                const unsigned short *pair = j < 4 ? first.of + 2 * j : second.of + 2 * (j - 4);
                value = activate(activation, activation.function, widen(pair[0]), widen(pair[1]));
            }
            out.of[j] = narrow(value);
        }
        to[i] = out.all;
    }
#else
    const uint4 *of = from + static_cast<size_t>(entry / top_k) * pieces;
    for (unsigned i = threadIdx.x; i < pieces; i += blockDim.x) {
        to[i] = __ldcg(of + i);
    }
#endif
}
