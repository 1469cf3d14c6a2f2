#pragma once
// How k is cut into chunks, and the order in which their sums are added: `Cut` of the reference.

// Leaves of leaf_k, each of leaf_chunks chunks of chunk_k, the last of which ends with the leaf. The sums of a leaf's
// chunks are added in ascending order, those of leaves by a balanced tree: there are 1, 2, 4 or 8 leaves.
struct Cut {
    unsigned chunk_k, leaf_k, leaf_chunks;

    __device__ __forceinline__ unsigned chunks(unsigned size_k) const { return size_k / leaf_k * leaf_chunks; }

    // Where chunk c begins; for the number of all chunks, where k ends.
    __device__ __forceinline__ unsigned begin(unsigned c) const {
        return c / leaf_chunks * leaf_k + c % leaf_chunks * chunk_k;
    }

    __device__ __forceinline__ unsigned end(unsigned c) const {
        return min(begin(c) + chunk_k, (c / leaf_chunks + 1) * leaf_k);
    }

    // Chunks of a run, whose sums are added in ascending order before runs are added by the tree: a leaf's. Two leaves of
    // one chunk are a run as well: a chain of two is a tree of two.
    __device__ __forceinline__ unsigned run() const { return max(leaf_chunks, 2u); }
};
