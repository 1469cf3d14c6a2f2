//! The layer's canonical bits compared with loops over a matrix unit written here, and with the
//! layer's own bounds.

use marlinspike::Error;
use marlinspike::case::{Activation, CheckpointFormat, QuantConfig};
use marlinspike::formats::mxfp4;
use marlinspike::formats::{awq, gptq, nvfp4};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::bounds::{Declared, Int8Layer};
use marlinspike::moe::layer::{Layer, Routed, Stages, sum_of_ranks};
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{self, ScalarType};
use marlinspike::products::tensor_core::{Architecture, Decoded, Instruction, Unit, find};
use marlinspike::products::{Class, Convention};
use marlinspike::vectors::{Rng, weight};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

fn widen(ty: ScalarType, bits: u16) -> f32 {
    ty.to_f64(bits.into()) as f32
}

fn narrow(ty: ScalarType, x: f32) -> u16 {
    if ty == F16 { scalar::f32_to_f16_rne(x) } else { scalar::f32_to_bf16_rne(x) }
}

fn narrow_once(ty: ScalarType, x: f64) -> u16 {
    if ty == F16 { scalar::f64_to_f16_rne(x) } else { scalar::f64_to_bf16_rne(x) }
}

/// Scales and biases of ordinary size, so that nothing overflows.
fn tame(ty: ScalarType, rows: usize, cols: usize, rng: &mut Rng, spread: f64) -> Table {
    let data = match ty {
        ScalarType::FLOAT8_E8M0FNU => {
            TableData::B8((0..rows * cols).map(|_| rng.between(119, 122) as u8).collect())
        }
        ScalarType::FLOAT8_E4M3FN => {
            TableData::B8((0..rows * cols).map(|_| rng.between(0x20, 0x40) as u8).collect())
        }
        _ => TableData::B16(
            (0..rows * cols)
                .map(|_| narrow_once(ty, spread * f64::from(rng.between(1, 1000)) / 1000.0))
                .collect(),
        ),
    };
    Table::new(ty, rows, cols, data).expect("a table")
}

/// A small layer and its tokens.
struct Small {
    w13: Vec<Weight<'static>>,
    w2: Vec<Weight<'static>>,
    activation: Activation,
    dtype: ScalarType,
    input_dtype: Option<ScalarType>,
    on_input: bool,
    map: Option<Vec<i32>>,
    experts: usize,
    top_k: usize,
    x: Vec<u16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

const H: usize = 128;
const I: usize = 64;

/// The bits of every stage.
#[derive(Default)]
struct ByHand {
    gate_up: Vec<u16>,
    activated: Vec<u16>,
    down: Vec<u16>,
    y: Vec<u16>,
}

impl Small {
    fn new(
        format: CheckpointFormat,
        ty: ScalarType,
        dtype: ScalarType,
        group: GroupSize,
        activation: Activation,
    ) -> Self {
        let quant = QuantConfig {
            checkpoint_format: format,
            weight_type: ty,
            dtype,
            input_dtype: None,
            group_size: group,
            desc_act: false,
            is_k_full: true,
            has_bias: true,
            tensor_parallel: None,
            convention: None,
        };
        let mut rng = Rng::new(17);
        let width = if activation.is_gated() { 2 * I } else { I };
        let mut stack = |shape: Shape| -> Vec<Weight<'static>> {
            (0..3)
                .map(|e| {
                    let mut w =
                        weight(&mut rng, &format!("w[{e}]"), &quant, shape, shape.size_k).unwrap();
                    let (rows, cols) = (w.scales.rows(), w.scales.cols());
                    w.codes = Codes::from_fn(w.codes.bits(), shape, |_, _| {
                        // e4m3's NaN is not a valid weight.
                        let code = rng.next_u32() as u8;
                        if code & 0x7f == 0x7f { 0 } else { code & (0xff >> (8 - w.codes.bits())) }
                    })
                    .unwrap();
                    let spread = if w.codes.bits() == 8 { 2e-4 } else { 4e-3 };
                    w.scales = tame(w.scales.ty(), rows, cols, &mut rng, spread);
                    w.bias = Some(tame(dtype, 1, cols, &mut rng, 0.5));
                    w.global_scale = w.global_scale.map(|_| 0.0078 * (e + 1) as f32);
                    w
                })
                .collect()
        };
        let (w13, w2) = (stack(Shape::new(H, width)), stack(Shape::new(I, H)));
        let x = (0..4 * H)
            .map(|_| narrow_once(dtype, f64::from(rng.between(0, 2000)) / 1000.0 - 1.0))
            .collect();
        let weights = (0..8).map(|_| rng.between(1, 1000) as f32 / 1000.0).collect();
        Self {
            w13,
            w2,
            activation,
            dtype,
            input_dtype: None,
            on_input: false,
            map: None,
            experts: 3,
            top_k: 2,
            x,
            ids: vec![0, 1, 2, 0, 1, 2, -1, 1],
            weights,
        }
    }

