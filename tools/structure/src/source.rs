//! The crates of the workspace and their module trees.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::TokenStream;
use quote::ToTokens as _;
use syn::{Attribute, Item, UseTree};

use crate::size::{self, Function};
use crate::surface::{self, Public};
use crate::tokens;

/// A crate of the workspace.
pub struct Crate {
    /// Folder below the workspace root, for example `reference`.
    pub folder: String,
    /// Folders of the workspace's crates that its `[dependencies]` name.
    pub dependencies: Vec<String>,
    /// The modules; the first is the root, and parents precede their children.
    pub modules: Vec<Module>,
}

/// One module: a file, or an inline `mod` in one.
pub struct Module {
    /// Names from the root down; empty for the root.
    pub path: Vec<String>,
    /// Index of the parent.
    pub parent: Option<usize>,
    /// The file, below the workspace root.
    pub file: String,
    /// Modules declared here.
    pub children: BTreeMap<String, usize>,
    /// Names that `use` brings into scope, with the path of each.
    pub aliases: BTreeMap<String, Vec<String>>,
    /// Paths whose contents `use path::*` brings into scope.
    pub globs: Vec<Vec<String>>,
    /// Names of the items defined here.
    pub items: Vec<String>,
    /// Paths of at least two segments in the code of the items.
    pub paths: Vec<Vec<String>>,
    /// What is `pub` here.
    pub public: Vec<Public>,
}

/// A Rust file of the product. Items that only tests compile do not count.
pub struct File {
    /// Path below the workspace root.
    pub path: String,
    /// Lines.
    pub lines: usize,
    /// Its functions.
    pub functions: Vec<Function>,
    /// Lines that match on variants of a storage scheme.
    pub scheme_matches: usize,
    /// Its identifiers and literals, in lower case and without `_`.
    pub words: BTreeSet<String>,
}

/// The product code of the workspace.
pub struct Workspace {
    /// Its crates, in the order of `members`.
    pub crates: Vec<Crate>,
    /// Its files, in the order they were read.
    pub files: Vec<File>,
}

impl Workspace {
    /// Reads the crates that `root/Cargo.toml` lists as members, except `skipped`.
    ///
    /// # Errors
    /// When a manifest or source cannot be read or parsed.
    pub fn read(root: &Path, skipped: &[&str]) -> Result<Self> {
        let manifest = read(&root.join("Cargo.toml"))?;
        let members = quoted(section(&manifest, "members = [", "]")?);
        let names = packages(root, &members)?;
        let mut workspace = Self { crates: Vec::new(), files: Vec::new() };
        for folder in members.iter().filter(|m| !skipped.contains(&m.as_str())) {
            let modules = workspace.modules(root, folder)?;
            let dependencies = dependencies(root, folder, &names)?;
            workspace.crates.push(Crate { folder: folder.clone(), dependencies, modules });
        }
        Ok(workspace)
    }

    /// The crate in `folder`.
    pub fn crate_at(&self, folder: &str) -> Option<&Crate> {
        self.crates.iter().find(|c| c.folder == folder)
    }

    fn modules(&mut self, root: &Path, folder: &str) -> Result<Vec<Module>> {
        let mut modules = Vec::new();
        for entry in ["lib.rs", "main.rs"] {
            let file = root.join(folder).join("src").join(entry);
            if file.is_file() {
                let mut reader = Reader { root, files: &mut self.files, modules: &mut modules };
                reader.file(&file, None, Vec::new())?;
            }
        }
        if modules.is_empty() {
            bail!("{folder}: found neither src/lib.rs nor src/main.rs");
        }
        Ok(modules)
    }
}

struct Reader<'a> {
    root: &'a Path,
    files: &'a mut Vec<File>,
    modules: &'a mut Vec<Module>,
}

impl Reader<'_> {
    fn file(&mut self, file: &Path, parent: Option<usize>, path: Vec<String>) -> Result<usize> {
        let text = read(file)?;
        let syntax = syn::parse_file(&text).with_context(|| file.display().to_string())?;
        let shown = file.strip_prefix(self.root).unwrap_or(file).display().to_string();
        let (kept, tests): (Vec<Item>, Vec<Item>) =
            syntax.items.into_iter().partition(|item| !attributes(item).iter().any(is_test));
        let test_lines: usize = tests.iter().map(lines_of).sum();
        let lines = text.lines().count() - test_lines;
        let kept = with_tokens(kept);
        let index = self.module(&kept, file, &shown, parent, path)?;
        let functions = size::functions(&shown, kept.iter().map(|(item, _)| item));
        let words = tokens::words(kept.into_iter().map(|(_, tokens)| tokens));
        let scheme_matches = text.lines().filter(|line| line.contains("Scheme::")).count();
        self.files.push(File { path: shown, lines, functions, scheme_matches, words });
        Ok(index)
    }

    fn module(
        &mut self,
        items: &[(Item, TokenStream)],
        file: &Path,
        shown: &str,
        parent: Option<usize>,
        path: Vec<String>,
    ) -> Result<usize> {
        let index = self.modules.len();
        self.modules.push(Module {
            path: path.clone(),
            parent,
            file: shown.to_owned(),
            children: BTreeMap::new(),
            aliases: BTreeMap::new(),
            globs: Vec::new(),
            items: Vec::new(),
            paths: Vec::new(),
            public: Vec::new(),
        });
        for (item, tokens) in items.iter().filter(|(item, _)| !attributes(item).iter().any(is_test))
        {
            self.modules[index].public.extend(surface::of_item(&path, item));
            match item {
                Item::Use(used) if used.leading_colon.is_none() => {
                    flatten(&used.tree, &mut Vec::new(), &mut self.modules[index]);
                }
                Item::Mod(child) => {
                    let name = child.ident.to_string();
                    let mut below = path.clone();
                    below.push(name.clone());
                    let at = match &child.content {
                        Some((_, items)) => {
                            let items = with_tokens(items.clone());
                            self.module(&items, file, shown, Some(index), below)?
                        }
                        None => {
                            let file = child_file(file, &name, &child.attrs, &path)?;
                            self.file(&file, Some(index), below)?
                        }
                    };
                    self.modules[index].children.entry(name).or_insert(at);
                }
                other => {
                    let module = &mut self.modules[index];
                    module.items.extend(tokens::item_name(other));
                    module.paths.extend(tokens::paths(tokens.clone()));
                }
            }
        }
        Ok(index)
    }
}

