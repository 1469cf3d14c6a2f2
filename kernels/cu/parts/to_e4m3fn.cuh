#pragma once
// f32 to e4m3fn, to nearest even, saturating.

// In integer arithmetic: the instruction exists only from sm_89 on.
__device__ __forceinline__ unsigned char to_e4m3fn(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    unsigned code;
    if (magnitude < 0x3c800000u) {
        // Below 2^-6: multiples of 2^-9. The product is exact; 8 of them are the least normal number.
        code = static_cast<unsigned>(rintf(__fmul_rn(__uint_as_float(magnitude), 512.0f)));
    } else {
        // Adds half a unit of the last place kept, less one where that place is even; then the exponent's bias.
        const unsigned rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
        code = min((rounded >> 20) - (120u << 3), 0x7eu);
    }
    return static_cast<unsigned char>(sign | code);
}
