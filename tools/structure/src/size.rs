//! Lines of files and functions, parameters of functions.

use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Block, ImplItemFn, Item, ItemFn, ItemMod, Signature, TraitItemFn};

use crate::source;

/// A function of the product.
pub struct Function {
    /// `file:name`, the name of a method with its type: `Type::name`.
    pub name: String,
    /// Lines from its signature to its closing brace.
    pub lines: usize,
    /// Parameters, including the receiver.
    pub parameters: usize,
}

/// Every function of the items of `file`.
pub(crate) fn functions<'i>(file: &str, items: impl Iterator<Item = &'i Item>) -> Vec<Function> {
    let mut functions = Functions { file, owner: None, found: Vec::new() };
    for item in items {
        functions.visit_item(item);
    }
    functions.found
}

struct Functions<'f> {
    file: &'f str,
    owner: Option<String>,
    found: Vec<Function>,
}

impl Functions<'_> {
    fn add(&mut self, signature: &Signature, block: Option<&Block>) {
        let owner = self.owner.as_ref().map_or_else(String::new, |owner| format!("{owner}::"));
        let start = signature.span().start().line;
        let end = block.map_or(signature.span().end().line, |b| b.span().end().line);
        self.found.push(Function {
            name: format!("{}:{owner}{}", self.file, signature.ident),
            lines: end + 1 - start,
            parameters: signature.inputs.len(),
        });
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !item.attrs.iter().any(source::is_test) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.add(&item.sig, Some(&item.block));
        visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        let outer = std::mem::replace(&mut self.owner, owner);
        visit::visit_item_impl(self, item);
        self.owner = outer;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !item.attrs.iter().any(source::is_test) {
            self.add(&item.sig, Some(&item.block));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.add(&item.sig, item.default.as_ref());
        visit::visit_trait_item_fn(self, item);
    }
}
