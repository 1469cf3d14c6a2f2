//! Comparison of a block's stages with the derived bound of each, from the stages before it.

use marlinspike::moe::block::Near;
use marlinspike::{Error, Result};

use super::routes::{Floats, Routes};
use super::rows::{ExpertRows, points};
use super::stages::Stages;
use super::whole::WholeBlock;
use crate::run::output::{Check, Output};

/// The stages of a block that ran, in their order.
struct Ran<'o> {
    outputs: &'o [Output],
    worst: Check,
}

impl<'o> Ran<'o> {
    fn numbers(&self, name: &str) -> Option<Vec<f32>> {
        let found = self.outputs.iter().find(|o| o.name == name)?;
        Some(found.bits().map(|bits| found.ty.to_f64(bits) as f32).collect())
    }

    /// The numbers of a stage that every block has.
    fn need(&self, name: &str) -> Result<Vec<f32>> {
        self.numbers(name).ok_or_else(|| Error::missing(name, "the stages of the block"))
    }

    /// Compares a stage with its bound, unless the block lacks it; whether it is within.
    fn accepts(&mut self, name: &str, near: &[Near]) -> bool {
        let Some(found) = self.outputs.iter().find(|o| o.name == name) else { return true };
        let check = outside(found, near);
        let unbounded = check.unbounded.max(self.worst.unbounded);
        self.worst = Check { unbounded, ..check };
        self.worst.mismatches == 0
    }
}

impl WholeBlock {
    /// Compares every stage with its derived bound, and stops at the first that is outside. A bound
    /// is that of an implementation which has the stages before as they were found.
    pub(super) fn check(&self, x: &Floats, routes: &Routes, outputs: &[Output]) -> Result<Check> {
        let worst = Check { mismatches: 0, first: None, stage: None, unbounded: 0 };
        let mut ran = Ran { outputs, worst };
        self.judge(x, routes, &mut ran)?;
        Ok(ran.worst)
    }

    fn judge(&self, x: &Floats, routes: &Routes, ran: &mut Ran<'_>) -> Result<()> {
        let rows = |all: &[f32], stages: &Stages, width: usize| -> Vec<Near> {
            all.chunks_exact(width).flat_map(|row| stages.near(points(row), x.ty)).collect()
        };
        let [before, after] = &self.stages;
        if !ran.accepts("expert_input", &rows(&x.values, before, self.hidden)) {
            return Ok(());
        }
        let input = ran.numbers("expert_input").unwrap_or_else(|| x.values.clone());
        let down = ran.need("down")?;
        let output = ran.numbers("expert_output").unwrap_or_else(|| down.clone());
        let (gate_up, activated) = (ran.need("gate_up")?, ran.need("activated")?);
        let found = ExpertRows { gate_up, activated, down, output };
        let routed = routes.routed()?;
        let near = self.experts.near(&input, &found, routed, x.ty)?;
        let stages = [
            ("gate_up", &near.gate_up),
            ("activated", &near.activated),
            ("down", &near.down),
            ("expert_output", &near.output),
        ];
        if !stages.iter().all(|(name, near)| ran.accepts(name, near)) {
            return Ok(());
        }
        if !ran.accepts("y_experts", &self.experts.near_sum(&found.output, routed, x.ty)) {
            return Ok(());
        }
        let sum = ran.need("y_experts")?;
        if !ran.accepts("routed_output", &rows(&sum, after, self.experts.hidden)) {
            return Ok(());
        }
        let added = ran.numbers("routed_output").unwrap_or(sum);
        if self.surrounding.tail.shared.is_some()
            && !ran.accepts("shared", &self.near_shared(x, routes)?)
        {
            return Ok(());
        }
        let near = self.near_y(&added, ran.numbers("shared").as_deref(), x);
        ran.accepts("y", &near);
        Ok(())
    }

    /// The sum of the shared experts.
    fn near_shared(&self, x: &Floats, routes: &Routes) -> Result<Vec<Near>> {
        let shared = self.surrounding.tail.shared.as_ref();
        let Some((shared, experts)) = shared.and_then(|s| Some((s, s.nears()?))) else {
            return Err(Error::missing("shared experts", "the bound"));
        };
        let sum = self.experts.sum(x.ty);
        let mut all = Vec::with_capacity(x.values.len());
        for (t, x_row) in x.values.chunks_exact(self.hidden).enumerate() {
            let x_row: Vec<f64> = x_row.iter().map(|&x| x.into()).collect();
            let one = |(j, e): (usize, &marlinspike::moe::block::Shared)| {
                let weight = routes.shared.as_ref().map(|w| w[t * experts.len() + j]);
                e.apply(&x_row, &shared.activation, weight, x.ty)
            };
            let parts: Vec<Vec<Near>> = experts.iter().enumerate().map(one).collect();
            all.extend((0..self.hidden).map(|h| match &parts[..] {
                [part] => part[h],
                parts => sum.total(&parts.iter().map(|part| part[h]).collect::<Vec<_>>()),
            }));
        }
        Ok(all)
    }

    /// `y` of the routed part and the shared experts' sum.
    fn near_y(&self, routed: &[f32], shared: Option<&[f32]>, x: &Floats) -> Vec<Near> {
        let (tail, sum) = (&self.surrounding.tail, self.experts.sum(x.ty));
        let point = |v: f32| Near::point(v.into());
        let value = |i: usize| {
            let mut terms = vec![point(routed[i])];
            terms.extend(shared.map(|shared| point(shared[i])));
            terms.extend(tail.output_bias.as_ref().map(|b| point(b[i % self.hidden])));
            let y = if terms.len() > 1 { sum.total(&terms) } else { terms[0] };
            if tail.is_averaged { y.halved() } else { y }
        };
        let whole: Vec<Near> = (0..routed.len()).map(value).collect();
        whole.chunks_exact(self.hidden).flat_map(|y| tail.stages.near(y.to_vec(), x.ty)).collect()
    }
}

