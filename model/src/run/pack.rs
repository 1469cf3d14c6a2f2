//! Layers of an original checkpoint for the int4 path, packed into memory.

use marlinspike::case::ActivationRounding;
use marlinspike::w4a8::moe::{Mode, MoeLayer};
use marlinspike::w4a8::packed::{PackedRhs, PackedStack, RhsLayout};
use marlinspike::w4a8::stored::{Description, MoeDescription};
use marlinspike::w4a8::{Kernel, Linear};
use marlinspike::{Error, Result};

use super::error::RunError;
use crate::convert::error::{ConvertError, Refused};
use crate::convert::job::packed_stack;
use crate::convert::plan::ConversionPlan;
use crate::convert::settings::Settings;
use crate::convert::stack::StackPlan;
use crate::convert::target::int4;
use crate::model::layers::{Layers, Role};
use crate::model::{Model, ModelError};

/// The plan of the int4 path for every quantized layer of a checkpoint.
#[derive(Debug)]
pub struct Packer<'m, 'f> {
    model: &'m Model<'f>,
    layers: Layers,
    plan: ConversionPlan,
    settings: Settings,
}

impl<'m, 'f> Packer<'m, 'f> {
    /// Plans the layers of `model`. Nothing is read but headers and configs.
    ///
    /// # Errors
    /// [`ModelError`] for modules whose tensors do not fit together.
    pub fn new(model: &'m Model<'f>) -> Result<Self, ModelError> {
        let (layers, settings) = (Layers::group(model)?, Settings::new(int4::FORMAT));
        let plan = ConversionPlan::new(model, &layers, &settings)?;
        Ok(Self { model, layers, plan, settings })
    }

    /// The layers that can be packed, by name.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.plan.descriptions.keys().map(String::as_str)
    }

    /// Whether a tensor belongs to a quantized layer.
    pub fn owns(&self, tensor: &str) -> bool {
        self.layers.owned.contains(tensor)
    }

    /// Bytes of all packed layers together.
    pub fn bytes(&self) -> u64 {
        let outputs = self.plan.stacks.iter().flat_map(|s| &s.outputs);
        outputs.filter_map(|o| o.spec.byte_len()).sum()
    }

    /// The layers that cannot be packed, with the reasons.
    pub fn refused(&self) -> &[Refused] {
        &self.plan.refused
    }

    /// The error for refused layers.
    pub fn refusal(&self, refused: Vec<Refused>) -> RunError {
        let target = self.settings.format.title();
        RunError::Refused(ConvertError::Refused { target, refused })
    }

    /// The plans of a layer's stacks.
    pub(super) fn stacks<'p>(&'p self, module: &'p str) -> impl Iterator<Item = &'p StackPlan> {
        self.plan.stacks.iter().filter(move |s| s.module == module)
    }

    /// The settings of the plan.
    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether `module` is linear or experts.
    ///
    /// # Errors
    /// [`Error::Missing`] for a layer that is not in [`Packer::modules`].
    pub fn description(&self, module: &str) -> Result<&Description> {
        let described = self.plan.descriptions.get(module).and_then(|d| d.int4.as_ref());
        described.ok_or_else(|| Error::missing(module, "its description"))
    }

    /// Packs a linear layer on rayon's current pool.
    ///
    /// # Errors
    /// [`Error::Missing`] for a layer of another kind; errors of the format, naming the tensor.
    pub fn linear(
        &self,
        module: &str,
        rounding: ActivationRounding,
        kernel: Box<dyn Kernel>,
    ) -> Result<Linear<'static>> {
        let Description::Linear(described) = self.description(module)? else {
            return Err(Error::missing(module, "a linear layer"));
        };
        let layout = described.layout;
        let weight = PackedRhs::new(layout, self.stack(module, Role::Dense, layout)?)?;
        Ok(Linear::new(weight, rounding).with_kernel(kernel))
    }

    /// Packs experts on rayon's current pool.
    ///
    /// # Errors
    /// As [`Packer::linear`].
    pub fn experts(
        &self,
        module: &str,
        rounding: ActivationRounding,
        kernel: Box<dyn Kernel>,
    ) -> Result<MoeLayer<'static>> {
        let Description::Moe(described) = self.description(module)? else {
            return Err(Error::missing(module, "a layer of experts"));
        };
        let described: MoeDescription = described.clone();
        let (w13, w2) = (described.w13_layout()?, described.w2_layout()?);
        let w13 = PackedStack::new("w13", w13, self.stack(module, Role::W13, w13)?)?;
        let w2 = PackedStack::new("w2", w2, self.stack(module, Role::W2, w2)?)?;
        let layer = MoeLayer::described(described, w13, w2, rounding, Mode::Extended)?;
        Ok(layer.with_kernel(kernel))
    }

    fn stack(&self, module: &str, role: Role, layout: RhsLayout) -> Result<Vec<u8>> {
        let found = self.stacks(module).find(|s| s.role == role);
        let stack = found.ok_or_else(|| Error::missing(module, "the plan of its layer"))?;
        packed_stack(self.model, stack, &self.settings, layout.packed_len())
    }
}
