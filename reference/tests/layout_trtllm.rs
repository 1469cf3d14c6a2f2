//! Layouts of FlashInfer's and CUTLASS's 4-bit MoE kernels against what FlashInfer 0.6.8.post1 and
//! vLLM 0.21.0 made (`tables/flashinfer_layouts`, `data/flashinfer_facts.json`), every byte and back,
//! and their laws around every edge.

mod blackwell;

use blackwell::{Golden, Stream, facts, is_a_bijection};
use marlinspike::Error;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::flashinfer::{
    Alphas, BLOCK_K_BYTES, ExpertLayout, MoeKernel, Nvfp4Backend, PackedExperts, PackedRows,
    Projection, RoutingMethod, RoutingSizes, RowOrder, RowStep, Scoring,
};
use marlinspike::layout::{Layout, compare as compare_packed};
use marlinspike::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

fn steps() -> Vec<(&'static str, Vec<RowStep>)> {
    let tile128 = RowStep::shuffle(128);
    vec![
        ("swap", vec![RowStep::SwapHalves]),
        ("gated", vec![RowStep::Interleave(1)]),
        ("interleave64", vec![RowStep::Interleave(64)]),
        ("shuffle_tile128", vec![tile128]),
        ("shuffle_tile64", vec![RowStep::shuffle(64)]),
        ("gated_shuffle_tile128", vec![RowStep::Interleave(1), tile128]),
    ]
}

#[test]
fn row_orders_are_upstreams() {
    let golden = Golden::load();
    let mut compared = 0;
    for (name, steps) in steps() {
        for size_n in [64, 256] {
            let Some(found) = golden.get(&format!("rows.{name}.{size_n}")) else { continue };
            let found: Vec<usize> = found.elements::<i32>().iter().map(|&r| r as usize).collect();
            assert_eq!(RowOrder::new(size_n, &steps).unwrap().sources(), found, "{name} {size_n}");
            compared += 1;
        }
    }
    assert_eq!(compared, 11, "interleave64 needs 128 rows");
}

#[test]
fn row_orders_are_permutations_with_an_inverse() {
    for (name, steps) in steps() {
        for size_n in [0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 96, 127, 128, 130, 192, 384] {
            let Ok(order) = RowOrder::new(size_n, &steps) else {
                let unit = match name {
                    "swap" | "gated" => 2,
                    "interleave64" => 128,
                    "shuffle_tile64" => 16,
                    _ => 32,
                };
                assert!(size_n == 0 || size_n % unit != 0, "{name} {size_n}");
                continue;
            };
            for row in 0..size_n {
                assert_eq!(order.source(order.target(row)), row, "{name} {size_n}");
            }
            let mut sources = order.sources();
            sources.sort_unstable();
            assert!(sources.into_iter().eq(0..size_n), "{name} {size_n}");
        }
    }
    assert!(matches!(RowOrder::new(64, &[RowStep::Shuffle(8)]), Err(Error::Size { .. })));
    assert!(matches!(RowOrder::new(64, &[RowStep::Interleave(0)]), Err(Error::Size { .. })));
    assert!(matches!(
        RowOrder::new(64, &[RowStep::Interleave(usize::MAX)]),
        Err(Error::Size { .. })
    ));
}

#[test]
fn packed_rows_hold_every_bit_once_and_come_back() {
    let mut rng = Rng::new(11);
    for bits in [4, 8] {
        for (size_k, block) in [
            (8, None),
            (24, None),
            (64, Some(4)),
            (64, Some(16)),
            (1024 / bits as usize, Some(BLOCK_K_BYTES)),
            (2048 / bits as usize, Some(BLOCK_K_BYTES)),
        ] {
            for (name, steps) in steps() {
                for size_n in [2, 16, 32, 64, 128] {
                    let Ok(order) = RowOrder::new(size_n, &steps) else { continue };
                    let shape = Shape::new(size_k, size_n);
                    let what = format!("{name} {bits} bits {shape} {block:?}");
                    let layout = PackedRows::new(shape, bits, order.clone(), block).expect(&what);
                    is_a_bijection(&layout, size_k, size_n, 8, &what);
                    let words = (0..shape.len() * bits as usize / 32).map(|_| rng.next_u32());
                    let codes = Codes::from_words(bits, shape, words.collect::<Vec<_>>()).unwrap();
                    let packed = layout.pack(&codes).unwrap();
                    for (k, n) in [(0, 0), (size_k - 1, 1), (size_k / 2, size_n - 1)] {
                        let slot = layout.offset(k, n);
                        let found = packed[slot.element] >> slot.bit & (0xff >> (8 - bits));
                        assert_eq!(found, codes.get(k, n), "{what} ({k}, {n})");
                    }
                    assert_eq!(layout.unpack(&packed).unwrap(), codes, "{what}");
                    let short = layout.unpack(&packed[1..]);
                    assert!(matches!(short, Err(Error::Shape { .. })), "{what}");
                }
            }
        }
    }
}

