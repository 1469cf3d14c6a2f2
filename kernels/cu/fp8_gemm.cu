// y[M, N] = x[M, K] * W[N, K] with both operands e4m3fn, by Hopper's warpgroup instructions. Upstream operators:
// vLLM `cutlass_scaled_mm`, `cutlass_moe_mm`; DeepGEMM `fp8_gemm_nt`. For sm_90a alone.
//
// A thread block computes tiles of `tile_n` columns x ROWS rows, one after another. A producer thread keeps a ring of
// `stages` stages of 128 k filled. Warpgroups of consumers multiply them, both operands in shared memory. The sum over a
// stage is one chain of four instructions from zero. It joins the total in f32, k ascending: by an addition (scales of
// channels and tokens follow the last one), or with HAS_BLOCKS by total = fma(sum, rn(x scale * w scale), total).
// Without IS_PROMOTED the instructions of all stages are one chain, whose sum is the total. Either order depends on
// nothing but K.
//
//   w_map       W [experts * N, K]; boxes of 128 k x tile_n columns of y, 128-byte swizzle
//   x_map       x [rows, K]; boxes of 128 k x ROWS rows, 128-byte swizzle. With IS_MOE the rows are those of the blocks
//               of ROWS entries (gathered), padding included
//   half_map    with 128 ROWS: likewise, boxes of 64 rows
//   y_map       y; boxes of 64 columns x ROWS rows, with 128 ROWS 64 rows, 128-byte swizzle
//   w_scales    f32 [experts, N]; with HAS_BLOCKS [experts, N / 128, K / 128], both rounded up
//   x_scales    f32 [rows], or one for all rows where x_scale_step is 0; with HAS_BLOCKS [K / 128, x_scale_step],
//               x_scale_step a multiple of 4 and at least the number of rows
//   bias        16-bit [experts, N]; null: none
//   y           16-bit [rows, N]; with IS_MOE rows of padding hold anything
//   raster      blocks of rows whose tiles are computed concurrently, so that the parts of W and x that they read stay
//               in the L2 cache
//   block_rows  int32, rows of each block that have entries (IS_MOE only)
//   row_weights  f32, one for each row of y, which multiplies it (IS_MOE only); null: none
//
// Parameters, all required:
//   IS_BF16     half.cuh
//   HAS_BLOCKS  0 or 1: scales for 128 x 128 of W and 1 x 128 of x, else of columns and rows
//   IS_PROMOTED 0 or 1: sums join a total in f32 after each 128 k; 1 with HAS_BLOCKS
//   IS_MOE      0 or 1: experts
//   ROWS        8, 16, 32, 48 or 64; 128, with 8 WARPS
//   WARPS       4, 8 or 16 warps of consumers
//   IS_WIDE     0 or 1: tiles of 256 columns instead of 128, with 128 ROWS only
//
// Launch: thread blocks of THREADS threads; dynamic shared memory of stages * (tile_n * 128 + STAGE_BYTES) + END_BYTES
// bytes (fp8_gemm_sizes.cuh). K is a multiple of 16, N of 8, tile_n of 16 and at most 16 WARPS, or with 128 ROWS what
// IS_WIDE says.

#include "fp8_gemm_few.cuh"
#include "fp8_gemm_many.cuh"

// Registers of a thread: consumers claim those that producers release. Together they are those of the launch: more
// would never be granted.
constexpr int PRODUCER_REGISTERS = WARPS <= 8 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = RESIDENT == 2 ? 96 : WARPS <= 8 ? 232 : 112;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    fp8_gemm(const __grid_constant__ TensorMap w_map,
        const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap half_map,
        const __grid_constant__ TensorMap y_map,
        const float *__restrict__ w_scales,
        const float *__restrict__ x_scales,
        const unsigned short *__restrict__ bias,
        unsigned short *__restrict__ y,
        unsigned size_m,
        unsigned size_n,
        unsigned size_k,
        unsigned x_scale_step,
        unsigned tile_n,
        unsigned stages,
        unsigned raster,
        // With experts:
        const int *__restrict__ expert_ids,
        const int *__restrict__ num_tokens_post_padded,
        const int *__restrict__ block_rows,
        const float *__restrict__ row_weights) {
    const Product p = {w_scales, x_scales,     bias,   y,      size_m, size_n,     size_k,
                       x_scale_step, tile_n, stages, raster, expert_ids, num_tokens_post_padded,
                       block_rows, row_weights};
    extern __shared__ __align__(1024) unsigned char pointer[];
    const Memory memory(p, shared_address(pointer));
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            prefetch_map(w_map);
            prefetch_map(x_map);
        }
        for (unsigned slot = threadIdx.x; slot < stages; slot += 32) {
            barrier_init(memory.start + memory.full_at + slot * 8, 1);
            barrier_init(memory.start + memory.empty_at + slot * 8, WARPS);
        }
        fence_barrier_init();
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCERS) {
        if constexpr (WARPS > 4) {
            release_registers<PRODUCER_REGISTERS>();
        }
        if (threadIdx.x == 0) {
            produce(p, w_map, x_map, half_map, memory);
        }
    } else {
        if constexpr (WARPS > 4) {
            claim_registers<CONSUMER_REGISTERS>();
        }
        wait_for_last_kernel();
        let_next_kernel_start();
        if constexpr (HAS_MANY_ROWS) {
            many::consume(p, y_map, memory, pointer);
        } else {
            few::consume(p, y_map, memory, pointer);
        }
    }
}
