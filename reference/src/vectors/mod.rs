//! Skeleton: vectors.
