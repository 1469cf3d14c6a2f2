//! Verdicts and diagnoses of case files.
#![allow(missing_docs)]

mod activation_rows;
mod declared_diagnosis;
mod diagnosis;
mod golden;
mod golden_damage;
mod group_quant;
mod layer_readings;
mod layer_rules;
mod limits;
mod moe_diagnosis;
mod open_exponential;
mod product_diagnosis;
mod product_diagnosis_moe;
mod product_model;
mod schedule_golden;
mod staged_outputs;
mod stated_activations;
mod stated_keys;
mod stated_nvfp4;
mod stated_routing;
mod torch_products;
mod wrapped_sums;
