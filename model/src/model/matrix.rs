//! Matrices of a layer and the places of their tensors.

/// The matrices of a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// One linear layer.
    Dense,
    /// The experts' gate and up projections, side by side along N.
    W13,
    /// The experts' down projections.
    W2,
}

impl Role {
    /// Upstream's prefix of parameter names.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Dense => "",
            Self::W13 => "w13_",
            Self::W2 => "w2_",
        }
    }
}

/// The location of one matrix's tensors.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Matrix {
    /// Prefix of the tensor names: `model.layers.0.mlp.up_proj.`, or
    /// `model.layers.0.mlp.experts.down_proj_` for a stored stack.
    pub prefix: String,
    /// Its position along the first dimension of a stored stack.
    pub index: Option<usize>,
    /// The part of the stored columns that it has: part i of n equal ones. `None`: all columns.
    pub columns: Option<[usize; 2]>,
}

impl Matrix {
    /// The module's name, for messages.
    pub fn name(&self) -> String {
        let base = self.prefix.trim_end_matches(['.', '_']);
        let name = self.index.map_or_else(|| base.to_owned(), |i| format!("{base}[{i}]"));
        match self.columns {
            None => name,
            Some([part, of]) => format!("{name}, part {part} of {of}"),
        }
    }
}

/// One projection of one expert: the layer (`...experts`), the expert, the projection.
pub(super) fn expert_of(module: &str) -> Option<(&str, usize, &str)> {
    let (rest, projection) = module.rsplit_once('.')?;
    let (layer, expert) = rest.rsplit_once('.')?;
    (layer.rsplit('.').next() == Some("experts")).then_some(())?;
    let plain = !expert.is_empty() && expert.bytes().all(|b| b.is_ascii_digit());
    Some((layer, plain.then(|| expert.parse().ok()).flatten()?, projection))
}

/// The slot of a projection: gate 0 and up 1 of w13, or w2.
pub(super) fn slot_of(projection: &str) -> Option<(Role, usize)> {
    match projection {
        "gate_proj" | "w1" => Some((Role::W13, 0)),
        "up_proj" | "w3" => Some((Role::W13, 1)),
        "down_proj" | "w2" => Some((Role::W2, 0)),
        _ => None,
    }
}
