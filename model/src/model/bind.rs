//! The tensors of a matrix of each scheme, and the dimensions along which K and N run.

use marlinspike::config::{ActivationScheme, ScaleStrategy, Scheme};
use marlinspike::formats::compressed_tensors;
use marlinspike::formats::integers::{IntFormat, Packing};
use marlinspike::num::dims::{GroupSize, Shape};

use super::matrix::Matrix;
use super::{Model, ModelError};

/// The role of a tensor of a quantized matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Codes.
    Weight,
    /// Scales.
    Scale,
    /// Run-time zero points.
    Zeros,
    /// The group of each row.
    GIdx,
    /// The scale over all blocks.
    Global,
    /// Scale of static activations (block formats: the activations' global scale).
    InputScale,
    /// Zero point of static activations.
    InputZero,
    /// Bias.
    Bias,
}

/// The dimension of a tensor along which K or N runs, and the number of rows or columns per
/// element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Dimension, not counting the experts dimension of a stored stack.
    pub dim: usize,
    /// Rows or columns per element.
    pub unit: usize,
}

/// One tensor of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// Its role.
    pub part: Part,
    /// Possible suffixes of its name; the first that exists is used.
    pub suffixes: &'static [&'static str],
    /// Whether its absence is an error.
    pub required: bool,
    /// The axis of K, if a slice of K needs a slice of the tensor.
    pub k: Option<Axis>,
    /// The axis of N.
    pub n: Option<Axis>,
}

/// The group size of a scheme.
pub fn group_size(scheme: &Scheme, size_k: usize) -> GroupSize {
    match (scheme, scheme.group_size()) {
        // A block larger than the matrix covers whole columns.
        (Scheme::Fp8(_), GroupSize::Of(block_k)) if block_k > size_k => GroupSize::Channel,
        (_, group_size) => group_size,
    }
}

/// Whether a `g_idx` assigns rows to groups.
pub fn act_order(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.desc_act && w.group_size != GroupSize::Channel)
}

const fn axis(dim: usize, unit: usize) -> Option<Axis> {
    Some(Axis { dim, unit })
}

const fn part(
    part: Part,
    suffixes: &'static [&'static str],
    k: Option<Axis>,
    n: Option<Axis>,
) -> Binding {
    Binding { part, suffixes, required: true, k, n }
}

/// The tensors of integer codes, `pack` per word; `groups` is the axis of the groups of k.
fn integers(
    format: &'static IntFormat,
    pack: usize,
    groups: impl Fn(usize) -> Option<Axis>,
) -> Vec<Binding> {
    let [k, n] = if format.columns_first { [1, 0] } else { [0, 1] };
    let (per_k, per_n, per_zero) = match format.packing {
        Packing::AlongK => (pack, 1, pack),
        Packing::AlongN(_) => (1, pack, pack),
        Packing::Bytes => (1, 1, 1),
    };
    let names = format.names;
    let bind = |name: &'static &'static str, of, k, n| part(of, std::slice::from_ref(name), k, n);
    vec![
        bind(&names.weight, Part::Weight, axis(k, per_k), axis(n, per_n)),
        bind(&names.scales, Part::Scale, groups(k), axis(n, 1)),
        bind(&names.zeros, Part::Zeros, groups(k), axis(n, per_zero)),
        bind(&names.g_idx, Part::GIdx, axis(0, 1), None),
    ]
}

/// Names of the scales of FP8 weights: of blocks, of tensors and channels, of experts in three
/// dimensions, and of DeepSeek's own files.
const FP8_SCALES: &[&str] = &["weight_scale_inv", "weight_scale", "_scale_inv", "scale"];

