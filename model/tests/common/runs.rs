//! Conversions within the test's own process.

use std::num::NonZero;
use std::path::Path;

use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::Capability;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::execute::{Execution, MEMORY};
use marlinspike_model::convert::io::Unsynced;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::marlin;
use marlinspike_model::convert::{Output, Summary, convert_model};
use marlinspike_model::load::preparation::Preparation;
use marlinspike_model::model::{Model, ModelFiles};

pub const EXECUTION: Execution =
    Execution { threads: NonZero::new(2).unwrap(), memory: MEMORY, stop_after: None };

pub fn settings() -> Settings {
    Settings {
        format: marlin::FORMAT,
        dtype: ScalarType::BFLOAT16,
        input: InputDtype::Model,
        tp: Ranks::ONE,
        ep: Ranks::ONE,
        device: Capability::cuda(8, 0),
        skip_unsupported: false,
        allow_underflow: false,
        shard_bytes: 1 << 30,
        preparation: Preparation::AS_STORED,
        merge_projections: false,
    }
}

pub fn run_with(
    model: &Path,
    out: &Path,
    settings: &Settings,
    execution: Execution,
) -> Result<Summary, ConvertError> {
    let files = ModelFiles::open(model)?;
    let model = Model::new(&files)?;
    convert_model(&model, folder(out, false), settings, execution, &())
}

pub fn folder(dir: &Path, force: bool) -> Output<'_> {
    Output { storage: &Unsynced, dir, force }
}

pub fn run(model: &Path, out: &Path, settings: &Settings) -> Result<Summary, ConvertError> {
    run_with(model, out, settings, EXECUTION)
}

pub fn golden(kind: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data").join(kind)
}
