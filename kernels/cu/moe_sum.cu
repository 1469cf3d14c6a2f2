// The sum over a token's experts, canonically: f32 from the first slot to the last, one rounding.
// Upstream operator: vLLM `moe_sum`.
//
//   down  16-bit [rows, top_k, size_n]
//   y     16-bit [rows, size_n]
//
// With SLOTS OF_EXPERTS, slots without an expert of this rank do not count, so that they need not be cleared:
//   slots     int32 [rows, top_k]: topk_ids
//   expert_of int32 [num_experts]: -1 where an expert is not here; null: all are
// With SLOTS IN_BLOCKS, slots without a place do not count:
//   down      16-bit [places, size_n]
//   slots     int32 [rows, top_k]: place_of of `moe_align_block_size`: the row of a slot; negative: none
//
// Parameters: IS_BF16 (half.cuh); SLOTS; WIDTH: 1, or 8 where that divides size_n.
// One thread writes WIDTH elements. Launch with a grid (rows, blocks for size_n / WIDTH threads).

#include "depend.cuh"
#include "half.cuh"

enum SlotType : unsigned { ALL_SLOTS = 0, OF_EXPERTS = 1, IN_BLOCKS = 2 };

constexpr bool IS_WIDE = WIDTH == 8;
static_assert(IS_WIDE || WIDTH == 1, "WIDTH must be 1 or 8");
using Piece = Choose<IS_WIDE, uint4, unsigned short>::Type;

// A piece and its elements.
union Elements {
    Piece all;
    unsigned short values[WIDTH];
};

extern "C" __global__ void moe_sum(const Piece *__restrict__ down,
                                   Piece *__restrict__ y,
                                   unsigned top_k,
                                   unsigned size_n,
                                   const int *__restrict__ slots,
                                   const int *__restrict__ expert_of,
                                   unsigned num_experts) {
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned row = blockIdx.x, pieces = size_n / WIDTH;
    const unsigned piece = blockIdx.y * blockDim.x + threadIdx.x;
    if (piece >= pieces) {
        return;
    }
    const size_t first = static_cast<size_t>(row) * top_k;
    float sum[WIDTH] = {};
    // Absent slots add +0, which does not change a sum that starts at +0. Their values are still read, so that no
    // read depends on another.
#pragma unroll 8
    for (unsigned j = 0; j < top_k; ++j) {
        size_t of = first + j;
        bool is_here = true;
        if constexpr (SLOTS == OF_EXPERTS) {
            const unsigned id = static_cast<unsigned>(slots[first + j]);
            is_here = id < num_experts && (!expert_of || expert_of[id] >= 0);
        } else if constexpr (SLOTS == IN_BLOCKS) {
            const int place = slots[first + j];
            is_here = place >= 0;
            of = is_here ? place : 0;
        }
        Elements slot;
        slot.all = down[of * pieces + piece];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            sum[i] = __fadd_rn(sum[i], is_here ? widen(slot.values[i]) : 0.0f);
        }
    }
    Elements out;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        out.values[i] = narrow(sum[i]);
    }
    y[static_cast<size_t>(row) * pieces + piece] = out.all;
}