#[test]
fn blocks_of_k_are_upstreams() {
    let golden = Golden::load();
    let found = golden.tensor("block_major_k.3x256").elements::<i32>().into_owned();
    let order = RowOrder::new(3, &[]).unwrap();
    let layout = PackedRows::new(Shape::new(256, 3), 8, order, Some(BLOCK_K_BYTES)).unwrap();
    assert_eq!(layout.packed_shape(), [6, 128]);
    for (element, &value) in found.iter().enumerate() {
        let (n, k) = (value as usize / 256, value as usize % 256);
        assert_eq!(layout.offset(k, n).element, element, "k {k} n {n}");
    }
    let order = RowOrder::new(3, &[]).unwrap();
    let cut = PackedRows::new(Shape::new(384, 3), 4, order, Some(BLOCK_K_BYTES));
    assert!(matches!(cut, Err(Error::Size { .. })), "192 bytes are no whole blocks");
    let order = RowOrder::new(3, &[]).unwrap();
    let huge = PackedRows::new(Shape::new(usize::MAX - 7, 3), 4, order, None);
    assert!(matches!(huge, Err(Error::Size { .. })));
}

#[test]
fn a_difference_is_found_where_it_is() {
    let order = RowOrder::new(64, &[RowStep::Interleave(1), RowStep::shuffle(128)]).unwrap();
    let layout = PackedRows::new(Shape::new(512, 64), 4, order, Some(BLOCK_K_BYTES)).unwrap();
    let codes = Codes::from_fn(4, layout.shape(), |k, n| (k + n) as u8 & 15).unwrap();
    let expected = layout.pack(&codes).unwrap();
    let mut found = expected.clone();
    for (k, n) in [(300, 40), (301, 40), (7, 63)] {
        let slot = layout.offset(k, n);
        found[slot.element] ^= 1 << slot.bit;
    }
    let diff = compare_packed(&layout, 4, 2, &expected, &found);
    let first = diff.first.expect("a difference");
    // The second block of 256 k lies behind the whole first one.
    assert_eq!((diff.count, first.place.row, first.place.col), (3, 7, 63));
    assert_eq!((first.expected, first.found), (6, 7));
}

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

/// Packs, compares every byte with upstream's and unpacks what upstream made.
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
    use Nvfp4Backend::{
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
                ExpertLayout::nvfp4(backend, projection, hidden, intermediate, gated).expect(name);
            let e2m1 = ScalarType::FLOAT4_E2M1F;
            let given = weights(&label, experts, layout.shape(), e2m1, 16, part);
            let names = [format!("{label}.{part}"), format!("{label}.{part}_scale")];
            compare(&golden, &layout, &given, [&names[0], &names[1]]);
        }
    }
}

#[test]
fn sizes_that_upstream_refuses_are_errors() {
    for (hidden, intermediate) in [(0, 256), (256, 0), (128, 256), (256, 384), (264, 256)] {
        for projection in [Projection::W13, Projection::W2] {
            let refused = ExpertLayout::mxint4(projection, hidden, intermediate);
            assert!(matches!(refused, Err(Error::Size { .. })), "{hidden} {intermediate}");
        }
    }
    for (_, backend) in Nvfp4Backend::NAMED {
        for (hidden, intermediate, gated) in
            [(0, 64, true), (64, 0, true), (24, 64, true), (64, 32, true), (64, 40, false)]
        {
            let refused =
                ExpertLayout::nvfp4(backend, Projection::W13, hidden, intermediate, gated);
            assert!(matches!(refused, Err(Error::Size { .. })), "{backend:?} {hidden}");
        }
        let huge = ExpertLayout::nvfp4(backend, Projection::W2, usize::MAX - 15, 64, true);
        assert!(matches!(huge, Err(Error::Size { .. })), "{backend:?}");
        let ungated = ExpertLayout::nvfp4(backend, Projection::W13, 64, 64, false);
        let refuses = backend == Nvfp4Backend::FlashInferCuteDsl;
        assert_eq!(matches!(ungated, Err(Error::Unsupported { .. })), refuses, "{backend:?}");
    }
}