/// Items, each with its tokens: they are costly to make, and read twice.
fn with_tokens(items: Vec<Item>) -> Vec<(Item, TokenStream)> {
    let pair = |item: Item| {
        let tokens = item.to_token_stream();
        (item, tokens)
    };
    items.into_iter().map(pair).collect()
}

/// The file of `mod name;` in `file`.
fn child_file(file: &Path, name: &str, attrs: &[Attribute], path: &[String]) -> Result<PathBuf> {
    let folder = file.parent().unwrap_or(Path::new("."));
    for attr in attrs.iter().filter(|a| a.path().is_ident("path")) {
        if let syn::Meta::NameValue(pair) = &attr.meta
            && let syn::Expr::Lit(literal) = &pair.value
            && let syn::Lit::Str(text) = &literal.lit
        {
            return Ok(folder.join(text.value()));
        }
    }
    let stem = file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
    let folder = match stem {
        "lib" | "main" if path.is_empty() => folder.to_owned(),
        "mod" => folder.to_owned(),
        _ => folder.join(stem),
    };
    let candidates = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
    match candidates.iter().find(|c| c.is_file()) {
        Some(found) => Ok(found.clone()),
        None => bail!("{}: no file for `mod {name}`", file.display()),
    }
}

fn flatten(tree: &UseTree, prefix: &mut Vec<String>, module: &mut Module) {
    let depth = prefix.len();
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, module);
        }
        UseTree::Name(name) if name.ident == "self" => {
            let alias = prefix.last().cloned().unwrap_or_default();
            module.aliases.insert(alias, prefix.clone());
        }
        UseTree::Name(name) => {
            prefix.push(name.ident.to_string());
            module.aliases.insert(name.ident.to_string(), prefix.clone());
        }
        UseTree::Rename(rename) => {
            if rename.ident != "self" {
                prefix.push(rename.ident.to_string());
            }
            // `as _` brings a trait into scope without a name.
            let alias = match rename.rename.to_string().as_str() {
                "_" => format!("_{}", module.aliases.len()),
                alias => alias.to_owned(),
            };
            module.aliases.insert(alias, prefix.clone());
        }
        UseTree::Glob(_) => module.globs.push(prefix.clone()),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, module);
            }
        }
    }
    prefix.truncate(depth);
}

/// Whether an attribute compiles its item only for tests: `cfg(test)`, `cfg(all(test, ...))`.
pub(crate) fn is_test(attr: &Attribute) -> bool {
    let syn::Meta::List(list) = &attr.meta else { return false };
    let text = list.tokens.to_string();
    attr.path().is_ident("cfg")
        && (text == "test" || text.starts_with("all") && !text.contains("not (test"))
        && text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test")
}

/// The attributes of an item.
pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(i) => &i.attrs,
        Item::Enum(i) => &i.attrs,
        Item::ExternCrate(i) => &i.attrs,
        Item::Fn(i) => &i.attrs,
        Item::ForeignMod(i) => &i.attrs,
        Item::Impl(i) => &i.attrs,
        Item::Macro(i) => &i.attrs,
        Item::Mod(i) => &i.attrs,
        Item::Static(i) => &i.attrs,
        Item::Struct(i) => &i.attrs,
        Item::Trait(i) => &i.attrs,
        Item::TraitAlias(i) => &i.attrs,
        Item::Type(i) => &i.attrs,
        Item::Union(i) => &i.attrs,
        Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

fn lines_of(item: &Item) -> usize {
    use syn::spanned::Spanned as _;
    let span = item.span();
    span.end().line + 1 - span.start().line
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| file.display().to_string())
}

fn section<'t>(text: &'t str, from: &str, to: &str) -> Result<&'t str> {
    let (_, rest) = text.split_once(from).with_context(|| format!("Cargo.toml has no `{from}`"))?;
    let (section, _) = rest.split_once(to).with_context(|| format!("`{from}` is not closed"))?;
    Ok(section)
}

fn quoted(text: &str) -> Vec<String> {
    text.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Package names of the members, with their folders.
fn packages(root: &Path, members: &[String]) -> Result<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    for folder in members {
        let manifest = read(&root.join(folder).join("Cargo.toml"))?;
        names.insert(section(&manifest, "name = \"", "\"")?.to_owned(), folder.clone());
    }
    Ok(names)
}

/// The workspace's own crates among `[dependencies]`.
fn dependencies(
    root: &Path,
    folder: &str,
    names: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    let manifest = read(&root.join(folder).join("Cargo.toml"))?;
    let Some((_, rest)) = manifest.split_once("\n[dependencies]\n") else { return Ok(Vec::new()) };
    let lines = rest.lines().take_while(|line| !line.starts_with('['));
    let named = lines.filter_map(|line| line.split([' ', '.', '=']).next());
    Ok(named.filter_map(|name| names.get(name).cloned()).collect())
}
