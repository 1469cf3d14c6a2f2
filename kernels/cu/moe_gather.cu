// Rows in the order of a product's blocks: the row for entry t is row place_of[t]. Without ACTIVATES it is row
// t / top_k of x, and its router weight is gathered with it; with ACTIVATES it is the activation of the row of gate_up
// in the same place. With QUANTIZES the 16-bit values are quantized, by groups of 128 or by rows. Rows of padding keep their
// contents.
//
//   rows      16-bit, x [entries / top_k, size_k], written by no kernel later than the one before the last; or
//             gate_up [places, width], whose width is size_k (gate alone) or 2 * size_k
//   gathered  16-bit [places, size_k]; with QUANTIZES e4m3fn
//   scales    of groups f32 [size_k / 128, scale_step]: a row's scales are in its column, and scale_step is at least
//             the number of places; of rows f32 [places]
//   place_of  int32 [entries] of `moe_align_block_size`; negative: the entry has no row. With ACTIVATES, written by no
//             kernel later than the one before the last
//   topk_weights  f32 [entries], without ACTIVATES
//   row_weights   f32 [places], likewise
//   placing       with PLACES, instead of place_of: what is aligned, and where the results go (place_entries.cuh)
//
// Parameters: IS_BF16 (half.cuh); ACTIVATES: 0 or 1; QUANTIZES: 0, 1 (groups) or 2 (rows); IS_UE8M0 (fp8_groups.cuh), with
// groups; PLACES: 0 or, without ACTIVATES, 1: no kernel has aligned the entries, of which there are at most MOST_PLACED for at
// most MOST_EXPERTS experts, top_k up to 32. size_k is a multiple of 8, with groups of 128; a piece is eight values.
// Launch: with ACTIVATES threads (x, y) of a block for pieces (x) of entries (y), a grid (blocks of entries, blocks
// of pieces); without, a grid (rows of x, blocks for PIECES pieces of a thread), of whole warps. Rows that are quantized as a
// whole have one thread block, or with ACTIVATES whole warps of one, with dynamic shared memory of 16 bytes for each piece.

#include "activate_eight.cuh"
#include "depend.cuh"
#include "fp8_groups.cuh"
#include "fp8_rows.cuh"
#include "half.cuh"
#include "place_entries.cuh"

constexpr bool HAS_GROUPS = QUANTIZES == 1, HAS_ROWS = QUANTIZES == 2;
constexpr unsigned PIECES = 4;  // most pieces of one row that a thread holds

// Where rows go.
struct Gathered {
    void *rows;
    float *scales;
    unsigned pieces, scale_step;  // pieces of a row

    struct Piece {
        uint4 halves;
        uint2 codes;
        float scale;

        // The lanes of a group's pieces take part together.
        __device__ __forceinline__ void take(const uint4 &values) {
            if constexpr (HAS_GROUPS) {
                const unsigned words[4] = {values.x, values.y, values.z, values.w};
                unsigned eight[2];
                scale = quantize_group(words, eight);
                codes = make_uint2(eight[0], eight[1]);
            } else {
                halves = values;
            }
        }

        // Of a row with that scale.
        __device__ __forceinline__ void quantize(const uint4 &values, const Divisor &of_row) {
            codes = make_uint2(four_codes(values.x, values.y, of_row), four_codes(values.z, values.w, of_row));
        }
    };

    __device__ __forceinline__ void store(size_t place, unsigned at, const Piece &piece) const {
        if constexpr (QUANTIZES) {
            static_cast<uint2 *>(rows)[place * pieces + at] = piece.codes;
            if constexpr (HAS_GROUPS) {
                constexpr unsigned GROUP_PIECES = FP8_GROUP / 8;
                if (at % GROUP_PIECES == 0) {
                    scales[static_cast<size_t>(at / GROUP_PIECES) * scale_step + place] = piece.scale;
                }
            }
        } else {
            static_cast<uint4 *>(rows)[place * pieces + at] = piece.halves;
        }
    }
};

