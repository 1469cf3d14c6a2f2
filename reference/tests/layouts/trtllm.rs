//! Whole layers of FlashInfer's and CUTLASS's 4-bit MoE kernels, compared with the outputs of
//! FlashInfer 0.6.8.post1 and vLLM 0.21.0 (`tables/flashinfer_layouts`,
//! `data/flashinfer_facts.json`), every byte, packed and unpacked.

use crate::blackwell::{Golden, Stream, facts};
use marlinspike::Error;
use marlinspike::layouts::Layout;
use marlinspike::layouts::flashinfer::{
    Alphas, ExpertBackend, ExpertLayout, PackedExperts, Projection,
};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Weights `[N, K]` as files hold them: bytes of two codes, or words of eight, in `[E, N, K / 2]`.
fn weights(
    name: &str,
    experts: usize,
    shape: Shape,
    ty: ScalarType,
    group: usize,
    projection: &str,
) -> Vec<Weight<'static>> {
    let Shape { size_k, size_n } = shape;
    let codes = Stream::new(&format!("{name}.{projection}"));
    let scales = Stream::new(&format!("{name}.{projection}_scale"));
    let code = |e: usize, k: usize, n: usize| {
        let row = e * size_n + n;
        if ty == ScalarType::UINT4B8 {
            (codes.word(row * size_k / 8 + k / 8) >> (k % 8 * 4)) as u8 & 15
        } else {
            codes.byte(row * size_k / 2 + k / 2) >> (k % 2 * 4) & 15
        }
    };
    let groups = size_k / group;
    let at = |e: usize, g: usize, n: usize| (e * size_n + n) * groups + g;
    let places = || (0..groups * size_n).map(|i| (i / size_n, i % size_n));
    (0..experts)
        .map(|e| Weight {
            name: format!("{projection}.{e}"),
            ty,
            codes: Codes::from_fn(4, shape, |k, n| code(e, k, n)).unwrap(),
            scales: if ty == ScalarType::UINT4B8 {
                let bits = places().map(|(g, n)| scales.bf16(at(e, g, n))).collect();
                Table::new(ScalarType::BFLOAT16, groups, size_n, TableData::B16(bits)).unwrap()
            } else {
                let bits = places().map(|(g, n)| scales.e4m3(at(e, g, n))).collect();
                Table::new(E4M3, groups, size_n, TableData::B8(bits)).unwrap()
            },
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(group)),
            global_scale: None,
            bias: None,
        })
        .collect()
}