/// Values of an output outside the bound, and those without one.
fn outside(found: &Output, near: &[Near]) -> Check {
    let has_bound = |near: &Near| near.error.is_finite() && near.exact.is_finite();
    let accepts = |bits: u32, near: &Near| {
        !has_bound(near) || near.interval().rounded(found.ty).contains(found.ty.to_f64(bits))
    };
    let unbounded = near.iter().filter(|near| !has_bound(near)).count();
    let pairs = found.bits().zip(near.iter()).enumerate();
    let mut wrong = pairs.filter(|(_, (bits, near))| !accepts(*bits, near)).peekable();
    let first = wrong.peek().map(|(i, (bits, near))| {
        let at = [i / found.size_n, i % found.size_n];
        (at, *bits, found.ty.encode_rne(near.exact))
    });
    let missing = found.bits().count().abs_diff(near.len());
    Check { mismatches: wrong.count() + missing, first, stage: Some(found.name), unbounded }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use marlinspike::container::{Container, write_container};
    use marlinspike::num::scalar::ScalarType;

    use super::*;
    use crate::model::{Model, ModelFiles};
    use crate::run::block::dense::compensated;
    use crate::run::block::tail::Engine;
    use crate::run::block::whole::Stored;
    use crate::run::input::{Inputs, Sizes};
    use crate::run::list;
    use crate::run::options::Source;

    /// Writes a block of transformers as a model folder.
    fn write(name: &str, dir: &Path) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
        let bytes = fs::read(root.join(format!("{name}.safetensors"))).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let prefix = &file.metadata()["layer_prefix"];
        let no_weights = ["hidden_states", "router_weight", "correction_bias", "token_ids"];
        let own = file.tensors().filter_map(|t| {
            let t = t.unwrap().into_owned();
            let name = t.name().strip_prefix("in.")?.to_owned();
            (!no_weights.contains(&&*name)).then(|| t.renamed(format!("{prefix}{name}")))
        });
        let own: Vec<_> = own.collect();
        let bytes = write_container(&own, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(dir.join("model.safetensors"), bytes).unwrap();
        fs::write(dir.join("config.json"), &file.metadata()["config.json"]).unwrap();
    }

    /// A copy of an output whose largest value is wrong by `part` of it.
    fn damaged(found: &Output, part: f64) -> Output {
        let values: Vec<f64> = found.bits().map(|b| found.ty.to_f64(b)).collect();
        let largest =
            (0..values.len()).max_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs()));
        let wrong = |(i, v): (usize, &f64)| if Some(i) == largest { v * (1.0 + part) } else { *v };
        let values: Vec<f32> = values.iter().enumerate().map(|v| wrong(v) as f32).collect();
        Output::floats(found.name, found.ty, found.size_n, &values)
    }

    #[test]
    fn the_first_stage_outside_its_bound_is_named() {
        let mut stages = std::collections::BTreeSet::new();
        let names = ["muse_spark-small", "nemotron_h-latent-small", "inkling-small", "qwen3_moe"];
        for (name, ty) in
            names.into_iter().zip([ScalarType::FLOAT32, ScalarType::BFLOAT16].iter().cycle())
        {
            let temp = tempfile::tempdir().unwrap();
            write(name, temp.path());
            let module = list(temp.path(), None).unwrap().remove(0);
            let files = ModelFiles::open(temp.path()).unwrap();
            let model = Model::new(&files).unwrap();
            let block = WholeBlock::read(&model, &module, Stored::Plain).unwrap();
            let sizes =
                Sizes { size_k: block.hidden, num_experts: Some(block.scores), has_router: true };
            let source = Source::Seeded { seed: 5, tokens: 4, dtype: *ty };
            let mut inputs: Inputs<Floats> = Inputs::seeded(5, 4, *ty, sizes).unwrap();
            let tokens = block.tokens(&source, &inputs).unwrap();
            let router = block.surrounding.router.as_ref().unwrap();
            let Inputs { x, routing } = &mut inputs;
            router.fill(&x.values, *ty, None, routing, false).unwrap();
            let routes = block.routes(x, routing, &tokens).unwrap();
            let refuse =
                |_: &marlinspike::method::Product<'_>| unreachable!("nothing is quantized");
            let engine = Engine { dot: compensated, multiply: &refuse };
            let outputs = block.forward(x, &routes, engine).unwrap();
            let fine = block.check(x, &routes, &outputs).unwrap();
            assert_eq!((fine.mismatches, fine.stage, fine.unbounded), (0, Some("y"), 0), "{name}");
            for i in 0..outputs.len() {
                // In bf16 a sum may be wrong by a rounding for each of its terms.
                let part = if *ty == ScalarType::FLOAT32 { 1e-4 } else { 0.125 };
                let all: Vec<Output> = outputs
                    .iter()
                    .enumerate()
                    .map(|(j, o)| damaged(o, if i == j { part } else { 0.0 }))
                    .collect();
                let found = block.check(x, &routes, &all).unwrap();
                assert_eq!(found.stage, Some(outputs[i].name), "{name}");
                assert!(found.mismatches > 0, "{name}: {}", outputs[i].name);
                stages.insert(outputs[i].name);
            }
        }
        let all = [
            "activated",
            "down",
            "expert_input",
            "expert_output",
            "gate_up",
            "routed_output",
            "shared",
            "y",
            "y_experts",
        ];
        assert!(stages.into_iter().eq(all));
    }
}
