//! "The first hour" and the lists of CONTRIBUTING and ARCHITECTURE: functions are in the files that are
//! named for them, and the traced weight is where the page says.

use std::fs;

use marlinspike::container::Container;
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::layouts::{Layout, Slot};
use marlinspike::num::dims::Shape;
use marlinspike::weight::Codes;

use super::pages::root;
use crate::support::{run, stdout};

const PAGE: &str = "docs/src/internals/first-hour.md";

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every "`name` in `path`" of a page.
fn places(page: &str) -> Vec<(String, String)> {
    let text = read(page).split_whitespace().collect::<Vec<_>>().join(" ");
    let parts: Vec<&str> = text.split('`').collect();
    let spans = parts.windows(3).skip(1).step_by(2).filter(|window| window[1] == " in ");
    spans.map(|window| (window[0].to_owned(), window[2].to_owned())).collect()
}

#[test]
fn named_functions_are_in_the_files_that_are_named_for_them() {
    let (mut checked, mut missing) = (0, Vec::new());
    for page in [PAGE, "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        for (name, path) in places(page) {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "_:-".contains(c);
            if !root().join(&path).is_file() || !name.chars().all(is_plain) {
                continue;
            }
            checked += 1;
            let last = name.rsplit("::").next().unwrap_or(&name);
            let source = read(&path);
            let is_part = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            if !source.split(|c| !is_part(c)).any(|word| word == last) {
                missing.push(format!("{page}: `{name}` is not in {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(checked > 30, "{checked}");
}

#[test]
fn the_traced_weight_is_where_the_page_says() {
    let name = "model.layers.0.self_attn.o_proj.qweight";
    let file = root().join("golden/data/checkpoints/gptq-dynamic/model.safetensors");
    let bytes = fs::read(file).unwrap();
    let qweight = Container::parse(&bytes).unwrap().tensor(name).unwrap();
    let words = qweight.view2::<u32>().unwrap();
    let (k, n) = (17, 42);
    let word = words[[k / 8, n]];
    let code = word >> (4 * (k % 8)) & 15;
    assert_eq!(code, 11);

    let layout = WeightLayout::new(Shape::new(128, 128), 4, Activations::Bits16).unwrap();
    let packed = layout.pack(&Codes::from_view(4, words).unwrap(), None).unwrap();
    let slot = layout.offset(k, n);
    assert_eq!(slot, Slot { element: 290, bit: 24, width: 4 });
    let packed = packed.into_iter().nth(slot.element).unwrap();
    assert_eq!(packed >> slot.bit & 15, code);
    let fragment = layout.locate(slot.element, slot.bit).fragment.unwrap();
    assert_eq!((fragment.tile_k, fragment.tile_n), (1, 0));
    assert_eq!((fragment.lane, fragment.mma_n, fragment.register, fragment.part), (8, 5, 0, 1));

    let page = read(PAGE);
    for shown in [format!("`{word:#x}`"), format!("`{packed:#x}`")] {
        assert!(page.contains(&shown), "{PAGE} does not have {shown}");
    }
}

#[test]
fn the_traced_case_has_the_verdict_that_the_page_says() {
    let case = root().join("golden/data/cases/linear-bf16_u4b8_g128_act1.safetensors");
    let found = run(["check".as_ref(), "-v".as_ref(), case.as_os_str()]);
    let lines = stdout(&found).lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let outputs: Vec<_> = lines.filter(|words| words.last() == Some(&"pass")).collect();
    let exact = outputs.iter().filter(|words| words[2..4] == ["100", "%"]).count();
    let y = outputs.iter().find(|words| words[0] == "y").unwrap();
    assert_eq!((outputs.len(), exact), (6, 5), "{outputs:?}");
    assert_eq!(y[2..], ["75.0000", "%", "0", "1.000", "pass"]);
}
