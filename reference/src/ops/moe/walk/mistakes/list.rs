//! The known mistakes of a layer's stages.

use std::borrow::Cow;

use crate::judge::mistake::KnownMistake;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::layer::{Layer, Routed};
use crate::ops::layer::summed::SHARED_MISSING;
use crate::ops::moe::source::Source;
use crate::weight::Weight;

/// A layer whose parts a mistake may replace.
#[derive(Clone)]
pub(super) struct Changed<'l> {
    pub(super) layer: Layer<'l>,
    pub(super) top_k: usize,
    pub(super) ids: Cow<'l, [i32]>,
    pub(super) weights: Cow<'l, [f32]>,
    /// Other matrices than the layer's: w13, w2.
    pub(super) matrices: [Option<Vec<Weight<'l>>>; 2],
    /// Whether a shared expert's output is added; false without one.
    pub(super) adds_shared: bool,
}

/// A mistake with a layer.
pub(super) type Mistake<'l> = KnownMistake<'l, Changed<'l>, Changed<'l>>;

impl<'l> Changed<'l> {
    /// The layer without a mistake.
    pub(super) fn right(source: &'l Source<'_>) -> Self {
        let (layer, routed) = (source.layer(), source.routed());
        Self {
            layer,
            top_k: routed.top_k,
            ids: routed.topk_ids.into(),
            weights: routed.topk_weights.into(),
            matrices: [None, None],
            adds_shared: source.has_shared(),
        }
    }

    /// The first stage that differs from that of the `right` layer.
    pub(super) fn first_stage(&self, right: &Self) -> usize {
        let (own, other) = (&self.layer, &right.layer);
        let on_input = own.router_weight_on_input;
        let same_routing = self.ids == right.ids
            && own.expert_map == other.expert_map
            && own.num_experts == other.num_experts
            && on_input == other.router_weight_on_input
            && !(on_input && self.weights != right.weights);
        match () {
            () if !same_routing || self.matrices[0].is_some() => 0,
            () if own.activation != other.activation => 1,
            () if self.adds_shared != right.adds_shared => 3,
            () => 2,
        }
    }

    /// The layer and its routing.
    pub(super) fn layer(&self) -> (Layer<'_>, Routed<'_>) {
        let [w13, w2] = &self.matrices;
        let layer = Layer {
            w13: w13.as_deref().unwrap_or(self.layer.w13),
            w2: w2.as_deref().unwrap_or(self.layer.w2),
            ..self.layer
        };
        let routed = Routed { top_k: self.top_k, topk_ids: &self.ids, topk_weights: &self.weights };
        (layer, routed)
    }

    /// The matrices of w13 (0) or w2 (1), changed.
    fn with(mut self, which: usize, change: impl Fn(&mut Weight<'l>)) -> Self {
        let own = [self.layer.w13, self.layer.w2][which];
        let mut matrices = own.to_vec();
        matrices.iter_mut().for_each(change);
        self.matrices[which] = Some(matrices);
        self
    }
}

/// A mistake that replaces parts of a layer; `None` where it makes no difference.
fn mistake<'l>(
    id: &'static str,
    text: impl Into<String>,
    make: impl Fn(Changed<'l>) -> Option<Changed<'l>> + 'l,
) -> Mistake<'l> {
    KnownMistake::new(id, text, make)
}

/// The mistakes of a layer.
pub(super) fn mistakes<'l>(layer: &Layer<'_>) -> Vec<Mistake<'l>> {
    let mut all = routings();
    all.extend(activations(layer.activation));
    for (which, name) in [(0, "w13"), (1, "w2")] {
        all.push(mistake("bias-missing", format!("the bias of {name} was not added"), move |c| {
            let own = [c.layer.w13, c.layer.w2][which];
            let has = own.iter().any(|w| w.bias.is_some());
            has.then(|| c.with(which, |w| w.bias = None))
        }));
        let text = format!("the global scales of {name} were not applied");
        all.push(mistake("global-scale-missing", text, move |c| {
            let own = [c.layer.w13, c.layer.w2][which];
            let has = own.iter().any(|w| w.global_scale.is_some());
            has.then(|| c.with(which, |w| w.global_scale = w.global_scale.map(|_| 1.0)))
        }));
        let text = format!("the first expert's scales of {name} were taken for all");
        all.push(mistake("weight-scale-of-first-expert", text, move |c| {
            let own = [c.layer.w13, c.layer.w2][which];
            let scales = own.first()?.scales.clone();
            Some(c.with(which, |w| w.scales = scales.clone()))
        }));
        let text = format!("the first expert's {name} was taken for all");
        all.push(mistake("wrong-expert", text, move |c| {
            let first = [c.layer.w13, c.layer.w2][which].first()?.clone();
            Some(c.with(which, |w| *w = first.clone()))
        }));
    }
    let (id, text) = SHARED_MISSING;
    all.push(mistake(id, text, |c: Changed<'l>| {
        c.adds_shared.then_some(Changed { adds_shared: false, ..c })
    }));
    all
}