/// The tensors of a matrix of `scheme`, the weight first; empty if the scheme is unquantized.
pub fn bindings(scheme: &Scheme) -> Vec<Binding> {
    let optional = |b: Binding| Binding { required: false, ..b };
    let bias = optional(part(Part::Bias, &["bias"], None, axis(0, 1)));
    // With act-order, rows of a slice may belong to any group, so each slice keeps all scales.
    let groups = |dim| match group_size(scheme, usize::MAX) {
        GroupSize::Of(g) if !act_order(scheme) => axis(dim, g),
        _ => None,
    };
    let pack = 32 / scheme.bits().unwrap_or(8) as usize;
    let mut list = match scheme {
        Scheme::Unquantized { .. } => return Vec::new(),
        Scheme::Wna16(w) => integers(w.checkpoint_format, pack, groups),
        Scheme::Fp8(f) => {
            let (k, n) = match f.strategy {
                ScaleStrategy::Tensor => (None, None),
                ScaleStrategy::Channel => (None, axis(0, 1)),
                ScaleStrategy::Block { block_n, block_k } => (axis(1, block_k), axis(0, block_n)),
            };
            vec![
                part(Part::Weight, &["weight", ""], axis(1, 1), axis(0, 1)),
                part(Part::Scale, FP8_SCALES, k, n),
                optional(part(Part::InputScale, &["input_scale", "activation_scale"], None, None)),
            ]
        }
        Scheme::Block { format, container, .. } if container.stacks_experts() => vec![
            part(Part::Weight, &["blocks"], axis(1, format.block), axis(0, 1)),
            part(Part::Scale, &["scales"], axis(1, format.block), axis(0, 1)),
        ],
        Scheme::Block { format, .. } => {
            let packed = axis(1, format.codes_per_byte());
            let float = |of, suffixes| part(of, suffixes, None, None);
            let mut list = vec![
                part(Part::Weight, format.weight_suffixes, packed, axis(0, 1)),
                part(Part::Scale, format.scale_suffixes, axis(1, format.block), axis(0, 1)),
            ];
            if format.has_global_scale() {
                list.push(float(Part::Global, format.global_suffixes));
            }
            if format.quantizes_activations() {
                list.push(optional(float(Part::InputScale, format.input_suffixes)));
            }
            list
        }
        Scheme::W4A8Int8 { checkpoint_format, .. } => integers(checkpoint_format, pack, groups),
        Scheme::W4A8Fp8 { .. } => integers(&compressed_tensors::PACKED, pack, groups),
        Scheme::W8A8Int8 { strategy, activations, input_symmetric } => {
            let n = if *strategy == ScaleStrategy::Tensor { None } else { axis(0, 1) };
            let mut list = vec![
                part(Part::Weight, &["weight"], axis(1, 1), axis(0, 1)),
                part(Part::Scale, &["weight_scale"], None, n),
            ];
            if *activations == ActivationScheme::StaticTensor {
                list.push(part(Part::InputScale, &["input_scale"], None, None));
                if !input_symmetric {
                    list.push(part(Part::InputZero, &["input_zero_point"], None, None));
                }
            }
            list
        }
        _ => vec![part(Part::Weight, &["weight_packed", "weight"], axis(1, pack), axis(0, 1))],
    };
    // As upstream does, skip zero points of symmetric matrices and `g_idx` without act-order.
    let read_zeros = matches!(scheme, Scheme::Wna16(w) if !w.symmetric());
    list.retain(|b| match b.part {
        Part::Zeros => read_zeros,
        Part::GIdx => act_order(scheme),
        _ => true,
    });
    list.push(bias);
    list
}

/// A tensor of a matrix, found in the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its binding to the matrix.
    pub binding: Binding,
    /// Tensor name.
    pub name: String,
    /// Shape, without the experts dimension of a stored stack.
    pub shape: Vec<usize>,
    /// Position in a stored stack.
    pub index: Option<usize>,
    /// Elements before the matrix along the axis of N.
    pub n_start: usize,
}

/// Reduces `len` to one of `of` equal parts; the elements before `part`, or `len` if they differ.
fn part_of(len: &mut usize, part: usize, of: usize) -> Result<usize, usize> {
    if of == 0 || !len.is_multiple_of(of) {
        return Err(*len);
    }
    *len /= of;
    Ok(part * *len)
}

