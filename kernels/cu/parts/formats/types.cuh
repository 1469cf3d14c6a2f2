#pragma once
// Types of codes and of scales. The host passes the values as parameters.

// Types of codes. The values are the parameter CODES.
enum CodeType : unsigned {
    UINT4B8 = 0,    // 4-bit integers less 8
    UINT4 = 1,      // 4-bit integers less a zero point
    UINT8B128 = 2,  // 8-bit integers less 128
    E2M1 = 3,
    E4M3 = 4,  // finite
};

// Types of scales. The values are the parameter SCALES.
enum ScaleType : unsigned {
    BITS16 = 0,
    E8M0 = 1,               // up to 2 (e2m1) or 2^7 (e4m3); bf16 alone
    UE4M3 = 2,              // positive
    E8M0_WIDE = 3,          // up to 2^126; bf16 alone
    BITS16_BELOW_HALF = 4,  // below 1/2 in magnitude: 4-bit integers without zero points, bf16
    BITS16_BELOW_32ND = 5,  // below 1/32: integers without zero points, bf16
};
