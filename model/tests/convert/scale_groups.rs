//! Checkpoints with act-order whose scales have rows without a group, or lack rows.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::runs::{EXECUTION, run_with, settings};
use crate::common::{Format, write_tiny};
use marlinspike::container::{Container, write_container};
use marlinspike::num::tensor::Tensor;

/// Changes the number of rows of the matrix's `tensor` in the model at `dir`; added rows repeat the
/// first.
fn set_rows(dir: &Path, tensor: &str, rows: usize) {
    let mut edited = 0;
    for i in 1..=2 {
        let path = dir.join(format!("model-{i:05}-of-00002.safetensors"));
        let bytes = fs::read(&path).unwrap();
        let container = Container::parse(&bytes).unwrap();
        let tensors = container.tensors().map(|t| t.unwrap().into_owned());
        let tensors: Vec<_> = tensors
            .map(|t| {
                if !t.name().ends_with(tensor) {
                    return t;
                }
                edited += 1;
                let (name, shape) = (t.name().to_owned(), t.shape().to_vec());
                let row = t.bytes().len() / shape[0];
                let bytes: Vec<u8> = t.bytes().iter().cycle().take(row * rows).copied().collect();
                Tensor::from_vec(name, t.dtype(), vec![rows, shape[1]], bytes).unwrap()
            })
            .collect();
        let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(edited, 1, "{tensor}");
}

/// K 128 in groups of 32: four.
#[test]
fn act_order_scales_have_a_row_for_each_group() {
    let convert = |edit: &dyn Fn(&Path)| {
        let temp = tempfile::tempdir().unwrap();
        let (model, out) = (temp.path().join("model"), temp.path().join("out"));
        write_tiny(Format::GptqActOrder, &model, 1);
        edit(&model);
        run_with(&model, &out, &settings(), EXECUTION).map_err(|e| e.to_string())
    };
    convert(&|_| ()).unwrap();
    convert(&|model| set_rows(model, ".scales", 4)).unwrap();
    for (rows, found) in [(5, "[5, 64]"), (3, "[3, 64]")] {
        let error = convert(&|model| set_rows(model, ".scales", rows)).unwrap_err();
        for part in ["q_proj.scales`", found, "[groups, N] with 4 groups, 32"] {
            assert!(error.contains(part), "{rows}: {part:?} is not in {error}");
        }
    }
}
