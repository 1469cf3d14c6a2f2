//! README's table of methods: every cell is a dash or names an existing test.

use std::fs;
use std::path::Path;

const COLUMNS: [&str; 7] =
    ["checkpoint", "layout", "exact", "bound", "schedule", "CPU fast path", "CUDA"];

const MODELS: &str = "reference/tests/config/checkpoint_models.rs";
const METHOD: &str = "reference/tests/methods/method.rs";
const METHODS: &str = "cli/tests/models/methods.rs";
const INT8: &str = "cli/tests/models/int8.rs";
const INT8_PATH: &str = "reference/tests/w4a8/int8.rs";
const INTEGERS: &str = "reference/tests/methods/int8.rs";
const BLOCKS: &str = "reference/tests/fp8_bound/blocks.rs";
const LAYOUTS: &str = "reference/tests/layouts/fp8_blocks.rs";
/// On a GPU.
const FLOATS: &str = "accel/tests/kernels/formats.rs";

type Test = Option<(&'static str, &'static str)>;

const STAGES: Test = Some((METHODS, "stages_equal_those_computed_apart"));
const DEFINED: Test = Some((METHODS, "every_method_runs_and_its_definition_agrees"));
const BOUNDED: Test = Some((METHOD, "scheduled_products_are_within_their_bounds"));
const FORMATS: Test =
    Some(("model/tests/convert/formats.rs", "every_format_and_rank_unpacks_to_the_original"));
const FLASHINFER: Test = Some((METHODS, "experts_convert_to_flashinfers_forms"));
const INT4_FP8: Test = Some((INT8, "int4_weights_with_fp8_activations"));
const INT4_PATH: Test = Some(("model/tests/convert/kleidi.rs", "every_format_that_the_path_takes"));
/// On a GPU; groups of 32 too.
const CANONICAL: Test =
    Some(("accel/tests/kernels/gemm.rs", "products_equal_the_canonical_schedule"));
/// On a GPU; both kinds of scales.
const W8A8: Test = Some((
    "accel/tests/mutants/fp8_gemm/products.rs",
    "fp8_products_equal_the_reference_under_every_plan",
));
const W4A8_CASES: Test = Some(("reference/tests/methods/w4a8_fp8.rs", "damaged_outputs_fail"));
const MICROSCALED: Test = Some((MODELS, "microscaled_models"));

