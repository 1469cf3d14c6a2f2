//! Products of e4m3fn activations and weights.

use marlinspike::case::{Case, Fp8Operands};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::schedule::ScheduleChoice;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use super::{BackendError, CaseRun, Operations};
use crate::ops::fp8_gemm::{Fp8Product, Fp8Sums};

impl<O: Operations> CaseRun<'_, O> {
    /// `y` of a product of e4m3fn operands, judged by the bits of the kernel's schedule.
    pub(super) fn fp8_product(&mut self, c: Fp8Operands) -> Result<(), BackendError> {
        let Some(recorded) = self.case.output("y") else { return Ok(()) };
        let weight = weight(self.case, &c)?;
        let mut scales = floats(self.case.input("a_scales")?);
        if c.block.is_none() {
            scales = scales.iter().copied().cycle().take(c.size_m).collect();
        }
        let (dtype, codes) = (c.dtype, self.case.input("a")?.bytes());
        let product = |sums| Fp8Product { weight: &weight, dtype, codes, scales: &scales, sums };
        // By the declared schedule, where it is one of the kernel's.
        let declares = |sums| match (&c.schedule, product(sums).schedule()) {
            (Some(ScheduleChoice::Given(declared)), Ok(own)) => **declared == own,
            _ => false,
        };
        let sums = match declares(Fp8Sums::Unpromoted) {
            true => Fp8Sums::Unpromoted,
            false => Fp8Sums::Promoted,
        };
        let product = product(sums);
        let (made, wrong) = self.attempt(|o| Ok((o.run(&product)?, product.schedule()?)))?;
        let (y, schedule) = match made {
            Ok(made) => made,
            Err(reason) => {
                self.absent("y", &reason);
                return Ok(());
            }
        };
        let y = Tensor::from_vec("y", recorded.dtype(), recorded.shape().to_vec(), y)?;
        let Some(config) = self.case.config.with_schedule(schedule) else {
            self.absent("y", "its config states no schedule");
            return Ok(());
        };
        let report = self.judged(&y, &[], &config, self.declared)?;
        self.push(report, &y, wrong);
        Ok(())
    }
}

/// The values of f32 or UE8M0 scales.
fn floats(tensor: &Tensor<'_>) -> Vec<f32> {
    let ty = ScalarType::FLOAT8_E8M0FNU;
    match tensor.dtype() {
        DType::F32 => tensor.elements::<f32>().into_owned(),
        _ => tensor.bytes().iter().map(|&byte| ty.to_f64(byte.into()) as f32).collect(),
    }
}

/// The weight of a case, whose scales are repeated for each column.
fn weight(case: &Case<'_>, c: &Fp8Operands) -> Result<Weight<'static>, BackendError> {
    let (size_k, size_n) = (c.size_k, c.size_n);
    let (bytes, scales) = (case.input("weight")?.bytes(), floats(case.input("weight_scale")?));
    let (groups, group_size) = match c.block {
        Some(block) => (size_k.div_ceil(block.k), GroupSize::Of(block.k)),
        None => (1, GroupSize::Channel),
    };
    let scale = |i: usize| match c.block {
        Some(block) => scales[i % size_n / block.n * groups + i / size_n],
        None => scales[i % scales.len()],
    };
    let bits = (0..groups * size_n).map(|i| scale(i).to_bits()).collect();
    let bias = c.has_bias.then(|| case.input("bias")).transpose()?;
    Ok(Weight {
        name: "weight".into(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes: Codes::from_fn(8, Shape::new(size_k, size_n), |k, n| bytes[n * size_k + k])?,
        scales: Table::new(ScalarType::FLOAT32, groups, size_n, TableData::B32(bits))?,
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias: bias.map(|bias| Table::from_tensor(bias, c.dtype)).transpose()?,
    })
}
