//! An expert layer of 4-bit weights and e4m3fn activations: one scale for each row.

use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

use super::experts::moe_w4a8_gemm_activated;
use super::{MOE as ROW, RowsA8, W4a8Plan, moe_w4a8_gemm};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    operation::Row,
    ops::{
        align::RoutedRows,
        check,
        fp8_rows::{ExpertWeight, Fp8RowsLayer, Fp8RowsWorkspace, Rows},
        gather::Gathered,
        gemm::MarlinWeight,
        layer::blocks::GateUp,
    },
};

/// One rank's layer in a device's memory. The result has the bits of the reference's
/// [`MethodLayer::forward`](marlinspike::method::MethodLayer::forward) by
/// [`Schedule::canonical_wgmma`](marlinspike::products::schedule::Schedule::canonical_wgmma), for any batch.
pub type W4a8Layer = Fp8RowsLayer<MarlinWeight>;

/// Buffers between the stages of a layer.
pub type W4a8Workspace = Fp8RowsWorkspace<W4a8Plan>;

impl ExpertWeight for MarlinWeight {
    type Plan = W4a8Plan;

    fn row() -> &'static Row {
        &ROW
    }

    fn plans(weights: [&Self; 2], entries: usize, device: &Device) -> [W4a8Plan; 2] {
        W4a8Plan::of_experts(weights, entries, device.multiprocessors())
    }

    fn rows(plan: W4a8Plan) -> u32 {
        plan.rows
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn dtype(&self) -> ScalarType {
        self.dtype()
    }

    fn scales(&self, places: usize) -> usize {
        places
    }

    fn gathered<'r>(&self, Rows { codes, scales }: &'r mut Rows, _: bool) -> Gathered<'r> {
        Gathered::Fp8Rows { codes, scales }
    }

    fn multiply(
        &self,
        device: &Device,
        Rows { codes, scales }: &Rows,
        y: &mut Buffer<u16>,
        plan: W4a8Plan,
        routed: RoutedRows<'_>,
    ) -> Result<(), AccelError> {
        moe_w4a8_gemm(device, RowsA8 { codes, scales }, self, y, plan, routed)
    }

    fn multiply_activated(
        &self,
        device: &Device,
        gate_up: GateUp<'_>,
        y: &mut Buffer<u16>,
        plan: W4a8Plan,
        routed: RoutedRows<'_>,
    ) -> Result<bool, AccelError> {
        moe_w4a8_gemm_activated(device, gate_up, self, y, plan, routed)
    }
}

impl W4a8Layer {
    /// Packs a layer's weights and copies them to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] or [`MarlinWeight::for_8_bit`] refuses, a layer that states a
    /// type of activations, and act-order; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        if layer.input_dtype.is_some() || layer.orders.iter().any(Option::is_some) {
            return Err(ROW.refuse("layer", "an input_dtype, or act-order", "neither"));
        }
        let input = ScalarType::FLOAT8_E4M3FN;
        let weight = |weights| MarlinWeight::for_8_bit(device, weights, layer.dtype, input);
        Self::of(device, layer, [weight(layer.w13)?, weight(layer.w2)?], false)
    }

    /// Bytes of the codes and scales of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        self.weights.iter().map(MarlinWeight::bytes).sum()
    }
}
