//! An expert layer of e4m3fn weights and activations.

use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

use super::{Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight, MOE as ROW, RowsFp8, moe_fp8_gemm};
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
        quantize::fp8_scale_step,
    },
};

/// One rank's layer in a device's memory. With scales of channels, activations have one scale for each row; with those of
/// blocks, one for each 128 k of a row. The result has the bits of the reference's
/// [`MethodLayer::forward`](marlinspike::method::MethodLayer::forward) by the schedules of [`moe_fp8_gemm`], for any
/// batch.
pub type Fp8Layer = Fp8RowsLayer<Fp8Weight>;

/// Buffers between the stages of a layer.
pub type Fp8Workspace = Fp8RowsWorkspace<Fp8Plan>;

impl ExpertWeight for Fp8Weight {
    type Plan = Fp8Plan;

    fn row() -> &'static Row {
        &ROW
    }

    fn plans(weights: [&Self; 2], entries: usize, _: &Device) -> [Fp8Plan; 2] {
        [Fp8Plan::of_experts(weights[0].experts(), entries); 2]
    }

    fn rows(plan: Fp8Plan) -> u32 {
        plan.rows
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn dtype(&self) -> ScalarType {
        self.dtype()
    }

    fn scales(&self, places: usize) -> usize {
        match self.scales_of() {
            Fp8Scales::Channels => places,
            Fp8Scales::Blocks => self.shape().size_k / Self::BLOCK * fp8_scale_step(places),
        }
    }

    fn gathered<'r>(&self, Rows { codes, scales }: &'r mut Rows, ue8m0: bool) -> Gathered<'r> {
        match self.scales_of() {
            Fp8Scales::Channels => Gathered::Fp8Rows { codes, scales },
            Fp8Scales::Blocks => Gathered::Fp8Groups { codes, scales, ue8m0 },
        }
    }

    fn multiply(
        &self,
        device: &Device,
        Rows { codes, scales }: &Rows,
        y: &mut Buffer<u16>,
        plan: Fp8Plan,
        routed: RoutedRows<'_>,
    ) -> Result<(), AccelError> {
        moe_fp8_gemm(device, RowsFp8 { codes, scales }, self, y, plan, routed)
    }
}

impl Fp8Layer {
    /// Copies a layer's weights to the device. `ue8m0`: the scales of blocks of activations are rounded up to powers of
    /// two.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] refuses, weights that [`Fp8Weight::new`] refuses or whose
    /// scales are of different kinds, and a layer with another type of activations or act-order; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>, ue8m0: bool) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        if layer.input_dtype.is_some() || layer.orders.iter().any(Option::is_some) {
            let found = "8-bit activations of Marlin's layout, or act-order";
            return Err(ROW.refuse("layer", found, "neither"));
        }
        let weight = |weights| Fp8Weight::new(device, weights, layer.dtype);
        let weights = [weight(layer.w13)?, weight(layer.w2)?];
        Self::with_weights(device, layer, weights, ue8m0)
    }

    /// [`Self::new`] with these weights instead of the layer's.
    pub(crate) fn with_weights(
        device: &Device,
        layer: &Layer<'_>,
        weights: [Fp8Weight; 2],
        ue8m0: bool,
    ) -> Result<Self, AccelError> {
        let [w13, w2] = weights.each_ref().map(Fp8Weight::scales_of);
        if w13 != w2 {
            return Err(ROW.refuse(
                "scales",
                format!("{w13:?} and {w2:?}"),
                "the same for w13 and w2",
            ));
        }
        Self::of(device, layer, weights, ue8m0)
    }

    /// The layer, whose products are summed otherwise; [`Self::new`] takes [`Fp8Sums::Promoted`].
    ///
    /// # Errors
    /// As [`Fp8Weight::summed`].
    pub fn summed(self, sums: Fp8Sums) -> Result<Self, AccelError> {
        self.with(|weight| weight.summed(sums))
    }

    /// Bytes of the codes and scales of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        let [w13, w2] = &self.weights;
        (w13.bytes() + w2.bytes()) / w13.experts()
    }
}
