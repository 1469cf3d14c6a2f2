// f16 and bf16 as bit patterns; IS_BF16 (0 or 1) chooses the type of a source. Conversions round to
// nearest even, and every NaN becomes 0x7fff, as the instructions do it.

#if !defined(IS_BF16)
#error "IS_BF16 must be 0 or 1"
#endif

__device__ __forceinline__ float widen(unsigned short bits) {
#if IS_BF16
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ unsigned short narrow(float value) {
    unsigned short bits;
#if IS_BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}
