#pragma once
// Shared by the warpgroups of marlin_gemm_wgmma.cu: the tiles of a product, the ring of pipeline stages in shared
// memory, and the producers that fill it.

#include "barrier.cuh"
#include "cut.cuh"
#include "wgmma.cuh"
#include "wgmma_sizes.cuh"

// A unit of work of a thread block: chunks [begin, end) of k of one tile, with rows from `row` on and columns from n0
// on of an expert's product. Producers store it with the piece's first stage.
struct alignas(16) Piece {
    unsigned row, n0;
    int expert;  // negative: no product
    unsigned short begin, end;
};

// The operands, as the kernel takes them.
struct Product {
    const uint4 *qweight;
    const unsigned char *scales;
    const unsigned *zeros;
    const unsigned short *bias;
    const float *global_scale;
    unsigned size_m, size_n, size_k, group_size;
    const Cut &cut;
    unsigned raster;
    float4 *totals;
    unsigned *totals_ready;
    // With experts:
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const float *row_weights;
    // The f32 sums of a rank's part of k, with IS_PART.
    float *part;

    __device__ unsigned groups() const { return GROUPS == 0 ? 1 : size_k / group_size; }

    __device__ unsigned blocks() const {
        if constexpr (IS_MOE) {
            return static_cast<unsigned>(__ldcg(num_tokens_post_padded)) / ROWS;
        } else {
            return (size_m + ROWS - 1) / ROWS;
        }
    }

    __device__ unsigned tiles(unsigned blocks) const {
        return blocks * ((size_n + N_TILE - 1) / N_TILE);
    }

    __device__ unsigned chunks() const { return cut.chunks; }

    // All of tile `index`. Tiles are numbered by groups of `raster` blocks of rows, through all columns of a group.
    __device__ Piece tile(unsigned index, unsigned blocks) const {
        const unsigned columns = (size_n + N_TILE - 1) / N_TILE;
        const unsigned first = index / (raster * columns) * raster;
        const unsigned side = min(raster, blocks - first), in = index % (raster * columns);
        const unsigned block = first + in % side;
        const int expert = IS_MOE ? __ldcg(expert_ids + block) : 0;
        return {block * ROWS, in / side * N_TILE, expert, 0, static_cast<unsigned short>(chunks())};
    }
};

// The pieces of this thread block. Tiles are scheduled round-robin: in each wave every thread block has one. Where
// the last wave is partial, its tiles and those of the wave before are split along k, in equal parts of at least one
// tile. A part begins with the last chunks of a tile whose first chunks end the part of the thread block before. Sums
// of first chunks are added before those of last ones, so each part computes the first chunks of its last tile early,
// and their totals are ready long before the next thread block continues from them. Pairs of a tree are not split, so
// that at most two totals are handed over.
class Share {
    unsigned blocks, rounds, head, whole, tail, from, part_end;

   public:
    __device__ explicit Share(const Product &p) : blocks(p.blocks()) {
        const unsigned chunks = p.chunks(), unit = p.cut.run == 2 && chunks > 1 ? 2 : 1;
        const unsigned tiles = p.tiles(blocks), units = chunks / unit, index = blockIdx.x;
        const unsigned left = tiles % gridDim.x;
        rounds = tiles / gridDim.x + (index < left);
        head = whole = tail = from = part_end = 0;
        const unsigned most = (left * units + gridDim.x - 1) / gridDim.x;
        // Handing totals over takes the time of some stages.
        if (tiles > gridDim.x && left > 0 && (units - most) * unit * (p.cut.begins[1] / STAGE_K) > SPLIT_STAGES) {
            rounds = tiles / gridDim.x - 1;
            const unsigned first = rounds * gridDim.x;
            // Fewer than 2^32 for up to 2^14 thread blocks.
            const unsigned all = (tiles - first) * units;
            const unsigned begin = all * index / gridDim.x, end = all * (index + 1) / gridDim.x;
            tail = begin % units == 0 ? 0 : (units - begin % units) * unit;
            head = end % units * unit;
            from = first + (begin + units - 1) / units;
            part_end = first + end / units;
            whole = part_end - from;
        }
    }

    __device__ unsigned count() const { return rounds + (head > 0) + whole + (tail > 0); }

    // Piece i of count().
    __device__ Piece piece(const Product &p, unsigned i) const {
        const unsigned before = rounds + (head > 0);
        if (i < rounds) {
            return p.tile(i * gridDim.x + blockIdx.x, blocks);
        }
        if (i < before) {
            Piece first = p.tile(part_end, blocks);
            first.end = head;
            return first;
        }
        if (i < before + whole) {
            return p.tile(from + i - before, blocks);
        }
        Piece last = p.tile(from - 1, blocks);
        last.begin = last.end - tail;
        return last;
    }
};

// A slot of the ring, and the parity of the passes over it.
struct Place {
    unsigned slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// One producer's copies of a piece's weights, scales and zero points: of each stage one of the four rows of 16 k, and
// the scales of one group. Where a stage has fewer groups, they go to producers from 1 on.
struct PieceStream {
    static constexpr unsigned STAGE_GROUPS = GROUPS > 0 ? GROUPS : 1;

