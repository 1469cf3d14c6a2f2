//! Values that replace what a function returns.

use quote::ToTokens;
use syn::{GenericArgument, PathArguments, ReturnType, Type};

/// Most values for a tuple.
const MOST: usize = 8;

/// Expressions that a function with this return type could return instead; none if it returns `impl Trait` or never.
pub(crate) fn of_return(output: &ReturnType) -> Vec<String> {
    match output {
        ReturnType::Default => vec!["()".to_owned()],
        ReturnType::Type(_, of) => values(of),
    }
}

fn values(of: &Type) -> Vec<String> {
    match of {
        Type::Paren(inner) => values(&inner.elem),
        Type::Group(inner) => values(&inner.elem),
        Type::Never(_) | Type::ImplTrait(_) => Vec::new(),
        Type::Tuple(tuple) if tuple.elems.is_empty() => vec!["()".to_owned()],
        Type::Tuple(tuple) => {
            let empty = vec![String::new()];
            let all = tuple.elems.iter().fold(empty, |made, element| {
                let element = values(element);
                made.iter()
                    .flat_map(|head| element.iter().map(move |value| format!("{head}{value}, ")))
                    .collect()
            });
            all.into_iter().take(MOST).map(|inner| format!("({inner})")).collect()
        }
        Type::Array(array) => {
            let length = array.len.to_token_stream();
            values(&array.elem).iter().map(|value| format!("[{value}; {length}]")).collect()
        }
        Type::Reference(reference) => match &*reference.elem {
            Type::Path(path) if path.path.is_ident("str") => texts(&["\"\"", "\"xyzzy\""]),
            Type::Slice(slice) => {
                let one = values(&slice.elem)
                    .into_iter()
                    .map(|value| format!("Vec::leak(vec![{value}])"));
                std::iter::once("Vec::leak(Vec::new())".to_owned()).chain(one).collect()
            }
            inner => {
                values(inner).iter().map(|value| format!("Box::leak(Box::new({value}))")).collect()
            }
        },
        Type::Path(path) => named(path),
        _ => texts(&["Default::default()"]),
    }
}

fn named(path: &syn::TypePath) -> Vec<String> {
    let Some(last) = path.path.segments.last() else { return Vec::new() };
    let inner = |wrap: &dyn Fn(&str) -> String| -> Vec<String> {
        let PathArguments::AngleBracketed(arguments) = &last.arguments else {
            return vec![wrap("Default::default()")];
        };
        match arguments
            .args
            .iter()
            .find_map(|one| if let GenericArgument::Type(of) = one { Some(of) } else { None })
        {
            Some(of) => values(of).iter().map(|value| wrap(value)).collect(),
            None => vec![wrap("Default::default()")],
        }
    };
    let after =
        |first: &str, rest: Vec<String>| std::iter::once(first.to_owned()).chain(rest).collect();
    match last.ident.to_string().as_str() {
        "bool" => texts(&["true", "false"]),
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" => texts(&["0", "1"]),
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => texts(&["0", "1", "-1"]),
        "f32" | "f64" => texts(&["0.0", "1.0", "-1.0"]),
        "String" => texts(&["String::new()", "\"xyzzy\".to_owned()"]),
        "Option" => after("None", inner(&|value| format!("Some({value})"))),
        "Result" => inner(&|value| format!("Ok({value})")),
        "Vec" => after("Vec::new()", inner(&|value| format!("vec![{value}]"))),
        "Box" => inner(&|value| format!("Box::new({value})")),
        _ => texts(&["Default::default()"]),
    }
}

fn texts(values: &[&str]) -> Vec<String> {
    values.iter().map(|&value| value.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<String> {
        of_return(&syn::parse_str(text).unwrap())
    }

    #[test]
    fn values_follow_the_type() {
        assert_eq!(of(""), ["()"]);
        assert_eq!(of("-> bool"), ["true", "false"]);
        assert_eq!(of("-> Result<Option<u8>>"), ["Ok(None)", "Ok(Some(0))", "Ok(Some(1))"]);
        assert_eq!(of("-> (bool, &'static str)").len(), 4);
        assert_eq!(of("-> &[f32]")[..2], ["Vec::leak(Vec::new())", "Vec::leak(vec![0.0])"]);
        assert_eq!(of("-> [i8; N + 1]")[2], "[-1; N + 1]");
        assert_eq!(of("-> Self"), ["Default::default()"]);
        assert!(of("-> impl Iterator<Item = u8>").is_empty());
    }
}
