//! Parses [`Schedule`] from JSON and checks the rules that need no weight.

use serde_json::Value;

use super::{
    Chunks, GroupScale, GroupSum, MultiplyAdd, Order, Schedule, ScheduleError, Step, StepOp, Sum,
    WeightForm,
};
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{Accumulator, Unit};

type Result<T, E = ScheduleError> = std::result::Result<T, E>;

/// The largest k of a key, the index range of kernels.
const MAX_K: usize = (1 << 31) - 1;
/// Largest number of warps that share a tile, and of steps.
const MAX_WARPS: usize = 64;
const MAX_STEPS: usize = 16;
/// Largest number of chunks, since each takes memory in the executor.
pub(super) const MAX_CHUNKS: usize = 1 << 16;

impl Schedule {
    /// Reads a schedule from JSON text.
    ///
    /// # Errors
    /// [`ScheduleError::Json`] for malformed JSON and for repeated or unknown keys, with the key;
    /// otherwise as [`Schedule::validate`].
    pub fn parse(text: &str) -> Result<Self> {
        let mut de = serde_json::Deserializer::from_str(text);
        let schedule: Self = serde_path_to_error::deserialize(&mut de).map_err(json)?;
        let end = de.end();
        end.map_err(|e| ScheduleError::Json { key: ".".to_owned(), problem: e.to_string() })?;
        schedule.validate()?;
        Ok(schedule)
    }

    /// Reads a schedule from a JSON value.
    ///
    /// # Errors
    /// As [`Schedule::parse`].
    pub fn from_json(value: &Value) -> Result<Self> {
        let schedule: Self = serde_path_to_error::deserialize(value).map_err(json)?;
        schedule.validate()?;
        Ok(schedule)
    }

    /// The schedule as JSON.
    pub fn to_json(&self) -> Value {
        // Serialization cannot fail: there are only names, integers and lists.
        serde_json::to_value(self).unwrap_or(Value::Null)
    }

    /// The type of the output: the last step's.
    pub fn output_type(&self) -> ScalarType {
        self.epilogue.last().map_or(ScalarType::FLOAT32, |s| s.ty)
    }