#[test]
fn weights_that_do_not_fit_are_errors() {
    let cutlass = Nvfp4Backend::VllmCutlass;
    let layout = ExpertLayout::nvfp4(cutlass, Projection::W2, 32, 64, true).unwrap();
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

/// What a backend does with the activations' global scales.
#[test]
fn activation_scales_are_shared_or_each_experts_own() {
    let scales = [vec![0.5, 0.25], vec![2.0, 1.0], vec![0.125, 0.125]];
    for (name, backend) in Nvfp4Backend::NAMED {
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

#[test]
fn routing_methods_are_upstreams() {
    let facts = facts();
    for row in facts["rows"].as_array().expect("rows") {
        let scoring = Scoring::from_name(row[0].as_str().expect("a name")).unwrap();
        let method = RoutingMethod::of(
            scoring,
            row[1].as_u64().expect("top_k") as usize,
            row[2].as_bool().expect("renormalize"),
            row[3].as_u64().map(|g| g as usize),
            row[4].as_bool().expect("bias"),
        );
        assert_eq!(method.name(), row[5].as_str().expect("a name"), "{row}");
        assert_eq!(Some(method.value()), row[6].as_i64(), "{row}");
    }
    let all = facts["vllm"].as_object().expect("methods");
    assert_eq!(all.len(), RoutingMethod::NAMED.len());
    for (name, method) in RoutingMethod::NAMED {
        assert_eq!(all[name].as_i64(), Some(method.value()), "{name}");
        // FlashInfer's numbers are the same; what it does not have is vLLM's alone.
        let kernels = facts["flashinfer"].get(name).and_then(serde_json::Value::as_i64);
        assert_eq!(kernels, Some(method.value()).filter(|&v| v < 100), "{name}");
    }
    assert!(matches!(Scoring::from_name("relu"), Err(Error::Unsupported { .. })));
}

#[test]
fn kernels_take_the_methods_that_upstream_lists() {
    let facts = facts();
    let listed = [
        ("Nvfp4", MoeKernel::Nvfp4),
        ("Fp8Block", MoeKernel::Fp8Block),
        ("Fp8Tensor", MoeKernel::Fp8Tensor),
        ("Bf16", MoeKernel::Bf16),
        ("Mxfp4", MoeKernel::Mxfp4),
    ];
    for (name, kernel) in listed {
        let taken: Vec<&str> = facts["kernels"][name]
            .as_array()
            .expect("a list")
            .iter()
            .map(|m| m.as_str().expect("a name"))
            .collect();
        for (method_name, method) in RoutingMethod::NAMED {
            let found = method.expect_in(kernel);
            assert_eq!(found.is_ok(), taken.contains(&method_name), "{name} {method_name}");
            if let Err(error) = found {
                assert!(matches!(error, Error::Unsupported { .. }));
                assert!(error.to_string().contains(method_name), "{error}");
            }
        }
    }
    // mxint4 is given whatever the layer has: the numbers that the runner has a branch for.
    for (name, method) in RoutingMethod::NAMED {
        assert_eq!(method.expect_in(MoeKernel::MxInt4).is_ok(), method.value() < 8, "{name}");
    }
}

/// The numbers are those of models whose routers the kernels were written for, and one beyond each.
#[test]
fn routers_have_limits() {
    use RoutingMethod::{DeepSeekV3, Llama4, MiniMax2, Renormalize, Unspecified};
    let fits = |method: RoutingMethod, [num_experts, top_k, n_group, topk_group]: [usize; 4]| {
        method.expect_sizes(RoutingSizes { num_experts, top_k, n_group, topk_group })
    };
    for (method, sizes) in [
        (DeepSeekV3, [256, 8, 8, 4]),
        (DeepSeekV3, [384, 8, 1, 1]),
        (DeepSeekV3, [512, 22, 0, 0]),
        (Renormalize, [128, 8, 0, 0]),
        (Renormalize, [4, 4, 0, 0]),
        (Renormalize, [2048, 32, 0, 0]),
        (MiniMax2, [256, 8, 0, 0]),
        (Llama4, [128, 1, 0, 0]),
    ] {
        fits(method, sizes).unwrap_or_else(|e| panic!("{method:?} {sizes:?}: {e}"));
    }
    for (method, sizes, what) in [
        (DeepSeekV3, [256, 23, 8, 4], "top_k"),
        (DeepSeekV3, [256, 8, 8, 5], "topk_group"),
        (DeepSeekV3, [256, 8, 8, 0], "topk_group"),
        (DeepSeekV3, [128, 8, 2, 3], "experts per group"),
        (DeepSeekV3, [64, 8, 2, 3], "topk_group"),
        (DeepSeekV3, [256, 8, 16, 4], "n_group"),
        (DeepSeekV3, [260, 8, 8, 4], "n_group"),
        (DeepSeekV3, [516, 8, 4, 4], "num_experts"),
        (Llama4, [128, 2, 0, 0], "top_k"),
        (Llama4, [132, 1, 0, 0], "num_experts"),
        (Renormalize, [130, 8, 0, 0], "num_experts"),
        (Renormalize, [2052, 8, 0, 0], "num_experts"),
        (Renormalize, [64, 33, 0, 0], "top_k"),
        (Renormalize, [8, 9, 0, 0], "top_k"),
        (Renormalize, [8, 0, 0, 0], "top_k"),
        (Renormalize, [0, 1, 0, 0], "top_k"),
    ] {
        let Err(Error::Size { what: found, .. }) = fits(method, sizes) else {
            panic!("{method:?} takes {sizes:?}");
        };
        assert_eq!(found, format!("{what} of {}", method.name()), "{sizes:?}");
    }
    let none = fits(Unspecified, [128, 8, 0, 0]);
    assert!(matches!(none, Err(Error::Unsupported { .. })));
}
