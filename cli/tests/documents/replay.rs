//! Every fenced block of the documents: commands run and print what is shown, or are at least commands of
//! the program; JSON is JSON; every other block is listed with the reason.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use clap::error::ErrorKind;

use super::pages::{documents, root};
use super::schema_command::python;

/// A fenced block.
struct Block {
    /// The page, from the repository's root.
    page: String,
    language: String,
    text: String,
}

/// The blocks of all documents, in order.
fn blocks() -> Vec<Block> {
    let root = root();
    let mut blocks = Vec::new();
    let mut pages = documents();
    pages.sort();
    for path in pages {
        let page = path.strip_prefix(&root).unwrap().display().to_string();
        // Users' documents: README, the book without its log, and the crates' READMEs.
        let is_book = page.starts_with("docs/src/") && !page.starts_with("docs/src/log/");
        let below = page.strip_prefix("integrations/").unwrap_or(&page);
        let is_readme = below.ends_with("README.md") && below.matches('/').count() <= 1;
        if !(is_book || is_readme) {
            continue;
        }
        let mut open: Option<Block> = None;
        for line in fs::read_to_string(&path).unwrap().lines() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (None, Some(language)) => {
                    let (page, language) = (page.clone(), language.trim().to_owned());
                    open = Some(Block { page, language, text: String::new() });
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(block), None) => {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{page}: a block does not end");
    }
    blocks
}

/// Blocks that this test neither runs nor parses: page, beginning of a line in it, reason.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    (
        "docs/src/reference/schema.md",
        "",
        "written by the program; `schema_command` compiles and runs the examples",
    ),
    ("docs/src/guides/python.md", "", "integrations/python/tests/test_guide.py runs the blocks"),
    (
        "integrations/python/README.md",
        "import marlinspike",
        "integrations/python/tests/test_first_contact.py runs it",
    ),
    ("docs/src/results/findings.md", "", "other projects' operators and versions"),
    ("docs/src/guides/browser.md", "#layout", "an address, which integrations/web/tests open"),
    (
        "docs/src/guides/campaigns.md",
        "summary = ",
        "Python; integrations/python/tests/test_recipes.py runs the recipes",
    ),
    (
        "docs/src/guides/campaigns.md",
        "$ python integrations/recipes/ray_campaign.py",
        "needs Ray; integrations/python/tests/test_recipes.py",
    ),
    ("docs/src/guides/campaigns.md", "$ marlinspike fuzz", "needs a kernel of the reader's"),
    ("docs/src/guides/torch.md", "import torch", "needs a GPU"),
    ("docs/src/guides/invariance.md", "let split", "needs GPUs"),
    ("docs/src/guides/invariance.md", "import hashlib", "needs vLLM"),
    ("docs/src/guides/fuzz.md", "for line in sys.stdin", "part of a program"),
    (
        "docs/src/guides/fuzz.md",
        "#include \"marlinspike_kernel.h\"",
        "part of a library; the recipes are compiled by `fuzz` tests",
    ),
    ("docs/src/guides/fuzz.md", "found in case 0: marlin_scales", "needs an edited recipe"),
    (
        "docs/src/guides/fuzz.md",
        "$ marlinspike fuzz --op linear --lib ./splitk.so",
        "needs a kernel of the reader's",
    ),
    ("docs/src/guides/fuzz.md", "$ c++ -std", "compiled by cli/tests/check/fuzz.rs"),
    ("docs/src/guides/fuzz.md", "$ cargo run -p marlinspike-proptests", "a build of its own"),
    ("docs/src/guides/convert.md", "in vLLM 0.33.0", "a line of a large model's output"),
    ("docs/src/internals/tensor-cores.md", "", "needs a GPU"),
    ("integrations/vllm/README.md", "", "needs vLLM"),
];

/// Pages whose shell and Rust blocks are read but not run.
fn is_listed(block: &Block) -> bool {
    let listed = |&&(page, begin, _): &&(&str, &str, &str)| {
        page == block.page && block.text.lines().any(|line| line.trim_start().starts_with(begin))
    };
    ELSEWHERE.iter().any(|entry| listed(&entry))
}

/// The commands of a shell block, each on one line without its comment.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let line = if open.is_empty() { line.trim_start_matches("$ ") } else { line };
        match line.strip_suffix('\\') {
            Some(begin) => open.push_str(begin),
            None => commands.push(std::mem::take(&mut open) + line),
        }
    }
    commands
}

/// The arguments of a command of the program; `None` for another command.
fn arguments(command: &str) -> Option<Vec<String>> {
    let command = command.split(" # ").next()?.split(" > ").next()?.split(" | ").next()?;
    let command = command.split(" && ").next()?;
    let words = shlex::split(command)?;
    (words.first()? == "marlinspike").then_some(words)
}

