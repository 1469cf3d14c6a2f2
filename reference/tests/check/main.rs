//! Verdicts and diagnoses of case files.
#![allow(missing_docs)]

mod activation_rows;
mod align_forms;
mod declared_diagnosis;
mod diagnosis;
mod distortions;
mod golden;
mod golden_damage;
mod group_quant;
mod layer_readings;
mod layer_rules;
mod limits;
mod moe_diagnosis;
mod open_exponential;
mod padding_rows;
mod product_diagnosis;
mod product_diagnosis_moe;
mod product_model;
mod quantizer_input;
mod quantizers;
mod schedule_golden;
mod shared_output;
mod staged_outputs;
mod stated_activations;
mod stated_keys;
mod stated_nvfp4;
mod stated_routing;
mod torch_products;
mod true_causes;
mod wrapped_sums;
