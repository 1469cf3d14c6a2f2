//! Layers with a family's routing rule and activation: the fast layer has the bits of the definition.

use super::layers::{Batch, Given, Sizes};
use marlinspike::Error;
use marlinspike::case::Activation;
use marlinspike::moe::families::{
    ChooseBy, GroupRule, GroupScore, Masked, Renormalize, RoutingRule, Score,
};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{GatedActivation, Mode, MoeLayer, Workspace};
use marlinspike::w4a8::{FamilyRouting, LayerRouter, Values, kernels, scalar::Scalar};

const EXPERTS: usize = 12;
const SIZES: Sizes = Sizes {
    experts: EXPERTS,
    size_h: 64,
    size_i: 96,
    groups: [GroupSize::Of(32), GroupSize::Channel],
    nr: 8,
};

/// DeepSeek-V3's rule with random numbers; `round` selects the other features.
fn rule(round: usize, rng: &mut Rng) -> RoutingRule {
    let scores = [Score::Sigmoid, Score::SqrtSoftplus, Score::Softmax, Score::SparseMixer];
    let scoring_func = scores[round % 4];
    let mixer = scoring_func == Score::SparseMixer;
    let groups = (!mixer && !round.is_multiple_of(3)).then(|| GroupRule {
        n_group: 4,
        topk_group: 2,
        group_score: [GroupScore::TopTwo, GroupScore::Max][round / 3 % 2],
        masked: [Masked::Excluded, Masked::Zero][round / 6 % 2],
    });
    let activations =
        [Activation::Silu, Activation::SwigluOai, Activation::SwigluStep, Activation::GeluTanh];
    let activation = activations[round / 2 % 4];
    RoutingRule {
        scoring_func,
        top_k: if mixer { 2 } else { 1 + rng.below(5) },
        choose_by: [ChooseBy::Score, ChooseBy::Logit][usize::from(!mixer) * (round / 4 % 2)],
        groups,
        renormalize: [
            Renormalize::Never,
            Renormalize::SumPlus(1e-20),
            Renormalize::SumAtLeast(0.5),
        ][round % 3],
        routed_scaling_factor: 2.5,
        correction_bias: (!mixer).then(|| "gate.e_score_correction_bias".to_owned()),
        expert_scale: round.is_multiple_of(5).then(|| "gate.per_expert_scale".to_owned()),
        apply_router_weight_on_input: round.is_multiple_of(7),
        activation,
        swiglu_limit: (activation == Activation::Silu && round.is_multiple_of(8)).then_some(0.5),
        ..RoutingRule::softmax(2, Renormalize::Never)
    }
}

fn family(rule: &RoutingRule, rng: &mut Rng) -> FamilyRouting {
    let mut values = |name: &Option<String>| {
        name.as_ref().map(|_| (0..EXPERTS).map(|_| rng.below(64) as f32 / 64.0 - 0.25).collect())
    };
    let (bias, scale) = (values(&rule.correction_bias), values(&rule.expert_scale));
    FamilyRouting::new(rule.clone(), EXPERTS, bias, scale).unwrap()
}

fn given(family: &FamilyRouting, seed: u64) -> Given {
    let mut given = Given::new(SIZES, seed);
    given.config.activation = family.rule().activation;
    given.config.router_weight_on_input = family.rule().apply_router_weight_on_input;
    given.config.router = family.clone().into();
    given
}

