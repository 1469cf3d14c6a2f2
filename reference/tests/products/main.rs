//! Matrix products: exact values, bounds, schedules and launches.
#![allow(missing_docs)]

mod canonical_tree;
mod fp8_promotion;
mod gemm_bound;
mod gemm_exact;
mod gemm_recipe;
mod marlin_launches;
mod marlin_products;
mod product_8bit;
mod product_readings;
mod schedule;
