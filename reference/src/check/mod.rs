//! Skeleton: check.
