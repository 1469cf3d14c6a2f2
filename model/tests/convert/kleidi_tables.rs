//! `convert --to kleidiai` of weights with zero points and with act-order.

use std::fs;

use crate::common::runs::{EXECUTION, run, run_with, settings};
use crate::common::{EXPERTS, Format, files, write_model};
use marlinspike::container::Container;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::kleidi::PackedRhs;
use marlinspike::w4a8::stored;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::execute::Execution;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::int4;

/// Zero points and act-order: the packed bytes give back the checkpoint's weights, whatever the parts that
/// they were packed in; and a rank that lacks rows is refused.
#[test]
fn zero_points_and_orders_come_back() {
    let temp = tempfile::tempdir().unwrap();
    let settings = Settings { format: int4::FORMAT, ..settings() };
    for (format, tables) in [
        (Format::Awq, CpuTables { zero_points: true, act_order: false }),
        (Format::GptqActOrder, CpuTables { zero_points: false, act_order: true }),
        (Format::CtActOrder, CpuTables { zero_points: false, act_order: true }),
    ] {
        let model = temp.path().join(format!("{format:?}"));
        let weights = write_model(format, &model);
        let out = temp.path().join(format!("{format:?}-out"));
        for memory in [EXECUTION.memory, 200_000] {
            let execution = Execution { memory, ..EXECUTION };
            let done = run_with(&model, &out, &settings, execution).unwrap();
            assert_eq!((done.converted, done.activations_quantized), (5, 5), "{format:?}");
            let same = |packed: &PackedRhs<'_>, names: &[String]| {
                assert_eq!(packed.layout().tables(), tables);
                let floats = packed.dequantized();
                let columns = names.iter().flat_map(|name| {
                    let weight = &weights[name];
                    (0..weight.shape().size_n).map(move |n| (weight, n))
                });
                let size_k = packed.layout().shape().size_k;
                let mut rest = floats.chunks_exact(size_k);
                for ((weight, n), column) in columns.zip(rest.by_ref()) {
                    let exact = (0..size_k).map(|k| weight.dequantize(k, n) as f32);
                    assert!(exact.eq(column.iter().copied()), "{format:?} {names:?} column {n}");
                }
                assert_eq!(rest.count(), 0);
            };
            let mut linear = 0;
            for path in
                files(&out).iter().filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            {
                let bytes = fs::read(path).unwrap();
                let file = Container::parse(&bytes).unwrap();
                for module in stored::modules(&file) {
                    let Ok(packed) = stored::linear(&file, module) else {
                        let (described, w13, w2) = stored::experts(&file, module).unwrap();
                        assert_eq!(described.tables, tables);
                        for e in 0..EXPERTS {
                            let name = |w: &str| format!("{module}.{e}.{w}_proj");
                            same(&w13.get(e), &[name("gate"), name("up")]);
                            same(&w2.get(e), &[name("down")]);
                        }
                        continue;
                    };
                    same(&packed, &[module.to_owned()]);
                    linear += 1;
                }
            }
            assert_eq!(linear, 3);
            fs::remove_dir_all(&out).unwrap();
        }
        let halves = Settings { tp: Ranks { size: 2, rank: 0 }, ..settings };
        let parts = run(&model, &out, &halves);
        match tables.act_order {
            // w2 and o_proj are cut along K.
            true => match parts.unwrap_err() {
                ConvertError::Refused { refused, .. } => {
                    let text = format!("{refused:?}");
                    assert!(text.contains("on this rank, expected all of them"), "{text}");
                }
                other => panic!("expected Refused, found {other}"),
            },
            false => assert_eq!(parts.unwrap().converted, 5),
        }
    }
}