#[test]
fn every_command_in_the_documents_is_one_of_the_program() {
    let mut found = 0;
    for block in blocks().iter().filter(|b| matches!(&*b.language, "sh" | "text" | "")) {
        let is_shell = block.language == "sh";
        let lines = commands(&block.text);
        for command in lines.iter().filter(|line| is_shell || line.starts_with("marlinspike ")) {
            let Some(arguments) = arguments(command) else { continue };
            if arguments.contains(&"…".to_owned()) {
                continue;
            }
            found += 1;
            // Features that this build lacks take any arguments.
            let parsed = marlinspike_cli::help::command().try_get_matches_from(&arguments);
            let refused = parsed.err().filter(|e| e.kind() != ErrorKind::DisplayHelp);
            assert!(refused.is_none(), "{}: {command}\n{}", block.page, refused.unwrap());
        }
    }
    assert!(found > 25, "{found}");
}

#[test]
fn json_in_the_documents_is_json() {
    for block in blocks().iter().filter(|b| b.language == "json") {
        let parsed: Result<serde_json::Value, _> = serde_json::from_str(&block.text);
        assert!(parsed.is_ok(), "{}: {}\n{}", block.page, parsed.unwrap_err(), block.text);
    }
}

/// Every block is run, parsed, compiled by rustdoc, or listed, and every entry of the list is used.
#[test]
fn every_block_is_replayed_or_listed() {
    let blocks = blocks();
    assert!(blocks.len() > 100, "{}", blocks.len());
    let replayed: BTreeSet<&str> = PAGES.iter().map(|(page, _)| *page).collect();
    for block in &blocks {
        let covered = match &*block.language {
            // Commands are parsed; doc tests of the crates compile Rust.
            "sh" | "json" | "toml" | "rust" | "rust,ignore" => true,
            "text" | "python" | "c" => {
                replayed.contains(&*block.page)
                    || arguments(block.text.lines().next().unwrap_or("")).is_some()
            }
            _ => false,
        };
        assert!(
            covered || is_listed(block),
            "{}: not replayed and not listed:\n{}",
            block.page,
            block.text
        );
    }
    for (page, begin, reason) in ELSEWHERE {
        let used = blocks.iter().any(|block| {
            block.page == *page
                && block.text.lines().any(|line| line.trim_start().starts_with(begin))
        });
        assert!(used && !reason.is_empty(), "{page}: no block begins with {begin:?}");
    }
}

/// Pages whose blocks run in order in one folder, and the files that an earlier block's text becomes.
const PAGES: &[(&str, &[(&str, &str)])] = &[
    ("docs/src/guides/check.md", &[]),
    ("docs/src/guides/convert.md", &[]),
    ("docs/src/guides/fuzz.md", &[("# kernel.py INPUT OUTPUT", "kernel.py")]),
    ("docs/src/guides/verdicts.md", &[]),
    ("README.md", &[]),
];

/// The example of check.md with zero points that are one too low.
const ZEROS: [(&str, &str); 3] = [
    ("(codes.astype(np.float32) - 8)", "(codes.astype(np.float32) - 7)"),
    ("\"mine.safetensors\"", "\"zeros.safetensors\""),
    ("\"name\": \"mine\"", "\"name\": \"zeros\""),
];

fn run_python(python: &Path, source: &str, folder: &Path) {
    let done = Command::new(python).arg("-c").arg(source).current_dir(folder).output().unwrap();
    assert!(done.status.success(), "{source}\n{}", String::from_utf8_lossy(&done.stderr));
}

fn run_shell(command: &str, folder: &Path) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_marlinspike")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).current_dir(folder).env("PATH", path).env("COLUMNS", "100");
    shell.env("NO_COLOR", "1").output().unwrap()
}

/// Times, thread counts and CPUs, which differ from run to run, as `#`.
fn normalized(line: &str) -> String {
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    for i in 0..words.len() {
        let is_number = words[i].parse::<f64>().is_ok();
        let next = words.get(i + 1).map_or("", |w| w.trim_end_matches([';', ':', ',']));
        if is_number && matches!(next, "s" | "ms" | "us" | "threads" | "thread") {
            words[i] = "#".to_owned();
            words[i + 1] = words[i + 1].replace("threads", "thread").replace("ms", "s");
        }
        if i > 0 && words[i - 1] == "with" && words.iter().any(|word| word == "on") {
            words[i] = "#".to_owned();
        }
    }
    words.join(" ")
}

/// Whether `found` has the `shown` lines; `…` alone is any number of lines, in a line any text.
fn is_shown(shown: &[&str], found: &[&str]) -> bool {
    match (shown.split_first(), found.split_first()) {
        (None, None) => true,
        (Some((line, rest)), _) if line.trim() == "…" => {
            (0..=found.len()).any(|skip| is_shown(rest, &found[skip..]))
        }
        (Some((line, rest)), Some((first, others))) => {
            let (line, first) = (normalized(line), normalized(first));
            let mut at = 0;
            let parts: Vec<&str> = line.split('…').collect();
            let in_order = parts.iter().all(|part| {
                let place = first[at..].find(part.trim());
                at += place.unwrap_or(0) + place.map_or(0, |_| part.trim().len());
                place.is_some()
            });
            let equal = if parts.len() == 1 { line == first } else { in_order };
            // A text that is cut may go on in further lines.
            let more = if line.ends_with('…') { others.len() } else { 0 };
            equal && (0..=more).any(|skip| is_shown(rest, &others[skip..]))
        }
        (_, _) => false,
    }
}