    fn layer(&self) -> Layer<'_> {
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [None, None],
            num_experts: self.experts,
            expert_map: self.map.as_deref(),
            activation: Definition::new(self.activation),
            dtype: self.dtype,
            input_dtype: self.input_dtype,
            router_weight_on_input: self.on_input,
        }
    }

    fn routed(&self) -> Routed<'_> {
        Routed::from_rows(self.top_k, &self.ids, &self.weights).unwrap()
    }

    fn x(&self) -> FloatView2<'_> {
        FloatView2::from_rows("x", self.dtype, H, &self.x).unwrap()
    }

    fn forward(&self) -> Stages {
        let layer = self.layer();
        layer.forward(self.x(), self.routed(), &layer.canonical().unwrap()).unwrap()
    }

    /// This rank's expert of a row.
    fn local(&self, row: usize) -> Option<usize> {
        let id = usize::try_from(self.ids[row]).ok()?;
        match &self.map {
            Some(map) => usize::try_from(map[id]).ok(),
            None => Some(id),
        }
    }

    /// One product of one row, as the documentation of the canonical schedule defines it: weights
    /// rounded to the activations' type, chunks of 256 k (here one), then global scale, bias and
    /// router weight in f32, one rounding.
    fn product(&self, row: &[u16], w: &Weight<'_>, router: Option<f32>) -> Vec<u16> {
        let (ty, unit) = (self.dtype, hopper(self.dtype));
        let Shape { size_k, size_n } = w.shape();
        assert!(size_k <= 256);
        let x: Vec<u32> = row.iter().map(|&b| b.into()).collect();
        let x = Decoded::new(unit, ty, &x, size_k);
        (0..size_n)
            .map(|n| {
                let column: Vec<u32> = (0..size_k)
                    .map(|k| {
                        let group = match &w.groups {
                            Groups::Uniform(GroupSize::Of(g)) => k / g,
                            _ => 0,
                        };
                        let code = ty_value(w, k, n) * w.scales.value(group, n);
                        narrow_once(ty, code).into()
                    })
                    .collect();
                let column = Decoded::new(unit, ty, &column, size_k);
                let mut y = f32::from_bits(unit.dot(x.row(0), column.row(0), 0));
                if let Some(global) = w.global_scale {
                    y *= global;
                }
                if let Some(bias) = &w.bias {
                    y += bias.value(0, n) as f32;
                }
                if let Some(weight) = router {
                    y *= weight;
                }
                narrow(ty, y)
            })
            .collect()
    }

    /// Every stage, row by row.
    fn by_hand(&self) -> ByHand {
        let mut out = ByHand::default();
        let definition = Definition::new(self.activation);
        for row in 0..self.ids.len() {
            let token = row / self.top_k;
            let x = &self.x[token * H..(token + 1) * H];
            let weight = self.weights[row];
            let on = |here: bool| here.then_some(weight);
            let gate_up = match self.local(row) {
                Some(e) => self.product(x, &self.w13[e], on(self.on_input)),
                None => vec![0; self.w13[0].shape().size_n],
            };
            let activated: Vec<u16> = (0..I)
                .map(|i| {
                    let [gate, up] =
                        definition.places(i, I).map(|at| widen(self.dtype, gate_up[at]));
                    narrow(self.dtype, self.activate(gate, up))
                })
                .collect();
            let down = match self.local(row) {
                Some(e) => self.product(&activated, &self.w2[e], on(!self.on_input)),
                None => vec![0; H],
            };
            out.gate_up.extend(gate_up);
            out.activated.extend(activated);
            out.down.extend(down);
        }
        for token in 0..self.ids.len() / self.top_k {
            for n in 0..H {
                let slots = (0..self.top_k).map(|j| out.down[(token * self.top_k + j) * H + n]);
                let sum = slots.fold(0.0, |sum, b| sum + widen(self.dtype, b));
                out.y.push(narrow(self.dtype, sum));
            }
        }
        out
    }

    fn activate(&self, gate: f32, up: f32) -> f32 {
        use marlinspike::moe::math;
        match self.activation {
            Activation::Silu => gate / (1.0 + math::exp(-gate)) * up,
            Activation::Relu2NoMul => gate.max(0.0) * gate.max(0.0),
            Activation::SwigluOai => {
                let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
                gate / (1.0 + math::exp(-(1.702 * gate))) * (up + 1.0)
            }
            other => panic!("not written here: {other}"),
        }
    }
}

