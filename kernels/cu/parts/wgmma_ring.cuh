// What the warpgroups of marlin_gemm_wgmma.cu share: the tiles of a product, the ring of stages in shared
// memory, and its producers. The macros are those of that file.

#if !defined(BITS) || !defined(HAS_ZERO) || !defined(GROUPS) || !defined(IS_MOE) || \
    !defined(WARPS) || !defined(COLUMNS) || !defined(ROWS) || !defined(STAGES)
#error "a parameter is missing"
#endif

#define PRODUCERS 128
#define THREADS (PRODUCERS + WARPS * 32)
#define N_TILE (WARPS * COLUMNS)
#define STAGE_K 64
// Stages that take as long as writing a tile's totals and reading them.
#define SPLIT_STAGES 24

// 16-byte pieces of 16 k of one column tile, and of all of them: neighbours in memory.
#define TILE_PIECES (32 * (BITS / 4))
#define ROW_PIECES (N_TILE / 64 * TILE_PIECES)

// Shared memory: rings of x, weights, scales and zeros; a finished tile, for each 64 columns a box of
// the copy engine's; barriers.
#define X_BYTES (ROWS * 128)
#define WEIGHT_BYTES (4 * ROW_PIECES * 16)
#define SCALE_BYTES (GROUPS * N_TILE * SCALE_SIZE)
#define ZERO_BYTES (HAS_ZERO * GROUPS * N_TILE / 2)
#define BOX_BYTES (ROWS * 128)
#define Y_AT (STAGES * X_BYTES)
#define WEIGHTS_AT (Y_AT + N_TILE / 64 * BOX_BYTES)
#define SCALES_AT (WEIGHTS_AT + STAGES * WEIGHT_BYTES)
#define ZEROS_AT (SCALES_AT + STAGES * SCALE_BYTES)
#define FULL_AT (ZEROS_AT + STAGES * ZERO_BYTES)
#define EMPTY_AT (FULL_AT + STAGES * 8)
#define PIECES_AT ((EMPTY_AT + STAGES * 8 + 15) / 16 * 16)
// With experts each slot has room for the weights of a piece's rows: they come with its first stage.
#define ROW_WEIGHTS_AT (PIECES_AT + STAGES * 16)
#define ROW_WEIGHT_BYTES (IS_MOE * ROWS * 4)

// What thread blocks compute at a stretch: of the rows from `row` on and the columns from n0 on of an
// expert's product chunks [begin, end) of k. Producers leave it beside a piece's first stage.
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
    unsigned size_m, size_n, size_k, chunk_k, group_size;
#if IS_MOE
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const float *row_weights;
#endif
    unsigned raster;
    float4 *totals;
    unsigned *are_there;

    __device__ unsigned groups() const { return GROUPS == 0 ? 1 : size_k / group_size; }

    __device__ unsigned blocks() const {
#if IS_MOE
        return static_cast<unsigned>(__ldcg(num_tokens_post_padded)) / ROWS;
#else
        return (size_m + ROWS - 1) / ROWS;
#endif
    }

    __device__ unsigned tiles(unsigned blocks) const {
        return blocks * ((size_n + N_TILE - 1) / N_TILE);
    }

    __device__ unsigned chunks() const { return (size_k + chunk_k - 1) / chunk_k; }

    // Tile `index` of all, whole. `raster` blocks of rows, all their columns, then the next ones.
    __device__ Piece tile(unsigned index, unsigned blocks) const {
        const unsigned columns = (size_n + N_TILE - 1) / N_TILE;
        const unsigned first = index / (raster * columns) * raster;
        const unsigned side = min(raster, blocks - first), in = index % (raster * columns);
        const unsigned block = first + in % side;
#if IS_MOE
        const int expert = __ldcg(expert_ids + block);
#else
        constexpr int expert = 0;
#endif
        return {block * ROWS, in / side * N_TILE, expert, 0, static_cast<unsigned short>(chunks())};
    }
};

// The pieces of this thread block. Tiles go round: in each round every thread block has one. What is left
// for no whole round is shared out with the last one by chunks, in equal parts of at least one tile. A
// part begins with the last chunks of a tile whose first ones end the part of the thread block before;
// sums are added in ascending order, so the first ones are computed first of a part, and their totals are
// long there when the last ones, last of another part, go on from them.
class Share {
    unsigned blocks, rounds, head, whole, tail, from, part_end;

