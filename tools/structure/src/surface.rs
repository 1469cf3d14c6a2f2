//! The public surface of a crate: every item that is `pub`. Rust's lint `unreachable_pub` holds that other crates
//! can name each of them.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Fields, ImplItem, Item, TraitItem, UseTree, Visibility};

/// What another crate can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A function or method.
    Function,
    /// A struct, enum, union, trait or alias.
    Type,
    /// A constant or static.
    Constant,
    /// A field or variant.
    Part,
    /// A re-export.
    Use,
}

/// One public item.
#[derive(Debug, Clone)]
pub struct Public {
    /// What it is.
    pub kind: Kind,
    /// Its own name; of a re-export, the path.
    pub name: String,
    /// Its declaration without body, on one line, after the module: `weight: pub fn ty(&self) -> ScalarType`.
    pub declaration: String,
}

/// The public items of `item` in the module `path`.
pub(crate) fn of_item(path: &[String], item: &Item) -> Vec<Public> {
    let mut found = Found { module: path.join("::"), all: Vec::new() };
    match item {
        Item::Fn(i) if is_public(&i.vis) => found.function("", &i.sig),
        Item::Const(i) if is_public(&i.vis) => {
            found.item(Kind::Constant, ("const ", &i.ident), &format!(": {}", text(&*i.ty)));
        }
        Item::Static(i) if is_public(&i.vis) => {
            found.item(Kind::Constant, ("static ", &i.ident), &format!(": {}", text(&*i.ty)));
        }
        Item::Type(i) if is_public(&i.vis) => {
            let is = format!("{} = {}", text(&i.generics), text(&*i.ty));
            found.item(Kind::Type, ("type ", &i.ident), &is);
        }
        Item::Struct(i) if is_public(&i.vis) => {
            found.item(Kind::Type, ("struct ", &i.ident), &text(&i.generics));
            found.fields(&i.ident.to_string(), &i.fields);
        }
        Item::Enum(i) if is_public(&i.vis) => {
            found.item(Kind::Type, ("enum ", &i.ident), &text(&i.generics));
            for variant in &i.variants {
                let owner = format!("{}::", i.ident);
                let name = variant.ident.to_string();
                found.named(Kind::Part, &owner, ("", &name), &text(&variant.fields));
            }
        }
        Item::Trait(i) if is_public(&i.vis) => {
            found.item(Kind::Type, ("trait ", &i.ident), &text(&i.generics));
            for member in &i.items {
                if let TraitItem::Fn(member) = member {
                    found.function(&format!("{}::", i.ident), &member.sig);
                }
            }
        }
        Item::Impl(i) if i.trait_.is_none() => {
            for member in &i.items {
                let owner = format!("{}::", text(&*i.self_ty));
                match member {
                    ImplItem::Fn(m) if is_public(&m.vis) => found.function(&owner, &m.sig),
                    ImplItem::Const(m) if is_public(&m.vis) => {
                        let (name, ty) = (m.ident.to_string(), format!(": {}", text(&m.ty)));
                        found.named(Kind::Constant, &owner, ("const ", &name), &ty);
                    }
                    _ => {}
                }
            }
        }
        Item::Use(i) if is_public(&i.vis) => {
            let mut names = Vec::new();
            re_exports(&i.tree, "", &mut names);
            for name in names {
                found.named(Kind::Use, "", ("use ", &name), "");
            }
        }
        _ => {}
    }
    found.all
}

struct Found {
    module: String,
    all: Vec<Public>,
}

impl Found {
    fn named(&mut self, kind: Kind, owner: &str, (word, name): (&str, &str), rest: &str) {
        let what = format!("{word}{name}{rest}");
        let module = &self.module;
        let declaration = match module.is_empty() {
            true => format!("{owner}{what}"),
            false => format!("{module}: {owner}{what}"),
        };
        self.all.push(Public { kind, name: name.to_owned(), declaration });
    }

    fn item(&mut self, kind: Kind, (word, name): (&str, &syn::Ident), rest: &str) {
        self.named(kind, "", (word, &name.to_string()), rest);
    }

    fn function(&mut self, owner: &str, signature: &syn::Signature) {
        let name = signature.ident.to_string();
        let whole = text(signature);
        // What precedes the name: `fn `, `unsafe fn `.
        let (word, rest) = whole.split_once(&name).unwrap_or(("fn ", ""));
        self.named(Kind::Function, owner, (word, &name), rest);
    }

    fn fields(&mut self, owner: &str, fields: &Fields) {
        for (at, field) in fields.iter().enumerate().filter(|(_, field)| is_public(&field.vis)) {
            let name = field.ident.as_ref().map_or_else(|| at.to_string(), ToString::to_string);
            let ty = format!(": {}", text(&field.ty));
            self.named(Kind::Part, &format!("{owner}::"), ("", &name), &ty);
        }
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// `tokens` on one line, spaced as rustfmt does.
fn text(tokens: &impl ToTokens) -> String {
    let mut text = String::new();
    write(tokens.to_token_stream(), &mut text);
    text.replace(",)", ")").replace(", }", " }").replace(", >", ">")
}

fn write(tokens: TokenStream, text: &mut String) {
    let is_word = |text: &str| {
        text.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '>' || c == ')')
    };
    let mut tokens = tokens.into_iter();
    while let Some(token) = tokens.next() {
        match token {
            // An attribute; comments are some.
            TokenTree::Punct(punct) if punct.as_char() == '#' => drop(tokens.next()),
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => (" { ", " }"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                text.push_str(open);
                write(group.stream(), text);
                text.truncate(text.trim_end().len());
                text.push_str(close);
            }
            TokenTree::Ident(_) | TokenTree::Literal(_) => {
                if is_word(text) {
                    text.push(' ');
                }
                text.push_str(&token.to_string());
            }
            TokenTree::Punct(punct) => match punct.as_char() {
                ',' | ';' => {
                    text.push(punct.as_char());
                    text.push(' ');
                }
                ':' if punct.spacing() == Spacing::Joint || text.ends_with(':') => text.push(':'),
                ':' => text.push_str(": "),
                '-' => text.push_str(" -"),
                '>' if text.ends_with('-') => text.push_str("> "),
                '=' | '+' => text.push_str(&format!(" {} ", punct.as_char())),
                '&' if is_word(text) => text.push_str(" &"),
                other => text.push(other),
            },
        }
    }
}

fn re_exports(tree: &UseTree, prefix: &str, names: &mut Vec<String>) {
    match tree {
        UseTree::Path(path) => {
            re_exports(&path.tree, &format!("{prefix}{}::", path.ident), names);
        }
        UseTree::Name(name) => names.push(format!("{prefix}{}", name.ident)),
        UseTree::Rename(name) => names.push(format!("{prefix}{} as {}", name.ident, name.rename)),
        UseTree::Glob(_) => names.push(format!("{prefix}*")),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| re_exports(tree, prefix, names));
        }
    }
}
