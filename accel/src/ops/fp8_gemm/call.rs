//! Products of e4m3fn operands on host memory.

use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Fp8BlockKernel, Fp8Kernel, Schedule};
use marlinspike::weight::Weight;

use super::{
    Fp8Scales, Fp8Sums, Fp8Weight, ROW, RowsFp8, fp8_gemm,
    weight::{check_sums, scales_of},
};
use crate::{
    call::{Call, low_halves},
    device::Device,
    error::AccelError,
    operation::Row,
    ops::quantize::fp8_scale_step,
};

/// x `[M, K]` times a matrix, both e4m3fn.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Product<'a> {
    /// The matrix.
    pub weight: &'a Weight<'a>,
    /// Type of the outputs.
    pub dtype: ScalarType,
    /// `[M, K]`.
    pub codes: &'a [u8],
    /// `[M]`, or `[M, K / 128]` where the weight has groups.
    pub scales: &'a [f32],
    /// How products are summed.
    pub sums: Fp8Sums,
}

impl Fp8Product<'_> {
    /// The schedule that the kernel computes for this weight.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight or outputs that it does not take.
    pub fn schedule(&self) -> Result<Schedule, AccelError> {
        let scales = scales_of(self.weight)?;
        check_sums(scales, self.sums)?;
        let is_promoted = self.sums == Fp8Sums::Promoted;
        let schedule = match scales {
            Fp8Scales::Channels => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, self.dtype, is_promoted),
            Fp8Scales::Blocks => Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, self.dtype),
        };
        schedule.map_err(|error| ROW.refuse("dtype", error, "float16 or bfloat16"))
    }
}

impl Call for Fp8Product<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn validate(&self) -> Result<(), AccelError> {
        self.schedule().map(drop)
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        let weight = Fp8Weight::new(device, std::slice::from_ref(self.weight), self.dtype)?;
        let weight = weight.summed(self.sums)?;
        let shape = weight.shape();
        let (size_m, groups) = (self.codes.len() / shape.size_k, self.weight.scales.rows());
        let scales = match weight.scales_of() {
            Fp8Scales::Channels => device.upload(self.scales)?,
            Fp8Scales::Blocks => {
                let step = fp8_scale_step(size_m);
                let of_row = |i: usize| (i % step < size_m).then(|| i % step * groups + i / step);
                let value =
                    |i| of_row(i).and_then(|at| self.scales.get(at)).copied().unwrap_or_default();
                device.upload(&(0..groups * step).map(value).collect::<Vec<_>>())?
            }
        };
        let codes = device.upload(self.codes)?;
        let mut y = device.zeroed(size_m * shape.size_n)?;
        let x = RowsFp8 { codes: &codes, scales: &scales };
        fp8_gemm(device, x, &weight, &mut y)?;
        device.download(&y)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let schedule = self.schedule().map_err(|error| {
            marlinspike::Error::unsupported(error, "scales of channels or 128 x 128 blocks")
        })?;
        let x: Vec<u32> = self.codes.iter().map(|&code| code.into()).collect();
        let extras = Extras { activation_scales: Some(self.scales), ..Extras::default() };
        let x = rows_of("x", &x, self.weight.shape().size_k)?;
        schedule.execute(x, self.weight, extras).map(low_halves)
    }
}