    size_t weight_step;
    unsigned part, columns;
    const uint4 *weight_from;
    unsigned group_left;  // stages of the group, with this one
    unsigned row;         // of the stage's groups
    const unsigned char *scale_from;
    const unsigned *zero_from;

    __device__ __forceinline__ PieceStream(const Product &p, const Piece &piece, unsigned begin, unsigned part,
                                           size_t weight_step)
        : weight_step(weight_step), part(part), columns(min(p.size_n - piece.n0, N_TILE)) {
        weight_from = p.qweight + (piece.expert * (p.size_k / 16) + begin / 16 + part) * weight_step +
                      piece.n0 / 64 * TILE_PIECES;
        if constexpr (GROUPS > 0) {
            group_left = (p.group_size - begin % p.group_size) / STAGE_K;
            const size_t first_group = static_cast<size_t>(piece.expert) * (p.size_k / p.group_size) +
                                       begin / p.group_size;
            row = GROUPS == 4 ? part : part - 1;
            scale_from = p.scales + ((first_group + row % STAGE_GROUPS) * p.size_n + piece.n0) * SCALE_SIZE;
            if constexpr (HAS_ZERO) {
                zero_from = p.zeros + (first_group * p.size_n + piece.n0) / 8;
            }
        }
    }

    // Bytes that all producers copy of a stage, with x.
    __device__ __forceinline__ unsigned stage_bytes() const {
        return X_BYTES + columns * (STAGE_K * BITS / 8 + GROUPS * SCALE_SIZE) + HAS_ZERO * GROUPS * columns / 2;
    }

    // Copies the next stage to that slot; barrier `full` counts the bytes.
    __device__ __forceinline__ void copy(const Product &p, unsigned memory, unsigned slot, unsigned full) {
        copy_bulk(memory + WEIGHTS_AT + slot * WEIGHT_BYTES + part * (ROW_PIECES * 16), weight_from,
                  columns * (BITS * 2), full);
        weight_from += 4 * weight_step;
        if constexpr (GROUPS > 0) {
            if (row < GROUPS) {
                copy_bulk(memory + SCALES_AT + slot * SCALE_BYTES + row * (N_TILE * SCALE_SIZE), scale_from,
                          columns * SCALE_SIZE, full);
            }
            if constexpr (HAS_ZERO) {
                if (part == 3) {
#pragma unroll
                    for (int row = 0; row < GROUPS; ++row) {
                        copy_bulk(memory + ZEROS_AT + slot * ZERO_BYTES + row * (N_TILE / 2),
                                  zero_from + row * (p.size_n / 8), columns / 2, full);
                    }
                }
            }
            if (GROUPS > 1 || --group_left == 0) {
                scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * p.size_n;
                if constexpr (HAS_ZERO) {
                    zero_from += GROUPS * (p.size_n / 8);
                }
                group_left = p.group_size / STAGE_K;
            }
        }
    }
};

// Fills the ring with the stages of all pieces of this thread block, then adds a piece that ends at 0 as the end
// mark. Four lanes of different warps do so: one lane would take longer to issue a stage's copies than its products
// take.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &x_map, unsigned memory,
                                        Piece *pieces, unsigned part) {
    const size_t weight_step = static_cast<size_t>(p.size_n / 64) * TILE_PIECES;
    const bool has_row_weights = IS_MOE && p.row_weights;
    const Share share(p);
    Place place;
    for (unsigned i = 0; i < share.count(); ++i) {
        const Piece piece = share.piece(p, i);
        if (piece.expert < 0) {
            continue;
        }
        const unsigned begin = p.cut.begins[piece.begin];
        const unsigned stages = (p.cut.begins[piece.end] - begin) / STAGE_K;
        PieceStream stream(p, piece, begin, part, weight_step);
        const unsigned bytes = stream.stage_bytes();
        for (unsigned stage = 0; stage < stages; ++stage) {
            const unsigned full = memory + FULL_AT + place.slot * 8;
            barrier_wait(memory + EMPTY_AT + place.slot * 8, place.phase ^ 1);
            if (part == 0) {
                if (stage == 0) {
                    pieces[place.slot] = piece;
                }
                barrier_expect(full, bytes + (stage == 0 && has_row_weights ? ROW_WEIGHT_BYTES : 0));
                copy_box(memory + place.slot * X_BYTES, x_map, begin + stage * STAGE_K, piece.row, full);
            }
            if (part == 1 && stage == 0 && has_row_weights) {
                copy_bulk(memory + ROW_WEIGHTS_AT + place.slot * ROW_WEIGHT_BYTES,
                          p.row_weights + piece.row, ROW_WEIGHT_BYTES, full);
            }
            stream.copy(p, memory, place.slot, full);
            place.next();
        }
    }
    if (part == 0) {
        barrier_wait(memory + EMPTY_AT + place.slot * 8, place.phase ^ 1);
        pieces[place.slot].end = 0;
        barrier_arrive(memory + FULL_AT + place.slot * 8);
    }
}
