// The activation between an expert's two products. Upstream operators: vLLM `silu_and_mul`,
// `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul`.
//
//   gate_up    16-bit [rows, width]: width is size_i (gate alone) or 2 * size_i
//   activated  16-bit [rows, size_i]
//
// Compile-time parameters: IS_BF16 (half.cuh); WIDTH: 1, or 8 where that divides size_i.
// One thread makes WIDTH columns of a row. Launch: threads (x, y) of a block for such pieces (x) of rows (y), a
// grid (blocks of rows, blocks of pieces).

#if !defined(WIDTH)
#error "WIDTH must be 1 or 8"
#endif

#if WIDTH == 8
typedef uint4 Piece;
#else
typedef unsigned short Piece;
#endif

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
#if WIDTH == 8
    activated[to] = activate_piece(activation, gate_up, row, pieces, piece);
#else
    float value;
    if (activation.columns == 2) {
        value = activate(activation, activation.function, widen(gate_up[to]));
    } else {
        const bool halves = activation.columns == 0;
        const size_t first = halves ? to + static_cast<size_t>(row) * pieces : 2 * to;
        value = activate(activation, activation.function, widen(gate_up[first]),
                         widen(gate_up[first + (halves ? pieces : 1)]));
    }
    activated[to] = narrow(value);
#endif
}
