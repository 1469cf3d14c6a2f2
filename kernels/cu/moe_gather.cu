// Rows in the order of a product's blocks: the row made for entry t is row place_of[t]. Without ACTIVATES it is
// row t / top_k of x; with it what the activation makes of the row of gate_up in the same place. Rows of padding
// stay as they are. Without ACTIVATES router weights are gathered beside the rows.
//
//   x         16-bit [entries / top_k, size_k]; written by none but older kernels than the last one
//   gate_up   16-bit [places, width], whose width is size_k (gate alone) or 2 * size_k
//   gathered  16-bit [places, size_k]
//   place_of  int32 [entries] of `moe_align_block_size`; negative: the entry has no row
//   topk_weights  f32 [entries]
//   row_weights   f32 [places]
//
// Compile-time parameters: IS_BF16 (half.cuh), and ACTIVATES: 0 or 1.
// size_k is a multiple of 8; a piece is eight values.

#if !defined(ACTIVATES)
#error "ACTIVATES must be 0 or 1"
#endif

#if ACTIVATES

// A thread makes a piece. Launch: threads (x, y) of a block for pieces (x) of entries (y), a grid (blocks of
// entries, blocks of pieces).
extern "C" __global__ void moe_gather(const uint4 *__restrict__ gate_up,
                                      uint4 *__restrict__ gathered,
                                      const int *__restrict__ place_of,
                                      unsigned entries,
                                      unsigned size_k,
                                      Activation activation) {
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned entry = blockIdx.x * blockDim.y + threadIdx.y;
    const unsigned pieces = size_k / 8, piece = blockIdx.y * blockDim.x + threadIdx.x;
    if (entry >= entries || piece >= pieces) {
        return;
    }
    const int place = __ldcg(place_of + entry);
    if (place >= 0) {
        gathered[static_cast<size_t>(place) * pieces + piece] =
            activate_piece(activation, gate_up, place, pieces, piece);
    }
}

#else

#define ITEMS 4  // pieces of a thread

// A thread copies up to ITEMS pieces of one row of x to all of its places. Launch: a grid (rows of x, blocks for
// the pieces), of whole warps.
extern "C" __global__ void moe_gather(const uint4 *__restrict__ x,
                                      uint4 *__restrict__ gathered,
                                      const int *__restrict__ place_of,
                                      const float *__restrict__ topk_weights,
                                      float *__restrict__ row_weights,
                                      unsigned size_k,
                                      unsigned top_k) {
    const unsigned pieces = size_k / 8, lane = threadIdx.x % 32;
    const unsigned first = blockIdx.y * blockDim.x * ITEMS + threadIdx.x;
    const size_t row = blockIdx.x;
    // Before it waits: the last kernel is the alignment, which writes no x.
    uint4 piece[ITEMS];
#pragma unroll
    for (unsigned i = 0; i < ITEMS; ++i) {
        const unsigned at = first + i * blockDim.x;
        if (at < pieces) {
            piece[i] = __ldcg(x + row * pieces + at);
        }
    }
    wait_for_last_kernel();
    let_next_kernel_start();
    for (unsigned slots = 0; slots < top_k; slots += 32) {
        const unsigned count = min(top_k - slots, 32);
        const size_t entry = row * top_k + slots + lane;
        const int of_lane = lane < count ? __ldcg(place_of + entry) : -1;
        if (blockIdx.y == 0 && threadIdx.x < 32 && of_lane >= 0) {
            row_weights[of_lane] = __ldcg(topk_weights + entry);
        }
        for (unsigned slot = 0; slot < count; ++slot) {
            const int place = __shfl_sync(~0u, of_lane, slot);
            if (place < 0) {
                continue;
            }
            uint4 *to = gathered + static_cast<size_t>(place) * pieces;
#pragma unroll
            for (unsigned i = 0; i < ITEMS; ++i) {
                const unsigned at = first + i * blockDim.x;
                if (at < pieces) {
                    to[at] = piece[i];
                }
            }
        }
    }
}

#endif
