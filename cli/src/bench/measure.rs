//! From arguments to measurements.

use std::time::Duration;

use anyhow::{Context as _, Result};
use marlinspike::num::dims::GroupSize;
use marlinspike::w4a8::limits::Instruction;
use marlinspike::w4a8::{Kernel, fastest, kernels};
use marlinspike_bench::limits::{Effort, Limits};
use marlinspike_bench::ours::{self, Ours, Weights};
use marlinspike_bench::timing::{Budget, race};
use marlinspike_bench::{Workload, machine, threads, workload};
use rayon::ThreadPool;

use super::args::Cpu;
use super::report::{Case, Machine, Report, Row};
use crate::error::Explained;

/// Validated benchmark parameters.
pub(super) struct Plan {
    shapes: Vec<Workload>,
    tokens: Vec<usize>,
    threads: Vec<usize>,
    groups: Vec<GroupSize>,
    budget: Budget,
    effort: Effort,
    cold_bytes: usize,
    kernel: String,
    pinned: bool,
}

/// `given`, or `default` if it is empty.
fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

impl Plan {
    /// Returns an error for an unknown kernel, a group size that does not divide K, and weights
    /// that exceed the available memory.
    pub(super) fn new(args: &Cpu) -> Result<Self> {
        let named = workload::NAMED.map(|(_, workload)| workload);
        let [few, all] = [&[named[0], named[3]], named.as_slice()];
        let groups = [GroupSize::Of(32), GroupSize::Of(128), GroupSize::Channel];
        let [quick_seconds, seconds] = [0.5, 2.0];
        let mut counts = vec![1];
        counts.extend(Some(threads::available() as u32).filter(|&n| n > 1));
        let plan = Self {
            shapes: or(&args.shapes, if args.quick { few } else { all }),
            tokens: numbers(&or(
                &args.tokens,
                if args.quick { &[1, 64] } else { &[1, 8, 64, 512] },
            )),
            threads: numbers(&or(&args.threads, &counts)),
            groups: or(&args.groups, if args.quick { &groups[..1] } else { &groups }),
            budget: Budget {
                calls: args.calls.unwrap_or(if args.quick { 10 } else { 50 }) as usize,
                time: Duration::from_secs_f64(args.seconds.unwrap_or(if args.quick {
                    quick_seconds
                } else {
                    seconds
                })),
            },
            effort: if args.quick { Effort::quick() } else { Effort::full() },
            cold_bytes: if args.warm { 0 } else { machine::cold_bytes() },
            kernel: kernel_name(args.kernel.as_deref())?,
            pinned: !args.no_pin,
        };
        plan.check_groups()?;
        plan.check_memory()?;
        Ok(plan)
    }

    fn check_groups(&self) -> Result<()> {
        for &shape in &self.shapes {
            for &group in &self.groups {
                ours::check(shape, group).map_err(|error| {
                    let help = "choose a group size that divides K, and for a layer both H and I";
                    Explained::new(format!("{shape}: {error}"), help)
                })?;
            }
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<()> {
        let Some(available) = machine::available_memory() else { return Ok(()) };
        let tokens = self.tokens.iter().copied().max().unwrap_or(1) as u64;
        for shape in &self.shapes {
            // At most 4.5 bits per weight and 12 bytes per column, the buffer of the limits, and
            // the rows of every stage in f32.
            let weights = shape.weights() * 5 / 8 + 2 * self.cold_bytes as u64;
            let [a, b] = shape.sizes().map(|size| size as u64);
            let top_k = match *shape {
                Workload::Dense { .. } => 1,
                Workload::Moe { top_k, .. } => top_k as u64,
            };
            let rows = tokens.saturating_mul(8 * (a + b)).saturating_mul(top_k);
            let needed = weights.saturating_add(rows).saturating_add(self.effort.read_bytes as u64);
            if needed > available {
                let gb = |bytes: u64| bytes as f64 / 1e9;
                let message = format!(
                    "{shape}: needs {:.1} GB of memory, {:.1} GB are available",
                    gb(needed),
                    gb(available)
                );
                return Err(
                    Explained::new(message, "choose a smaller shape or fewer tokens").into()
                );
            }
        }
        Ok(())
    }

    /// Measures the limits before and after the cases.
    pub(super) fn measure(&self) -> Result<Report> {
        let cpus = if self.pinned { threads::cpus() } else { Vec::new() };
        let pool =
            |&n| threads::pool(n, &cpus).with_context(|| format!("{n} threads cannot be started"));
        let pools: Vec<ThreadPool> = self.threads.iter().map(pool).collect::<Result<_>>()?;
        let instruction = Instruction::of_kernel(&self.kernel);
        let limits = || -> Vec<Limits> {
            pools.iter().map(|pool| Limits::measure(pool, instruction, self.effort)).collect()
        };
        let before = limits();
        let mut cases = Vec::new();
        for &shape in &self.shapes {
            for &group in &self.groups {
                let kernel = || kernel(&self.kernel).unwrap_or_else(fastest);
                let weights = Weights::new(shape, group, self.cold_bytes, kernel)?;
                for &tokens in &self.tokens {
                    for pool in &pools {
                        cases.push(self.case(pool, shape, group, &weights, tokens));
                    }
                }
            }
        }
        let limits: Vec<Limits> =
            before.into_iter().zip(limits()).map(|(before, after)| before.better(after)).collect();
        let cpus = threads::cpus();
        let pinned = self.pinned && self.threads.iter().all(|&n| n <= cpus.len());
        let machine = Machine {
            cpu: machine::cpu_name(),
            last_level_cache: machine::last_level_cache(),
            kernel: self.kernel.clone(),
            instruction: instruction.map(Instruction::name),
            pinned,
        };
        let rows = cases.into_iter().map(|case| Row::new(case, &limits)).collect();
        Ok(Report { machine, limits, results: rows })
    }

    fn case(
        &self,
        pool: &ThreadPool,
        shape: Workload,
        group: GroupSize,
        weights: &Weights,
        tokens: usize,
    ) -> Case {
        let mut ours = Ours::new(pool, shape, weights, tokens);
        let bytes_read = ours.bytes_read();
        let seconds = race(&mut [&mut ours], self.budget)[0];
        let threads = pool.current_num_threads();
        Case { shape, group, tokens, threads, weight_bytes: weights.bytes(), bytes_read, seconds }
    }
}

fn numbers(given: &[u32]) -> Vec<usize> {
    given.iter().map(|&n| n as usize).collect()
}

fn kernel(name: &str) -> Option<Box<dyn Kernel>> {
    kernels().into_iter().find(|kernel| kernel.name() == name)
}

/// The requested kernel, or the fastest one.
fn kernel_name(name: Option<&str>) -> Result<String> {
    let Some(name) = name else { return Ok(fastest().name().to_owned()) };
    let names: Vec<_> = kernels().iter().map(|k| k.name()).collect();
    if !names.contains(&name) {
        let help = format!("this CPU supports {}", names.join(", "));
        return Err(Explained::new(format!("--kernel {name}: no such kernel here"), help).into());
    }
    Ok(name.to_owned())
}
