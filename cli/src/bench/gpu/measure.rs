//! From arguments to figures.

use anyhow::{Context as _, Result};
use marlinspike::num::dims::Shape;
use marlinspike_accel::limits::{self, Limits, Operands};
use marlinspike_accel::ops::fp8_gemm::{Fp8Scales, Fp8Sums};
use marlinspike_accel::timing::Times;
use marlinspike_accel::workload::{COLD_BYTES, Dense, ExpertLayer, Fp8Dense, Sizes};
use marlinspike_accel::{AccelError, Device};
use marlinspike_bench::Workload;
use marlinspike_bench::workload::{FP8_LAYERS, FP8_PRODUCTS, GPU_LAYERS, GPU_PRODUCTS};

use super::peers::Peer;
use super::report::{Case, Machine, Report, Row};
use super::{Args, Input};
use crate::error::of_gpu;

const TOKENS: [u32; 6] = [1, 16, 64, 256, 1024, 4096];

/// One workload on the device.
enum Ready {
    Dense(Dense),
    /// Both operands e4m3fn.
    Fp8(Fp8Dense),
    Layer(Box<ExpertLayer>),
}

impl Ready {
    fn new(device: &Device, args: &Args, workload: Workload) -> Result<Self, AccelError> {
        match workload {
            Workload::Dense { size_k, size_n } if args.is_w8a8() => {
                let shape = Shape::new(size_k, size_n);
                Fp8Dense::new(device, shape, kind(args), COLD_BYTES).map(Self::Fp8)
            }
            Workload::Dense { .. }
                if matches!(args.input, Some(Input::Fp8Block | Input::Fp8Fast)) =>
            {
                Err(AccelError::Argument {
                    operation: "workload",
                    what: "input",
                    found: format!("weights of type {}", args.ty.name),
                    expected: "weights of type fp8".into(),
                })
            }
            Workload::Dense { size_k, size_n } => Dense::new(
                device,
                args.ty,
                Shape::new(size_k, size_n),
                args.input.map(Input::ty),
                COLD_BYTES,
            )
            .map(Self::Dense),
            Workload::Moe { .. }
                if !args.is_w8a8() && !matches!(args.input, None | Some(Input::Fp8)) =>
            {
                Err(AccelError::Argument {
                    operation: "workload",
                    what: "input",
                    found: format!("a layer of weights of type {}", args.ty.name),
                    expected: "fp8, or a product, KxN".into(),
                })
            }
            Workload::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
                let sizes = Sizes { num_experts, top_k, hidden_size, intermediate_size };
                let layer = match (args.is_w8a8(), args.input) {
                    (true, _) => ExpertLayer::fp8(device, kind(args), sizes),
                    (false, Some(_)) => ExpertLayer::w4a8(device, args.ty, sizes),
                    (false, None) => ExpertLayer::new(device, args.ty, sizes),
                };
                layer.map(|layer| Self::Layer(Box::new(layer)))
            }
        }
    }

    /// Times of a call, the least number of bytes that it moves, and the number of experts that it
    /// hits.
    fn time(
        &self,
        device: &Device,
        workload: Workload,
        tokens: usize,
        args: &Args,
    ) -> Result<(Times, f64, Option<f64>), AccelError> {
        let replays = args.replays as usize;
        let bytes_of_input = if args.input.is_some() { 1 } else { 2 };
        let [a, b] = workload.sizes();
        match self {
            Self::Dense(dense) => {
                let times = dense.time(device, tokens, None, replays)?;
                let moved = dense.bytes() + tokens * (bytes_of_input * a + 2 * b);
                Ok((times, moved as f64, None))
            }
            Self::Fp8(dense) => {
                let times = dense.time(device, tokens, None, replays)?;
                let moved = dense.bytes() + tokens * (bytes_of_input * a + 2 * b);
                Ok((times, moved as f64, None))
            }
            Self::Layer(layer) => {
                let (times, hit) = layer.time(device, tokens, None, replays)?;
                // Intermediate activations may stay in the L2 cache and are not counted.
                let moved = hit * layer.bytes_of_expert() as f64 + (2 * 2 * tokens * a) as f64;
                Ok((times, moved, Some(hit)))
            }
        }
    }
}

/// Scales and sums of e4m3fn operands.
fn kind(args: &Args) -> (Fp8Scales, Fp8Sums) {
    match args.input {
        Some(Input::Fp8Block) => (Fp8Scales::Blocks, Fp8Sums::Promoted),
        Some(Input::Fp8Fast) => (Fp8Scales::Channels, Fp8Sums::Unpromoted),
        _ => (Fp8Scales::Channels, Fp8Sums::Promoted),
    }
}

/// The shapes that are measured where none is given.
fn default_shapes(args: &Args) -> Vec<Workload> {
    match (args.input, args.is_w8a8()) {
        (_, true) => [&FP8_PRODUCTS[..], &FP8_LAYERS.map(Workload::layer)].concat(),
        (None, _) => [&GPU_PRODUCTS[..], &GPU_LAYERS.map(Workload::layer)].concat(),
        (Some(_), _) => GPU_PRODUCTS.to_vec(),
    }
}

/// Measures the limits before and after the cases and keeps the better of both.
pub(super) fn measure(args: &Args, peers: &[Peer]) -> Result<Report> {
    let device = Device::open().map_err(of_gpu)?;
    let operands = if args.is_w8a8() { Operands::E4m3 } else { Operands::Bf16 };
    let before = limits::measure(&device, operands).map_err(of_gpu)?;
    let shapes = if args.shapes.is_empty() { default_shapes(args) } else { args.shapes.clone() };
    let tokens = if args.tokens.is_empty() { &TOKENS[..] } else { &args.tokens };
    let mut cases = Vec::new();
    for workload in shapes {
        let ready = Ready::new(&device, args, workload)
            .map_err(of_gpu)
            .with_context(|| format!("{workload} of {}", args.ty.name))?;
        for &tokens in tokens {
            let tokens = tokens as usize;
            let (times, bytes, experts_hit) = ready
                .time(&device, workload, tokens, args)
                .map_err(of_gpu)
                .with_context(|| format!("{workload}, {tokens} tokens"))?;
            cases.push(Case { workload, tokens, times, bytes, experts_hit });
        }
    }
    let after = limits::measure(&device, operands).map_err(of_gpu)?;
    let limits = Limits {
        read: before.read.max(after.read),
        matrix: before.matrix.max(after.matrix),
        ..before
    };
    let (major, minor) = device.compute_capability();
    let machine = Machine {
        device: device.name().to_owned(),
        compute_capability: format!("{major}.{minor}"),
        multiprocessors: device.multiprocessors(),
        read_tb_s: limits.read / 1e12,
        matrix_tflop_s: limits.matrix / 1e12,
        matrix_instruction: limits.instruction,
    };
    let rows = cases.into_iter().map(|case| Row::new(case, &limits, peers)).collect();
    Ok(Report {
        machine,
        weights: args.ty.name,
        activations: args.input.map_or("bf16", Input::name),
        replays: args.replays,
        results: rows,
    })
}