#[test]
fn the_fast_layer_has_the_bits_of_the_definition() {
    let mut rng = Rng::new(0xfa);
    let mut workspace = Workspace::default();
    for round in 0..if cfg!(target_arch = "aarch64") { 12 } else { 48 } {
        let rule = rule(round, &mut rng);
        let family = family(&rule, &mut rng);
        let given = given(&family, round as u64);
        let (tokens, ty) = (rng.below(20), [ScalarType::FLOAT32, ScalarType::BFLOAT16][round % 2]);
        let logits: Vec<f32> =
            (0..tokens * EXPERTS).map(|_| rng.below(4001) as f32 / 500.0 - 4.0).collect();
        let logits = rows_of("router_logits", &logits, EXPERTS).unwrap();
        let routing = rule.route(logits, family.tensors()).unwrap();
        // Held to the second implementation of the rule, in f64.
        let differences = rule.compare(logits, family.tensors(), routing.routed().unwrap());
        assert!(differences.unwrap().is_empty(), "{rule:?}");
        let batch = Batch::new(SIZES, ty, tokens, rule.top_k, &mut rng, |_, _| 0);
        let kind = GatedActivation::of_family(family.activation()).unwrap();
        let oracle = given.oracle();
        let expected = oracle
            .forward_activated(&Scalar, kind, &batch.x, routing.routed().unwrap())
            .unwrap()
            .bits();
        for (threads, kernel) in kernels().into_iter().enumerate() {
            let what = format!("{rule:?}, {ty}, {}", kernel.name());
            let layer = given.engine().with_kernel(kernel);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + threads % 3).build();
            let mut forward = |from: usize, to: usize| {
                let h = SIZES.size_h;
                let x = match &batch.x {
                    Values::F32(x) => Values::F32(x[from * h..to * h].to_vec()),
                    Values::Bf16(x) => Values::Bf16(x[from * h..to * h].to_vec()),
                };
                let mut y = Values::from_f32(vec![0.0; (to - from) * h], ty).unwrap();
                let logits = logits.slice(ndarray::s![from..to, ..]);
                let (x, out) = (x.view(h).unwrap(), y.view_mut(h).unwrap());
                layer.forward(x, logits, &mut workspace, out).unwrap();
                y.bits()
            };
            let cut = tokens / 3;
            pool.unwrap().install(|| {
                assert_eq!(forward(0, tokens), expected, "{what}");
                assert_eq!([forward(0, cut), forward(cut, tokens)].concat(), expected, "{what}");
            });
        }
    }
}

/// The limits of a family, by a formula in f64.
#[test]
fn limits_of_the_activation_are_applied() {
    let rule =
        RoutingRule { swiglu_limit: Some(0.75), ..RoutingRule::softmax(1, Renormalize::Never) };
    let family = FamilyRouting::new(rule, 2, None, None).unwrap();
    let kind = GatedActivation::of_family(family.activation()).unwrap();
    let mut rng = Rng::new(5);
    let row: Vec<f32> = (0..64).map(|_| rng.below(4001) as f32 / 1000.0 - 2.0).collect();
    let found = kind.apply(&Values::F32(row.clone()), 32).unwrap().to_f32();
    let mut limited = 0;
    for (i, &found) in found.iter().enumerate() {
        let (g, u) = (f64::from(row[i]).min(0.75), f64::from(row[32 + i]).clamp(-0.75, 0.75));
        let exact = g / (1.0 + (-g).exp()) * u;
        assert!((f64::from(found) - exact).abs() <= exact.abs() * 1e-6, "{g} {u}: {found}");
        limited += usize::from(row[i] > 0.75 || row[32 + i].abs() > 0.75);
    }
    assert!(limited > 8);
}

#[test]
fn configs_that_contradict_the_rule_are_refused() {
    let mut rng = Rng::new(6);
    let family = family(&rule(1, &mut rng), &mut rng);
    let refused = |change: fn(&mut Given)| {
        let mut given = given(&family, 1);
        change(&mut given);
        let stack = |name, all: &[marlinspike::layouts::kleidi::PackedRhs<'_>]| {
            let bytes: Vec<u8> = all.iter().flat_map(|m| m.bytes()).copied().collect();
            marlinspike::layouts::kleidi::PackedStack::new(name, all[0].layout(), bytes).unwrap()
        };
        let (w13, w2) = (stack("w13", &given.w13), stack("w2", &given.w2));
        MoeLayer::new(w13, w2, given.config).unwrap_err()
    };
    let error = refused(|g| g.config.mode = Mode::Upstream);
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let error = refused(|g| g.config.activation = Activation::Gelu);
    assert!(matches!(&error, Error::Size { what, .. } if what == "activation"), "{error}");
    let error = refused(|g| g.config.router_weight_on_input = !g.config.router_weight_on_input);
    assert!(matches!(&error, Error::Size { what, .. } if what == "router_weight_on_input"));
    // The tensors have an entry for each expert.
    let error = refused(|g| {
        let LayerRouter::Family(family) = &g.config.router else { panic!("a family") };
        let rule = family.rule().clone();
        let short = rule.correction_bias.as_ref().map(|_| vec![0.0; 16]);
        let scale = rule.expert_scale.as_ref().map(|_| vec![0.0; 16]);
        g.config.router = FamilyRouting::new(rule, 16, short, scale).unwrap().into();
    });
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}