/// Whether codes of the scheme share words of 32 bits.
pub(super) fn packs_words(scheme: &Scheme) -> bool {
    match scheme {
        Scheme::Wna16(w) => !matches!(w.checkpoint_format.packing, Packing::Bytes),
        _ => false,
    }
}

/// Drops the unit axes of scales of blocks that are stored as `[N / n, 1, K / k, 1]`.
fn squeeze(shape: &mut Vec<usize>) {
    if let [n, 1, k, 1] = shape[..] {
        *shape = vec![n, k];
    }
}

/// Compares the matrices of each expert with those of the first by `difference`.
///
/// # Errors
/// A sentence with the first difference: in the number of matrices, or as `difference` states it.
pub fn expect_alike(
    experts: &[Vec<Bound>],
    difference: fn(&Bound, &Bound) -> Option<String>,
) -> Result<(), String> {
    let Some(first) = experts.first() else { return Ok(()) };
    let unlike = |row: &Vec<Bound>| {
        if row.len() != first.len() {
            let (a, b) = (row.first()?, first.first()?);
            let (of_a, of_b) = (row.len(), first.len());
            return Some(format!("`{}` is one of {of_a} matrices, `{}` of {of_b}", a.name, b.name));
        }
        row.iter().zip(first).find_map(|(a, b)| difference(a, b))
    };
    match experts.iter().find_map(unlike) {
        Some(found) => Err(format!("{found}: experts must be alike")),
        None => Ok(()),
    }
}

/// A matrix with its tensors found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// Name for messages.
    pub name: String,
    /// Its tensors, the weight first.
    pub tensors: Vec<Found>,
    /// Size of the whole matrix.
    pub shape: Shape,
    /// Bytes of the tensors in the files.
    pub bytes: u64,
}

