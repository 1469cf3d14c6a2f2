//! Layers of an original checkpoint for the int4 path, packed into memory.

use marlinspike::w4a8::experts;
use marlinspike::w4a8::linears::{self, LinearLayer, LinearOptions};
use marlinspike::w4a8::moe::{ExpertLayer, ExpertOptions};
use marlinspike::w4a8::stored::Description;
use marlinspike::{Error, Result};

use super::error::RunError;
use super::has_method;
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

    /// The layer that runs if none is named: the first with experts, or the first, of those that run
    /// by no other method.
    pub(super) fn first(&self) -> Option<&str> {
        let own = || self.layers.stacks.iter().filter(|s| !has_method(&s.scheme));
        let experts = own().find(|s| s.role == Role::W13);
        experts.or_else(|| own().next()).map(|s| s.module.as_str())
    }

    /// Whether a tensor belongs to a quantized layer.
    pub fn owns(&self, tensor: &str) -> bool {
        self.layers.owned.contains(tensor)
    }

    /// Bytes of the packed layers that `wanted` names.
    pub fn bytes(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        let stacks = self.plan.stacks.iter().filter(|s| wanted(&s.module));
        stacks.flat_map(|s| &s.outputs).filter_map(|o| o.spec.byte_len()).sum()
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
        options: LinearOptions<'_>,
    ) -> Result<Box<dyn LinearLayer + 'static>> {
        let Description::Linear(described) = self.description(module)? else {
            return Err(Error::missing(module, "a linear layer"));
        };
        let bytes = self.stack(module, Role::Dense, described.sizes()?.packed_len)?;
        linears::layer(*described, bytes.into(), options)
    }

    /// Packs experts on rayon's current pool.
    ///
    /// # Errors
    /// As [`Packer::linear`] and [`experts::layer`].
    pub fn experts(
        &self,
        module: &str,
        options: ExpertOptions<'_>,
    ) -> Result<Box<dyn ExpertLayer + 'static>> {
        let Description::Moe(described) = self.description(module)? else {
            return Err(Error::missing(module, "a layer of experts"));
        };
        let [w13, w2] = described.sizes()?;
        let w13 = self.stack(module, Role::W13, w13.packed_len)?;
        let w2 = self.stack(module, Role::W2, w2.packed_len)?;
        experts::layer(described.clone(), [w13.into(), w2.into()], options)
    }

    fn stack(&self, module: &str, role: Role, packed_len: usize) -> Result<Vec<u8>> {
        let found = self.stacks(module).find(|s| s.role == role);
        let stack = found.ok_or_else(|| Error::missing(module, "the plan of its layer"))?;
        packed_stack(self.model, stack, &self.settings, packed_len)
    }
}