/// The value of a code minus its zero point.
fn ty_value(w: &Weight<'_>, k: usize, n: usize) -> f64 {
    let group = match &w.groups {
        Groups::Uniform(GroupSize::Of(g)) => k / g,
        _ => 0,
    };
    let zero = w.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
    w.ty.to_f64(w.codes.get(k, n).into()) - zero
}

fn hopper(ty: ScalarType) -> &'static Unit {
    let f32 = ScalarType::FLOAT32;
    find(Architecture::Hopper, Instruction::Mma, (ty, ty), f32, 16).expect("a unit")
}

fn layers() -> Vec<(&'static str, Small)> {
    use CheckpointFormat as F;
    let of = GroupSize::Of;
    let silu = Activation::Silu;
    let mut all = vec![
        ("gptq", Small::new(F::Int(&gptq::FORMAT), ScalarType::UINT4B8, F16, of(32), silu)),
        (
            "gptq channel",
            Small::new(
                F::Int(&gptq::FORMAT),
                ScalarType::UINT8B128,
                BF16,
                GroupSize::Channel,
                silu,
            ),
        ),
        ("awq", Small::new(F::Int(&awq::FORMAT), ScalarType::UINT4, BF16, of(64), silu)),
        ("fp8", Small::new(F::Fp8, ScalarType::FLOAT8_E4M3FN, F16, GroupSize::Channel, silu)),
        (
            "nvfp4",
            Small::new(
                F::Block(&nvfp4::FORMAT),
                ScalarType::FLOAT4_E2M1F,
                BF16,
                of(16),
                Activation::Relu2NoMul,
            ),
        ),
        (
            "mxfp4",
            Small::new(
                F::Block(&mxfp4::FORMAT),
                ScalarType::FLOAT4_E2M1F,
                BF16,
                of(32),
                Activation::SwigluOai,
            ),
        ),
    ];
    let mut on_input = Small::new(F::Int(&gptq::FORMAT), ScalarType::UINT4B8, BF16, of(64), silu);
    (on_input.on_input, on_input.top_k) = (true, 1);
    on_input.x = on_input.x.repeat(2);
    all.push(("router weight on input", on_input));
    let mut absent = Small::new(F::Int(&gptq::FORMAT), ScalarType::UINT4B8, F16, of(64), silu);
    (absent.experts, absent.map) = (5, Some(vec![-1, 0, 2, -1, 1]));
    absent.ids = vec![0, 1, 2, 4, 3, 0, -1, 4];
    all.push(("absent experts", absent));
    all
}

#[test]
fn canonical_bits_are_those_of_plain_loops() {
    for (name, small) in layers() {
        let (found, expected) = (small.forward(), small.by_hand());
        assert_eq!(found.gate_up.bits(), expected.gate_up, "{name}: gate_up");
        assert_eq!(found.activated.bits(), expected.activated, "{name}: activated");
        assert_eq!(found.down.bits(), expected.down, "{name}: down");
        assert_eq!(found.y.bits(), expected.y, "{name}: y");
        let shape = [small.ids.len() / small.top_k, H];
        assert_eq!((found.y.scalar_type(), found.y.shape()), (small.dtype, &shape[..]), "{name}");
        let y = found.y.bits();
        assert!(y.iter().any(|b| b & 0x7fff != 0), "{name}: only zeros");
        let finite = |b: &u16| widen(small.dtype, *b).is_finite();
        assert!(y.iter().all(finite), "{name}: overflow");
    }
}

/// Rows without an expert are zero in the products and contribute zero to y.
#[test]
fn rows_without_an_expert_are_zero() {
    let (_, small) = layers().pop().expect("the last one");
    let stages = small.forward();
    for row in (0..8).filter(|&r| small.local(r).is_none()) {
        assert!(stages.gate_up.bits()[row * 2 * I..][..2 * I].iter().all(|&b| b == 0), "{row}");
        assert!(stages.down.bits()[row * H..][..H].iter().all(|&b| b == 0), "{row}");
    }
    assert!((0..8).filter(|&r| small.local(r).is_none()).count() == 4);
    assert!(stages.y.bits()[2 * H..3 * H].iter().all(|&b| b == 0), "both experts are elsewhere");
}