/// Packs, compares every byte with upstream's, and unpacks upstream's bytes.
fn compare(
    golden: &Golden,
    layout: &ExpertLayout,
    given: &[Weight<'_>],
    [weights, scales]: [&str; 2],
) {
    let packed = layout.pack(given).unwrap();
    assert_eq!(packed.weights, golden.tensor(weights).bytes(), "{weights}");
    let found = golden.tensor(scales);
    assert_eq!(
        packed.scales.iter_bits().count(),
        found.bytes().len() * 8 / bits(layout),
        "{scales}"
    );
    let data = match bits(layout) {
        16 => TableData::B16(halves(found.bytes())),
        _ => TableData::B8(found.bytes().to_vec()),
    };
    let (rows, cols) = (packed.scales.rows(), packed.scales.cols());
    let table = Table::new(layout.scales().ty(), rows, cols, data).unwrap();
    assert_eq!(packed.scales, table, "{scales}");
    let upstreams = PackedExperts {
        experts: given.len(),
        weights: golden.tensor(weights).bytes().to_vec(),
        scales: table,
    };
    for (back, given) in layout.unpack(&upstreams).unwrap().iter().zip(given) {
        assert_eq!((&back.codes, &back.scales), (&given.codes, &given.scales), "{}", given.name);
    }
}

fn bits(layout: &ExpertLayout) -> usize {
    layout.scales().ty().storage_bits() as usize
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

#[test]
fn mxint4_is_upstreams() {
    let golden = Golden::load();
    for (projection, name, gemm, shape) in [
        (Projection::W13, "w13", "gemm1", Shape::new(256, 512)),
        (Projection::W2, "w2", "gemm2", Shape::new(256, 256)),
    ] {
        let layout = ExpertLayout::mxint4(projection, 256, 256).unwrap();
        assert_eq!(layout.shape(), shape);
        let given = weights("mxint4", 1, shape, ScalarType::UINT4B8, 32, name);
        let names = [format!("mxint4.{gemm}_weights"), format!("mxint4.{gemm}_scales")];
        compare(&golden, &layout, &given, [&names[0], &names[1]]);
        // A value: the byte's nibble is the code's two's complement.
        let packed = layout.pack(&given).unwrap();
        let slot = layout.weights().offset(77, 130);
        let nibble = packed.weights[slot.element] >> slot.bit & 15;
        let value = i32::from(given[0].codes.get(77, 130)) - 8;
        assert_eq!(i32::from((nibble << 4) as i8) >> 4, value, "{name}");
    }
}

#[test]
fn nvfp4_is_upstreams() {
    use ExpertBackend::{
        FlashInferCuteDsl, FlashInferCuteDslBatched, FlashInferCutlass, FlashInferTrtllm,
        VllmCutlass,
    };
    let golden = Golden::load();
    for (name, backend, experts, hidden, intermediate, gated) in [
        ("trtllm", FlashInferTrtllm, 1, 192, 64, true),
        ("trtllm_ungated", FlashInferTrtllm, 1, 256, 48, false),
        ("flashinfer_cutlass", FlashInferCutlass, 2, 48, 64, true),
        ("vllm_cutlass", VllmCutlass, 2, 48, 64, true),
        ("cutlass_ungated", FlashInferCutlass, 1, 64, 48, false),
        ("cutedsl_batched", FlashInferCuteDslBatched, 1, 32, 64, true),
        ("cutedsl", FlashInferCuteDsl, 1, 32, 128, true),
    ] {
        let label = format!("nvfp4.{name}");
        for (projection, part) in [(Projection::W13, "w13"), (Projection::W2, "w2")] {
            let layout =
                ExpertLayout::for_backend(backend, projection, hidden, intermediate, gated)
                    .expect(name);
            let e2m1 = ScalarType::FLOAT4_E2M1F;
            let given = weights(&label, experts, layout.shape(), e2m1, 16, part);
            let names = [format!("{label}.{part}"), format!("{label}.{part}_scale")];
            compare(&golden, &layout, &given, [&names[0], &names[1]]);
        }
    }
}

/// Every backend around the edges of its padding: a stack is restored, each code and scale is where
/// the layouts put it, and all other elements are zero.
#[test]
fn layers_come_back_around_every_edge() {
    let mut seen = 0;
    let mut check = |layout: &ExpertLayout, ty, group, part: &str| {
        let shape = layout.shape();
        let given = weights("edges", 2, shape, ty, group, part);
        let packed = layout.pack(&given).unwrap();
        let (len, padded) = (layout.weights().packed_len(), layout.weights().shape());
        let scales: Vec<u32> = packed.scales.iter_bits().collect();
        for (e, (back, given)) in layout.unpack(&packed).unwrap().iter().zip(&given).enumerate() {
            assert_eq!((&back.codes, &back.scales), (&given.codes, &given.scales), "{padded}");
            for (k, n) in [(0, 0), (shape.size_k - 1, shape.size_n - 1), (shape.size_k / 2, 1)] {
                let slot = layout.weights().offset(k, n);
                let found = packed.weights[e * len + slot.element] >> slot.bit & 15;
                let signed = if ty == ScalarType::UINT4B8 { 8 } else { 0 };
                assert_eq!(found ^ signed, given.codes.get(k, n), "{padded} ({k}, {n})");
                let slot = layout.scales().offset(k / group, n);
                let found = scales[e * layout.scales().packed_len() + slot.element];
                assert_eq!(found, given.scales.bits(k / group, n), "{padded} ({k}, {n})");
            }
        }
        seen += 1;
    };
    for (hidden, intermediate) in [(256, 512), (512, 256)] {
        for (projection, part) in [(Projection::W13, "w13"), (Projection::W2, "w2")] {
            let layout = ExpertLayout::mxint4(projection, hidden, intermediate).unwrap();
            check(&layout, ScalarType::UINT4B8, 32, part);
        }
    }
    for (_, backend) in ExpertBackend::NAMED {
        for hidden in [16, 240, 272] {
            for (intermediate, gated) in
                [(64, true), (192, true), (16, false), (112, false), (144, false)]
            {
                for (projection, part) in [(Projection::W13, "w13"), (Projection::W2, "w2")] {
                    let layout =
                        ExpertLayout::for_backend(backend, projection, hidden, intermediate, gated);
                    if let Ok(layout) = layout {
                        check(&layout, ScalarType::FLOAT4_E2M1F, 16, part);
                    } else {
                        assert!(!gated && backend == ExpertBackend::FlashInferCuteDsl);
                    }
                }
            }
        }
    }
    assert_eq!(seen, 4 + 2 * (5 * 3 * 5 - 3 * 3));
}

#[test]
fn sizes_that_upstream_refuses_are_errors() {
    for (hidden, intermediate) in [(0, 256), (256, 0), (128, 256), (256, 384), (264, 256)] {
        for projection in [Projection::W13, Projection::W2] {
            let refused = ExpertLayout::mxint4(projection, hidden, intermediate);
            assert!(matches!(refused, Err(Error::Size { .. })), "{hidden} {intermediate}");
        }
    }
    for (_, backend) in ExpertBackend::NAMED {
        for (hidden, intermediate, gated) in
            [(0, 64, true), (64, 0, true), (24, 64, true), (64, 32, true), (64, 40, false)]
        {
            let refused =
                ExpertLayout::for_backend(backend, Projection::W13, hidden, intermediate, gated);
            assert!(matches!(refused, Err(Error::Size { .. })), "{backend:?} {hidden}");
        }
        let huge = ExpertLayout::for_backend(backend, Projection::W2, usize::MAX - 15, 64, true);
        assert!(matches!(huge, Err(Error::Size { .. })), "{backend:?}");
        let ungated = ExpertLayout::for_backend(backend, Projection::W13, 64, 64, false);
        let refuses = backend == ExpertBackend::FlashInferCuteDsl;
        assert_eq!(matches!(ungated, Err(Error::Unsupported { .. })), refuses, "{backend:?}");
    }
}

#[test]
fn weights_that_do_not_fit_are_errors() {
    let cutlass = ExpertBackend::VllmCutlass;
    let layout = ExpertLayout::for_backend(cutlass, Projection::W2, 32, 64, true).unwrap();
    let e2m1 = ScalarType::FLOAT4_E2M1F;
    let good = weights("errors", 2, layout.shape(), e2m1, 16, "w2");
    let packed = layout.pack(&good).unwrap();
    let refused = |change: &dyn Fn(&mut Weight<'static>)| {
        let mut experts = good.clone();
        change(&mut experts[1]);
        let error = layout.pack(&experts).unwrap_err();
        assert!(error.to_string().contains("w2.1"), "{error}");
        error
    };
    let ty = refused(&|w| w.ty = ScalarType::UINT4B8);
    assert!(matches!(ty, Error::Unsupported { .. }), "{ty}");
    let bias = refused(&|w| {
        let zeros = TableData::B16(vec![0; 32]);
        w.bias = Some(Table::new(ScalarType::BFLOAT16, 1, 32, zeros).unwrap());
    });
    assert!(matches!(bias, Error::Unsupported { .. }), "{bias}");
    let scales = refused(&|w| w.scales = w.scales.map(ScalarType::FLOAT8_E8M0FNU, |b| b));
    assert!(matches!(scales, Error::Unsupported { .. }), "{scales}");
    let shape =
        refused(&|w| *w = weights("errors", 1, Shape::new(32, 32), e2m1, 16, "w2.1").remove(0));
    assert!(matches!(shape, Error::Shape { .. }), "{shape}");
    let mut bits: Vec<u8> = packed.scales.iter_bits().map(|b| b as u8).collect();
    let padding = (0..bits.len()).find(|&element| layout.scales().is_padding(element));
    bits[padding.expect("32 rows do not fill a tile")] = 1;
    let (rows, cols) = (packed.scales.rows(), packed.scales.cols());
    let scales = Table::new(E4M3, rows, cols, TableData::B8(bits)).unwrap();
    let dirty = layout.unpack(&PackedExperts { scales, ..packed.clone() });
    assert!(matches!(dirty, Err(Error::Value { .. })), "{dirty:?}");
    let short = PackedExperts { weights: packed.weights[1..].to_vec(), ..packed.clone() };
    assert!(matches!(layout.unpack(&short), Err(Error::Shape { .. })));
    let more = PackedExperts { experts: usize::MAX, ..packed };
    assert!(matches!(layout.unpack(&more), Err(Error::Shape { .. })));
}

/// A backend's treatment of the activations' global scales.
#[test]
fn activation_scales_are_shared_or_each_experts_own() {
    let scales = [vec![0.5, 0.25], vec![2.0, 1.0], vec![0.125, 0.125]];
    for (name, backend) in ExpertBackend::NAMED {
        let own = name == "VLLM_CUTLASS";
        let expected = if own { vec![0.5, 2.0, 0.125] } else { vec![2.0; 3] };
        assert_eq!(backend.activation_scales(&scales).unwrap(), expected, "{name}");
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let refused = backend.activation_scales(&[vec![1.0], vec![1.0, bad]]);
            assert!(matches!(refused, Err(Error::Value { .. })), "{name} {bad}");
        }
    }
}

#[test]
fn alphas_are_upstreams() {
    let facts = facts();
    let values = |list: &serde_json::Value| -> Vec<Vec<f32>> {
        let bits = |v: &serde_json::Value| f32::from_bits(v.as_i64().expect("bits") as u32);
        let lists = list.as_array().expect("lists").iter();
        lists.map(|l| l.as_array().expect("values").iter().map(bits).collect()).collect()
    };
    for row in facts["alphas"].as_array().expect("rows") {
        let gated = row[0].as_bool().expect("gated");
        let (given, made) = (values(&row[1]), values(&row[2]));
        let given: [&[f32]; 4] = [&given[0], &given[1], &given[2], &given[3]];
        let found = Alphas::new(given, gated).unwrap();
        assert_eq!([found.g1_alphas, found.g2_alphas, found.g1_scale_c][..], made, "{gated}");
        let few = Alphas::new([given[0], &given[1][1..], given[2], given[3]], gated);
        assert!(matches!(few, Err(Error::Shape { .. })));
        let zero = vec![0.0; given[3].len()];
        let none = Alphas::new([given[0], given[1], given[2], &zero], gated);
        assert!(matches!(none, Err(Error::Value { .. })));
    }
}
