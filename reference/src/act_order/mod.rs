//! Skeleton: act_order.