/// Experts on several ranks: the rows of all slots, copied to the token's owner and added in slot order, give the bits of
/// one rank. Sums in the order of ranks and sums of sums give others: these inputs can tell.
#[test]
fn slots_of_several_ranks_added_in_slot_order_are_the_whole_layer() {
    let (format, ty) = (CheckpointFormat::Int(&gptq::FORMAT), ScalarType::UINT4B8);
    let whole = Small {
        top_k: 4,
        // Two large slots of one expert cancel.
        ids: vec![1, 0, 2, 0, 2, 0, 1, 0],
        weights: [0.75, 1_048_576.0, 0.8, -1_048_576.0].repeat(2),
        ..Small::new(format, ty, BF16, GroupSize::Of(64), Activation::Silu)
    };
    let whole = Small { x: whole.x[..2 * H].to_vec(), ..whole };
    let wanted = whole.forward();
    let sum_in = |down: &[u16], order: &dyn Fn(usize) -> Vec<usize>| -> Vec<u16> {
        let value = |row: usize, n: usize| widen(BF16, down[row * H + n]);
        let of = |(token, n): (usize, usize)| {
            narrow(BF16, order(token).into_iter().fold(0.0, |sum, row| sum + value(row, n)))
        };
        (0..2).flat_map(|token| (0..H).map(move |n| of((token, n)))).collect()
    };
    for rank_of in [[0, 1, 1], [0, 1, 2], [1, 0, 0], [0, 0, 0]] {
        let ranks: Vec<Stages> = (0..3)
            .filter(|rank| rank_of.contains(rank))
            .map(|rank| {
                let here: Vec<usize> = (0..3).filter(|&e| rank_of[e] == rank).collect();
                let place = |e: usize| here.iter().position(|&h| h == e).map_or(-1, |p| p as i32);
                let own = Small {
                    w13: here.iter().map(|&e| whole.w13[e].clone()).collect(),
                    w2: here.iter().map(|&e| whole.w2[e].clone()).collect(),
                    map: Some((0..3).map(place).collect()),
                    x: whole.x.clone(),
                    ids: whole.ids.clone(),
                    weights: whole.weights.clone(),
                    ..whole
                };
                own.forward()
            })
            .collect();
        let down: Vec<u16> = (0..8 * H)
            .map(|at| ranks[rank_of[whole.ids[at / H] as usize]].down.bits()[at])
            .collect();
        assert_eq!(down, wanted.down.bits(), "{rank_of:?}");
        let in_slots = |token: usize| (token * 4..token * 4 + 4).collect();
        assert_eq!(sum_in(&down, &in_slots), wanted.y.bits(), "{rank_of:?}");
        if ranks.len() == 1 {
            continue;
        }
        let by_rank = |token: usize| {
            let mut rows: Vec<usize> = in_slots(token);
            rows.sort_by_key(|&row| rank_of[whole.ids[row] as usize]);
            rows
        };
        assert_ne!(sum_in(&down, &by_rank), wanted.y.bits(), "{rank_of:?}: slot order by rank");
        let views: Vec<_> = ranks
            .iter()
            .map(|stages| FloatView2::from_rows("y", BF16, H, stages.y.bits()).unwrap())
            .collect();
        let of_sums = sum_of_ranks(&views).unwrap();
        assert_ne!(of_sums.bits(), wanted.y.bits(), "{rank_of:?}: each rank's sum");
    }
}

/// The canonical layer follows the canonical convention on Hopper's unit, also with 8-bit
/// activations.
#[test]
fn canonical_bits_are_within_their_own_bounds() {
    use CheckpointFormat as F;
    let mut all = layers();
    for (name, input, group) in [
        ("int8 groups", ScalarType::INT8, GroupSize::Of(32)),
        ("int8 channel", ScalarType::INT8, GroupSize::Channel),
        ("fp8 groups", ScalarType::FLOAT8_E4M3FN, GroupSize::Of(32)),
        ("fp8 channel", ScalarType::FLOAT8_E4M3FN, GroupSize::Channel),
    ] {
        let silu = Activation::Silu;
        let mut small = Small::new(F::Int(&gptq::FORMAT), ScalarType::UINT4B8, BF16, group, silu);
        small.input_dtype = Some(input);
        all.push((name, small));
    }
    for (name, small) in all {
        let class = match small.input_dtype {
            None => Class::of_unit(hopper(small.dtype)),
            Some(_) => Class::any_order(),
        };
        let int8 = Int8Layer::default();
        let declared = Declared { convention: Convention::Canonical, class: &class, int8 };
        let stages = small.forward();
        let bounds = small.layer().bounds(small.x(), small.routed(), declared).unwrap();
        let (mut widths, mut medians) = (Vec::new(), Vec::new());
        for (stage, found, bounds) in [
            ("gate_up", stages.gate_up.bits(), &bounds.gate_up),
            ("activated", stages.activated.bits(), &bounds.activated),
            ("down", stages.down.bits(), &bounds.down),
            ("y", stages.y.bits(), &bounds.y),
        ] {
            for (i, (&bits, bound)) in found.iter().zip(bounds).enumerate() {
                let value = widen(small.dtype, bits);
                assert!(bound.allows(value), "{name} {stage} {i}: {value} in {bound:?}");
            }
            let relative = |b: &marlinspike::num::interval::Bound| {
                (b.interval.hi - b.interval.lo) / b.exact.abs().max(1e-3)
            };
            let mut all: Vec<f64> = bounds.iter().map(relative).collect();
            all.sort_by(f64::total_cmp);
            widths.push(format!("{stage} {:.1e}", all[all.len() / 2]));
            medians.push(all[all.len() / 2]);
        }
        println!("{name}: median relative widths {widths:?}");
        // The bounds are tight: half of y's elements have a bound below a quarter of their value.
        assert!(medians[3] < 0.25 || small.input_dtype.is_some(), "{name}: {widths:?}");
    }
}

