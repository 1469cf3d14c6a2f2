//! `marlinspike fuzz` with promises beyond right values, and the recipes in C and C++.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A GPTQ product whose f32 sum runs over k forwards or backwards: both are within the bound.
const KERNEL: &str = r#"
#include "marlinspike_kernel.h"
#include <math.h>
#include <string.h>

int marlinspike_kernel_abi(void) { return MARLINSPIKE_KERNEL_ABI; }

static float from_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return bits >> 15 ? -size : size;
}

static uint16_t to_half(float x) {
  uint16_t sign = signbit(x) ? 0x8000 : 0;
  float size = fabsf(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  frexpf(size, &exponent);
  if (size == 0 || exponent < -13) exponent = -13;
  /* nearbyintf: ties to even; a carry moves into the exponent. */
  int steps = (int)nearbyintf(ldexpf(size, 11 - exponent));
  return sign | (steps + ((exponent + 13) << 10));
}

static const DLTensor *input(const marlinspike_call *call, const char *name) {
  for (size_t i = 0; i < call->num_inputs; i++)
    if (!strcmp(call->inputs[i].name, name)) return &call->inputs[i].tensor;
  return 0;
}

int marlinspike_kernel_run(const marlinspike_call *call) {
  static int calls;
  int call_number = calls++;
  const DLTensor *x = input(call, "x"), *q = input(call, "qweight"), *s = input(call, "scales");
  long m = x->shape[0], k = x->shape[1], n = q->shape[1], group = k / s->shape[0];
  const uint16_t *xs = x->data, *ss = s->data;
  const uint32_t *words = q->data;
  for (long i = 0; i < m; i++) {
    /* Each case is called twice: only pairs of calls differ. */
    int backwards = ORDER;
    for (long j = 0; j < n; j++) {
      float sum = 0;
      for (long l = 0; l < k; l++) {
        long at = backwards ? k - 1 - l : l;
        float code = (float)(words[at / 8 * n + j] >> (at % 8 * 4) & 15) - 8;
        sum += from_half(xs[i * k + at]) * (code * from_half(ss[at / group * n + j]));
      }
      ((uint16_t *)call->outputs[0].tensor.data)[i * n + j] = to_half(sum);
    }
  }
  (void)call_number;
  return MARLINSPIKE_OK;
}
"#;

const WHERE: &str = "checkpoint_format=gptq,weight_type=uint4b8,dtype=float16,input_dtype=null,\
                     desc_act=false,has_bias=false,tensor_parallel.size=null";

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_laws").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn marlinspike(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    let Output { status, stdout, stderr } =
        command.args(arguments).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (status.code(), text(stdout), text(stderr))
}

/// Writes the header as a user does, and compiles a library with it.
fn compile(folder: &Path, source: &str, options: &[&str]) {
    let (_, header, _) = marlinspike(folder, &["fuzz", "header"]);
    std::fs::write(folder.join("marlinspike_kernel.h"), header).unwrap();
    std::fs::write(folder.join("kernel.c"), source).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-I", "."]).args(options);
    cc.args(["-o", "kernel.so", "kernel.c", "-lm"]).current_dir(folder);
    assert!(cc.status().expect("a C compiler").success());
}

/// The exit code and text of a campaign of the product that adds in `order`.
fn campaign(name: &str, order: &str, promises: &[&str]) -> (Option<i32>, String) {
    let folder = folder(name);
    compile(&folder, KERNEL, &[&format!("-DORDER={order}")]);
    let mut arguments = vec!["fuzz", "--op", "linear", "--lib", "kernel.so", "--seed", "1"];
    arguments.extend(["--cases", "16", "--findings", "1", "--where", WHERE]);
    arguments.extend(promises);
    let (code, text, _) = marlinspike(&folder, &arguments);
    (code, text)
}

