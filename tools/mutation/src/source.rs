//! The mutants of a source file, and the file with all of them as branches.

use std::ops::Range;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Arm, BinOp, Block, Expr, Item, Pat, Signature, Stmt};

use crate::values;

/// One change of one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutant {
    /// Number in the build; mutants of one place have consecutive numbers.
    pub id: u32,
    /// Number of the place's first mutant.
    pub place: u32,
    /// The file, below the root of the crate.
    pub file: String,
    /// Line of the place.
    pub line: usize,
    /// The function around it.
    pub function: String,
    /// What is replaced with what.
    pub change: String,
}

/// How the branches of a place are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Another expression in place of this one.
    Expression,
    /// A return in front of a body; the range is empty.
    Return,
    /// A condition on a match arm; the range is empty, behind its pattern.
    Arm,
}

/// A place with its changes, as text.
#[derive(Debug, Clone)]
struct Place {
    range: Range<usize>,
    form: Form,
    first: u32,
    changes: Vec<String>,
}

/// The mutants of a file.
#[derive(Debug)]
pub struct Source {
    text: String,
    places: Vec<Place>,
    /// Its mutants, in the order of their numbers.
    pub mutants: Vec<Mutant>,
    /// Mutants in constant functions and items, where a branch on the environment is impossible.
    pub constant: usize,
}

/// A file with branches, and where they are.
#[derive(Debug)]
pub struct Branched {
    /// The text.
    pub text: String,
    /// Range and number of each change.
    pub changes: Vec<(Range<usize>, u32)>,
    /// Range and numbers of each place.
    pub places: Vec<(Range<usize>, Range<u32>)>,
}

impl Source {
    /// The mutants of `text`, numbered from `first`.
    ///
    /// # Errors
    /// Where the file is not Rust.
    pub fn parse(file: &str, text: &str, first: u32) -> Result<Self> {
        let parsed =
            syn::parse_file(text).with_context(|| format!("{file}: expected Rust source"))?;
        let source = Self::plain(text);
        let mut finder =
            Finder { file, source, next: first, functions: Vec::new(), constant: false };
        finder.visit_file(&parsed);
        Ok(finder.source)
    }

    /// A file without mutants.
    pub fn plain(text: &str) -> Self {
        Self { text: text.to_owned(), places: Vec::new(), mutants: Vec::new(), constant: 0 }
    }

    /// The file with a branch for each mutant that `keep` accepts.
    pub fn branched(&self, keep: &dyn Fn(u32) -> bool) -> Branched {
        let mut places: Vec<&Place> =
            self.places.iter().filter(|place| place.kept(keep).next().is_some()).collect();
        // Outer places first; the sort is stable, so of equal ranges the one found first is the outer one.
        places.sort_by_key(|place| (place.range.start, std::cmp::Reverse(place.range.end)));
        let mut made = Branched { text: String::new(), changes: Vec::new(), places: Vec::new() };
        self.write(0..self.text.len(), &mut places.into_iter().peekable(), keep, &mut made);
        made
    }

    /// Writes a range of the source; `places` starts with the first one in it.
    fn write<'a>(
        &self,
        range: Range<usize>,
        places: &mut std::iter::Peekable<impl Iterator<Item = &'a Place> + Clone>,
        keep: &dyn Fn(u32) -> bool,
        made: &mut Branched,
    ) {
        let mut at = range.start;
        while let Some(place) = places.next_if(|place| place.range.end <= range.end) {
            made.text += &self.text[at..place.range.start];
            at = place.range.end;
            let start = made.text.len();
            let numbers = place.first..place.first + place.changes.len() as u32;
            let pick = format!("crate::mutation::pick({})", place.first);
            // Every other number, also that of a mutant without a branch, is the original.
            let others = numbers
                .clone()
                .filter(|&id| !keep(id))
                .map(|id| format!("{} | ", id - place.first));
            let others = format!("{}{}..", others.collect::<String>(), place.changes.len());
            match place.form {
                Form::Arm => {
                    made.text += &format!(" if {pick} != 0");
                    made.changes.push((start..made.text.len(), place.first));
                }
                Form::Expression | Form::Return => {
                    let is_return = place.form == Form::Return;
                    made.text += &format!(
                        "{}match {pick} {{ {others} => ",
                        if is_return { " " } else { "(" }
                    );
                    if is_return {
                        made.text += "{}";
                    } else {
                        self.write(place.range.clone(), places, keep, made);
                    }
                    for (id, change) in place.kept(keep) {
                        made.text += &format!(", {} => ", id - place.first);
                        let from = made.text.len();
                        made.text += change;
                        made.changes.push((from..made.text.len(), id));
                    }
                    made.text += if is_return { " }" } else { " })" };
                }
            }
            made.places.push((start..made.text.len(), numbers));
        }
        made.text += &self.text[at..range.end];
    }
}

