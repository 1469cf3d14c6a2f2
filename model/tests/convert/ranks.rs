//! Folders of one rank, and folders for FP8 activations, through `run`.

use std::path::Path;

use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::Capability;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::{Format as Target, Settings};
use marlinspike_model::convert::target::{deepgemm, experts, int4, marlin};
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::origin::PartialOutput;
use marlinspike_model::run::output::{LayerKind, Run};
use marlinspike_model::run::run as run_layer;

use crate::common::runs::{run as convert, settings};
use crate::common::{EXPERTS, Format, HIDDEN, write_model};

const MOE: &str = "model.layers.0.mlp.experts";
const COLUMN: &str = "model.layers.0.self_attn.q_proj";
const ROW: &str = "model.layers.0.self_attn.o_proj";

fn run(dir: &Path, layer: &str) -> Run {
    let mut options = Options::default();
    options.layer = Some(layer.to_owned());
    options.check = true;
    options.input = Source::Seeded { seed: 5, tokens: 4, dtype: ScalarType::BFLOAT16 };
    let found = run_layer(dir, &options).unwrap_or_else(|e| panic!("{dir:?} {layer}: {e}"));
    assert_eq!(found.check.unwrap().mismatches, 0, "{dir:?} {layer}");
    found
}

fn values(run: &Run) -> Vec<f32> {
    let halves = run.y().bytes.chunks_exact(2);
    halves.map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
}

/// Relative distance of the sum of `parts` from `whole`.
fn distance(parts: &[Vec<f32>], whole: &[f32]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (i, &expected) in whole.iter().enumerate() {
        let sum: f64 = parts.iter().map(|p| f64::from(p[i])).sum();
        error += (sum - f64::from(expected)).powi(2);
        size += f64::from(expected).powi(2);
    }
    (error / size).sqrt()
}

/// Every format that takes `format`'s experts and linear layers, with whether linear layers run.
fn targets(format: Format) -> Vec<Target> {
    let mut all = vec![marlin::FORMAT];
    all.extend(matches!(format, Format::CtPack | Format::Gptq4).then_some(int4::FORMAT));
    let blocks = format == Format::Fp8Block;
    all.extend(
        (blocks || matches!(format, Format::Nvfp4 | Format::Mxint4)).then_some(experts::FORMAT),
    );
    all.extend(blocks.then_some(deepgemm::FORMAT));
    all
}

#[test]
fn every_rank_runs_as_its_part_of_the_layer() {
    let temp = tempfile::tempdir().unwrap();
    for format in Format::ALL {
        let model = temp.path().join(format!("{format:?}"));
        write_model(format, &model);
        for target in targets(format) {
            let all = |tp, ep| Settings {
                format: target,
                tp,
                ep,
                skip_unsupported: true,
                device: Capability::cuda(9, 0),
                ..settings()
            };
            let folder = |name: &str, tp, ep| {
                let out = model.join(format!("{}-{name}", target.name()));
                convert(&model, &out, &all(tp, ep)).unwrap();
                out
            };
            let whole = folder("whole", Ranks::ONE, Ranks::ONE);
            let rank = |size, rank| Ranks { size, rank };
            let tp: Vec<_> =
                (0..2).map(|r| folder(&format!("tp{r}"), rank(2, r), Ranks::ONE)).collect();
            let ep: Vec<_> =
                (0..2).map(|r| folder(&format!("ep{r}"), Ranks::ONE, rank(2, r))).collect();
            let context = format!("{format:?} {}", target.name());
            let expected = run(&whole, MOE);
            assert_eq!(expected.partial, None, "{context}");
            let expected = values(&expected);
            // Each rank rounds its sum to 16 bits.
            for (ranks, of, limit) in [(&tp, "tp", 0.02), (&ep, "ep", 0.01)] {
                let runs: Vec<_> = ranks.iter().map(|dir| run(dir, MOE)).collect();
                let parts: Vec<_> = runs.iter().map(values).collect();
                let found = distance(&parts, &expected);
                assert!(found < limit, "{context} {of}: {found}");
                // One rank alone is not the layer.
                assert!(distance(&parts[..1], &expected) > 0.1, "{context} {of}");
                for (r, run) in runs.iter().enumerate() {
                    let partial = run.partial.as_ref().unwrap();
                    assert_eq!(partial.output, PartialOutput::Sum, "{context}");
                    let stated = if of == "tp" { partial.tp } else { partial.ep };
                    assert_eq!(stated.map(|s| (s.rank, s.size)), Some((r as u64, 2)), "{context}");
                    let experts = (of == "ep").then_some([[2, 1][r], EXPERTS]);
                    assert_eq!(partial.experts, experts, "{context}");
                }
            }
            if target == experts::FORMAT {
                continue;
            }
            // Linear layers: columns side by side to the bit, or a sum.
            let y = run(&whole, COLUMN);
            let parts: Vec<_> = tp.iter().map(|dir| run(dir, COLUMN)).collect();
            for (token, row) in y.y().bytes.chunks_exact(2 * y.y().size_n).enumerate() {
                let part = |r: &Run| {
                    let width = 2 * r.y().size_n;
                    r.y().bytes[token * width..(token + 1) * width].to_vec()
                };
                let side_by_side: Vec<u8> = parts.iter().flat_map(part).collect();
                assert_eq!(row, side_by_side, "{context} token {token}");
            }
            assert!(parts.iter().all(|p| {
                p.partial.as_ref().is_some_and(|p| p.output == PartialOutput::Columns)
            }));
            for dir in &tp {
                let found = run(dir, ROW);
                assert_eq!(found.partial.unwrap().output, PartialOutput::Sum, "{context}");
                assert_eq!(found.kind, LayerKind::Linear(Shape::new(256, HIDDEN)), "{context}");
            }
            // With expert parallelism alone, linear layers are whole.
            assert_eq!(run(&ep[1], ROW).partial, None, "{context}");
        }
    }
}

#[test]
fn folders_for_fp8_activations_run_with_them() {
    let temp = tempfile::tempdir().unwrap();
    for format in [Format::Gptq4, Format::CtPack, Format::Mxfp4] {
        let model = temp.path().join(format!("{format:?}"));
        write_model(format, &model);
        let folder = |name: &str, input, tp| {
            let out = model.join(name);
            let device = Capability::cuda(8, 9);
            convert(&model, &out, &Settings { input, tp, device, ..settings() }).unwrap();
            out
        };
        let plain = folder("plain", InputDtype::Model, Ranks::ONE);
        let quantized = folder("fp8", InputDtype::Fp8, Ranks::ONE);
        for layer in [COLUMN, MOE] {
            let [a, b] = [&plain, &quantized].map(|dir| run(dir, layer));
            // e4m3 rounds each activation by up to 1/16 of it.
            let found = distance(&[values(&b)], &values(&a));
            assert!((1e-4..0.06).contains(&found), "{format:?} {layer}: {found}");
            assert!(b.arithmetic.contains("fp8"), "{}", b.arithmetic);
            assert!(!a.arithmetic.contains("fp8"), "{}", a.arithmetic);
        }
        let rank = folder("rank", InputDtype::Fp8, Ranks { size: 2, rank: 1 });
        assert!(run(&rank, COLUMN).partial.is_some());
    }
}
