// y[M, N] = x[M, K] * W[K, N] with e4m3fn activations and 4-bit weights in Marlin's layout for them, by Hopper's
// warpgroup instructions: `Schedule::canonical_wgmma` of the reference. For sm_90a alone.
//
// A thread block computes tiles of `tile_n` columns x ROWS rows, one after another. Producers keep a ring of `stages`
// stages of 128 k filled. Warpgroups of consumers take 64 columns each: 4-bit codes become e4m3 in registers, the 64-row
// side of wgmma; rows of x are its other side, read from shared memory. A part is one chain of instructions from zero over
// a group of k, or over 128 k where all of k is one group. It joins the total in f32, k ascending: total = fma(part, scale
// of the group, total), or with one group total = total + part, and the column's scale follows the last part. Then the
// row's scale and the bias in one multiply-add, the router weight, one rounding. This order depends on nothing but K and
// the groups.
//
//   x_map       x [rows, K]; boxes of 128 k x ROWS rows, 128-byte swizzle. With IS_MOE the rows are those of the blocks
//               of ROWS entries (gathered), padding included
//   y_map       y; boxes of 64 columns x ROWS rows, 128-byte swizzle
//   qweight, scales, zeros, bias  as in marlin_gemm_a8.cu for e4m3 activations
//   x_scales    f32 [rows]
//   y           16-bit [rows, N]; with IS_MOE rows of padding hold anything
//   raster      blocks of rows whose tiles are computed concurrently, so that the parts of W and x that they read stay
//               in the L2 cache
//   block_rows  int32, rows of each block that have entries, for at most 32 ROWS: others are not written (IS_MOE only)
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//   is_early    1: the kernel before this one on the stream did not write the blocks (IS_MOE only)
//   gate_up, activation  with ACTIVATES, instead of x and its scales: 16-bit rows of the activation's width, of which row r
//               becomes row r of x (moe_gather.cu). Blocks and router weights were not written by the kernel before this one
//   few         where that kernel makes the blocks: what it makes them of, if that is little (few_entries.cuh; IS_MOE only)
//
// Parameters, all required:
//   IS_BF16, CODES, GROUPS, IS_MOE  as in marlin_gemm_a8.cu
//   ROWS        8, 16, 32 or 64; 128, 192 or 256 with 8 WARPS
//   WARPS       8 or 16 warps of consumers
//   ACTIVATES   0; with experts, few rows, one part in a stage and K up to MOST_K 1: rows of x are made of gate_up
//   SPLITS      1; with 16 WARPS 4 or 8: four warpgroups share 64 or 32 columns and compute different stages
//
// Launch: thread blocks of THREADS threads; dynamic shared memory of stages * STAGE_BYTES + END_BYTES bytes
// (a8_wgmma_sizes.cuh), at least LEAST_STAGES and a multiple of STAGE_MULTIPLE. K is a multiple of 128, N of 64, tile_n of
// 32 and at most N_TILE.

#include "a8_wgmma_columns.cuh"
#include "a8_wgmma_few.cuh"
#include "a8_wgmma_shared.cuh"

// Registers of a thread: consumers claim those that producers and promoters release. Together they are those of the launch:
// more would never be granted.
constexpr int PRODUCER_REGISTERS = WARPS <= 8 ? 24 : IS_SHARED ? 40 : 32;
constexpr int CONSUMER_REGISTERS = RESIDENT == 2 ? 104 : WARPS <= 8 ? 240 : IS_SHARED ? 96 : 112;
constexpr int PROMOTER_REGISTERS = 56;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    marlin_gemm_a8_wgmma(const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap y_map,
        const unsigned char *__restrict__ qweight,
        const unsigned char *__restrict__ scales,
        const unsigned *__restrict__ zeros,
        const unsigned short *__restrict__ bias,
        const float *__restrict__ x_scales,
        unsigned short *__restrict__ y,
        unsigned size_m,
        unsigned size_n,
        unsigned size_k,
        unsigned tile_n,
        unsigned stages,
        unsigned raster,
        // With experts:
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const int *__restrict__ block_rows,
        const float *__restrict__ row_weights,
        unsigned is_early,
        const FewEntries few,
        // With ACTIVATES:
        const uint4 *__restrict__ gate_up,
        const Activation activation) {
    const Product p = {qweight, scales, zeros,  bias,   x_scales,   y,
                       size_m,  size_n, size_k, tile_n, stages,     raster,
                       expert_ids, num_tokens_post_padded, block_rows, row_weights, is_early};
    extern __shared__ __align__(1024) unsigned char pointer[];
    const Memory memory(p, shared_address(pointer));
    if (threadIdx.x == 0) {
        for (unsigned slot = 0; slot < stages; ++slot) {
            barrier_init(memory.start + memory.full_at + slot * 8, 1);
            barrier_init(memory.start + memory.empty_at + slot * 8, IS_SHARED ? 4 : WARPS);
        }
        if constexpr (IS_SHARED) {
            PartSlots(memory, pointer).init();
        }
        fence_barrier_init();
    }
    FilledTile *const found = reinterpret_cast<FilledTile *>(pointer + memory.found_at);
    if (IS_MOE && few.entries > 0 && threadIdx.x / 32 == 1) {
        // Through shared memory: otherwise the compiler keeps the producers' addresses in each lane's registers.
        const FilledTile tile = tile_of_entries(p, few);
        if (threadIdx.x % 32 == 0) {
            *found = tile;
        }
    }
    __syncthreads();
    if (threadIdx.x < PRODUCERS) {
        release_registers<PRODUCER_REGISTERS>();
        const unsigned first = warp_of_block();
        if (threadIdx.x % 32 == 0) {
            produce(p, x_map, memory, first, IS_MOE && few.entries > 0 ? *found : FilledTile{{0, 0, -1}, 0});
        }
    } else if (IS_SHARED && threadIdx.x >= THREADS - PROMOTERS) {
        release_registers<PROMOTER_REGISTERS>();
        wait_for_last_kernel();
        promote_shared(p, memory, pointer);
    } else {
        claim_registers<CONSUMER_REGISTERS>();
        wait_for_last_kernel();
        let_next_kernel_start();
        if constexpr (IS_SHARED) {
            multiply_shared<ROWS>(p, memory, pointer);
        } else if constexpr (OVERLAPS) {
            consume_few<ROWS>(p, memory, pointer, {gate_up, activation});
        } else {
            consume(p, y_map, memory, pointer);
        }
    }
}