impl Place {
    fn kept(&self, keep: &dyn Fn(u32) -> bool) -> impl Iterator<Item = (u32, &str)> {
        (self.first..).zip(self.changes.iter().map(String::as_str)).filter(|(id, _)| keep(*id))
    }
}

struct Finder<'a> {
    file: &'a str,
    source: Source,
    next: u32,
    functions: Vec<String>,
    constant: bool,
}

impl Finder<'_> {
    fn text(&self, of: &impl Spanned) -> &str {
        &self.source.text[of.span().byte_range()]
    }

    /// Adds a place; `changes` are (description, text).
    fn add(&mut self, range: Range<usize>, form: Form, changes: Vec<(String, String)>) {
        if self.constant {
            self.source.constant += changes.len();
            return;
        }
        if changes.is_empty() {
            return;
        }
        let line = self.source.text[..range.start].matches('\n').count() + 1;
        let place = self.next;
        for (change, _) in &changes {
            let function = self.functions.join("::");
            let change = change.split_whitespace().collect::<Vec<_>>().join(" ");
            let mutant =
                Mutant { id: self.next, place, file: self.file.to_owned(), line, function, change };
            self.source.mutants.push(mutant);
            self.next += 1;
        }
        let changes = changes.into_iter().map(|(_, text)| text).collect();
        self.source.places.push(Place { range, form, first: place, changes });
    }

    fn body(&mut self, signature: &Signature, block: &Block) {
        let constant = self.constant;
        self.constant |= signature.constness.is_some();
        self.functions.push(signature.ident.to_string());
        if signature.unsafety.is_none() && !block.stmts.is_empty() {
            let at = block.span().byte_range().start + 1;
            let changes = values::of_return(&signature.output).into_iter();
            let changes = changes
                .map(|value| (format!("return {value}"), format!("return {value}")))
                .collect();
            self.add(at..at, Form::Return, changes);
        }
        visit::visit_block(self, block);
        self.functions.pop();
        self.constant = constant;
    }

    fn binary(&mut self, node: &syn::ExprBinary) {
        let operator = self.text(&node.op).to_owned();
        let others: &[&str] = match node.op {
            // A condition with `let` is no expression.
            BinOp::And(_) | BinOp::Or(_) if has_let(&node.left) || has_let(&node.right) => &[],
            BinOp::Add(_) => &["-", "*"],
            BinOp::Sub(_) => &["+", "/"],
            BinOp::Mul(_) => &["+", "/"],
            BinOp::Div(_) => &["%", "*"],
            BinOp::Rem(_) => &["/", "+"],
            BinOp::And(_) => &["||"],
            BinOp::Or(_) => &["&&"],
            BinOp::BitAnd(_) => &["|", "^"],
            BinOp::BitOr(_) => &["&", "^"],
            BinOp::BitXor(_) => &["|", "&"],
            BinOp::Shl(_) => &[">>"],
            BinOp::Shr(_) => &["<<"],
            BinOp::Eq(_) => &["!="],
            BinOp::Ne(_) => &["=="],
            BinOp::Lt(_) => &["==", ">", "<="],
            BinOp::Gt(_) => &["==", "<", ">="],
            BinOp::Le(_) => &[">"],
            BinOp::Ge(_) => &["<"],
            BinOp::AddAssign(_) => &["-=", "*="],
            BinOp::SubAssign(_) => &["+=", "/="],
            BinOp::MulAssign(_) => &["+=", "/="],
            BinOp::DivAssign(_) => &["%=", "*="],
            BinOp::RemAssign(_) => &["/=", "+="],
            BinOp::BitAndAssign(_) => &["|=", "^="],
            BinOp::BitOrAssign(_) => &["&=", "^="],
            BinOp::BitXorAssign(_) => &["|=", "&="],
            BinOp::ShlAssign(_) => &[">>="],
            BinOp::ShrAssign(_) => &["<<="],
            _ => &[],
        };
        let (left, right) = (self.text(&node.left), self.text(&node.right));
        let changes = others.iter().map(|other| {
            (format!("replace {operator} with {other}"), format!("({left}) {other} ({right})"))
        });
        let changes = changes.collect();
        self.add(node.span().byte_range(), Form::Expression, changes);
    }
}

