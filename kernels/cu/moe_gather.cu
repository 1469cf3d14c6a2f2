// Rows of x in the order of a product's blocks: gathered[i] = x[sorted_token_ids[i] / top_k]. Rows of
// padding stay as they are.
//
//   x         16-bit [size_m / top_k, size_k]
//   gathered  16-bit [room for num_tokens_post_padded, size_k]
//   sorted_token_ids, num_tokens_post_padded  of `moe_align_block_size`; size_m and above: padding
//
// Launch: any number of threads. size_k is a multiple of 8.

extern "C" __global__ void moe_gather(const uint4 *__restrict__ x,
                                      uint4 *__restrict__ gathered,
                                      const int *__restrict__ sorted_token_ids,
                                      const int *__restrict__ num_tokens_post_padded,
                                      unsigned size_m,
                                      unsigned size_k,
                                      unsigned top_k) {
    wait_for_last_kernel();
    const unsigned pieces = size_k / 8;
    const size_t all = static_cast<size_t>(__ldcg(num_tokens_post_padded)) * pieces;
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
        const size_t row = i / pieces;
        const unsigned entry = static_cast<unsigned>(__ldcg(sorted_token_ids + row));
        if (entry < size_m) {
            gathered[i] = __ldcg(x + static_cast<size_t>(entry / top_k) * pieces + i % pieces);
        }
    }
}
