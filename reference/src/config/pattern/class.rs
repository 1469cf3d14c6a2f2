//! Classes of characters.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class as HirClass, HirKind};

/// Sorted ranges of characters, ends included.
pub(super) type Class = Vec<(char, char)>;

/// The characters of a class in `regex-syntax`'s notation.
pub(super) fn ranges(text: &str, casei: bool) -> Result<Class, String> {
    let mut parser = ParserBuilder::new().case_insensitive(casei).nest_limit(64).build();
    let hir = parser.parse(text).map_err(|e| e.to_string())?;
    match hir.kind() {
        HirKind::Class(HirClass::Unicode(class)) => {
            Ok(class.iter().map(|r| (r.start(), r.end())).collect())
        }
        HirKind::Class(HirClass::Bytes(class)) => {
            Ok(class.iter().map(|r| (char::from(r.start()), char::from(r.end()))).collect())
        }
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|e| e.to_string())?;
            let mut chars = text.chars();
            match (chars.next(), chars.next()) {
                (Some(c), None) => Ok(vec![(c, c)]),
                _ => Err(format!("{text:?} is not one character")),
            }
        }
        _ => Err(format!("`{text}` is not a set of characters")),
    }
}