   public:
    __device__ explicit Share(const Product &p) : blocks(p.blocks()) {
        const unsigned tiles = p.tiles(blocks), chunks = p.chunks(), index = blockIdx.x;
        const unsigned left = tiles % gridDim.x;
        rounds = tiles / gridDim.x + (index < left);
        head = whole = tail = from = part_end = 0;
        const unsigned most = (left * chunks + gridDim.x - 1) / gridDim.x;
        // Handing totals over takes as long as some stages.
        if (tiles > gridDim.x && left > 0 && (chunks - most) * (p.chunk_k / STAGE_K) > SPLIT_STAGES) {
            rounds = tiles / gridDim.x - 1;
            const unsigned first = rounds * gridDim.x;
            // Fewer than 2^32 for up to 2^14 thread blocks.
            const unsigned all = (tiles - first) * chunks;
            const unsigned begin = all * index / gridDim.x, end = all * (index + 1) / gridDim.x;
            tail = begin % chunks == 0 ? 0 : chunks - begin % chunks;
            head = end % chunks;
            from = first + (begin + tail) / chunks;
            part_end = first + end / chunks;
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

// A place in the ring, and how often the ring was gone round, mod 2.
struct Place {
    unsigned slot = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Fills the ring with the stages of all pieces of this thread block, then leaves a piece that ends at 0. By
// four lanes of different warps: asking the copy engine for all parts of a stage would take one longer
// than the stage's products take.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &x_map, unsigned memory,
                                        Piece *pieces, unsigned part) {
    const size_t weight_step = static_cast<size_t>(p.size_n / 64) * TILE_PIECES;
#if IS_MOE
    const bool has_row_weights = p.row_weights;
#else
    constexpr bool has_row_weights = false;
#endif
    const Share share(p);
    Place place;
    for (unsigned i = 0; i < share.count(); ++i) {
        const Piece piece = share.piece(p, i);
        if (piece.expert < 0) {
            continue;
        }
        const unsigned columns = min(p.size_n - piece.n0, N_TILE);
        const unsigned begin = piece.begin * p.chunk_k;
        const unsigned stages = (min(piece.end * p.chunk_k, p.size_k) - begin) / STAGE_K;
        // Each part has one of the four rows of 16 k.
        const uint4 *weight_from =
            p.qweight + (piece.expert * (p.size_k / 16) + begin / 16 + part) * weight_step +
            piece.n0 / 64 * TILE_PIECES;
#if GROUPS > 0
        unsigned group_left = (p.group_size - begin % p.group_size) / STAGE_K;  // stages, with this one
        const size_t first_group = static_cast<size_t>(piece.expert) * (p.size_k / p.group_size) +
                                   begin / p.group_size;
        // Of a stage's groups each part has the scales of one; where there are fewer, from part 1 on.
        const unsigned row = GROUPS == 4 ? part : part - 1;
        const unsigned char *scale_from =
            p.scales + ((first_group + row % GROUPS) * p.size_n + piece.n0) * SCALE_SIZE;
#if HAS_ZERO
        const unsigned *zero_from = p.zeros + (first_group * p.size_n + piece.n0) / 8;
#endif
#endif
        const unsigned bytes = X_BYTES + columns * (STAGE_K * BITS / 8 + GROUPS * SCALE_SIZE) +
                               HAS_ZERO * GROUPS * columns / 2;
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
#if IS_MOE
            if (part == 1 && stage == 0 && has_row_weights) {
                copy_bulk(memory + ROW_WEIGHTS_AT + place.slot * ROW_WEIGHT_BYTES,
                          p.row_weights + piece.row, ROW_WEIGHT_BYTES, full);
            }
#endif
            copy_bulk(memory + WEIGHTS_AT + place.slot * WEIGHT_BYTES + part * (ROW_PIECES * 16),
                      weight_from, columns * (BITS * 2), full);
            weight_from += 4 * weight_step;
#if GROUPS > 0
            if (row < GROUPS) {
                copy_bulk(memory + SCALES_AT + place.slot * SCALE_BYTES + row * (N_TILE * SCALE_SIZE),
                          scale_from, columns * SCALE_SIZE, full);
            }
#if HAS_ZERO
            if (part == 3) {
#pragma unroll
                for (int row = 0; row < GROUPS; ++row) {
                    copy_bulk(memory + ZEROS_AT + place.slot * ZERO_BYTES + row * (N_TILE / 2),
                              zero_from + row * (p.size_n / 8), columns / 2, full);
                }
            }
#endif
            if (GROUPS > 1 || --group_left == 0) {
                scale_from += static_cast<size_t>(GROUPS * SCALE_SIZE) * p.size_n;
#if HAS_ZERO
                zero_from += GROUPS * (p.size_n / 8);
#endif
                group_left = p.group_size / STAGE_K;
            }
#endif
            place.next();
        }
    }
    if (part == 0) {
        barrier_wait(memory + EMPTY_AT + place.slot * 8, place.phase ^ 1);
        pieces[place.slot].end = 0;
        barrier_arrive(memory + FULL_AT + place.slot * 8);
    }
}
