//! The tensors of a MoE block by their checkpoint names, in the one form that [`crate::moe::block`]
//! has: stacks `[E, N, K]`, gate before up.
//!
//! Checkpoints hold experts one by one (`experts.3.gate_proj.weight`, `experts.3.w1.weight`), fused
//! to three dimensions (`experts.gate_up_proj`, `input_linear.weight`), transposed (`[E, H, 2I]`) or
//! as rows of one matrix (`experts.mlp.w1`).

use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// What a family's block has besides its routing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsRule {
    /// Whether gate and up alternate along N of the stored gate_up.
    pub interleaved: bool,
    /// Whether the experts have a gate projection.
    pub gated: bool,
    /// The shared expert's activation, where it is not the routed experts'.
    pub shared: SharedRule,
    /// Whether the output passes a norm, which is not computed.
    pub has_output_norm: bool,
    /// Why the block cannot be computed.
    pub refused: Option<&'static str>,
}

impl ExpertsRule {
    /// Gate and up in halves, one activation for all experts.
    pub(super) const PLAIN: Self = Self {
        interleaved: false,
        gated: true,
        shared: SharedRule::Same,
        has_output_norm: false,
        refused: None,
    };
}

/// The shared expert, where it differs from a routed one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SharedRule {
    /// As the routed experts.
    Same,
    /// Plain SiLU without limits.
    Plain,
    /// `swiglustep` with a limit for each layer in `swiglu_limits_shared`; 0 or null means none.
    Step(Option<f32>),
    /// Averaged with the routed sum, unless `shared_expert_combination_strategy` is `sum`.
    Averaged,
}

/// The matrices of a block.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockTensors {
    /// Router `[E, H]`, zero experts included.
    pub router_weight: Option<Tensor<'static>>,
    /// Bias of the logits `[E]`.
    pub router_bias: Option<Tensor<'static>>,
    /// `[E, 2I, H]`, or `[E, I, H]` without a gate.
    pub w13: Tensor<'static>,
    /// `[E, 2I]`.
    pub w13_bias: Option<Tensor<'static>>,
    /// `[E, H, I]`.
    pub w2: Tensor<'static>,
    /// `[E, H]`.
    pub w2_bias: Option<Tensor<'static>>,
    /// `[2S, H]` and `[H, S]` of the shared expert.
    pub shared: Option<[Tensor<'static>; 2]>,
    /// `[1, H]`.
    pub shared_gate: Option<Tensor<'static>>,
    /// `[H]`, added to the output.
    pub output_bias: Option<Tensor<'static>>,
}

/// Modules of a layer that may hold its experts.
const PARENTS: &[&str] =
    &["mlp.", "block_sparse_moe.", "feed_forward.", "ffn.", "moe.", "mixer.", ""];
