//! What a block's routing takes from its tokens besides their hidden states: ids that a table of the
//! files maps to experts, and types that select a group of experts.

use std::path::Path;

use marlinspike::container::Container;
use marlinspike::moe::block::Near;
use marlinspike::moe::families::Tokens;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::{Error, Result};

use crate::map::MappedFile;
use crate::model::routing::full_name;
use crate::model::{Model, ModelError};
use crate::run::error::RunError;
use crate::run::input;
use crate::run::options::Source;

/// The experts of each token id.
#[derive(Debug)]
pub(super) struct TokenTable {
    /// The tensor's name in the files.
    name: String,
    /// `[rows, top_k]`.
    experts: Vec<i32>,
    top_k: usize,
}

/// What a layer's tokens state.
#[derive(Debug, Default)]
pub(super) struct TokenInputs {
    /// `[M, top_k]`: rows of the table.
    experts: Option<Vec<i32>>,
    /// `[M]`: groups of experts.
    pub(super) groups: Option<Vec<usize>>,
    /// `[M, shared experts]` each: logits, and their largest errors.
    shared: Option<[Vec<f64>; 2]>,
}

/// What a layer needs of its tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenNeeds<'t> {
    /// M.
    pub(super) tokens: usize,
    /// The table of token ids, if it chooses the experts.
    pub(super) table: Option<&'t TokenTable>,
    /// Groups of experts.
    pub(super) groups: usize,
}

impl TokenTable {
    /// The table `name` of the experts `module`, relative to their parent.
    ///
    /// # Errors
    /// [`ModelError::Module`] naming a tensor that is missing, is not `[rows, top_k]` or holds
    /// numbers that are no ids.
    pub(super) fn read(
        model: &Model<'_>,
        module: &str,
        name: &str,
        top_k: usize,
    ) -> std::result::Result<Self, ModelError> {
        let wrong = |e: Error| ModelError::module(module, e);
        let full = full_name(module, name).unwrap_or_else(|| name.to_owned());
        if model.entry(&full).is_none() {
            return Err(wrong(Error::missing(full, "the layer's routing")));
        }
        let tensor = model.tensor(&full)?;
        let numbers = integers(&tensor).map_err(wrong)?;
        if !matches!(*tensor.shape(), [rows, columns] if rows > 0 && columns == top_k) {
            let expected = format!("[rows, {top_k}], a row for each token id");
            return Err(wrong(Error::shape(full, tensor.shape(), expected)));
        }
        let one = |(i, &id): (usize, &i64)| {
            let at = [i / top_k, i % top_k];
            i32::try_from(id).map_err(|_| Error::value(&full, &at, id, "an expert's id"))
        };
        let experts = numbers.iter().enumerate().map(one).collect::<Result<_>>().map_err(wrong)?;
        Ok(Self { name: full, experts, top_k })
    }

    /// Rows, one for each token id.
    fn rows(&self) -> usize {
        self.experts.len() / self.top_k
    }

    /// The experts of a token id.
    fn row(&self, id: usize) -> &[i32] {
        &self.experts[id * self.top_k..(id + 1) * self.top_k]
    }
}

impl TokenInputs {
    /// What `needs` asks for, from the input file or drawn from the seed.
    ///
    /// # Errors
    /// [`ModelError::Format`] with the path and the tensor that is missing or does not fit.
    pub(super) fn new(
        source: &Source,
        needs: TokenNeeds<'_>,
    ) -> std::result::Result<Self, RunError> {
        if needs.table.is_none() && needs.groups < 2 {
            return Ok(Self::default());
        }
        match source {
            Source::File(path) => Self::read(path, needs),
            Source::Seeded { seed, .. } => Ok(Self::seeded(*seed, needs)),
        }
    }

    /// Ids and types from a stream of their own, which depends on the seed alone.
    fn seeded(seed: u64, needs: TokenNeeds<'_>) -> Self {
        let mut rng = Rng::new(!seed);
        let mut below = |n: usize| (rng.next_u32() as usize) % n;
        let mut draw = |n: usize| -> Vec<usize> { (0..needs.tokens).map(|_| below(n)).collect() };
        let experts = needs.table.map(|table| {
            let ids = draw(table.rows());
            ids.into_iter().flat_map(|id| table.row(id).to_vec()).collect()
        });
        let groups = (needs.groups > 1).then(|| draw(needs.groups));
        Self { experts, groups, shared: None }
    }

    fn read(path: &Path, needs: TokenNeeds<'_>) -> std::result::Result<Self, RunError> {
        let map = MappedFile::open(path)?;
        let read = Container::parse(&map).map_err(Error::from).and_then(|f| Self::of(&f, needs));
        read.map_err(|e| ModelError::Format { path: path.to_owned(), source: Box::new(e) }.into())
    }

    fn of(file: &Container<'_>, needs: TokenNeeds<'_>) -> Result<Self> {
        let mut made = Self::default();
        if let Some(table) = needs.table {
            let by = format!("a layer whose table `{}` chooses the experts", table.name);
            let rule = format!("a row of `{}`, below {}", table.name, table.rows());
            let ids = numbers_below(file, "token_ids", needs.tokens, table.rows(), [&by, &rule])?;
            made.experts = Some(ids.into_iter().flat_map(|id| table.row(id).to_vec()).collect());
        }
        if needs.groups > 1 {
            let by = "a layer with a group of experts for each type of token";
            let rule = format!("a type below {}", needs.groups);
            let types = numbers_below(file, "token_types", needs.tokens, needs.groups, [by, &rule]);
            made.groups = Some(types?);
        }
        Ok(made)
    }

    /// With logits of the shared experts.
    pub(super) fn with_shared(self, logits: &[Near]) -> Self {
        let exact = logits.iter().map(|n| n.exact).collect();
        let errors = logits.iter().map(|n| n.error).collect();
        Self { shared: Some([exact, errors]), ..self }
    }

    /// As the rule takes them.
    pub(super) fn tokens(&self) -> Tokens<'_> {
        Tokens {
            experts: self.experts.as_deref(),
            groups: self.groups.as_deref(),
            shared_logits: self.shared.as_ref().map(|[exact, _]| exact.as_slice()),
            shared_errors: self.shared.as_ref().map(|[_, errors]| errors.as_slice()),
        }
    }
}

/// `[tokens]` numbers below `limit`; `by` and `rule` are the texts of the errors.
fn numbers_below(
    file: &Container<'_>,
    name: &str,
    tokens: usize,
    limit: usize,
    [by, rule]: [&str; 2],
) -> Result<Vec<usize>> {
    let tensor = input::find(file, name)?.ok_or_else(|| Error::missing(name, by))?;
    tensor.expect_shape(&[tokens])?;
    let one = |(t, x): (usize, i64)| {
        let known = usize::try_from(x).ok().filter(|&x| x < limit);
        known.ok_or_else(|| Error::value(name, &[t], x, rule))
    };
    integers(&tensor)?.into_iter().enumerate().map(one).collect()
}

/// Numbers of a tensor of 32- or 64-bit integers.
fn integers(tensor: &Tensor<'_>) -> Result<Vec<i64>> {
    tensor.expect_dtype(&[DType::I32, DType::I64])?;
    Ok(match tensor.dtype() {
        DType::I32 => tensor.elements::<i32>().iter().map(|&x| x.into()).collect(),
        _ => {
            let (each, _) = tensor.bytes().as_chunks::<8>();
            each.iter().map(|b| i64::from_le_bytes(*b)).collect()
        }
    })
}