/// A bf16 x for an f16 layer, and an x of other columns.
#[test]
fn other_types_and_shapes_of_x_are_refused() {
    let (_, small) = layers().swap_remove(0);
    let (layer, other) = (small.layer(), if small.dtype == F16 { BF16 } else { F16 });
    let how = layer.canonical().unwrap();
    let x = FloatView2::from_rows("x", other, H, &small.x).unwrap();
    let e = layer.forward(x, small.routed(), &how).unwrap_err();
    assert!(matches!(&e, Error::Dtype { tensor, .. } if tensor == "x"), "{e}");
    let narrow = FloatView2::from_rows("x", small.dtype, H / 2, &small.x).unwrap();
    let e = layer.forward(narrow, small.routed(), &how).unwrap_err();
    assert!(matches!(&e, Error::Shape { tensor, .. } if tensor == "x"), "{e}");
}

fn refused(change: impl Fn(&mut Small)) -> Error {
    let mut small = Small::new(
        CheckpointFormat::Int(&gptq::FORMAT),
        ScalarType::UINT4B8,
        F16,
        GroupSize::Of(32),
        Activation::Silu,
    );
    change(&mut small);
    let layer = small.layer();
    let how = match layer.canonical() {
        Ok(how) => how,
        Err(e) => return e,
    };
    let made = Routed::from_rows(small.top_k, &small.ids, &small.weights).and_then(|routed| {
        layer.forward(FloatView2::from_rows("x", small.dtype, H, &small.x)?, routed, &how)
    });
    made.unwrap_err()
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let named = |e: Error, name: &str| assert!(e.to_string().contains(name), "{name}: {e}");
    let e = refused(|s| s.ids[3] = 3);
    assert!(matches!(&e, Error::Value { index, .. } if index == &[1, 1]), "{e}");
    named(e, "topk_ids");
    named(refused(|s| s.ids[0] = -2), "topk_ids");
    let e = refused(|s| s.map = Some(vec![0, 1, 7]));
    assert!(matches!(&e, Error::Value { .. }), "{e}");
    named(e, "expert_map");
    named(refused(|s| s.map = Some(vec![0, 1])), "expert_map");
    let e = refused(|s| s.experts = 4);
    assert!(matches!(&e, Error::Size { .. }), "{e}");
    named(e, "num_experts");
    let e = refused(|s| s.x.truncate(100));
    assert!(matches!(&e, Error::Shape { .. }), "{e}");
    named(e, "`x`");
    named(refused(|s| s.weights.truncate(2)), "topk_weights");
    named(refused(|s| s.top_k = 3), "topk_ids");
    named(refused(|s| s.top_k = 0), "topk_ids");
    named(refused(|s| s.w2.truncate(1)), "experts");
    named(refused(|s| s.w13.clear()), "experts");
    let e = refused(|s| s.w2[1] = s.w13[1].clone());
    assert!(matches!(&e, Error::Shape { .. }), "{e}");
    let e = refused(|s| s.activation = Activation::SiluNoMul);
    assert!(matches!(&e, Error::Shape { .. }), "{e}");
    let e = refused(|s| s.input_dtype = Some(ScalarType::FLOAT8_E5M2));
    assert!(matches!(&e, Error::Unsupported { .. }), "{e}");
    let e = refused(|s| s.dtype = ScalarType::FLOAT32);
    assert!(matches!(&e, Error::Unsupported { .. }), "{e}");
}
