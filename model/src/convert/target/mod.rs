//! The kernel formats that `convert` writes, one row of a table for each.
//!
//! A new format takes a row in `TARGETS` and a file with its [`Descriptor`] and its `Target`.

pub mod deepgemm;
pub mod experts;
pub(crate) mod fp8_blocks;
pub mod int4;
mod kept;
pub mod marlin;
mod notes;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;

use marlinspike::layers::ExpertMap;
use marlinspike::w4a8::stored::Description;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use serde_json::Value;

use super::entry::Entry;
pub use super::format::{Choice, Descriptor, Format};
use super::job::Job;
use super::piece::{Constants, Piece};
use super::settings::Settings;
use super::stack::StackPlan;
use super::stack::info::StackInfo;
use crate::model::layers::{Layers, Stack};
use crate::model::{Model, ModelError};
pub use experts::EXPERT_BACKEND;
pub use marlinspike::layouts::ExpertBackend;

/// A layer's description in a file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The key of the metadata.
    pub key: String,
    /// Its JSON.
    pub value: Value,
    /// The int4 path: the parsed description.
    pub int4: Option<Description>,
}

/// The plan of a stack, or every reason why it is refused.
pub(crate) type Planned = Result<StackPlan, Vec<String>>;

/// The model and settings for planning stacks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'c> {
    pub(crate) model: &'c Model<'c>,
    pub(crate) kv_heads: Option<usize>,
    pub(crate) settings: &'c Settings,
}

/// One kernel format: everything of a conversion that depends on it.
pub(crate) trait Target: Debug {
    /// The options of the manifest that only this format has.
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

    /// The plan of the stack on this rank, or every reason why it is refused.
    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned;

    /// Notes on values that preparation changes in a planned stack; or the reason why the format
    /// cannot hold the result.
    fn notes(
        &self,
        _plan: &StackPlan,
        _context: Context<'_>,
    ) -> Result<Result<Vec<String>, String>, ModelError> {
        Ok(Ok(Vec::new()))
    }

    /// The descriptions of layers for the files' metadata, by module. `planned` has an entry for
    /// each stack; a layer that cannot be described is refused there.
    fn describe(
        &self,
        _layers: &Layers,
        _planned: &mut [Planned],
        _maps: &BTreeMap<String, ExpertMap>,
        _context: Context<'_>,
    ) -> BTreeMap<String, Described> {
        BTreeMap::new()
    }

    /// Whether files state which rank's part of a layer they hold.
    fn states_ranks(&self) -> bool {
        false
    }

    /// Whether the format quantizes activations that the checkpoint of `plan` keeps in 16 bits.
    fn quantizes_activations(&self, _plan: &StackPlan) -> bool {
        false
    }

    /// Values that all jobs of a stack share.
    fn constants(&self, plan: &StackPlan, context: Context<'_>) -> Result<Constants>;

    /// Packs the weight of a job.
    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>>;

    /// Whether the int4 path multiplies the packed bytes where they lie. Layers of the other formats
    /// are unpacked by [`Target::unpack`].
    fn runs_packed(&self) -> bool {
        false
    }

    /// Whether the format's kernels keep activations in 16 bits, even if the checkpoint's method
    /// quantizes them.
    fn keeps_activations(&self) -> bool {
        false
    }

    /// Every expert's weight of a converted stack.
    fn unpack(&self, entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
        Err(Error::unsupported(entry.module, "the int4 path runs its bytes as they are"))
    }
}

/// A format, and its target for an index into the values of its option.
type Row = (Format, fn(usize) -> Box<dyn Target>);

/// Every format.
static TARGETS: [Row; 4] = [
    (marlin::FORMAT, |_| Box::new(marlin::Marlin)),
    (int4::FORMAT, |chosen| Box::new(int4::Int4::new(chosen))),
    (experts::FORMAT, |chosen| Box::new(experts::Experts::new(chosen))),
    (deepgemm::FORMAT, |chosen| Box::new(deepgemm::DeepGemm::new(chosen))),
];

impl Format {
    /// Every format, with the defaults of its option.
    pub const ALL: [Self; 4] = [marlin::FORMAT, int4::FORMAT, experts::FORMAT, deepgemm::FORMAT];

    /// The format of this name, with the default of its option.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format that a converted config's `marlinspike` section names.
    pub fn of_section(section: &Value) -> Option<Self> {
        section["layout"].as_str().and_then(Self::from_name)
    }

    /// The behavior of the format.
    pub(crate) fn target(self) -> Box<dyn Target> {
        let row = TARGETS.iter().find(|(format, _)| format.name() == self.name());
        let (_, target) = row.expect("`TARGETS` has every format");
        target(self.chosen())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_its_own_name_and_target() {
        let rows: Vec<_> = TARGETS.iter().map(|(format, _)| *format).collect();
        assert_eq!(rows, Format::ALL);
        let names: std::collections::BTreeSet<_> = rows.iter().map(|f| f.name()).collect();
        assert_eq!(names.len(), rows.len());
        for format in rows {
            assert_eq!(Format::from_name(format.name()), Some(format));
            let values = format.descriptor().choice.map_or(&[][..], |c| c.values);
            for (i, value) in values.iter().enumerate() {
                let name = format.descriptor().choice.map_or("", |c| c.name);
                let chosen = format.with(name, value).expect("a value of the option");
                assert_eq!((chosen.chosen(), chosen == format), (i, i == 0));
                let _ = chosen.target();
                assert_eq!(format.with("no_option", value), None);
            }
            assert_eq!(format.with("nr", "5"), None);
        }
    }
}
