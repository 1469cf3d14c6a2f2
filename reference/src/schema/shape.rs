//! Shapes as expressions of config keys: the simplest expression that gives the demanded size under
//! every config of a group.

use std::fmt;

use serde_json::{Map, Value};

use super::TensorForm;
use super::sample::{Sample, size_names};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::schema::{Dim, stored};

/// A size of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extent {
    /// Always this.
    Fixed(u64),
    /// 1 or more: the values of other inputs decide.
    Some,
    /// 0 or more: the values of other inputs decide.
    Any,
    /// A key times a factor, divided by another.
    Key {
        /// The key, or what is derived of keys.
        name: String,
        /// Factor.
        times: u64,
        /// Divisor.
        over: u64,
    },
    /// Two keys' product over a divisor.
    Product {
        /// The keys.
        names: [String; 2],
        /// Divisor.
        over: u64,
    },
    /// Groups of `group_size` along a key: one where it is −1.
    Groups(String),
    /// A key over `over`, rounded up to a multiple of `to`, times `times` over `by`.
    RoundedUp {
        /// The key.
        name: String,
        /// Divisor before rounding.
        over: u64,
        /// What it is rounded up to a multiple of.
        to: u64,
        /// Factor after rounding.
        times: u64,
        /// Divisor after rounding.
        by: u64,
    },
    /// No expression of keys: [`super::tensors`] gives it for one config.
    Computed,
}

impl Extent {
    /// The size under a sample.
    fn under(&self, sample: &Sample) -> Option<u64> {
        let whole = |a: u64, b: u64| a.is_multiple_of(b).then_some(a / b);
        match self {
            Self::Fixed(size) => Some(*size),
            Self::Key { name, times, over } => whole(sample.size(name)? * times, *over),
            Self::Product { names: [a, b], over } => {
                whole(sample.size(a)? * sample.size(b)?, *over)
            }
            Self::Groups(name) => {
                let size = sample.size(name)?;
                match sample.config.get("group_size")?.as_i64()? {
                    ..=0 => Some(1),
                    group => whole(size, group as u64),
                }
            }
            Self::RoundedUp { name, over, to, times, by } => {
                let size = sample.size(name)?.div_ceil(*over).next_multiple_of(*to);
                whole(size * times, *by)
            }
            Self::Some | Self::Any | Self::Computed => None,
        }
    }

    /// Whether a demand is this size under a sample.
    pub(super) fn fits(&self, dim: Dim, sample: &Sample) -> bool {
        self.is(dim, self.under(sample))
    }

    /// Whether a demand is this size where the expression gives `under`.
    fn is(&self, dim: Dim, under: Option<u64>) -> bool {
        match (dim, self) {
            (Dim::Some, Self::Some) | (Dim::Any, Self::Any) | (_, Self::Computed) => true,
            (Dim::Is(size), _) => under == Some(size as u64),
            _ => false,
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(size) => write!(f, "{size}"),
            Self::Some => f.write_str("1 or more"),
            Self::Any => f.write_str("any"),
            Self::Computed => f.write_str("computed"),
            Self::Product { names: [a, b], over } => {
                write!(f, "{a} * {b}")?;
                scaled(f, 1, *over)
            }
            Self::Groups(name) => write!(f, "groups({name})"),
            Self::Key { name, times, over } => {
                f.write_str(name)?;
                scaled(f, *times, *over)
            }
            Self::RoundedUp { name, over, to, times, by } => {
                f.write_str("round_up(")?;
                f.write_str(name)?;
                scaled(f, 1, *over)?;
                write!(f, ", {to})")?;
                scaled(f, *times, *by)
            }
        }
    }
}

fn scaled(f: &mut fmt::Formatter<'_>, times: u64, over: u64) -> fmt::Result {
    if times > 1 {
        write!(f, " * {times}")?;
    }
    if over > 1 {
        write!(f, " / {over}")?;
    }
    Ok(())
}

/// Expressions of these sizes, the simplest first.
fn candidates(sizes: &[String]) -> Vec<Extent> {
    let key = |name: &String, times, over| Extent::Key { name: name.clone(), times, over };
    let mut all = vec![Extent::Some, Extent::Any];
    all.extend(sizes.iter().map(|n| key(n, 1, 1)));
    for (times, over) in [
        (1, 2),
        (1, 4),
        (1, 8),
        (1, 16),
        (1, 32),
        (1, 64),
        (1, 128),
        (1, 256),
        (2, 1),
        (4, 1),
        (8, 1),
    ] {
        all.extend(sizes.iter().map(|n| key(n, times, over)));
    }
    all.extend(sizes.iter().map(|n| Extent::Groups(n.clone())));
    for over in [1, 16, 32] {
        for (i, a) in sizes.iter().enumerate() {
            let product = |b: &String| Extent::Product { names: [a.clone(), b.clone()], over };
            all.extend(sizes[i + 1..].iter().map(product));
        }
    }
    for (over, to, times, by) in [
        (1, 8, 1, 1),
        (1, 32, 1, 1),
        (1, 64, 1, 1),
        (1, 128, 1, 1),
        (1, 256, 1, 1),
        (1, 4, 1, 1),
        (16, 4, 1, 1),
        (32, 4, 1, 1),
        (1, 128, 1, 2),
        (1, 256, 1, 2),
        (1, 64, 1, 2),
        (1, 128, 1, 32),
        (1, 256, 1, 32),
        (1, 64, 1, 32),
        (1, 128, 2, 1),
        (1, 64, 2, 1),
        (1, 256, 2, 1),
    ] {
        let rounded = |n: &String| Extent::RoundedUp { name: n.clone(), over, to, times, by };
        all.extend(sizes.iter().map(rounded));
    }
    all
}

