#pragma once
// How k is cut into chunks, and the order in which their sums are added: `Cut` of the reference.

constexpr unsigned MOST_CHUNKS = 8;

// The sums of a run of chunks are added in ascending order, those of runs by a balanced tree: there are 1, 2 or 4 runs.
// A run is a leaf, or two leaves of one chunk: a chain of two is a tree of two. A kernel takes it as a `__grid_constant__`
// and reads it there: a copy of the array would lie in local memory.
struct Cut {
    unsigned begins[MOST_CHUNKS + 1];  // where chunks begin, and where the last one ends
    unsigned chunks, run;
};