// The largest of the values of the threads with one threadIdx.y, whole warps; all threads of the block take part.
__device__ __forceinline__ float largest_of_row(float value) {
    __shared__ float of_warps[32];
    const unsigned warps = blockDim.x / 32, first = threadIdx.y * warps;
    value = warp_max(value);
    if (warps == 1) {
        return value;
    }
    if (threadIdx.x % 32 == 0) {
        of_warps[first + threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = of_warps[first];
    for (unsigned warp = 1; warp < warps; ++warp) {
        value = fmaxf(value, of_warps[first + warp]);
    }
    return value;
}

// The places of the entries of a row of x, each in a lane; negative: none. With PLACES top_k is at most 32.
__device__ __forceinline__ int place_of_lane(const PlacedEntries &entries, const int *place_of, size_t first, unsigned count) {
    const unsigned lane = threadIdx.x % 32;
    if constexpr (PLACES) {
        __shared__ int of_slots[32];
        for (unsigned slot = threadIdx.x / 32; slot < count; slot += blockDim.x / 32) {
            const int place = entries.place(first + slot, blockIdx.y == 0);
            if (lane == 0) {
                of_slots[slot] = place;
                if (blockIdx.y == 0) {
                    entries.placing.place_of[first + slot] = place;
                }
            }
        }
        __syncthreads();
        return lane < count ? of_slots[lane] : -1;
    } else {
        return lane < count ? __ldcg(place_of + first + lane) : -1;
    }
}

// A thread copies up to PIECES pieces of one row of x to all of its places, with HAS_ROWS as many as there are.
__device__ __forceinline__ void copy_rows(const uint4 *x, const Gathered &gathered, const int *place_of,
                                          const PlacedEntries &entries, const float *topk_weights, float *row_weights,
                                          unsigned top_k) {
    const unsigned pieces = gathered.pieces, lane = threadIdx.x % 32;
    const unsigned first = blockIdx.y * blockDim.x * PIECES + threadIdx.x, held = blockDim.x * PIECES;
    const size_t row = blockIdx.x;
    if constexpr (PLACES) {
        entries.prefetch_table();
        wait_for_last_kernel();
        let_next_kernel_start();
    }
    // Without PLACES reads x before waiting: the previous kernel is the alignment, which does not write x.
    const auto piece_at = [&](unsigned at) { return __ldcg(x + row * pieces + at); };
    uint4 values[PIECES];
#pragma unroll
    for (unsigned i = 0; i < PIECES; ++i) {
        const unsigned at = first + i * blockDim.x;
        if (at < pieces) {
            values[i] = piece_at(at);
        }
    }
    if constexpr (PLACES) {
        entries.load_table();
        entries.count();
    }
    Gathered::Piece piece[PIECES];
    [[maybe_unused]] Divisor of_row;
    [[maybe_unused]] float scale = 0.0f;
    if constexpr (HAS_ROWS) {
        float largest = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < PIECES; ++i) {
            if (first + i * blockDim.x < pieces) {
                largest = fmaxf(largest, largest_of_piece(values[i]));
            }
        }
        for (unsigned at = first + held; at < pieces; at += blockDim.x) {
            largest = fmaxf(largest, largest_of_piece(piece_at(at)));
        }
        largest = largest_of_row(largest);
        of_row = Divisor(scale_of_row(largest));
        scale = or_nan(of_row.divisor, largest);
    }
#pragma unroll
    for (unsigned i = 0; i < PIECES; ++i) {
        if (first + i * blockDim.x < pieces) {
            if constexpr (HAS_ROWS) {
                piece[i].quantize(values[i], of_row);
            } else {
                piece[i].take(values[i]);
            }
        }
    }
    if constexpr (!PLACES) {
        wait_for_last_kernel();
        let_next_kernel_start();
    } else if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) {
        const unsigned places = entries.places_of_runs(entries.placing.num_runs);
        if (lane == 0) {
            *entries.placing.num_tokens_post_padded = static_cast<int>(places);
        }
    }
    for (unsigned slots = 0; slots < top_k; slots += 32) {
        const unsigned count = min(top_k - slots, 32);
        const size_t entry = row * top_k + slots + lane;
        const int of_lane = place_of_lane(entries, place_of, row * top_k + slots, count);
        if (blockIdx.y == 0 && threadIdx.x < 32 && of_lane >= 0) {
            row_weights[of_lane] = __ldcg(topk_weights + entry);
            if constexpr (HAS_ROWS) {
                gathered.scales[of_lane] = scale;
            }
        }
        for (unsigned slot = 0; slot < count; ++slot) {
            const int place = __shfl_sync(~0u, of_lane, slot);
            if (place < 0) {
                continue;
            }
#pragma unroll
            for (unsigned i = 0; i < PIECES; ++i) {
                const unsigned at = first + i * blockDim.x;
                if (at < pieces) {
                    gathered.store(place, at, piece[i]);
                }
            }
            if constexpr (HAS_ROWS) {
                for (unsigned at = first + held; at < pieces; at += blockDim.x) {
                    Gathered::Piece further;
                    further.quantize(piece_at(at), of_row);
                    gathered.store(place, at, further);
                }
            }
        }
    }
}