impl Bound {
    /// How this matrix differs from `other` in its size or in which tensors it has.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if let Some(shapes) = self.shape_difference(other) {
            return Some(shapes);
        }
        // The scale of activations belongs to the product, and only some products have it.
        let of_weight = |f: &&Found| !matches!(f.binding.part, Part::InputScale | Part::InputZero);
        let only = |left: &Self, right: &Self| {
            let mut own = left.tensors.iter().filter(of_weight);
            let lone = own.find(|f| right.get(f.binding.part).is_none())?;
            Some(format!("found `{}`, and no such tensor of `{}`", lone.name, right.name))
        };
        only(self, other).or_else(|| only(other, self))
    }

    /// How this matrix differs from `other` in its size.
    pub fn shape_difference(&self, other: &Self) -> Option<String> {
        let differ = self.shape != other.shape;
        differ
            .then(|| format!("`{}` is {}, `{}` {}", self.name, self.shape, other.name, other.shape))
    }

    /// The tensor that holds `part`.
    pub fn get(&self, part: Part) -> Option<&Found> {
        self.tensors.iter().find(|f| f.binding.part == part)
    }

    /// Finds the tensors of `matrix`; shapes come from headers alone.
    ///
    /// # Errors
    /// [`ModelError::Module`] naming the tensor that is missing or has the wrong number of
    /// dimensions.
    pub fn find(model: &Model<'_>, scheme: &Scheme, matrix: &Matrix) -> Result<Self, ModelError> {
        let name = matrix.name();
        let mut tensors = Vec::new();
        let mut bytes = 0;
        // Of a packed word, in which the units of an axis count codes.
        let mut word = 4;
        for binding in bindings(scheme) {
            let full = |s: &&str| format!("{}{s}", matrix.prefix);
            let entry = binding.suffixes.iter().find_map(|s| model.entry(&full(s)));
            let Some(entry) = entry else {
                if !binding.required {
                    continue;
                }
                let wanted: Vec<_> =
                    binding.suffixes.iter().map(|s| format!("`{}`", full(s))).collect();
                let wanted = wanted.join(" or ");
                return Err(ModelError::module(
                    name,
                    format!("tensor {wanted} is missing: {} needs it", scheme.label()),
                ));
            };
            let mut shape = entry.shape().to_vec();
            let mut share = entry.byte_len();
            if let Some(i) = matrix.index {
                match shape.first().copied() {
                    Some(experts) if i < experts => share /= experts as u64,
                    _ => {
                        let found = format!("tensor `{}`: found shape {shape:?}", entry.name());
                        return Err(ModelError::module(
                            name,
                            format!("{found}, expected {} experts or more", i + 1),
                        ));
                    }
                }
                shape.remove(0);
            }
            if binding.part == Part::Scale && matches!(scheme, Scheme::Fp8(_)) {
                squeeze(&mut shape);
            }
            let dims = [binding.k, binding.n].into_iter().flatten().map(|a| a.dim + 1).max();
            if dims.is_some_and(|d| shape.len() < d) {
                let found = format!("tensor `{}`: found shape {shape:?}", entry.name());
                let expected = format!("{} dimensions or more", dims.unwrap_or(0));
                return Err(ModelError::module(name, format!("{found}, expected {expected}")));
            }
            if binding.part == Part::Weight && packs_words(scheme) {
                word = entry.dtype().bytes();
            }
            let tensor = entry.name().to_owned();
            let mut n_start = 0;
            if let (Some([part, of]), Some(Axis { dim, unit })) = (matrix.columns, binding.n) {
                n_start = part_of(&mut shape[dim], part, of).map_err(|all| {
                    let found = format!("tensor `{tensor}`: found {all} times {unit} columns");
                    ModelError::module(&name, format!("{found}, expected {of} equal parts"))
                })?;
                share /= of as u64;
            }
            bytes += share;
            tensors.push(Found { binding, name: tensor, shape, index: matrix.index, n_start });
        }
        let size = |f: &Found, axis: Option<Axis>| {
            axis.and_then(|a| {
                let unit = if a.unit > 1 { a.unit * word / 4 } else { a.unit };
                f.shape[a.dim].checked_mul(unit)
            })
        };
        let shape = tensors
            .first()
            .and_then(|w| Some(Shape::new(size(w, w.binding.k)?, size(w, w.binding.n)?)));
        let fits = |s: &Shape| s.size_k.checked_mul(s.size_n).is_some_and(|n| n < 1 << 48);
        let Some(shape) = shape.filter(fits) else {
            return Err(ModelError::module(name, "the sizes of its weight overflow"));
        };
        let bound = Self { name, tensors, shape, bytes };
        bound.check_groups(scheme)?;
        Ok(bound)
    }

    /// Under act-order a slice of K keeps the scales of the whole matrix, so only the whole matrix
    /// says how many groups there are.
    fn check_groups(&self, scheme: &Scheme) -> Result<(), ModelError> {
        let Scheme::Wna16(w) = scheme else { return Ok(()) };
        if !act_order(scheme) {
            return Ok(());
        }
        let refused = |message: String| Err(ModelError::module(&self.name, message));
        let groups = match w.group_size.groups(self.shape.k()) {
            Ok(groups) => groups,
            Err(e) => return refused(e.to_string()),
        };
        // GPTQ stores [groups, N], compressed-tensors [N, groups].
        let (dim, form) = match w.checkpoint_format.columns_first {
            true => (1, "[N, groups]"),
            false => (0, "[groups, N]"),
        };
        for found in [Part::Scale, Part::Zeros].into_iter().filter_map(|part| self.get(part)) {
            if found.shape.get(dim) != Some(&groups) {
                let (name, shape) = (&found.name, &found.shape);
                return refused(format!(
                    "tensor `{name}`: found shape {shape:?}, expected {form} with {groups} groups, \
                     {} values of K each",
                    w.group_size
                ));
            }
        }
        Ok(())
    }
}
