//! The kernel formats that `convert` writes: `Format::target` is the one place that lists them.
//!
//! A new format takes a variant of [`Format`], its rows here, and a file that implements `Target`.

pub mod flashinfer;
pub mod kleidi;
pub mod marlin;
mod notes;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;

use marlinspike::Result;
use marlinspike::layers::ExpertMap;
use marlinspike::layouts::flashinfer::Nvfp4Backend;
use marlinspike::w4a8::stored::Description;
use marlinspike::weight::Weight;
use serde_json::Value;

use super::job::Job;
use super::piece::{Constants, Piece};
use super::settings::{Format, Settings};
use super::stack::StackPlan;
use super::stack::info::StackInfo;
use crate::model::layers::{Layers, Stack};
use crate::model::{Model, ModelError};

/// What the metadata of a file say of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The key of the metadata.
    pub key: String,
    /// Its JSON.
    pub value: Value,
    /// The int4 path: the same, as it runs.
    pub int4: Option<Description>,
}

/// A plan of a stack, or every reason against.
pub(crate) type Planned = Result<StackPlan, Vec<String>>;

/// What all stacks are planned with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'c> {
    pub(crate) model: &'c Model<'c>,
    pub(crate) kv_heads: Option<usize>,
    pub(crate) settings: &'c Settings,
}

/// One kernel format: everything of a conversion that depends on it.
pub(crate) trait Target: Debug {
    /// The name that the command line and the converted config have for it.
    fn name(&self) -> &'static str;

    /// The name for people.
    fn title(&self) -> &'static str;

    /// What it is, in a line of help.
    fn about(&self) -> &'static str;

    /// What runs a layer in this format, in a word or two.
    fn column(&self) -> &'static str;

    /// The options of the manifest that this format alone has.
    fn options(&self, settings: &Settings) -> Vec<(&'static str, Value)>;

    /// Keys that this format adds to the section of the converted config.
    fn section(&self, _settings: &Settings) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Keys that this format adds to a layer of the converted config.
    fn layer(&self, plan: &StackPlan, settings: &Settings) -> Vec<(&'static str, Value)>;

    /// The stack as this format reads it.
    fn stack<'s>(
        &self,
        _model: &Model<'_>,
        stack: &'s Stack,
    ) -> Result<Cow<'s, Stack>, ModelError> {
        Ok(Cow::Borrowed(stack))
    }

    /// The stack on this rank, or every reason against.
    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned;

    /// What preparation changes in the numbers of a planned stack, in sentences; or the reason
    /// against, where the format cannot hold what was asked for.
    fn notes(
        &self,
        _plan: &StackPlan,
        _context: Context<'_>,
    ) -> Result<Result<Vec<String>, String>, ModelError> {
        Ok(Ok(Vec::new()))
    }

    /// What the files say of each layer, by module. A layer that cannot be described is refused in
    /// `planned`, which has an entry for each of the stacks.
    fn describe(
        &self,
        _layers: &Layers,
        _planned: &mut [Planned],
        _maps: &BTreeMap<String, ExpertMap>,
        _context: Context<'_>,
    ) -> BTreeMap<String, Described> {
        BTreeMap::new()
    }

    /// Whether a file says whose rank's part its layers are.
    fn states_ranks(&self) -> bool {
        false
    }

    /// Whether the format quantizes activations that the checkpoint of `plan` keeps in 16 bits.
    fn quantizes_activations(&self, _plan: &StackPlan) -> bool {
        false
    }

    /// What all jobs of a stack share.
    fn constants(&self, plan: &StackPlan, context: Context<'_>) -> Result<Constants>;

    /// Packs the weight of a job.
    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>>;
}

impl Format {
    /// Every format, with its usual options.
    pub const ALL: [Self; 3] = [
        Self::Marlin,
        Self::Kleidi { nr: 8 },
        Self::Flashinfer { backend: Nvfp4Backend::NAMED[0].1 },
    ];

    /// What is special about the format.
    pub(crate) fn target(self) -> Box<dyn Target> {
        match self {
            Self::Marlin => Box::new(marlin::Marlin),
            Self::Kleidi { nr } => Box::new(kleidi::Kleidi { nr }),
            Self::Flashinfer { backend } => Box::new(flashinfer::Flashinfer { backend }),
        }
    }

    /// The name that the command line and the converted config have for it.
    pub fn name(self) -> &'static str {
        self.target().name()
    }

    /// The name for people.
    pub fn title(self) -> &'static str {
        self.target().title()
    }

    /// What it is, in a line of help.
    pub fn about(self) -> &'static str {
        self.target().about()
    }

    /// What runs a layer in this format, in a word or two: the head of a column.
    pub fn column(self) -> &'static str {
        self.target().column()
    }
}