/// Expressions and the size that each gives under every sample.
pub(super) struct Candidates {
    extents: Vec<Extent>,
    /// By sample, then by expression.
    sizes: Vec<Vec<Option<u64>>>,
}

impl Candidates {
    /// Expressions of the sizes that `samples` have.
    pub(super) fn new(samples: &[Sample]) -> Self {
        let extents = candidates(&size_names(samples));
        let under = |sample: &Sample| extents.iter().map(|extent| extent.under(sample)).collect();
        Self { sizes: samples.iter().map(under).collect(), extents }
    }

    /// The expressions that are `dim` under a sample.
    fn fitting(&self, dim: Dim, sample: usize) -> Set {
        let mut words = vec![0; self.extents.len().div_ceil(64)];
        for (i, (extent, size)) in self.extents.iter().zip(&self.sizes[sample]).enumerate() {
            words[i / 64] |= u64::from(extent.is(dim, *size)) << (i % 64);
        }
        Set(words)
    }
}

/// A set of candidates.
#[derive(Debug, Clone, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn and(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= b);
    }

    fn first(&self) -> Option<usize> {
        let at = self.0.iter().position(|&word| word != 0)?;
        Some(at * 64 + self.0[at].trailing_zeros() as usize)
    }
}

/// A tensor under every sample.
pub(super) struct Fitted<'c> {
    candidates: &'c Candidates,
    seen: Vec<Option<Seen>>,
}

/// A tensor under one sample.
struct Seen {
    required: bool,
    or_single: bool,
    /// Names of types, then the same with the name of a key where that states the type.
    dtypes: Vec<Vec<String>>,
    dims: Vec<Dim>,
    fitting: Vec<Set>,
}

/// Keys that state a type of elements.
const TYPE_KEYS: [&str; 3] = ["dtype", "input_dtype", "scale_type"];

/// The element types that a name means: a safetensors type's, or a key's.
pub(super) fn dtypes_of(name: &str, config: &Map<String, Value>) -> Vec<DType> {
    if let Some(dtype) = DType::from_name(name) {
        return vec![dtype];
    }
    let named = |text: &str| ScalarType::NAMED.iter().find(|(n, _)| *n == text).map(|&(_, ty)| ty);
    match config.get(name).and_then(Value::as_str).and_then(named) {
        Some(ScalarType::FLOAT8_E8M0FNU) => vec![DType::U8, DType::F8E8M0],
        Some(ty) => vec![stored(ty)],
        None => Vec::new(),
    }
}

impl<'c> Fitted<'c> {
    pub(super) fn new(samples: &[Sample], candidates: &'c Candidates, name: &str) -> Self {
        let see = |(i, sample): (usize, &Sample)| {
            let rule = sample.rules.iter().find(|rule| rule.name == name)?;
            let plain: Vec<String> = rule.dtypes.iter().map(|d| d.name().to_owned()).collect();
            let mut dtypes = vec![plain];
            for key in TYPE_KEYS {
                let stated = dtypes_of(key, &sample.config);
                let keyed = match rule.dtypes.starts_with(&stated) && !stated.is_empty() {
                    true => {
                        let rest = &dtypes[0][stated.len()..];
                        [&[key.to_owned()][..], rest].concat()
                    }
                    false => Vec::new(),
                };
                dtypes.push(keyed);
            }
            let fitting = rule.shape.iter().map(|dim| candidates.fitting(*dim, i)).collect();
            let (required, or_single) = (rule.required, rule.or_single);
            Some(Seen { required, or_single, dtypes, dims: rule.shape.clone(), fitting })
        };
        Self { seen: samples.iter().enumerate().map(see).collect(), candidates }
    }

    /// The form that the tensor has in every sample of a group: `None` where there is no such form,
    /// `Some(None)` where it is unknown to all. With `computed`, a size that no expression gives is
    /// [`Extent::Computed`].
    pub(super) fn form(&self, group: &[usize], computed: bool) -> Option<Option<TensorForm>> {
        let first = match &self.seen[group[0]] {
            None => return group.iter().all(|&i| self.seen[i].is_none()).then_some(None),
            Some(first) => first,
        };
        let mut fitting = first.fitting.clone();
        let mut same_dtypes = vec![true; first.dtypes.len()];
        let mut same_dims = vec![true; first.dims.len()];
        for &i in group {
            let seen = self.seen[i].as_ref()?;
            let same = seen.required == first.required
                && seen.or_single == first.or_single
                && seen.dims.len() == first.dims.len();
            if !same {
                return None;
            }
            fitting.iter_mut().zip(&seen.fitting).for_each(|(a, b)| a.and(b));
            for (same, (a, b)) in same_dtypes.iter_mut().zip(seen.dtypes.iter().zip(&first.dtypes))
            {
                *same &= a == b && !a.is_empty();
            }
            for (same, (a, b)) in same_dims.iter_mut().zip(seen.dims.iter().zip(&first.dims)) {
                *same &= a == b;
            }
        }
        let dtypes = first.dtypes[same_dtypes.iter().position(|&same| same)?].clone();
        let mut shape = Vec::new();
        for (at, set) in fitting.iter().enumerate() {
            shape.push(match (first.dims[at], same_dims[at], set.first()) {
                // A few configs may agree on a size by chance.
                (Dim::Is(size), true, _) if group.len() > 3 => Extent::Fixed(size as u64),
                (_, _, Some(found)) => self.candidates.extents[found].clone(),
                (Dim::Is(size), true, None) => Extent::Fixed(size as u64),
                _ if computed => Extent::Computed,
                _ => return None,
            });
        }
        let (required, or_single) = (first.required, first.or_single);
        Some(Some(TensorForm { required, dtypes, shape, or_single }))
    }
}