fn routings<'l>() -> Vec<Mistake<'l>> {
    let weights = |c: Changed<'l>, change: fn(&mut [f32])| {
        let mut all = c.weights.to_vec();
        all.chunks_exact_mut(c.top_k.max(1)).for_each(change);
        (all[..] != c.weights[..]).then(|| Changed { weights: all.into(), ..c })
    };
    let ids = |c: Changed<'l>, change: &dyn Fn(i32) -> i32| {
        let all: Vec<i32> = c.ids.iter().map(|&id| change(id)).collect();
        (all[..] != c.ids[..]).then(|| Changed { ids: all.into(), ..c })
    };
    let shifted = move |c: Changed<'l>, step: i32| {
        let count = c.layer.num_experts as i32;
        ids(c, &|id| if id < 0 { id } else { (id + step).rem_euclid(count) })
    };
    vec![
        mistake("router-weight-missing", "router weights were not applied", move |c| {
            weights(c, |w| w.fill(1.0))
        }),
        mistake("router-weight-twice", "router weights were applied twice", move |c| {
            weights(c, |w| w.iter_mut().for_each(|w| *w *= *w))
        }),
        mistake(
            "router-weight-of-another-slot",
            "the router weights of each token are in the opposite order of its experts",
            move |c| weights(c, |w| w.reverse()),
        ),
        mistake(
            "router-weight-on-the-other-side",
            "router weights multiply the other product than the config says",
            |mut c| {
                c.layer.router_weight_on_input ^= true;
                Some(c)
            },
        ),
        mistake("slot-dropped", "the last expert of each token is missing", move |c| {
            weights(c, |w| {
                if let [.., last] = w {
                    *last = 0.0;
                }
            })
        }),
        mistake("slot-dropped", "the first expert of each token is missing", move |c| {
            weights(c, |w| {
                if let [first, ..] = w {
                    *first = 0.0;
                }
            })
        }),
        mistake("wrong-expert", "the matrices of the next expert were taken", move |c| {
            shifted(c, 1)
        }),
        mistake("wrong-expert", "the matrices of the expert before were taken", move |c| {
            shifted(c, -1)
        }),
        mistake("wrong-expert", "each token's experts are those of its first slot", |c| {
            let tokens = c.ids.chunks_exact(c.top_k.max(1));
            let all: Vec<i32> = tokens.flat_map(|t| vec![t[0]; t.len()]).collect();
            (all[..] != c.ids[..]).then(|| Changed { ids: all.into(), ..c })
        }),
        mistake("expert-map-ignored", "global expert ids were used as this rank's", |mut c| {
            let local = c.layer.w13.len();
            c.layer.expert_map?;
            let map = |id: &i32| if (*id as usize) < local { *id } else { -1 };
            c.ids = c.ids.iter().map(map).collect::<Vec<_>>().into();
            (c.layer.expert_map, c.layer.num_experts) = (None, local);
            Some(c)
        }),
    ]
}

fn activations<'l>(own: Definition) -> Vec<Mistake<'l>> {
    let mut all = Vec::new();
    let mut add = |id, text: String, definition: Definition| {
        if definition != own {
            all.push(mistake(id, text, move |c: Changed<'l>| {
                let layer = Layer { activation: definition, ..c.layer };
                Some(Changed { layer, ..c })
            }));
        }
    };
    let gated = own.columns != Columns::Gate;
    if gated {
        let text = "gate and up are exchanged".to_owned();
        add("gate-up-swapped", text, Definition { exchanged: !own.exchanged, ..own });
        let (id, text, columns) = match own.columns {
            Columns::Halves => (
                "gate-up-interleaved",
                "gate and up were read as alternating instead of in halves",
                Columns::Interleaved,
            ),
            _ => (
                "gate-up-in-halves",
                "gate and up were read in halves instead of as alternating",
                Columns::Halves,
            ),
        };
        add(id, text.to_owned(), Definition { columns, ..own });
    }
    let text = "the activation's limits were not applied".to_owned();
    let open = Definition { gate_limit: None, value_limit: None, up_limit: None, ..own };
    add("limit-left-out", text, open);
    let named = [
        (Activation::Silu, "silu"),
        (Activation::Gelu, "gelu"),
        (Activation::GeluTanh, "gelu_tanh"),
        (Activation::Relu2, "relu2"),
    ];
    for (activation, name) in named {
        let other = Definition {
            columns: own.columns,
            exchanged: own.exchanged,
            ..Definition::new(activation)
        };
        let text = format!("the activation was `{name}`");
        add("other-activation", text, other);
    }
    all
}
