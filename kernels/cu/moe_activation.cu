// The activation between an expert's two products. Upstream operators: vLLM `silu_and_mul`,
// `gelu_and_mul`, `gelu_tanh_and_mul`, `swigluoai_and_mul`.
//
//   gate_up    16-bit [rows, width]: width is size_i (gate alone) or 2 * size_i
//   activated  16-bit [rows, size_i]
//
// Compile-time parameters: IS_BF16 (half.cuh).
// One thread writes one element. Launch with a 1-D grid of as many threads.

extern "C" __global__ void moe_activation(const unsigned short *__restrict__ gate_up,
                                          unsigned short *__restrict__ activated,
                                          unsigned long long elements,
                                          unsigned size_i,
                                          Activation activation) {
    wait_for_last_kernel();
    let_next_kernel_start();
    const unsigned long long at =
        static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= elements) {
        return;
    }
    float value;
    if (activation.columns == 2) {
        value = activate(activation, activation.function, widen(gate_up[at]));
    } else {
        const bool halves = activation.columns == 0;
        const unsigned long long first = halves ? at / size_i * size_i + at : 2 * at;
        const unsigned long long second = first + (halves ? size_i : 1);
        value = activate(activation, activation.function, widen(gate_up[first]),
                         widen(gate_up[second]));
    }
    activated[at] = narrow(value);
}
