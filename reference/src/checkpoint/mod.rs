//! Skeleton: checkpoint.
