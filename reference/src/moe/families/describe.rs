//! Describes a row for `docs/src/reference/models.md`.

use std::fmt::Display;

use super::families;
use super::key::Key;
use super::row::{BiasRule, Family, RenormRule, ScoreRule, Support};
use super::rule::{ChooseBy, GroupScore, Masked};

/// Keys and default of a number.
fn key<T: Copy>(key: &Key<T>, show: impl Fn(T) -> String) -> String {
    let names: Vec<String> = key.keys.iter().map(|k| format!("`{k}`")).collect();
    let default = key.default.map_or("required".to_owned(), show);
    format!("{} ({default})", names.join(" or "))
}

fn number<T: Display>(value: T) -> String {
    value.to_string()
}

impl Family {
    fn choice(&self) -> String {
        let score = match &self.score {
            ScoreRule::Fixed(score) => score.name().to_owned(),
            ScoreRule::Key(k) => key(k, |s| s.name().to_owned()),
        };
        let mut parts = vec![score];
        if self.choose_by == ChooseBy::Logit {
            parts.push("chosen by logit".to_owned());
        }
        match self.bias {
            BiasRule::None => {}
            BiasRule::Required(name) => parts.push(format!("bias `{name}`")),
            BiasRule::IfKey(k, default, name) => {
                parts.push(format!("bias `{name}` if `{k}` ({default})"));
            }
        }
        if let Some(g) = self.groups {
            let of = |n: Option<usize>| n.map_or("required".to_owned(), number);
            let by = if g.score == GroupScore::Max { "their best" } else { "their two best" };
            let zero = if g.masked == Masked::Zero { ", others 0" } else { "" };
            let sizes =
                format!("`n_group` ({}), `topk_group` ({})", of(g.n_group), of(g.topk_group));
            parts.push(format!("groups by {by}{zero}: {sizes}"));
        }
        parts.join("; ")
    }

    fn weights(&self) -> String {
        let mut parts = match &self.renormalize {
            RenormRule::Never => vec!["not renormalized".to_owned()],
            RenormRule::Always(_) => vec!["renormalized".to_owned()],
            RenormRule::Key(k, _) => vec![format!("renormalized if {}", key(k, number))],
            RenormRule::Floor(k) => {
                vec![format!("divided by the sum, at least {}", key(k, number))]
            }
            RenormRule::Norm(k) => vec![format!("divided by the p-norm, p {}", key(k, number))],
        };
        if let Some(scale) = &self.scale {
            parts.push(format!("times {}", key(scale, number)));
        }
        if let Some(name) = self.expert_scale {
            parts.push(format!("times `{name}`"));
        }
        if self.weight_on_input {
            parts.push("on the expert's input".to_owned());
        }
        parts.join("; ")
    }
}

/// The table of families in Markdown, one row for each.
pub fn markdown() -> String {
    let mut text = String::from(
        "| `model_type` | score and choice | weights | experts per token | status |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    for family in families() {
        let names: Vec<String> = family.model_types.iter().map(|n| format!("`{n}`")).collect();
        let names = names.join(", ");
        let row = match family.support {
            Support::Refused(reason) => format!("| {names} | | | | refused: {reason} |\n"),
            support => {
                let status = match support {
                    Support::RoutingOnly(reason) => {
                        format!("right, as a block with stages: {reason}")
                    }
                    _ => "right".to_owned(),
                };
                let top_k = key(&family.top_k, number);
                format!(
                    "| {names} | {} | {} | {top_k} | {status} |\n",
                    family.choice(),
                    family.weights()
                )
            }
        };
        text.push_str(&row);
    }
    text
}
