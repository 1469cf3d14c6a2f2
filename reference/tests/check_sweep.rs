//! Wrong shapes and config values over all operations: no panic, memory within the stated bound,
//! and no wrong shape that passes or hides the verdicts on other outputs.

mod sweep;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use marlinspike::case::{Case, Limits};
use marlinspike::check::{CaseReport, Verdict, check_case};
use marlinspike::{Error, panics};
use marlinspike_golden::Tier;
use sweep::Raw;

/// The system's allocator, counting the bytes in use and their maximum.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is forwarded to the system's allocator with unchanged arguments; reallocation
// is the default implementation, which calls `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(now, Relaxed);
        // SAFETY: the caller guarantees the conditions of `System::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(now, Relaxed);
        // SAFETY: the caller guarantees the conditions of `System::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller guarantees the conditions of `System::dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The results of a sweep.
#[derive(Default)]
struct Sweep {
    checked: usize,
    /// Number of checks that gave a verdict.
    verdicts: usize,
    /// Largest allowed number of unwanted results.
    wrong: Vec<String>,
    /// Largest share of the stated memory.
    memory: (f64, String),
}

impl Sweep {
    /// Checks `raw`; panics and excessive memory are recorded as faults.
    fn check(&mut self, raw: &Raw, what: &str) -> Option<CaseReport> {
        let bytes = raw.bytes();
        let label = || format!("{}: {what}", raw.label);
        let before = IN_USE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let checked = panics::catch(|| check_case(&Case::parse(&bytes)?));
        let peak = PEAK.load(Relaxed) - before;
        let share = peak as f64 / Limits::memory(bytes.len() as u64) as f64;
        if share > self.memory.0 {
            self.memory = (share, label());
        }
        if share > 1.0 {
            self.wrong.push(format!("{}: {peak} bytes of memory", label()));
        }
        self.checked += 1;
        match checked {
            Ok(report) => {
                self.verdicts += 1;
                Some(report)
            }
            Err(error @ Error::Internal { .. }) => {
                self.wrong.push(format!("{}: {error}", label()));
                None
            }
            Err(_) => None,
        }
    }

    /// An output of another shape or type fails, and every other one still has its verdict.
    fn output(&mut self, changed: &Raw, name: &str, base: &CaseReport, what: &str) {
        let Some(report) = self.check(changed, what) else {
            let text = format!("{}: {what}: an error, not a verdict", changed.label);
            return self.wrong.push(text);
        };
        let mut wrong =
            |text: String| self.wrong.push(format!("{}: {what}: {text}", changed.label));
        for output in &report.outputs {
            let before = base.outputs.iter().find(|o| o.name == output.name);
            let passed = before.is_some_and(|o| o.verdict == Verdict::Pass);
            match output.verdict {
                Verdict::Pass if output.name == name => wrong("passes".to_owned()),
                Verdict::Fail if output.name != name && passed => {
                    wrong(format!("`{}` fails with it: {:?}", output.name, output.diagnosis));
                }
                _ => {}
            }
        }
        if report.outputs.len() != base.outputs.len() {
            wrong(format!("{} reports", report.outputs.len()));
        }
    }

    fn shapes(&mut self, raw: &Raw, base: &CaseReport) {
        for (i, tensor) in raw.tensors.iter().enumerate() {
            let mut changes: Vec<_> =
                sweep::shapes(tensor.shape()).into_iter().map(|s| (tensor.dtype(), s)).collect();
            changes.extend(sweep::dtypes(tensor.dtype()).map(|d| (d, tensor.shape().to_vec())));
            for (dtype, shape) in changes {
                let what = format!("{} as {dtype} {shape:?}", tensor.name());
                let changed = raw.reshaped(i, dtype, shape.clone());
                // One value may represent a stack of experts.
                let single = shape.is_empty() && tensor.name().ends_with("input_global_scale");
                let output = tensor.name().strip_prefix("out.").filter(|_| !single);
                match output {
                    Some(name) => self.output(&changed, name, base, &what),
                    None => drop(self.check(&changed, &what)),
                }
            }
            self.check(&raw.without(&[tensor.name()]), &format!("without {}", tensor.name()));
        }
    }

    fn configs(&mut self, raw: &Raw, names: &BTreeSet<String>) {
        // Lists of values have equal lengths: `i / 5` brings each value's turn at some key.
        let turn = |i: usize| (i + i / 5).is_multiple_of(step());
        let configs = sweep::configs(&raw.config(), names).into_iter().enumerate();
        for (_, (what, config)) in configs.filter(|(i, _)| turn(*i)) {
            self.check(&raw.with_config(&config), &what);
        }
    }
}

/// One config in this many.
fn step() -> usize {
    Tier::current().pick(16, 2, 1)
}

/// The only test of this file, since the allocations of another test would be counted, too.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_shape_or_config_value_takes_the_checker_down() {
    let bases = sweep::bases();
    let mut names = BTreeSet::new();
    bases.iter().for_each(|raw| sweep::names(&raw.config(), &mut names));
    let mut sweep = Sweep::default();
    // A plain `cargo test` takes every second operation's case.
    for raw in bases.iter().step_by(Tier::current().pick(2, 1, 1)) {
        let (start, before) = (Instant::now(), sweep.checked);
        let base = sweep.check(raw, "unchanged").expect("a generated case has a verdict");
        sweep.shapes(raw, &base);
        sweep.configs(raw, &names);
        // Sizes that no tensor has now.
        let routing = ["in.router_logits", "in.expert_map", "in.x"];
        sweep.configs(&raw.without(&routing), &names);
        println!(
            "{}: {} bytes, {} checks in {:.2?}",
            raw.label,
            raw.bytes().len(),
            sweep.checked - before,
            start.elapsed()
        );
    }
    for raw in sweep::large() {
        sweep.memory.0 = 0.0;
        assert!(sweep.check(&raw, "many rows").is_some(), "{}", raw.label);
        println!("{}: {:.2} of the memory limit", raw.label, sweep.memory.0);
    }
    println!(
        "{} checks, {} verdicts; most memory: {:.4} of the limit, {}",
        sweep.checked, sweep.verdicts, sweep.memory.0, sweep.memory.1
    );
    let shown = sweep.wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
    assert!(sweep.wrong.is_empty(), "{} wrong:\n{shown}", sweep.wrong.len());
    assert!(sweep.verdicts > 1000 / step(), "{} verdicts", sweep.verdicts);
}
