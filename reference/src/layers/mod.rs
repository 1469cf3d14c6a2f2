//! Skeleton: layers.