fn has_let(of: &Expr) -> bool {
    match of {
        Expr::Let(_) => true,
        Expr::Binary(node) => has_let(&node.left) || has_let(&node.right),
        _ => false,
    }
}

fn tests_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg")
                && attribute.parse_args::<syn::Path>().is_ok_and(|of| of.is_ident("test")))
    })
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, constant) = match item {
            Item::Mod(item) => (&item.attrs, false),
            Item::Fn(item) => (&item.attrs, false),
            Item::Impl(item) => (&item.attrs, false),
            Item::Trait(item) => (&item.attrs, false),
            Item::Const(item) => (&item.attrs, true),
            Item::Static(item) => (&item.attrs, true),
            _ => return,
        };
        if tests_only(attributes) {
            return;
        }
        let before = self.constant;
        self.constant |= constant;
        let name = match item {
            Item::Impl(item) => Some(self.text(&item.self_ty).to_owned()),
            Item::Trait(item) => Some(item.ident.to_string()),
            _ => None,
        };
        self.functions.extend(name.clone());
        visit::visit_item(self, item);
        if name.is_some() {
            self.functions.pop();
        }
        self.constant = before;
    }

    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.body(&node.sig, &node.block);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        if !tests_only(&node.attrs) {
            self.body(&node.sig, &node.block);
        }
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.body(&node.sig, block);
        }
    }

    fn visit_impl_item_const(&mut self, node: &'ast syn::ImplItemConst) {
        let before = std::mem::replace(&mut self.constant, true);
        visit::visit_impl_item_const(self, node);
        self.constant = before;
    }

    fn visit_expr(&mut self, node: &'ast Expr) {
        match node {
            Expr::Const(_) => return,
            // The length is a constant.
            Expr::Repeat(repeat) => return self.visit_expr(&repeat.expr),
            Expr::Binary(binary) => self.binary(binary),
            Expr::Unary(unary) if matches!(unary.op, syn::UnOp::Not(_) | syn::UnOp::Neg(_)) => {
                let change = (
                    format!("delete {}", self.text(&unary.op)),
                    format!("({})", self.text(&unary.expr)),
                );
                self.add(node.span().byte_range(), Form::Expression, vec![change]);
            }
            Expr::Struct(literal) if literal.rest.is_some() && !literal.fields.is_empty() => {
                self.fields(literal)
            }
            Expr::Match(of) => self.arms(&of.arms),
            _ => {}
        }
        visit::visit_expr(self, node);
    }

    fn visit_stmt(&mut self, node: &'ast Stmt) {
        if !matches!(node, Stmt::Macro(_)) {
            visit::visit_stmt(self, node);
        }
    }

    fn visit_macro(&mut self, _: &'ast syn::Macro) {}

    fn visit_type(&mut self, _: &'ast syn::Type) {}

    fn visit_pat(&mut self, _: &'ast Pat) {}

    fn visit_path_arguments(&mut self, _: &'ast syn::PathArguments) {}

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

impl Finder<'_> {
    fn fields(&mut self, literal: &syn::ExprStruct) {
        let rest = literal.rest.as_ref().map(|rest| self.text(rest).to_owned()).unwrap_or_default();
        let name = self.text(&literal.path).to_owned();
        let fields: Vec<&str> = literal.fields.iter().map(|field| self.text(field)).collect();
        let changes = (0..fields.len()).map(|left_out| {
            let kept = fields.iter().enumerate().filter(|&(at, _)| at != left_out);
            let kept: String = kept.map(|(_, field)| format!("{field}, ")).collect();
            (format!("delete field {}", fields[left_out]), format!("{name} {{ {kept}..{rest} }}"))
        });
        let changes = changes.collect();
        self.add(literal.span().byte_range(), Form::Expression, changes);
    }

    fn arms(&mut self, arms: &[Arm]) {
        let any = |arm: &Arm| arm.guard.is_none() && matches!(&arm.pat, Pat::Wild(_));
        for arm in arms {
            if let Some((_, guard)) = &arm.guard {
                let values = ["true", "false"]
                    .map(|value| (format!("replace guard with {value}"), value.to_owned()));
                if !has_let(guard) {
                    self.add(guard.span().byte_range(), Form::Expression, values.to_vec());
                }
            } else if !any(arm) && arms.iter().any(any) {
                let at = arm.pat.span().byte_range().end;
                let change = (format!("delete arm {}", self.text(&arm.pat)), String::new());
                self.add(at..at, Form::Arm, vec![change]);
            }
        }
    }
}
