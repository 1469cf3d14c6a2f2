//! Reads quantized Hugging Face model folders, converts them into kernel formats, and runs single
//! layers on the CPU.
//!
//! | function | does |
//! | --- | --- |
//! | [`inspect`](inspect()) | lists the quantized layers and the kernels that take them |
//! | [`convert`](convert()) | writes the model in a kernel's format |
//! | [`verify`] | hashes every file of a converted folder and compares the hashes with its manifest |
//! | [`run`](run()) | runs one layer and can compare it with its definition |
//!
//! ```
//! use marlinspike_model::convert::settings::Options;
//! use marlinspike_model::convert::target::int4;
//! use marlinspike_model::run::options::Options as RunOptions;
//! use marlinspike_model::{convert, inspect, run, verify};
//! # use marlinspike::num::tensor::{DType, Tensor};
//! # let temp = tempfile::tempdir()?;
//! # let (model, packed) = (temp.path().join("model"), temp.path().join("packed"));
//! # std::fs::create_dir(&model)?;
//! # let codes: Vec<u32> = (0..16 * 64).map(|i: u32| i.wrapping_mul(0x9e37_79b9)).collect();
//! # let name = |part| format!("model.layers.0.self_attn.q_proj.{part}");
//! # let tensors = [
//! #     Tensor::from_vec(name("qweight"), DType::I32, vec![16, 64], codes)?,
//! #     Tensor::from_vec(name("scales"), DType::BF16, vec![4, 64], vec![0x3c00u16; 4 * 64])?,
//! # ];
//! # let bytes = marlinspike::container::write_container(&tensors, &Default::default(), Vec::new())?;
//! # std::fs::write(model.join("model.safetensors"), bytes)?;
//! # std::fs::write(model.join("config.json"), r#"{"dtype": "bfloat16", "quantization_config":
//! #     {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "desc_act": false}}"#)?;
//!
//! // List the quantized layers and the kernel that takes each.
//! let found = inspect(&model, &Default::default())?;
//! assert_eq!(found.layers[0].chosen, Some("marlin"));
//!
//! // Convert into KleidiAI's layout for a CPU, then verify every byte against the manifest.
//! convert(&model, &packed, &Options::new(int4::FORMAT), &())?;
//! assert!(verify(&packed, None)?.damaged.is_empty());
//!
//! // Run one layer on seeded activations and compare it with its definition bit for bit.
//! let mut options = RunOptions::default();
//! options.check = true;
//! assert!(run(&packed, &options)?.is_equal());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate never prints, exits the process or reads arguments. Errors are [`model::ModelError`],
//! [`convert::error::ConvertError`] and [`run::error::RunError`], one variant for each failure.

pub mod convert;
pub mod fuzz;
pub mod inspect;
pub mod load;
pub mod map;
pub mod model;
pub mod run;

pub use self::convert::convert;
pub use self::convert::verify::verify;
pub use self::inspect::inspect;
pub use self::run::run;
