//! What the routing of a case's tokens depends on besides their logits.

use super::logits::shared_logits;
use crate::moe::block::Block;
use crate::moe::families::{RoutingRule, Tokens};
use crate::num::tensor::{DType, Tensor};
use crate::ops::schema::{Dim, Inputs, TensorRule, rule};
use crate::{Error, Result};

/// The inputs of a rule that depends on its tokens.
pub(in crate::ops) fn tensors(routing: &RoutingRule) -> Vec<TensorRule> {
    let input = |name: &str, shape: &[Dim]| rule(format!("in.{name}"), &[DType::I32], shape);
    let mut all = Vec::new();
    if routing.token_table.is_some() {
        all.push(input("token_ids", &[Dim::Some]).required(true));
        let table = [Dim::Some, Dim::Is(routing.top_k)];
        all.push(input("token_table", &table).required(true));
    }
    if routing.token_groups > 1 {
        all.push(input("token_types", &[Dim::Some]).required(true));
    }
    if routing.shared_experts > 0 {
        let shape = [Dim::Some, Dim::Is(routing.shared_experts)];
        all.push(rule("in.shared_logits", &[DType::F32], &shape));
    }
    all
}

/// [`Tokens`] of a case.
pub(in crate::ops) struct TokenInputs {
    experts: Option<Vec<i32>>,
    groups: Option<Vec<usize>>,
    shared: Option<[Vec<f64>; 2]>,
}

impl TokenInputs {
    /// Reads them from the inputs. Logits of shared experts are computed from the hidden states if
    /// the case does not state them.
    pub(in crate::ops) fn read(
        inputs: &Inputs<'_>,
        routing: &RoutingRule,
        block: Option<&Block>,
    ) -> Result<Self> {
        let rows = inputs.get("router_logits").and_then(|t| t.shape().first().copied());
        let need = |name: &str| {
            let tensor = inputs.get(name);
            tensor.ok_or_else(|| Error::missing(format!("in.{name}"), "the routing"))
        };
        let by_token = |name: &str| -> Result<Vec<i32>> {
            let tensor = need(name)?;
            tensor.expect_shape(&[rows.unwrap_or_default()])?;
            Ok(tensor.elements::<i32>().into_owned())
        };
        let experts = match routing.token_table {
            Some(_) => Some(looked_up(&by_token("token_ids")?, need("token_table")?)?),
            None => None,
        };
        let groups = (routing.token_groups > 1).then(|| by_token("token_types")).transpose()?;
        let groups = groups.map(|all| {
            let one = |(t, &kind): (usize, &i32)| {
                let group = usize::try_from(kind).ok().filter(|&g| g < routing.token_groups);
                let expected = format!("0 to {}", routing.token_groups - 1);
                group.ok_or_else(|| Error::value("in.token_types", &[t], kind, expected))
            };
            all.iter().enumerate().map(one).collect::<Result<Vec<_>>>()
        });
        let shared = match (routing.shared_experts, inputs.get("shared_logits")) {
            (0, _) => None,
            (_, Some(stated)) => {
                let values: Vec<f64> =
                    stated.elements::<f32>().iter().map(|&x| f64::from(x)).collect();
                let errors = vec![0.0; values.len()];
                Some([values, errors])
            }
            (_, None) => {
                let near = match block {
                    Some(block) => shared_logits(inputs, block, routing)?,
                    None => return Err(Error::missing("in.shared_logits", "the routing")),
                };
                Some([
                    near.iter().map(|n| n.exact).collect(),
                    near.iter().map(|n| n.error).collect(),
                ])
            }
        };
        Ok(Self { experts, groups: groups.transpose()?, shared })
    }

    pub(in crate::ops) fn tokens(&self) -> Tokens<'_> {
        Tokens {
            experts: self.experts.as_deref(),
            groups: self.groups.as_deref(),
            shared_logits: self.shared.as_ref().map(|[values, _]| values.as_slice()),
            shared_errors: self.shared.as_ref().map(|[_, errors]| errors.as_slice()),
        }
    }

    /// The group of token `t`.
    pub(in crate::ops) fn group(&self, t: usize) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups[t])
    }
}

/// Rows of `table` at the ids of the tokens.
fn looked_up(ids: &[i32], table: &Tensor<'_>) -> Result<Vec<i32>> {
    let [rows, top_k] = table.dims2()?;
    let values = table.elements::<i32>();
    let mut experts = Vec::with_capacity(ids.len() * top_k);
    for (t, &id) in ids.iter().enumerate() {
        let Some(row) = usize::try_from(id).ok().filter(|&row| row < rows) else {
            let expected = format!("a row of in.token_table, below {rows}");
            return Err(Error::value("in.token_ids", &[t], id, expected));
        };
        experts.extend(&values[row * top_k..(row + 1) * top_k]);
    }
    Ok(experts)
}
