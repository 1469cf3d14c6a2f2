// The activation between an expert's two products. Upstream operators: vLLM `silu_and_mul`,
// `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul`.
//
//   gate_up    16-bit [rows, width]: width is size_i (gate alone) or 2 * size_i
//   activated  16-bit [rows, size_i]
//
// Parameters: IS_BF16 (half.cuh); WIDTH: 1, or 8 where that divides size_i.
// One thread computes WIDTH columns of a row. Launch: threads (x, y) of a block for such pieces (x) of rows (y), a
// grid (blocks of rows, blocks of pieces).

#include "activate_eight.cuh"
#include "depend.cuh"
#include "half.cuh"

constexpr bool IS_WIDE = WIDTH == 8;
static_assert(IS_WIDE || WIDTH == 1, "WIDTH must be 1 or 8");
using Piece = Choose<IS_WIDE, uint4, unsigned short>::Type;

__device__ __forceinline__ uint4 activate_at(const Activation &activation, const uint4 *gate_up, size_t row,
                                             unsigned pieces, unsigned piece) {
    return activate_piece(activation, gate_up, row, pieces, piece);
}

__device__ __forceinline__ unsigned short activate_at(const Activation &activation,
                                                      const unsigned short *gate_up, size_t row,
                                                      unsigned columns, unsigned column) {
    const size_t to = row * columns + column;
    float value;
    if (activation.columns == GATE_ALONE) {
        value = activate(activation, activation.function, widen(gate_up[to]));
    } else {
        const bool halves = activation.columns == HALVES;
        const size_t first = halves ? to + row * columns : 2 * to;
        value = activate(activation, activation.function, widen(gate_up[first]),
                         widen(gate_up[first + (halves ? columns : 1)]));
    }
    return narrow(value);
}

extern "C" __global__ void moe_activation(const Piece *__restrict__ gate_up,
                                          Piece *__restrict__ activated,
                                          unsigned rows,
                                          unsigned size_i,
                                          Activation activation) {
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
    const unsigned pieces = size_i / WIDTH, piece = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= rows || piece >= pieces) {
        return;
    }
    const size_t to = static_cast<size_t>(row) * pieces + piece;
    activated[to] = activate_at(activation, gate_up, row, pieces, piece);
}