// The threads with one threadIdx.y activate the row of an entry, and quantize it as a whole.
__device__ __forceinline__ void activate_row(const Activation &activation, const uint4 *gate_up,
                                             const Gathered &gathered, const int *place_of, unsigned entries) {
    extern __shared__ uint4 activated[];
    const unsigned pieces = gathered.pieces, entry = blockIdx.x * blockDim.y + threadIdx.y;
    // The last kernel, which computed gate_up, did not write the places.
    const int place = entry < entries ? __ldcg(place_of + entry) : -1;
    wait_for_last_kernel();
    let_next_kernel_start();
    // A thread reads what it has written.
    uint4 *row = activated + threadIdx.y * pieces;
    float largest = 0.0f;
    if (place >= 0) {
        for (unsigned at = threadIdx.x; at < pieces; at += blockDim.x) {
            const uint4 values = activate_piece(activation, gate_up, place, pieces, at);
            largest = fmaxf(largest, largest_of_piece(values));
            row[at] = values;
        }
    }
    largest = largest_of_row(largest);
    if (place < 0) {
        return;
    }
    const Divisor of_row(scale_of_row(largest));
    if (threadIdx.x == 0) {
        gathered.scales[place] = or_nan(of_row.divisor, largest);
    }
    for (unsigned at = threadIdx.x; at < pieces; at += blockDim.x) {
        Gathered::Piece piece;
        piece.quantize(row[at], of_row);
        gathered.store(place, at, piece);
    }
}

extern "C" __global__ void moe_gather(const uint4 *__restrict__ rows,
                                      void *__restrict__ gathered_rows,
                                      // With QUANTIZES:
                                      float *__restrict__ scales,
                                      unsigned scale_step,
                                      const int *__restrict__ place_of,
                                      unsigned entries,
                                      unsigned size_k,
                                      // With ACTIVATES:
                                      Activation activation,
                                      // Without:
                                      const float *__restrict__ topk_weights,
                                      float *__restrict__ row_weights,
                                      unsigned top_k,
                                      // With PLACES:
                                      Placing placing) {
    const unsigned pieces = size_k / 8;
    const Gathered gathered = {gathered_rows, scales, pieces, scale_step};
    if constexpr (ACTIVATES && HAS_ROWS) {
        activate_row(activation, rows, gathered, place_of, entries);
    } else if constexpr (ACTIVATES) {
        // A thread computes a piece.
        const unsigned entry = blockIdx.x * blockDim.y + threadIdx.y;
        const unsigned at = blockIdx.y * blockDim.x + threadIdx.x;
        const bool is_here = entry < entries && at < pieces;
        const int place = is_here ? __ldcg(place_of + entry) : -1;
        wait_for_last_kernel();
        let_next_kernel_start();
        if (place >= 0) {
            Gathered::Piece piece;
            piece.take(activate_piece(activation, rows, place, pieces, at));
            gathered.store(place, at, piece);
        }
    } else {
        const PlacedEntries to_place(placing, entries);
        copy_rows(rows, gathered, place_of, to_place, topk_weights, row_weights, top_k);
    }
}
