//! Fuzz targets for the inputs of this crate: model folders and the activations of `run --input`.
//! No input may panic, and every accepted input must be consistent.
//!
//! As with `marlinspike_proptests::fuzz`, `tools/fuzz/` calls them under libFuzzer, and the tests on
//! stable Rust replay a corpus and mutations of it.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::sync::LazyLock;

use marlinspike::Error;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::container::Container;
use marlinspike::layouts::CPU_INT4;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::Capability;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::Values;
use marlinspike::w4a8::moe::{Mode, MoeLayer};
use marlinspike::w4a8::packed::{PackedStack, RhsLayout};
use marlinspike::w4a8::stored::{MoeDescription, OperatorRouting, StoredRouting};

use crate::convert::error::ConvertError;
use crate::convert::io::Unsynced;
use crate::convert::parallel::Ranks;
use crate::convert::plan::ConversionPlan;
use crate::convert::settings::{Execution, Format, Settings};
use crate::convert::target::int4;
use crate::convert::{Output, Summary, convert_model};
use crate::model::layers::Layers;
use crate::model::{Model, ModelError, ModelFiles};
use crate::run::error::RunError;
use crate::run::input::{Halves, Inputs, Routing, Sizes};
use crate::run::layer::{Layer, LoadOptions, Opened};

/// K of the layer that runs on the fuzzed activations.
const SIZE_K: usize = 32;
/// Number of experts of that layer.
const EXPERTS: usize = 4;

/// A small layer with arbitrary codes and finite scales.
fn small_layer() -> marlinspike::Result<Layer<'static>> {
    let described = MoeDescription {
        format: &CPU_INT4,
        hidden_size: SIZE_K,
        intermediate_size: 32,
        num_experts: EXPERTS,
        expert_map: None,
        group_size: GroupSize::Of(32),
        nr: 8,
        tables: CpuTables::NONE,
        routing: StoredRouting::Operator(OperatorRouting {
            top_k: 2,
            scoring_func: ScoringFunc::Softmax,
            renormalize: true,
            activation: Activation::Silu,
            router_weight_on_input: false,
        }),
    };
    let mut rng = Rng::new(1);
    // Bytes below 0x3c keep every scale, sum and bias at or below 1/128.
    let mut stack = |name, layout: RhsLayout| {
        let len = EXPERTS * layout.packed_len();
        let bytes: Vec<u8> = (0..len).map(|_| rng.below(0x3c) as u8).collect();
        PackedStack::new(name, layout, bytes)
    };
    let (w13, w2) = (stack("w13", described.w13_layout()?)?, stack("w2", described.w2_layout()?)?);
    let rounding = ActivationRounding::HalfAway;
    let layer = MoeLayer::described(described, w13, w2, rounding, Mode::Extended)?;
    Ok(Layer::Moe(Box::new(layer)))
}

/// Fuzzes the activations of `run --input`, for experts and for a linear layer, in the types of
/// both paths. Accepted activations must run, and the fastest kernel must equal the definition bit
/// for bit.
///
/// # Errors
/// Errors of the container, of the activations, or of the layer.
pub fn input(data: &[u8]) -> marlinspike::Result<()> {
    static LAYER: LazyLock<marlinspike::Result<Layer<'static>>> = LazyLock::new(small_layer);
    let file = Container::parse(data)?;
    let sizes = |num_experts| Sizes { size_k: SIZE_K, num_experts, has_router: false };
    let halves = Inputs::<Halves>::of(&file, sizes(Some(EXPERTS)));
    if let Ok(found) = &halves {
        consistent(found.x.bits.len(), &found.routing);
    }
    if let Ok(found) = Inputs::<Values>::of(&file, sizes(None)) {
        assert_eq!(found.routing, Routing::Logits(Vec::new()));
        assert!(!found.x.is_empty() && found.x.len().is_multiple_of(SIZE_K));
    }
    let inputs = match Inputs::<Values>::of(&file, sizes(Some(EXPERTS))) {
        Ok(inputs) => inputs,
        // The int4 path accepts other types of x than the other path.
        Err(error) => return halves.map(|_| ()).map_err(|_| error),
    };
    consistent(inputs.x.len(), &inputs.routing);
    let layer = LAYER.as_ref().map_err(Error::clone)?;
    let mut y = layer.output(&inputs)?;
    layer.runner(&inputs)(&mut y)?;
    let expected = layer.definition(&inputs)?;
    assert_eq!(y.len(), expected.len());
    let finite = expected.to_f32().iter().all(|v| v.is_finite());
    assert!(!finite || y.bits() == expected.bits(), "kernel and definition differ");
    Ok(())
}

