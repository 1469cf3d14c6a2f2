#pragma once
// Marlin's single order: that of bias, and of scales with one group.

// Position of column n of 64: of each 32 columns, position 8i + t takes column
// 2i + {0, 1, 8, 9, 16, 17, 24, 25}[t].
__device__ __forceinline__ unsigned single_position(unsigned n) {
    return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}
