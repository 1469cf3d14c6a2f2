#pragma once
// Codes of Marlin's weight layout to fragments of the matrix unit: the code's number exactly, times the scale,
// rounded once.

#include "formats/codes.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/int4.cuh"
#include "formats/one_step.cuh"
#include "formats/scales.cuh"
#include "formats/uint8b128.cuh"
#include "single_order.cuh"

using Scaling = Choose<HAS_G_IDX, RowScales,
                       Choose<IN_ONE_STEP, OneStepScales,
                              Choose<HAS_BYTE_SCALES, ByteScales, PairScales>::Type>::Type>::Type;

// Scales and zero points of one group of k.
struct Group : Scaling, ZeroPoints<HAS_ZERO> {};

// Loads a group's scales: `scales` are those of the lane's eight columns of 64, side by side; the warp's are part
// `part` of them.
template <class Group>
__device__ __forceinline__ void load_scales(Group &group, const unsigned char *scales, unsigned part) {
    // The warp's scales of the lane; one word where they fill half of it.
    constexpr unsigned BYTES = 2 * FRAGMENTS * SCALE_SIZE, WORDS = BYTES > 4 ? BYTES / 4 : 1;
    unsigned words[WORDS];
    scales += BYTES == 2 ? part / 2 * 4 : part * (WORDS * 4);
    if constexpr (WORDS == 4) {
        *reinterpret_cast<uint4 *>(words) = *reinterpret_cast<const uint4 *>(scales);
    } else if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2 *>(words) = *reinterpret_cast<const uint2 *>(scales);
    } else {
        words[0] = *reinterpret_cast<const unsigned *>(scales);
    }
    if constexpr (BYTES == 2) {
        words[0] >>= part % 2 * 8;
    }
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        if constexpr (HAS_BYTE_SCALES) {
            // Bytes 0, 2, 1, 3 of a word are those of four columns in order.
            group.set_bytes(j, j % 2 ? __byte_perm(words[j / 2], 0, 0x4341) : words[j / 2] & 0x00FF00FFu);
        } else {
            group.set(j, words[j]);
        }
    }
}

// Loads a group's zero points: `zeros` are those of the lane's eight columns.
template <class Group>
__device__ __forceinline__ void load_zeros(Group &group, const unsigned char *zeros, unsigned part) {
    group.load_zeros(*reinterpret_cast<const unsigned *>(zeros), part * (2 * FRAGMENTS));
}

// Loads the scales of a weight's only group: position(c) is the one of the lane's column c + lane / 4.
template <class Group, class Position>
__device__ __forceinline__ void load_single_scales(Group &group, const unsigned char *scales,
                                                   Position position) {
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS; ++i) {
        group.scale[i] = reinterpret_cast<const unsigned short *>(scales)[position(i * 8)] * 0x10001u;
    }
}

// And its zero points, where codes have them: `zeros` are those of the lane's columns of 64.
template <class Group>
__device__ __forceinline__ void load_single_zeros(Group &group, const unsigned *zeros, unsigned part) {
    if constexpr (HAS_ZERO) {
        group.load_zeros(*zeros, part * (2 * FRAGMENTS));
    }
}

// The A fragment (16 columns x 16 k) of one (lane, j).
template <class Group>
__device__ __forceinline__ void dequantize(unsigned (&a)[4], const Words &codes, const Group &group, int j) {
    if constexpr (IN_ONE_STEP) {
        group.weights(a, codes, j);
    } else {
        unsigned v[4];
        Numbers<CodeType{CODES}>::load(v, codes, group, j);
        group.multiply(a, v, j);
    }
}