#[test]
fn a_kernel_that_keeps_its_promises_passes() {
    let (code, text) = campaign("kept", "1", &["--deterministic", "--batch-invariant"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("16 pass"), "{text}");
}

#[test]
fn an_order_that_depends_on_the_batch_is_a_finding() {
    // Only the flag tells the two orders apart: both sums are right.
    let (code, text) = campaign("batch_unasked", "m > 1", &["--deterministic"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = campaign("batch", "m > 1", &["--batch-invariant"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("finding: batch dependence"), "{text}");
    assert!(text.contains("of y differs alone and in a batch of"), "{text}");
    // The repeated command makes the same promise.
    assert!(text.contains("--batch-invariant --seed 0x1"), "{text}");
}

#[test]
fn an_order_that_changes_between_runs_is_a_finding() {
    let (code, text) = campaign("runs_unasked", "call_number / 2 % 2", &[]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = campaign("runs", "call_number / 2 % 2", &["--deterministic"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("finding: nondeterminism"), "{text}");
    assert!(text.contains("--deterministic --seed 0x1"), "{text}");
}

fn recipe() -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../integrations/recipes/marlin_scales.c");
    std::fs::read_to_string(path).unwrap()
}

/// The options of the recipe's own command.
const SCALES: [&str; 8] = [
    "fuzz",
    "--op",
    "linear",
    "--output",
    "marlin_scales",
    "--lib=./kernel.so",
    "--where=checkpoint_format=gptq,input_dtype=null,tensor_parallel.size=null",
    "--seed=1",
];

#[test]
fn the_recipe_in_c_passes() {
    let folder = folder("recipe");
    compile(&folder, &recipe(), &[]);
    let (code, text, _) = marlinspike(&folder, &SCALES);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("200 pass"), "{text}");
}

#[test]
fn the_recipe_with_the_wrong_kind_of_permutation_is_named() {
    let folder = folder("recipe_wrong");
    let wrong = recipe().replace("group_size < size_k;", "group_size < size_k / 8;");
    assert_ne!(wrong, recipe());
    compile(&folder, &wrong, &[]);
    let first = [&SCALES[..], &["--findings", "1", "--timeout", "20", "--class", "fused-f32"]];
    let (code, text, progress) = marlinspike(&folder, &first.concat());
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("finding: marlin_scales: scales-other-permutation"), "{text}");
    assert!(text.contains("size_k=16 size_m=1 size_n=64"), "{text}");
    assert!(text.contains("1 cases in"), "stopped after one finding: {text}");
    assert!(progress.contains("found in case 0: marlin_scales: scales-other-permutation"));
    // The command that repeats the case has every option that decides about the verdict.
    assert!(text.contains("--timeout 20 --class fused-f32 --seed 0x1"), "{text}");
    // The kept case, of smaller sizes than the filter's, runs first again, but not in a campaign of
    // another kind of weight.
    let kept = "still fails: .marlinspike/linear-marlin-scales-scales-other-permutation";
    let (_, text, _) = marlinspike(&folder, &[&SCALES[..], &["--cases", "1"]].concat());
    assert!(text.contains("weight_type=uint8b128") && text.contains(kept), "{text}");
    let other = "--where=checkpoint_format=gptq,input_dtype=null,weight_type=uint4b8";
    let other = [&SCALES[..6], &["--seed=1", "--cases=1", other]].concat();
    let (_, text, _) = marlinspike(&folder, &other);
    assert!(text.contains("1 cases in") && !text.contains(kept), "{text}");
}

#[test]
fn the_reason_of_skipped_cases_is_printed() {
    let folder = folder("skipped");
    compile(&folder, &recipe(), &[]);
    let arguments = ["fuzz", "--op", "linear", "--lib", "kernel.so", "--cases", "3"];
    let (code, text, _) = marlinspike(&folder, &arguments);
    assert_eq!(code, Some(1), "{text}");
    let words = "3 not supported by the kernel (first reason: only marlin_scales of GPTQ's scales)";
    assert!(text.contains(words), "{text}");
}

/// Compiles a library in C++, under each standard in turn; the last one is used. `None` without a compiler.
fn compile_cpp(folder: &Path, source: &str) -> Option<()> {
    Command::new("c++").arg("--version").output().ok()?;
    let (_, header, _) = marlinspike(folder, &["fuzz", "header"]);
    std::fs::write(folder.join("marlinspike_kernel.h"), header).unwrap();
    std::fs::write(folder.join("kernel.cpp"), source).unwrap();
    std::fs::write(folder.join("empty.cpp"), "#include \"marlinspike_kernel.h\"\n").unwrap();
    let strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", "."];
    let mut runs: Vec<Vec<&str>> = ["-std=c++11", "-std=c++20"]
        .map(|standard| vec![standard, "-fsyntax-only", "empty.cpp"])
        .to_vec();
    runs.push(vec!["-std=c++17", "-O1", "-shared", "-fPIC", "-o", "kernel.so", "kernel.cpp"]);
    for run in runs {
        let made =
            Command::new("c++").args(strict).args(&run).current_dir(folder).output().unwrap();
        assert!(made.status.success(), "{run:?}: {}", String::from_utf8_lossy(&made.stderr));
    }
    Some(())
}

/// The recipe in C++, right and with a planted bug, by the command that it states.
#[test]
fn the_recipe_in_cpp_passes_and_its_bug_is_named() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../integrations/recipes/marlin_repack.cpp");
    let right = std::fs::read_to_string(path).unwrap();
    let options = "--op linear --output marlin_qweight --lib ./kernel.so --seed 1 --cases 60 --where \
                   checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false";
    let arguments: Vec<&str> = ["fuzz"].into_iter().chain(options.split_whitespace()).collect();
    let run = |name: &str, old: &str, new: &str| {
        let folder = folder(name);
        assert!(right.contains(old));
        compile_cpp(&folder, &right.replace(old, new))?;
        Some(marlinspike(&folder, &arguments))
    };
    let order = "{0, 2, 4, 6, 1, 3, 5, 7}";
    let Some((code, text, _)) = run("cpp", order, order) else { return };
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("60 pass"), "{text}");
    let (code, text, _) = run("cpp_order", order, "{0, 1, 2, 3, 4, 5, 6, 7}").unwrap();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("finding: marlin_qweight: word-order-plain"), "{text}");
    assert!(text.contains("size_k=16 size_m=1 size_n=64"), "{text}");
    let (_, text, _) = run("cpp_unwritten", "block < 4; ++block", "block < 3; ++block").unwrap();
    assert!(text.contains("left 128 of 512 bytes of `marlin_qweight` unwritten"), "{text}");
}