    /// Checks what can be checked without a weight.
    ///
    /// # Errors
    /// [`ScheduleError::Value`], naming the key.
    pub fn validate(&self) -> Result<&'static Unit> {
        let unit = self.unit.find()?;
        let integer = unit.accumulator == Accumulator::S32;
        if self.weights.exponent.unsigned_abs() > 126 {
            let expected = "an integer from -126 to 126";
            return Err(ScheduleError::value("weights.exponent", self.weights.exponent, expected));
        }
        if integer && (self.weights.form != WeightForm::Unscaled || self.weights.exponent != 0) {
            let found = format!("{:?}", self.weights);
            return Err(ScheduleError::value("weights", found, "unscaled, for an integer unit"));
        }
        if integer && self.group_sum.is_none() {
            let expected = "group_sum, which makes an integer unit's sums f32";
            return Err(ScheduleError::value("group_sum", "none", expected));
        }
        if self.group_sum.is_some() && self.weights.form != WeightForm::Unscaled {
            let expected = "unscaled, since group_sum applies the scales";
            return Err(ScheduleError::value("weights.form", "scaled", expected));
        }
        if let Some(GroupSum { scale, multiply_add: MultiplyAdd::Integer, .. }) = self.group_sum
            && (!integer || scale == GroupScale::Stored)
        {
            let (found, expected) = ("integer", "an integer unit, and scales `one` or `int16`");
            return Err(ScheduleError::value("group_sum.multiply_add", found, expected));
        }
        if let Some(GroupSum { scale, row_scale: Some(_), .. }) = self.group_sum {
            if integer || scale != GroupScale::Stored {
                let expected =
                    "none, unless the unit sums floats and the groups' scales are `stored`";
                return Err(ScheduleError::value("group_sum.row_scale", "a row scale", expected));
            }
            if let Some(step) = self.steps().find(|s| s.op.scales_rows()) {
                let expected = "no step of the row's scale, which group_sum applies";
                return Err(ScheduleError::value("epilogue", name(step), expected));
            }
        }
        if let Some(every) = self.group_sum.and_then(|g| g.every) {
            length("group_sum.every", every, unit.size_k)?;
        }
        self.validate_chunks(unit.size_k)?;
        if let Some(stripes) = self.stripes {
            length("stripes.tile", stripes.tile, unit.size_k)?;
            if stripes.warps == 0
                || stripes.warps > MAX_WARPS
                || !stripes.tile.is_multiple_of(stripes.warps * unit.size_k)
            {
                let per = unit.size_k;
                let expected = format!("1 to {MAX_WARPS}, and {per} times it divides the tile");
                return Err(ScheduleError::value("stripes.warps", stripes.warps, expected));
            }
            sum("stripes.sum", stripes.sum)?;
            if stripes.sum.order == Order::Halving && !stripes.warps.is_power_of_two() {
                let expected = "a power of two, for the order `halving`";
                return Err(ScheduleError::value("stripes.warps", stripes.warps, expected));
            }
        }
        sum("chunk_sum", self.chunk_sum)?;
        if self.chunk_sum.order == Order::Halving {
            let expected = "ascending, descending or pairwise";
            return Err(ScheduleError::value("chunk_sum.order", "halving", expected));
        }
        self.validate_steps()?;
        Ok(unit)
    }

    fn validate_chunks(&self, size_k: usize) -> Result<()> {
        if let Some(chunks) = self.leaf_chunks
            && !(2..MAX_CHUNKS).contains(&chunks)
        {
            let expected = format!("from 2 to {}", MAX_CHUNKS - 1);
            return Err(ScheduleError::value("leaf_chunks", chunks, expected));
        }
        match &self.chunks {
            Chunks::Whole => Ok(()),
            Chunks::Size(n) => length("chunks.size", *n, size_k),
            Chunks::Boundaries(all) => {
                if all.len() >= MAX_CHUNKS {
                    let expected = format!("fewer than {MAX_CHUNKS} boundaries");
                    return Err(ScheduleError::value("chunks.boundaries", all.len(), expected));
                }
                for (i, &k) in all.iter().enumerate() {
                    let key = format!("chunks.boundaries[{i}]");
                    length(&key, k, size_k)?;
                    if i > 0 && k <= all[i - 1] {
                        let expected = format!("more than the one before, {}", all[i - 1]);
                        return Err(ScheduleError::value(key, k, expected));
                    }
                }
                Ok(())
            }
            Chunks::Striped(s) => {
                length("chunks.striped.tile", s.tile, size_k)?;
                // Columns of one group of lanes share their chunks.
                length("chunks.striped.columns", s.columns, crate::products::tensor_core::LANES)?;
                length("chunks.striped.run", s.run, 1)?;
                s.rows.map_or(Ok(()), |rows| length("chunks.striped.rows", rows, 1))
            }
        }
    }

    fn validate_steps(&self) -> Result<()> {
        if self.epilogue.is_empty() {
            return Err(ScheduleError::value(
                "epilogue",
                "no steps",
                "a step that rounds at least",
            ));
        }
        let mut scalings = 0;
        let lists = [
            ("warp_steps", &self.warp_steps),
            ("chunk_steps", &self.chunk_steps),
            ("epilogue", &self.epilogue),
        ];
        for (list, steps) in lists {
            if steps.len() > MAX_STEPS {
                let expected = format!("at most {MAX_STEPS} steps");
                return Err(ScheduleError::value(list, steps.len(), expected));
            }
            let mut narrow: Option<ScalarType> = None;
            for (i, step) in steps.iter().enumerate() {
                let key = |part: &str| format!("{list}[{i}].{part}");
                float_type(&key("type"), step.ty)?;
                let wide = step.ty == ScalarType::FLOAT32;
                match narrow {
                    Some(ty) if ty != step.ty => {
                        let expected = format!("{ty}, which the value already is");
                        return Err(ScheduleError::value(key("type"), step.ty, expected));
                    }
                    None if !wide && step.op != StepOp::Round => {
                        let expected = "`round` before the first step in a 16-bit type";
                        return Err(ScheduleError::value(key("op"), name(step), expected));
                    }
                    _ => {}
                }
                if !wide {
                    narrow = Some(step.ty);
                }
                if list != "epilogue" && !wide {
                    return Err(ScheduleError::value(key("type"), step.ty, "float32"));
                }
                scalings += usize::from(step.op.scales_channels());
            }
        }
        if scalings > 1 {
            return Err(ScheduleError::value("epilogue", "two channel scales", "one at most"));
        }
        let global = |s: &Step| matches!(s.op, StepOp::GlobalScale | StepOp::RouterWeightGlobal);
        let global = self.steps().any(global);
        let by_group = self.group_sum.is_some_and(|g| g.scale == GroupScale::Stored);
        if self.weights.exponent != 0 && scalings == 0 && !global && !by_group {
            let expected = "0, for no step applies a scale that could undo it";
            return Err(ScheduleError::value("weights.exponent", self.weights.exponent, expected));
        }
        Ok(())
    }

    /// All steps, in the order in which they are applied to a sum.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.warp_steps.iter().chain(&self.chunk_steps).chain(&self.epilogue)
    }

    /// Whether the channel scale is one of the steps.
    pub(super) fn scales_channels(&self) -> bool {
        self.steps().any(|s| s.op.scales_channels())
    }
}

impl StepOp {
    pub(super) fn scales_rows(self) -> bool {
        matches!(self, Self::ActivationScale | Self::ActivationScaleBias)
    }

    fn scales_channels(self) -> bool {
        matches!(self, Self::ChannelScale | Self::ChannelScaleBias | Self::ChannelScaleBiasMarlin)
    }
}

fn json(e: serde_path_to_error::Error<serde_json::Error>) -> ScheduleError {
    ScheduleError::Json { key: e.path().to_string(), problem: e.inner().to_string() }
}

fn name(step: &Step) -> String {
    serde_json::to_value(step.op).map_or_else(|_| String::new(), |v| v.to_string())
}

fn length(key: &str, found: usize, unit: usize) -> Result<()> {
    if found > 0 && found <= MAX_K && found.is_multiple_of(unit) {
        return Ok(());
    }
    Err(ScheduleError::value(key, found, format!("a positive multiple of {unit} below 2^31")))
}

fn float_type(key: &str, ty: ScalarType) -> Result<()> {
    if [ScalarType::FLOAT32, ScalarType::FLOAT16, ScalarType::BFLOAT16].contains(&ty) {
        return Ok(());
    }
    Err(ScheduleError::value(key, ty, "float32, float16 or bfloat16"))
}

fn sum(key: &str, sum: Sum) -> Result<()> {
    float_type(&format!("{key}.type"), sum.ty)
}
