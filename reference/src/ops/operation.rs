//! The trait that every operation implements.

use serde_json::{Map, Value};

use super::CaseConfig;
use super::axes::Axes;
use super::case::Case;
use super::computation::{Defined, add_outputs};
use super::draw::{self, Rng};
use super::fp8_blocks::Fp8Operands;
use super::quant::QuantConfig;
use super::schema::{CaseError, Demand, Inputs, Reader, TensorRule};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::products::schedule::Schedule;

/// An operation, implemented by its config.
pub(crate) trait Operation: std::fmt::Debug {
    /// The config keys that the operation reads.
    fn keys() -> &'static [&'static str]
    where
        Self: Sized;

    /// The keys that `map` may have; `None` if any key is allowed.
    fn keys_in(_map: &Map<String, Value>) -> Option<&'static [&'static str]>
    where
        Self: Sized,
    {
        Some(Self::keys())
    }

    /// What the keys mean that only this operation has. The meanings of shared keys are in the schema's
    /// glossary.
    fn key_meanings() -> &'static [(&'static str, &'static str)]
    where
        Self: Sized,
    {
        &[]
    }

    /// Reads and checks the keys.
    fn read(r: &Reader<'_>) -> Result<Self, CaseError>
    where
        Self: Sized;

    /// Configs around the edges of tiles, groups and types, in the fixed order in which generated
    /// cases walk them.
    ///
    /// # Errors
    /// Currently none.
    fn lattice() -> Result<Vec<Self>>
    where
        Self: Sized;

    /// The axes of the configs, with what is illegal and why; `None` where the lattice is every
    /// combination of few values.
    ///
    /// # Errors
    /// Currently none.
    fn axes() -> Result<Option<Axes>>
    where
        Self: Sized,
    {
        Ok(None)
    }

    /// The ids of the known mistakes of [`Operation::computation`].
    fn mistakes() -> Vec<&'static str>
    where
        Self: Sized,
    {
        Vec::new()
    }

    /// The keys as JSON, as [`Operation::read`] accepts them.
    fn json(&self) -> Value;

    /// A short description of the config: the values of its keys.
    fn describe(&self) -> String {
        let word = |(key, value): (&String, &Value)| match value {
            Value::Null => None,
            Value::Object(_) => Some(key.clone()),
            Value::String(text) => Some(text.clone()),
            other => Some(format!("{key} {other}")),
        };
        let json = self.json();
        json.as_object().into_iter().flatten().filter_map(word).collect::<Vec<_>>().join(" ")
    }

    /// Layers: whether the activation multiplies by a second half of w13's rows.
    fn is_gated(&self) -> Option<bool> {
        None
    }

    /// Every tensor of the operation. `experts` is the leading axis of a MoE case's weights: the
    /// experts of this rank.
    ///
    /// # Errors
    /// For sizes that the operation cannot have.
    fn tensors(&self, experts: usize) -> Result<Vec<TensorRule>>;

    /// Checks the values of inputs whose shapes and types are right.
    ///
    /// # Errors
    /// [`crate::Error::Value`] for an invalid value; [`CaseError`] for contradicting statements.
    fn check_inputs(&self, _inputs: &Inputs<'_>) -> Result<()> {
        Ok(())
    }

    /// The memory and time of a check that its tensors do not bound.
    ///
    /// # Errors
    /// As [`Operation::tensors`].
    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        Ok(vec![Demand::outputs(case.op, &self.tensors(0)?)])
    }

    /// Number of rows of every output, if only the inputs determine it.
    fn output_rows(&self, _inputs: &Inputs<'_>) -> Option<usize> {
        None
    }

    /// The format of the quantized matrices.
    fn quant(&self) -> Option<&QuantConfig> {
        None
    }

    /// The operands of a product of e4m3fn rows and weights, which a backend may compute.
    fn fp8_operands(&self) -> Option<Fp8Operands> {
        None
    }

    /// The config whose `y` has the bits of this schedule; `None` where a config states none.
    fn with_schedule(&self, _schedule: Schedule) -> Option<CaseConfig> {
        None
    }

    /// K of the quantized matrix whose tensors begin with `prefix`.
    fn size_k(&self, _prefix: &str) -> Option<usize> {
        None
    }

    /// The bit-exact definition of the outputs; `None` for an operation that is judged stage by
    /// stage.
    ///
    /// # Errors
    /// For inputs that the operation refuses.
    fn computation(&self, _case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(None)
    }

    /// Adds every output that the reference computes, for an operation without a
    /// [`Operation::computation`].
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses; [`crate::Error::Unsupported`] by default.
    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        Err(crate::Error::unsupported(case.op, "the reference does not compute its outputs"))
    }

    /// The verdicts on the outputs of the case; by default, compared bit for bit with
    /// [`Operation::computation`].
    ///
    /// # Errors
    /// For inputs that the operation refuses.
    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        self.computation(case)?.map_or(Ok(Vec::new()), |computation| computation.judge(case))
    }

    /// Whether a case's outputs can have only one value each, so that another is wrong.
    fn fixes_every_bit(&self) -> bool {
        true
    }

    /// The config for the first row of activations alone, and the inputs that have an axis of rows;
    /// `None` where an output depends on all rows.
    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        None
    }

    /// The config of a kernel that cuts K otherwise; `None` where there is no such kernel.
    fn with_k_cut_otherwise(&self) -> Option<CaseConfig> {
        None
    }

    /// Adds random inputs to an empty case.
    ///
    /// # Errors
    /// Returns no error for a config of the lattice.
    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        draw::any_inputs(case, rng)
    }

    /// Adds random inputs to an empty case, and every output that the reference computes.
    ///
    /// # Errors
    /// Returns no error for a config of the lattice.
    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        self.draw_inputs(case, rng)?;
        add_outputs(case)
    }
}
