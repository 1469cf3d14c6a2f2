//! The stages of an expert layer. Each takes the previous stage's output: the device's if it
//! computed one, else the recorded one.

use marlinspike::case::{CaseConfig, MoeConfig, ScheduleChoice};
use marlinspike::check::LayerSource;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};

use super::operations::Operations;
use super::{BackendError, CaseRun, Computed};
use crate::error::AccelError;
use crate::ops::{activation::Activate, products::ExpertProduct, sum::SumSlots};

const STAGES: [&str; 4] = ["gate_up", "activated", "down", "y"];

impl<O: Operations> CaseRun<'_, O> {
    /// Alignment and stages of a layer.
    pub(super) fn stages(&mut self, c: &MoeConfig) -> Result<(), BackendError> {
        let names = ["sorted_token_ids", "expert_ids", "num_tokens_post_padded"];
        let wanted = |name: &&str| self.case.output(name).is_some();
        if !names.iter().any(wanted) && !STAGES.iter().any(wanted) {
            return Ok(());
        }
        let source = LayerSource::new(self.case, c)?;
        let (layer, routed) = (source.layer(), source.routed());
        self.align(routed.ids(), c.num_experts, c.block_size_m)?;

        let Some(last) = STAGES.iter().rposition(|name| self.case.output(name).is_some()) else {
            return Ok(());
        };
        // The judge takes the routing from the case too.
        let shape = vec![c.size_m, c.top_k];
        let routing = [
            Tensor::from_vec("topk_ids", DType::I32, shape.clone(), routed.ids().to_vec())?,
            Tensor::from_vec("topk_weights", DType::F32, shape, routed.weights().to_vec())?,
        ];
        let mut before: Computed<Vec<u16>> = match self.case.inputs.get("x") {
            Some(_) if c.rules.router_weight_on_x => {
                Err("no kernel applies router weights to x".to_owned())
            }
            Some(x) => Ok(x.elements::<u16>().into_owned()),
            None => Err("the case has no x".to_owned()),
        };
        for (stage, name) in STAGES.into_iter().enumerate().take(last + 1) {
            let known = before.clone();
            let (made, wrong) = match &known {
                Ok(_) if name == "y" && self.case.inputs.contains_key("shared_output") => {
                    (Err("no kernel adds a shared expert's output".to_owned()), 0)
                }
                Ok(values) => self.attempt(|o| stage_of(o, stage, c, &layer, routed, values))?,
                Err(reason) => (Err(reason.clone()), 0),
            };
            match (&made, self.case.output(name)) {
                (Ok(values), Some(_)) => {
                    let mut context = routing.to_vec();
                    if stage > 0
                        && let Ok(values) = &known
                    {
                        context.push(self.tensor(c, stage - 1, values.clone())?);
                    }
                    let made = self.tensor(c, stage, values.clone())?;
                    match stage {
                        0 => self.judge_product(made, &context, wrong, |config, choice| {
                            schedules(config, [choice, None]);
                        })?,
                        2 => self.judge_product(made, &context, wrong, |config, choice| {
                            schedules(config, [None, choice]);
                        })?,
                        _ => self.judge(made, &context, wrong)?,
                    }
                }
                (Err(reason), Some(_)) => self.absent(name, reason),
                (_, None) => {}
            }
            // If the device cannot compute a stage, the next one takes the recorded values.
            let recorded = self.case.output(name).map(|t| t.elements::<u16>().into_owned());
            before = made.or_else(|reason| recorded.ok_or(reason));
        }
        Ok(())
    }

    /// A stage's values as the case's tensor.
    fn tensor(
        &self,
        c: &MoeConfig,
        stage: usize,
        values: Vec<u16>,
    ) -> Result<Tensor<'static>, BackendError> {
        let rows = c.size_m * c.top_k;
        let shape = match stage {
            0 => vec![rows, c.w13_size_n()],
            1 => vec![rows, c.intermediate_size],
            2 => vec![rows, c.hidden_size],
            _ => vec![c.size_m, c.hidden_size],
        };
        let dtype = if c.quant.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 };
        Ok(Tensor::from_vec(STAGES[stage], dtype, shape, values)?)
    }
}

/// One stage, computed from the previous stage's values.
fn stage_of<O: Operations>(
    o: &O,
    stage: usize,
    c: &MoeConfig,
    layer: &Layer<'_>,
    routed: Routed<'_>,
    before: &[u16],
) -> Result<Vec<u16>, AccelError> {
    let experts = |weights, top_k, weighted: bool| {
        o.run(&ExpertProduct {
            weights,
            quant: &c.quant,
            num_experts: c.num_experts,
            expert_map: layer.expert_map,
            top_k,
            topk_ids: routed.ids(),
            topk_weights: weighted.then(|| routed.weights()),
            x: before,
        })
    };
    let on_input = layer.router_weight_on_input;
    let dtype = layer.dtype;
    match stage {
        0 => experts(layer.w13, c.top_k, on_input),
        1 => {
            let (definition, size_i) = (&layer.activation, c.intermediate_size);
            o.run(&Activate { definition, gate_up: before, dtype, size_i })
        }
        2 => experts(layer.w2, 1, !on_input),
        _ => o.run(&SumSlots { down: before, dtype, top_k: c.top_k, size_n: c.hidden_size }),
    }
}

/// Sets the schedules of `gate_up` and `down`.
fn schedules(config: &mut CaseConfig, [w13, w2]: [Option<ScheduleChoice>; 2]) {
    if let CaseConfig::Moe(c) = config {
        (c.schedule_w13, c.schedule_w2) = (w13, w2);
    }
}
