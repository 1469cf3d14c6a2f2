//! Layers whose rows are quantized to e4m3fn before each product, by Hopper's schedules: 4-bit weights, and
//! e4m3fn weights with scales of channels or of blocks.

use marlinspike::Result;
use marlinspike::case::{CheckpointFormat, MoeConfig};
use marlinspike::method::{MethodLayer, Quantizer};
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Fp8BlockKernel, Fp8Kernel, Schedule, Step, StepOp};
use marlinspike::quantize::Fp8GroupRule;
use marlinspike::weight::{TableData, Weight};
use proptest::prelude::*;

use super::{LayerInput, Local, MoeLayer, laws, moe_lattice};
use crate::{Law, Operation};

/// Columns, and k, of a block of e4m3fn weights.
const BLOCK: usize = 128;

/// A layer of 4-bit weights whose rows are e4m3fn with one scale each.
#[derive(Debug)]
pub struct W4a8Experts;

/// A layer of e4m3fn weights whose rows are e4m3fn: one scale for each row and column, or for groups of 128
/// of a row and blocks of 128 x 128.
#[derive(Debug)]
pub struct Fp8Experts;

/// The part of the rank; of e4m3fn in groups, with one scale for each block of 128 columns.
///
/// # Errors
/// As [`LayerInput::local`].
pub fn local_of_rows(input: &LayerInput) -> Result<Local> {
    let mut local = input.local()?;
    if has_blocks(&input.config) {
        for weight in local.w13.iter_mut().chain(&mut local.w2) {
            first_of_blocks(weight)?;
        }
    }
    Ok(local)
}

/// The layer of the rank's part, whose rows its quantizers make e4m3fn.
pub fn layer_of_rows<'l>(local: &'l Local, input: &LayerInput) -> Layer<'l> {
    Layer { input_dtype: None, ..local.layer(input) }
}

fn has_blocks(config: &MoeConfig) -> bool {
    config.quant.checkpoint_format == CheckpointFormat::Fp8
        && config.quant.group_size == GroupSize::Of(BLOCK)
}

fn first_of_blocks(weight: &mut Weight<'static>) -> Result<()> {
    let (rows, cols) = (weight.scales.rows(), weight.scales.cols());
    let at = |i: usize| weight.scales.bits(i / cols, i % cols / BLOCK * BLOCK) as u16;
    let bits = (0..rows * cols).map(at).collect();
    let ty = weight.scales.ty();
    weight.scales = marlinspike::weight::Table::new(ty, rows, cols, TableData::B16(bits))?;
    Ok(())
}

fn expected(
    input: &LayerInput,
    quantizer: Quantizer,
    schedule: impl Fn(&Weight<'_>) -> Result<Schedule>,
) -> Result<Vec<u16>> {
    let local = local_of_rows(input)?;
    let layer = layer_of_rows(&local, input);
    let quantizers = [quantizer.clone(), quantizer];
    let method = MethodLayer { layer, quantizers, w13_multipliers: None };
    let stages = method.forward(input.x_view()?, input.routed()?, |which, product| {
        product.execute(&schedule(&[layer.w13, layer.w2][which][0])?)
    });
    Ok(stages?.y.into_bits())
}

fn inputs(takes: fn(&MoeConfig) -> bool) -> BoxedStrategy<LayerInput> {
    let configs: Vec<_> = moe_lattice().unwrap_or_default().into_iter().filter(takes).collect();
    (any::<prop::sample::Index>(), any::<u64>(), 1usize..6, any::<bool>())
        .prop_filter_map("a configuration of the lattice", move |(at, seed, size_m, is_rank)| {
            let config = configs.get(at.index(configs.len().max(1)))?;
            match is_rank {
                true => LayerInput::draw_rank(config, seed, size_m).ok(),
                false => LayerInput::draw(config, seed, size_m).ok(),
            }
        })
        .boxed()
}

macro_rules! of_layers {
    ($name:ident $file:literal $takes:expr, $expected:expr) => {
        impl Operation for $name {
            const NAME: &'static str = $file;
            type Input = LayerInput;
            type Element = u16;

            fn inputs() -> BoxedStrategy<LayerInput> {
                inputs($takes)
            }

            fn expected(input: &LayerInput) -> Result<Vec<u16>> {
                $expected(input)
            }

            fn len(input: &LayerInput) -> Result<usize> {
                Ok(input.x.len())
            }

            fn place(input: &LayerInput, element: usize, bit: u32) -> String {
                MoeLayer::place(input, element, bit)
            }

            fn describe(input: &LayerInput) -> String {
                MoeLayer::describe(input)
            }

            fn own_laws() -> Vec<Law<Self>> {
                laws::of_bits()
            }
        }
    };
}

of_layers!(
    W4a8Experts "moe_w4a8_gemm layer"
    |c| c.quant.input_dtype == Some(ScalarType::FLOAT8_E4M3FN) && !c.quant.has_act_order(),
    |input: &LayerInput| {
        let dtype = input.config.quant.dtype;
        expected(input, Quantizer::Fp8Token, |weight| Schedule::canonical_wgmma(weight, dtype))
    }
);

of_layers!(
    Fp8Experts "moe_fp8_gemm layer"
    |c| {
        let q = &c.quant;
        let groups = [GroupSize::Channel, GroupSize::Of(BLOCK)];
        q.checkpoint_format == CheckpointFormat::Fp8 && groups.contains(&q.group_size)
    },
    |input: &LayerInput| {
        let dtype = input.config.quant.dtype;
        let (quantizer, mut schedule) = match has_blocks(&input.config) {
            true => {
                let rule = Fp8GroupRule::Quotient;
                let quantizer = Quantizer::Fp8GroupBy { size: BLOCK, rule, ue8m0: false };
                (quantizer, Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, dtype)?)
            }
            false => {
                (Quantizer::Fp8Token, Schedule::w8a8_fp8(Fp8Kernel::Cutlass, dtype, true)?)
            }
        };
        let router = Step { op: StepOp::RouterWeight, ty: ScalarType::FLOAT32 };
        if !schedule.epilogue.contains(&router) {
            schedule.epilogue.insert(schedule.epilogue.len() - 1, router);
        }
        expected(input, quantizer, |_| Ok(schedule.clone()))
    }
);
