//! The tests that depend on the instruction set or on generated floating-point code, inside the program
//! of the unit tests: under emulation, one compilation of the library serves all of them. They are the
//! same files that the host's test programs hold.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each program uses a part")]
#![allow(unreachable_patterns, reason = "here the enums of the library are complete")]

#[path = "../num/main.rs"]
mod num;
#[path = "../w4a8/main.rs"]
mod w4a8;
#[path = "../w4a8_alloc.rs"]
mod w4a8_alloc;

#[path = "../check"]
mod check {
    mod golden;
    mod schedule_golden;
}

#[path = "../layouts"]
mod layouts {
    mod bijection;
    mod e4m3;
    mod fp8_blocks;
    mod lattice;
    mod quantize_act_order;
    mod quantize_upstream;
    mod restore;
}

#[path = "../moe"]
mod moe {
    mod activation;
    mod activation_golden;
    mod activation_math;
    mod activation_widths;
    mod block_stages;
    mod golden;
    mod layer;
    mod norm_bound;
    mod router;
    mod router_bound;
    mod sum;
}

#[path = "../products"]
mod products {
    mod canonical_tree;
    mod fp8_promotion;
    mod gemm_bound;
    mod gemm_exact;
    mod gemm_recipe;
    mod marlin_products;
    mod schedule;
}
