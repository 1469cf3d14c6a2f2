//! Names in the tokens of an item.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::Item;

/// The name that an item defines in its module.
pub(crate) fn item_name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(i) => &i.ident,
        Item::Enum(i) => &i.ident,
        Item::Fn(i) => &i.sig.ident,
        Item::Macro(i) => i.ident.as_ref()?,
        Item::Static(i) => &i.ident,
        Item::Struct(i) => &i.ident,
        Item::Trait(i) => &i.ident,
        Item::TraitAlias(i) => &i.ident,
        Item::Type(i) => &i.ident,
        Item::Union(i) => &i.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Paths of at least two segments in an item's tokens, including bodies and macro arguments.
pub(crate) fn paths(item: TokenStream) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    scan_paths(item, &mut paths);
    paths
}

fn scan_paths(stream: TokenStream, paths: &mut Vec<Vec<String>>) {
    let mut path: Vec<String> = Vec::new();
    // Colons since the last identifier: two continue a path.
    let mut colons = 0;
    let mut external = false;
    let mut end = |path: &mut Vec<String>, external: &mut bool| {
        let done = std::mem::take(path);
        if done.len() > 1 && !*external {
            paths.push(done);
        }
        *external = false;
    };
    let mut groups = Vec::new();
    for token in stream {
        match token {
            TokenTree::Ident(ident) => {
                if colons != 2 {
                    end(&mut path, &mut external);
                } else if path.is_empty() {
                    external = true;
                }
                path.push(ident.to_string());
                colons = 0;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            other => {
                end(&mut path, &mut external);
                colons = 0;
                if let TokenTree::Group(group) = other {
                    groups.push(group.stream());
                }
            }
        }
    }
    end(&mut path, &mut external);
    for group in groups {
        scan_paths(group, paths);
    }
}

/// Every identifier and literal of the items in [`plain`] form; doc comments are skipped.
pub(crate) fn words(items: impl Iterator<Item = TokenStream>) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    for item in items {
        scan_words(item, &mut words);
    }
    words
}

/// A word without regard to case, `_` and `-`: `MXFP8` and `mx_fp8` are the same.
pub(crate) fn plain(text: &str) -> String {
    text.replace(['_', '-'], "").to_lowercase()
}

fn scan_words(stream: TokenStream, words: &mut BTreeSet<String>) {
    let mut after_hash = false;
    for token in stream {
        let hash = matches!(&token, TokenTree::Punct(p) if p.as_char() == '#');
        match token {
            TokenTree::Ident(ident) => drop(words.insert(plain(&ident.to_string()))),
            TokenTree::Literal(literal) => drop(words.insert(plain(&literal.to_string()))),
            TokenTree::Group(group) => {
                let doc = after_hash
                    && group.delimiter() == Delimiter::Bracket
                    && group.stream().to_string().starts_with("doc ");
                if !doc {
                    scan_words(group.stream(), words);
                }
            }
            TokenTree::Punct(_) => {}
        }
        after_hash = hash;
    }
}
