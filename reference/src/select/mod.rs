//! Skeleton: select.