/// Runs the commands of a block, each with the lines that follow it.
fn replay(block: &Block, folder: &Path) {
    let lines: Vec<&str> = block.text.lines().collect();
    let starts: Vec<usize> = (0..lines.len()).filter(|&i| lines[i].starts_with("$ ")).collect();
    for (at, &start) in starts.iter().enumerate() {
        let end = starts.get(at + 1).copied().unwrap_or(lines.len());
        let mut last = start;
        while lines[last].ends_with('\\') {
            last += 1;
        }
        let command = lines[start..=last].join("\n");
        let done = run_shell(command.trim_start_matches("$ "), folder);
        let found = String::from_utf8_lossy(&done.stdout).into_owned();
        let kept = |text: &&str| !text.trim().is_empty();
        let found: Vec<&str> = found.lines().filter(kept).collect();
        let shown: Vec<&str> = lines[last + 1..end].iter().copied().filter(kept).collect();
        let (page, errors) = (&block.page, String::from_utf8_lossy(&done.stderr));
        let both = format!("{}\n--- prints\n{}\n{errors}", shown.join("\n"), found.join("\n"));
        assert!(is_shown(&shown, &found), "{page}: {command}\n--- shows\n{both}");
    }
}

/// The pages' examples, in a folder with the repository's data.
fn replayed(page: &str) {
    let Some(python) = python() else {
        eprintln!("SKIPPED (no Python with numpy): {page}");
        return;
    };
    let has = Command::new(&python).args(["-c", "import numpy, safetensors, ml_dtypes"]).output();
    if !has.is_ok_and(|done| done.status.success()) {
        eprintln!("SKIPPED (no safetensors or ml_dtypes for Python): {page}");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    for name in ["golden", "integrations"] {
        std::os::unix::fs::symlink(root().join(name), folder.join(name)).unwrap();
    }
    let all = blocks();
    // The cases of check.md are those of README and verdicts.md, too.
    let check =
        all.iter().find(|b| b.text.contains("\"mine.safetensors\"") && b.language == "python");
    let source = &check.unwrap().text;
    run_python(&python, source, folder);
    let broken = ZEROS.iter().fold(source.clone(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    });
    run_python(&python, &broken, folder);
    let (_, files) = PAGES.iter().find(|(name, _)| *name == page).unwrap();
    let mut ran = 0;
    for block in all.iter().filter(|b| b.page == page && !is_listed(b)) {
        if let Some((_, name)) = files.iter().find(|(begin, _)| block.text.starts_with(begin)) {
            fs::write(folder.join(name), &block.text).unwrap();
        } else if block.language == "python" {
            run_python(&python, &block.text, folder);
        } else if block.text.starts_with("$ ") && !block.text.contains("kernel.py") {
            replay(block, folder);
        } else {
            continue;
        }
        ran += 1;
    }
    assert!(ran > 0, "{page}");
}

#[test]
fn check_replays() {
    replayed("docs/src/guides/check.md");
}

#[test]
fn verdicts_replays() {
    replayed("docs/src/guides/verdicts.md");
}

#[test]
fn convert_replays() {
    replayed("docs/src/guides/convert.md");
}

#[test]
fn fuzz_replays() {
    replayed("docs/src/guides/fuzz.md");
}

#[test]
fn readme_replays() {
    replayed("README.md");
}

/// A kernel in Python takes a minute for its 200 cases: the first finding of each block is compared.
#[test]
fn the_kernels_of_the_documents_are_found_wrong_as_shown() {
    let Some(python) = python() else {
        eprintln!(
            "SKIPPED (no Python with numpy): the_kernels_of_the_documents_are_found_wrong_as_shown"
        );
        return;
    };
    let all = blocks();
    let kernel = all.iter().find(|b| b.text.starts_with("# kernel.py")).unwrap();
    let mut ran = 0;
    for block in
        all.iter().filter(|b| b.text.contains("'python3 kernel.py'") && b.text.starts_with("$ "))
    {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("kernel.py"), &kernel.text).unwrap();
        let lines: Vec<&str> = block.text.lines().collect();
        let last = lines.iter().position(|line| !line.ends_with('\\')).unwrap();
        let command = lines[..=last].join("\n").replace("python3", &python.display().to_string());
        let done = run_shell(
            &format!("{} --findings 1 --cases 1", command.trim_start_matches("$ ")),
            temp.path(),
        );
        let found = String::from_utf8_lossy(&done.stdout).into_owned();
        for begin in ["finding: ", "  cause ", "  y ", "  kept in "] {
            let line =
                |text: &'_ str| text.lines().find(|l| l.starts_with(begin)).map(str::to_owned);
            let (shown, printed) = (line(&block.text).unwrap(), line(&found));
            let printed = printed.unwrap_or_else(|| panic!("{begin}: {found}"));
            assert!(
                printed.starts_with(shown.trim_end_matches('…')),
                "{}: {shown}\n{printed}",
                block.page
            );
        }
        ran += 1;
    }
    assert_eq!(ran, 2, "README and fuzz.md");
}