const ROUTERS: &[&str] = &[
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "router.classifier.weight",
    "gate.wg.weight",
];
/// Gate, up and down of one expert.
const EACH: &[[&str; 3]] = &[["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];
/// gate_up and down of all experts.
const FUSED: &[[&str; 2]] = &[
    ["experts.gate_up_proj", "experts.down_proj"],
    ["input_linear.weight", "output_linear.weight"],
    ["experts.fc1.weight", "experts.fc2.weight"],
    ["experts.w13_weight", "experts.w2_weight"],
];
/// Gate, up and down of all experts, with three dimensions.
const SEPARATE: &[[&str; 3]] = &[["gate_proj.weight", "up_proj.weight", "down_proj.weight"]];
/// Gate, up and down of all experts as rows of matrices `[E · I, H]`, down transposed.
const ROWS: [&str; 3] = ["experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"];
const SHARED: &[&str] = &["shared_experts.", "shared_expert.", "shared_mlp.", "share_expert."];
/// Of a shared expert next to the block (granite).
const FUSED_SHARED: [&str; 2] = ["input_linear.weight", "output_linear.weight"];
/// transformers 5.23.0 saves hy_v4's dense gates under this name.
const MISNAMED: [&str; 3] = ["linear_gate", "up_proj", "down_proj"];
/// Most experts that are read one by one.
const MOST: usize = 1 << 16;

/// A stack of matrices `[experts, n, k]` of one element type.
struct Stack {
    dtype: DType,
    shape: [usize; 3],
    bytes: Vec<u8>,
}

impl Stack {
    fn of(tensor: &Tensor<'_>) -> Result<Self> {
        let dtype = tensor.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::dtype(tensor.name(), dtype, "F32, F16 or BF16"));
        }
        let shape = match *tensor.shape() {
            [n, k] => [1, n, k],
            [experts, n, k] => [experts, n, k],
            ref other => return Err(Error::shape(tensor.name(), other, "two or three dimensions")),
        };
        Ok(Self { dtype, shape, bytes: tensor.bytes().to_vec() })
    }

    /// This stack's experts, then the other's.
    fn then(mut self, name: &str, other: Self) -> Result<Self> {
        if (self.dtype, self.shape[1..].to_vec()) != (other.dtype, other.shape[1..].to_vec()) {
            let rule = format!("{} of {:?}, as the experts before", self.dtype, &self.shape[1..]);
            return Err(Error::shape(name, &other.shape[1..], rule));
        }
        self.shape[0] += other.shape[0];
        self.bytes.extend(other.bytes);
        Ok(self)
    }

    /// Rows of each expert, then the other's rows of that expert.
    fn above(self, name: &str, other: &Self) -> Result<Self> {
        let [experts, n, k] = self.shape;
        if (self.dtype, experts, k) != (other.dtype, other.shape[0], other.shape[2]) {
            let rule = format!("{} of [{experts}, N, {k}], as the gate", self.dtype);
            return Err(Error::shape(name, &other.shape, rule));
        }
        let (own, more) = (n * k * self.dtype.bytes(), other.shape[1] * k * self.dtype.bytes());
        let mut bytes = Vec::with_capacity(self.bytes.len() + other.bytes.len());
        for e in 0..experts {
            bytes.extend(&self.bytes[e * own..(e + 1) * own]);
            bytes.extend(&other.bytes[e * more..(e + 1) * more]);
        }
        Ok(Self { dtype: self.dtype, shape: [experts, n + other.shape[1], k], bytes })
    }

    fn transposed(self) -> Self {
        let ([experts, n, k], width) = (self.shape, self.dtype.bytes());
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for e in 0..experts {
            for column in 0..k {
                for row in 0..n {
                    let at = ((e * n + row) * k + column) * width;
                    bytes.extend(&self.bytes[at..at + width]);
                }
            }
        }
        Self { dtype: self.dtype, shape: [experts, k, n], bytes }
    }

    /// Rows of one matrix as the rows of `experts` matrices.
    fn split(self, name: &str, experts: usize) -> Result<Self> {
        let [one, rows, k] = self.shape;
        if one != 1 || experts == 0 || !rows.is_multiple_of(experts) {
            let rule = format!("[{experts} · I, H]");
            return Err(Error::shape(name, &self.shape[1..], rule));
        }
        Ok(Self { shape: [experts, rows / experts, k], ..self })
    }

    fn tensor(self, name: &str) -> Result<Tensor<'static>> {
        Tensor::new(name, self.dtype, self.shape.to_vec(), self.bytes)
    }
}

