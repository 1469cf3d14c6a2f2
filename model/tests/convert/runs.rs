//! Runs of `convert`: interrupted runs leave only complete files and continue to the same bytes,
//! memory is bounded, and errors name the layers that cannot be converted.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZero;
use std::path::Path;

use crate::common::runs::{EXECUTION, golden, run, run_with, settings};
use crate::common::{Converted, Format, files, write_model};
use marlinspike::container::Container;
use marlinspike::layouts::marlin::InputDtype;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::execute::Execution;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::{ConversionPlan, Settings};
use marlinspike_model::model::layers::Layers;
use marlinspike_model::model::{Model, ModelFiles};

#[test]
fn a_stopped_run_leaves_whole_files_and_the_next_one_continues() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::Gptq4, &model);
    let settings = Settings { shard_bytes: 300_000, ..settings() };
    let (whole, parts) = (temp.path().join("whole"), temp.path().join("parts"));
    let summary = run(&model, &whole, &settings).unwrap();
    assert!(summary.files >= 3, "{summary:?}");

    let stopped =
        run_with(&model, &parts, &settings, Execution { stop_after: Some(1), ..EXECUTION })
            .unwrap_err();
    assert!(matches!(stopped, ConvertError::Stopped { files: 1 }), "{stopped}");
    let visible = |dir: &Path| {
        let names =
            files(dir).into_iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_owned());
        names.filter(|n| !n.starts_with('.')).collect::<Vec<_>>()
    };
    assert_eq!(visible(&parts).len(), 1, "{:?}", visible(&parts));
    // A killed process leaves part of the next file under its temporary name.
    let next = format!(".model-00002-of-{:05}.safetensors.partial", summary.files);
    fs::write(parts.join(next), b"half").unwrap();
    let first = fs::metadata(parts.join(&visible(&parts)[0])).unwrap().modified().unwrap();

    let other = Settings { tp: Ranks { size: 2, rank: 0 }, ..settings.clone() };
    let refused = run(&model, &parts, &other).unwrap_err();
    assert!(matches!(refused, ConvertError::Occupied { .. }), "{refused}");

    let resumed = run(&model, &parts, &settings).unwrap();
    assert_eq!(resumed.kept, 1);
    assert_eq!(visible(&parts), visible(&whole));
    assert!(
        files(&parts).iter().all(|p| !p.file_name().unwrap().to_str().unwrap().starts_with('.'))
    );
    for name in visible(&whole) {
        assert!(
            fs::read(whole.join(&name)).unwrap() == fs::read(parts.join(&name)).unwrap(),
            "{name}"
        );
    }
    let again = fs::metadata(parts.join(&visible(&parts)[1])).unwrap().modified().unwrap();
    assert!(again >= first);
    assert!(run(&model, &parts, &settings).unwrap().already_complete);
    let refused = run(&model, &parts, &other).unwrap_err();
    assert!(matches!(refused, ConvertError::Occupied { .. }), "{refused}");
    let refused = run(&model, &model, &settings).unwrap_err();
    assert!(matches!(refused, ConvertError::Occupied { .. }), "{refused}");
}

/// Name and bytes of every file.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |p: &Path| p.file_name().unwrap().to_str().unwrap().to_owned();
    files(dir).iter().map(|p| (name(p), fs::read(p).unwrap())).collect()
}