/// Asserts that x and the routing have the same number of rows.
fn consistent(values: usize, routing: &Routing) {
    assert!(values > 0 && values.is_multiple_of(SIZE_K));
    let tokens = values / SIZE_K;
    match routing {
        Routing::Logits(logits) => assert_eq!(logits.len(), tokens * EXPERTS),
        Routing::Given { top_k, ids, weights } => {
            assert_eq!((ids.len(), weights.len()), (tokens * top_k, tokens * top_k));
        }
    }
}

/// Writes the files that `data` describes into `folder`. A line `== NAME` starts each file; names
/// with characters other than letters, digits, `.`, `_` and `-` are skipped.
///
/// # Errors
/// The system's.
pub fn unpack(data: &[u8], folder: &Path) -> std::io::Result<()> {
    let mark = b"== ";
    let starts = (0..data.len())
        .filter(|&i| data[i..].starts_with(mark) && (i == 0 || data[i - 1] == b'\n'))
        .collect::<Vec<_>>();
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).map_or(data.len(), |&next| next - 1);
        let file = &data[start + mark.len()..end];
        let line = file.iter().position(|&b| b == b'\n').unwrap_or(file.len());
        let name = &file[..line];
        let plain = |b: &u8| b.is_ascii_alphanumeric() || b"._-".contains(b);
        if name.is_empty() || name.len() > 100 || name[0] == b'.' || !name.iter().all(plain) {
            continue;
        }
        let name = String::from_utf8_lossy(name).into_owned();
        fs::write(folder.join(name), file.get(line + 1..).unwrap_or_default())?;
    }
    Ok(())
}

fn settings(format: Format, ranks: usize) -> Settings {
    Settings {
        tp: Ranks { size: ranks, rank: ranks - 1 },
        device: Capability::cuda(9, 0),
        shard_bytes: 1 << 20,
        ..Settings::new(format)
    }
}

fn convert(model: &Model<'_>, dir: &Path, settings: &Settings) -> Result<Summary, ConvertError> {
    let output = Output { storage: &Unsynced, dir, force: false };
    let execution = Execution { threads: NonZero::<usize>::MIN, ..Execution::default() };
    convert_model(model, output, settings, execution, &())
}

/// Fuzzes a model folder, unpacked ([`unpack`]) into the empty folder `temp`: plans it for every
/// format and two ranks, converts it, and runs its first int4 layer. A second conversion must find
/// the first one complete, and a layer that runs must equal its definition bit for bit.
///
/// # Errors
/// Errors of the folder, of the plan, or of the first conversion.
pub fn model(data: &[u8], temp: &Path) -> Result<(), RunError> {
    let folder = temp.join("model");
    let io = |source| ModelError::Io { path: folder.clone(), source };
    fs::create_dir(&folder).map_err(io)?;
    unpack(data, &folder).map_err(io)?;
    let files = ModelFiles::open(&folder)?;
    let model = Model::new(&files)?;
    let layers = Layers::group(&model)?;
    for format in Format::ALL {
        for ranks in [1, 2] {
            let settings = settings(format, ranks);
            let plan = ConversionPlan::new(&model, &layers, &settings)?;
            let items = plan.shards.iter().flat_map(|s| &s.items);
            assert!(items.clone().all(|i| i.spec.byte_len().is_some()));
        }
    }
    for format in Format::ALL {
        let (settings, out) = (settings(format, 1), temp.join(format.name()));
        let done = match convert(&model, &out, &settings) {
            Err(ConvertError::NothingConverted { .. }) => continue,
            done => done.map_err(RunError::Refused)?,
        };
        assert!(!done.already_complete);
        // A folder without converted layers records no rank.
        if done.converted > 0 {
            let again = convert(&model, &out, &settings).map_err(RunError::Refused)?;
            assert!(again.already_complete);
        }
        Model::new(&ModelFiles::open(&out)?)?;
    }
    runs(&folder)?;
    let packed = temp.join(int4::FORMAT.name());
    if packed.join("config.json").exists() { runs(&packed) } else { Ok(()) }
}

/// Runs the first int4 layer of a model, if there is one, on two tokens.
fn runs(folder: &Path) -> Result<(), RunError> {
    let opened = Opened::open(folder, None)?;
    if opened.modules()?.is_empty() {
        return Ok(());
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let pool = pool.map_err(|e| RunError::Threads { reason: e.to_string() })?;
    let rounding = ActivationRounding::HalfAway;
    let loaded = opened.load(LoadOptions { layer: None, rounding, kernel: None, pool: &pool })?;
    let inputs: Inputs<Values> = Inputs::seeded(1, 2, ScalarType::FLOAT32, loaded.layer.sizes())?;
    let mut y = loaded.layer.output(&inputs)?;
    pool.install(|| loaded.layer.runner(&inputs)(&mut y))?;
    let expected = loaded.layer.definition(&inputs)?;
    let finite = expected.to_f32().iter().all(|v| v.is_finite());
    assert!(!finite || y.bits() == expected.bits(), "kernel and definition differ");
    Ok(())
}
