//! `#include` among the embedded files: each file once, in the order of use.

use std::collections::HashSet;

use crate::PARTS;

/// The text of a kernel with the files that it includes. It lives as long as the program.
pub(crate) fn resolved(name: &str, text: &str) -> &'static str {
    let (mut out, mut included) = (String::new(), HashSet::new());
    append(&mut out, &mut included, &format!("{name}.cu"), text);
    Box::leak(out.into_boxed_str())
}

fn append(out: &mut String, included: &mut HashSet<&'static str>, file: &str, text: &str) {
    *out += &format!("#line 1 \"{file}\"\n");
    for (i, line) in text.lines().enumerate() {
        let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix(".cuh\""));
        match name.map(|name| PARTS.iter().find(|part| part.0 == name)) {
            // Embedded files are included once without it.
            None if line == "#pragma once" => out.push('\n'),
            // A file that is not embedded is left to the compiler to refuse.
            None | Some(None) => *out += &format!("{line}\n"),
            Some(Some(&(name, text))) => {
                if included.insert(name) {
                    append(out, included, &format!("{name}.cuh"), text);
                }
                *out += &format!("#line {} \"{file}\"\n", i + 2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_included_once_and_lines_keep_their_numbers() {
        let text = "#include \"depend.cuh\"\n#include \"depend.cuh\"\nlast\n";
        let resolved = resolved("kernel", text);
        assert!(resolved.starts_with("#line 1 \"kernel.cu\"\n#line 1 \"depend.cuh\"\n\n//"));
        assert_eq!(resolved.matches("#line 1 \"depend.cuh\"").count(), 1);
        assert!(resolved.ends_with("}\n#line 2 \"kernel.cu\"\n#line 3 \"kernel.cu\"\nlast\n"));
        assert!(super::resolved("kernel", "#include \"absent.cuh\"\n").contains("#include"));
    }
}