/// Gate over up, and down, of all experts.
struct Experts {
    gate_up: Stack,
    down: Stack,
    biases: [Option<Tensor<'static>>; 2],
}

/// A lookup of a layer's tensors by their names below the layer.
type Get<'g, 't> = &'g dyn Fn(&str) -> Option<Tensor<'t>>;

impl BlockTensors {
    /// Reads a block whose hidden states have `hidden` features. `get` finds a tensor by its name
    /// below the layer, as `mlp.gate.weight`; `experts` is the number of experts in the config.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a form of experts that is not known, or for a block with further
    /// stages; [`Error::Shape`] and [`Error::Dtype`] naming a tensor.
    pub fn read(
        get: Get<'_, '_>,
        hidden: usize,
        experts: Option<usize>,
        rule: ExpertsRule,
    ) -> Result<Self> {
        if let Some(reason) = rule.refused {
            return Err(Error::unsupported("this family's block", reason));
        }
        for parent in PARENTS {
            let below = |name: &str| get(&format!("{parent}{name}"));
            let Some(found) = all(&below, experts, rule)? else { continue };
            if below("fc1_latent_proj.weight").is_some() {
                let reason = "its routed experts run between latent projections";
                return Err(Error::unsupported("this block", reason));
            }
            return found.block(get, &below, hidden, rule);
        }
        Err(Error::unsupported("the experts of this block", "no known tensor names were found"))
    }
}

/// The experts below one module; `None` if it has none.
fn all(get: Get<'_, '_>, experts: Option<usize>, rule: ExpertsRule) -> Result<Option<Experts>> {
    let none = || [None, None];
    for names in EACH {
        if let Some((gate_up, down)) = one_by_one(get, names, experts, rule.gated)? {
            return Ok(Some(Experts { gate_up, down, biases: none() }));
        }
    }
    for [gate_up, down] in FUSED {
        let (Some(first), Some(second)) = (get(gate_up), get(down)) else { continue };
        let bias = |name: &str| get(&format!("{name}_bias")).map(Tensor::into_owned);
        let biases = [bias(gate_up), bias(down)];
        let (gate_up, down) = (Stack::of(&first)?, Stack::of(&second)?);
        return Ok(Some(Experts { gate_up, down, biases }));
    }
    for [gate, up, down] in SEPARATE {
        let (Some(g), Some(u), Some(d)) = (get(gate), get(up), get(down)) else { continue };
        let gate_up = Stack::of(&g)?.above(up, &Stack::of(&u)?)?;
        return Ok(Some(Experts { gate_up, down: Stack::of(&d)?, biases: none() }));
    }
    let [gate, up, down] = ROWS.map(get);
    let (Some(gate), Some(up), Some(down)) = (gate, up, down) else { return Ok(None) };
    let Some(experts) = experts else {
        return Err(Error::unsupported(ROWS[0], "the config does not state the number of experts"));
    };
    let of = |t: &Tensor<'_>, name: &str| Stack::of(t)?.split(name, experts);
    let gate_up = of(&gate, ROWS[0])?.above(ROWS[1], &of(&up, ROWS[1])?)?;
    let down = of(&down, ROWS[2])?.transposed();
    Ok(Some(Experts { gate_up, down, biases: none() }))
}

/// Experts with a tensor each. Ids that have no down projection are zero experts.
fn one_by_one(
    get: Get<'_, '_>,
    [gate, up, down]: &[&str; 3],
    experts: Option<usize>,
    gated: bool,
) -> Result<Option<(Stack, Stack)>> {
    let mut whole: Option<(Stack, Stack)> = None;
    for e in 0..experts.unwrap_or(MOST).min(MOST) {
        let name = |part: &str| format!("experts.{e}.{part}.weight");
        let needed = |part: &str| -> Result<Stack> {
            let tensor = get(&name(part)).ok_or_else(|| Error::missing(name(part), "an expert"))?;
            Stack::of(&tensor)
        };
        if get(&name(down)).is_none() {
            break;
        }
        let up_rows = needed(up)?;
        let gate_up = if gated { needed(gate)?.above(&name(up), &up_rows)? } else { up_rows };
        let own = (gate_up, needed(down)?);
        whole = Some(match whole {
            None => own,
            Some((g, d)) => (g.then(&name(gate), own.0)?, d.then(&name(down), own.1)?),
        });
    }
    Ok(whole)
}

impl Experts {
    /// Turns matrices that are stored as `[E, K, N]`, and reads the rest of the block.
    fn block<'t>(
        self,
        get: Get<'_, 't>,
        below: Get<'_, 't>,
        hidden: usize,
        rule: ExpertsRule,
    ) -> Result<BlockTensors> {
        let Self { mut gate_up, mut down, biases: [w13_bias, w2_bias] } = self;
        let halves = if rule.gated { 2 } else { 1 };
        let fits = |g: [usize; 3], d: [usize; 3]| {
            g[2] == hidden && d[1] == hidden && g[1] == halves * d[2] && g[0] == d[0]
        };
        let turned = |[e, n, k]: [usize; 3]| [e, k, n];
        if !fits(gate_up.shape, down.shape) {
            if !fits(turned(gate_up.shape), turned(down.shape)) {
                let rule = format!("gate_up and down of hidden_size {hidden}");
                return Err(Error::shape("experts", &gate_up.shape, rule));
            }
            (gate_up, down) = (gate_up.transposed(), down.transposed());
        }
        let find = |names: &[&str]| names.iter().find_map(|n| below(n)).map(Tensor::into_owned);
        Ok(BlockTensors {
            router_weight: find(ROUTERS),
            router_bias: find(&["router.bias"]),
            w13: gate_up.tensor("w13")?,
            w13_bias,
            w2: down.tensor("w2")?,
            w2_bias,
            shared: shared(get, below, rule.gated)?,
            shared_gate: find(&["shared_expert_gate.weight"]),
            output_bias: find(&["bias"]),
        })
    }
}

/// The shared expert, inside the block or (step3) next to it.
fn shared<'t>(
    get: Get<'_, 't>,
    below: Get<'_, 't>,
    gated: bool,
) -> Result<Option<[Tensor<'static>; 2]>> {
    let flat = |stack: Stack, name: &str| {
        let [_, n, k] = stack.shape;
        Tensor::new(name, stack.dtype, vec![n, k], stack.bytes)
    };
    for module in SHARED {
        let [fused, down] = FUSED_SHARED.map(|name| format!("{module}{name}"));
        if let (Some(fused), Some(down)) = (get(&fused), get(&down)) {
            let (fused, down) = (Stack::of(&fused)?, Stack::of(&down)?);
            return Ok(Some([flat(fused, "shared_w13")?, flat(down, "shared_w2")?]));
        }
        for names in EACH.iter().chain([&MISNAMED]) {
            let [gate, up, down] = names.map(|n| format!("{module}{n}.weight"));
            let places: [Get<'_, 't>; 2] = [below, get];
            for place in places {
                let (Some(u), Some(d)) = (place(&up), place(&down)) else { continue };
                let w13 = match (gated, place(&gate)) {
                    (true, Some(g)) => Stack::of(&g)?.above(&up, &Stack::of(&u)?)?,
                    (true, None) => continue,
                    (false, _) => Stack::of(&u)?,
                };
                return Ok(Some([flat(w13, "shared_w13")?, flat(Stack::of(&d)?, "shared_w2")?]));
            }
        }
    }
    Ok(None)
}