/// With little memory, the matrices are split into small parts (with act-order, by columns), and
/// many threads write them to several files at once: the bytes are the same.
#[test]
fn memory_and_threads_change_no_byte() {
    const LITTLE: u64 = 800_000;
    let mut inputs: Vec<_> = Format::ALL.map(|f| (f, InputDtype::Model)).to_vec();
    inputs.push((Format::Gptq4, InputDtype::Int8));
    for (format, input) in inputs {
        let context = format!("{format:?} {input:?}");
        let temp = tempfile::tempdir().unwrap();
        let model = temp.path().join("model");
        write_model(format, &model);
        let settings = Settings { input, shard_bytes: 300_000, ..settings() };
        let (much, little) = (temp.path().join("much"), temp.path().join("little"));
        let one = NonZero::<usize>::MIN;
        let whole = run_with(&model, &much, &settings, Execution { threads: one, ..EXECUTION });
        assert!(whole.unwrap().peak_memory > LITTLE / 2, "{context}");

        let threads = NonZero::new(3).unwrap();
        let tight = Execution { threads, memory: LITTLE, ..EXECUTION };
        let summary = run_with(&model, &little, &settings, tight).unwrap();
        assert!((1..=LITTLE).contains(&summary.peak_memory), "{context} {summary:?}");
        assert!(contents(&much) == contents(&little), "{context}");

        let opened = ModelFiles::open(&model).unwrap();
        let opened = Model::new(&opened).unwrap();
        let plan =
            ConversionPlan::new(&opened, &Layers::group(&opened).unwrap(), &settings).unwrap();
        let w13 = plan.stacks.iter().find(|s| s.slice.shape.size_n == 1024).unwrap();
        let parts = w13.parts(LITTLE / 3);
        assert!(parts.len() > 1, "{context} {parts:?}");
        assert_eq!(parts.iter().any(|p| p.columns.start > 0), format.act_order(), "{context}");
    }
}

#[test]
fn a_matrix_that_no_part_of_fits_the_memory_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::GptqActOrder, &model);
    let out = temp.path().join("out");
    let execution = Execution { memory: 20_000, ..EXECUTION };
    match run_with(&model, &out, &settings(), execution).unwrap_err() {
        ConvertError::Memory { module, shape, needed, limit: 20_000 } => {
            assert!(module.starts_with("model.layers.0."), "{module}");
            // 64 columns of 4 bits, all rows.
            assert!(needed > (shape.size_k * 64 / 2) as u64, "{needed} {shape}");
        }
        other => panic!("expected Memory, found {other}"),
    }
    assert!(files(&out).iter().all(|p| p.extension().is_none_or(|e| e != "safetensors")));
}

#[test]
fn a_bad_tensor_stops_the_run_before_any_file_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::GptqActOrder, &model);
    // A group out of range: the first g_idx of the first shard.
    let path = model.join("model-00001-of-00002.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let at = Container::parse(&bytes)
        .unwrap()
        .get("model.layers.0.self_attn.q_proj.g_idx")
        .unwrap()
        .file_range()
        .start as usize;
    bytes[at..at + 4].copy_from_slice(&999i32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let out = temp.path().join("out");
    match run(&model, &out, &settings()).unwrap_err() {
        ConvertError::Weight { module, source } => {
            assert_eq!(module, "model.layers.0.self_attn.q_proj");
            assert!(
                matches!(*source, marlinspike::Error::Value { ref tensor, ref index, .. }
                if tensor == "model.layers.0.self_attn.q_proj.g_idx" && index == &[0]),
                "{source}"
            );
        }
        other => panic!("expected Weight, found {other}"),
    }
    assert!(files(&out).iter().all(|p| p.file_name().unwrap().to_str().unwrap().starts_with('.')));
}

#[test]
fn unsupported_modules_are_refused_with_reasons_or_copied() {
    let temp = tempfile::tempdir().unwrap();
    let model = golden("checkpoints").join("ct-int-w4a8-moe");
    let out = temp.path().join("out");
    match run(&model, &out, &settings()).unwrap_err() {
        ConvertError::Refused { refused, .. } => {
            assert_eq!(refused.len(), 6);
            assert!(refused.iter().all(|r| !r.reasons.is_empty()));
        }
        other => panic!("expected Refused, found {other}"),
    }
    let summary = run(&model, &out, &Settings { skip_unsupported: true, ..settings() }).unwrap();
    assert_eq!((summary.converted, summary.unsupported.len()), (0, 6));
    let bytes = fs::read(model.join("model.safetensors")).unwrap();
    let converted = Converted::read(&out);
    for t in Container::parse(&bytes).unwrap().tensors() {
        let t = t.unwrap();
        assert_eq!(converted.tensors[t.name()].bytes(), t.bytes(), "{}", t.name());
    }
}