/// Each method with the tests of its cells, in the order of the columns.
const METHOD_TESTS: [(&str, [Test; 7]); 14] = [
    (
        "W4A16, W8A16 integers",
        [
            Some((MODELS, "gptq_models")),
            FORMATS,
            DEFINED,
            Some(("reference/tests/products/gemm_bound.rs", "no_schedule_leaves_its_bound")),
            Some((
                "reference/tests/check/schedule_golden.rs",
                "every_product_of_the_gpu_is_reproduced",
            )),
            Some(("reference/tests/w4a8/tables.rs", "every_kernel_gives_the_bits_of_plain_loops")),
            CANONICAL,
        ],
    ),
    (
        "int4 with int8 or e4m3 activations",
        [
            Some((MODELS, "gptq_models")),
            Some((
                "cli/tests/models/convert_input_dtype.rs",
                "int8_scales_are_integers_under_one_factor",
            )),
            Some(("reference/tests/methods/int4_rows.rs", "exact_products_equal_big_integers")),
            Some(("reference/tests/check/golden_damage.rs", "every_case_passes")),
            Some((
                "reference/tests/check/schedule_golden.rs",
                "every_product_of_the_gpu_is_reproduced",
            )),
            None,
            Some(("accel/tests/kernels/gemm_a8.rs", "int8_products")),
        ],
    ),
    (
        "W4A8, int8 per token",
        [
            Some(("model/tests/convert/kleidi.rs", "a_published_w4a8_model")),
            INT4_PATH,
            None,
            Some(("reference/tests/w4a8/bound.rs", "no_kernel_of_the_class_leaves_its_bound")),
            Some(("reference/tests/w4a8/golden.rs", "every_output_of_every_case_is_right")),
            Some(("reference/tests/w4a8/engine.rs", "every_shape_route_and_kernel")),
            None,
        ],
    ),
    (
        "FP8 weight-only",
        [
            Some((MODELS, "fp8_models")),
            FORMATS,
            DEFINED,
            BOUNDED,
            DEFINED,
            None,
            Some((FLOATS, "fp8")),
        ],
    ),
    (
        "W8A8-FP8, tensor and channel scales",
        [
            STAGES,
            Some((METHODS, "fp8_experts_convert_as_upstream_prepares_them")),
            STAGES,
            BOUNDED,
            Some((METHOD, "promotion_keeps_what_fourteen_bits_lose")),
            None,
            W8A8,
        ],
    ),
    (
        "W8A8-FP8, blocks",
        [
            STAGES,
            Some((LAYOUTS, "flashinfers_experts_are_swapped_shuffled_and_cut")),
            STAGES,
            Some((BLOCKS, "no_simulated_block_kernel_leaves_its_bound")),
            Some((BLOCKS, "schedules_promote_as_the_naive_loop")),
            None,
            W8A8,
        ],
    ),
    (
        "MXFP8 weight-only",
        [MICROSCALED, FORMATS, DEFINED, BOUNDED, DEFINED, None, Some((FLOATS, "mxfp8"))],
    ),
    ("W8A8-MXFP8", [MICROSCALED, None, DEFINED, BOUNDED, DEFINED, None, None]),
    (
        "W8A8-int8",
        [
            Some((INT8, "int8_linear_layers")),
            Some((INT8, "converted_int8_layers_run_with_every_kernel")),
            Some((INT8, "int8_experts")),
            Some((INTEGERS, "damaged_outputs_fail")),
            Some((INTEGERS, "recorded_cases_pass")),
            Some((INT8_PATH, "every_kernel_gives_the_bits_of_the_formulas")),
            None,
        ],
    ),
    ("W4A8-FP8", [INT4_FP8, None, INT4_FP8, W4A8_CASES, INT4_FP8, None, None]),
    (
        "MXFP4 weight-only",
        [
            Some((MODELS, "gpt_oss_model")),
            Some((METHODS, "gpt_oss_is_padded_as_upstream_pads_it")),
            DEFINED,
            BOUNDED,
            DEFINED,
            Some(("reference/tests/w4a8/mxfp4.rs", "every_kernel_gives_the_bits_of_the_formulas")),
            Some((FLOATS, "mxfp4")),
        ],
    ),
    (
        "NVFP4 weight-only",
        [MICROSCALED, FORMATS, DEFINED, BOUNDED, DEFINED, None, Some((FLOATS, "nvfp4"))],
    ),
    (
        "W4A4-NVFP4",
        [
            STAGES,
            FLASHINFER,
            STAGES,
            Some((
                "reference/tests/moe/nvfp4_moe.rs",
                "products_are_exact_and_every_units_result_is_in_bounds",
            )),
            Some((
                "reference/tests/moe/nvfp4_moe.rs",
                "products_are_exact_and_every_units_result_is_in_bounds",
            )),
            None,
            None,
        ],
    ),
    (
        "mxint4",
        [
            Some((MODELS, "compressed_tensors_models")),
            FLASHINFER,
            DEFINED,
            BOUNDED,
            DEFINED,
            INT4_PATH,
            CANONICAL,
        ],
    ),
];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// Whether `source` has a test of this name; other attributes may come between.
fn is_test(source: &str, name: &str) -> bool {
    let mut before = source.split(&format!("\nfn {name}(")).next().unwrap().lines().rev();
    source.contains(&format!("\nfn {name}("))
        && before.by_ref().take_while(|line| line.starts_with("#[")).any(|line| line == "#[test]")
}

#[test]
fn every_cell_of_the_methods_table_has_its_test() {
    let readme = read("README.md");
    let table = readme.split("\n## Methods\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut rows = table
        .lines()
        .filter(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
    assert_eq!(rows.next().unwrap()[1..], COLUMNS);
    assert!(rows.next().unwrap().iter().all(|cell| *cell == "---"));
    let rows: Vec<_> = rows.collect();
    assert_eq!(rows.len(), METHOD_TESTS.len());
    for (row, (method, tests)) in rows.iter().zip(METHOD_TESTS) {
        assert_eq!(row[0], method);
        assert_eq!(row.len(), 1 + tests.len(), "{method}");
        for ((cell, test), column) in row[1..].iter().zip(tests).zip(COLUMNS) {
            assert_eq!(*cell == "–", test.is_none(), "{method}, {column}: {cell:?}");
            if let Some((file, name)) = test {
                assert!(is_test(&read(file), name), "{method}, {column}: {file} {name}");
            }
        }
    }
}
