#pragma once
// The order in which products of stages are begun and promoted.

#include "wgmma.cuh"

// Begins the products of `count` stages, and promotes each stage's sum when it is complete, both in ascending order: a
// stage's products run while the last one's sum is promoted.
template <class Stage, class Begin, class Promote>
__device__ __forceinline__ void run_stages(unsigned count, Begin begin, Promote promote) {
    // In another form, such as one end for even and odd numbers of stages, the compiler waits after each product.
    Stage even, odd;
    begin(even, 0);
    unsigned index = 1;
    for (; index + 1 < count; index += 2) {
        begin(odd, index);
        wgmma_wait<1>();
        promote(even);
        begin(even, index + 1);
        wgmma_wait<1>();
        promote(odd);
    }
    if (index < count) {
        begin(odd, index);
        wgmma_wait<1>();
        promote(even);
        wgmma_wait<0>();
        promote(odd);
    } else {
        wgmma_wait<0>();
        promote(even);
    }
}
