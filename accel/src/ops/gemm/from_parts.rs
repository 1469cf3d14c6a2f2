//! Weights of what is in a device's memory already.

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;

use super::{
    MarlinWeight, ROW,
    form::{Form, Packed, PackedScales},
    weight::{RowOrder, Spec},
};
use crate::{device::Device, error::AccelError, memory::Buffer, ops::check};

/// The buffers of a packed weight.
#[derive(Debug)]
pub struct PackedParts {
    /// `[experts, K / 16, N · 16 / pack]`.
    pub qweight: Buffer<u32>,
    /// Bytes of `[experts, groups, N]`, in the kernel's order.
    pub scales: Buffer<u8>,
    /// `[experts, groups, N / 8]`.
    pub zeros: Option<Buffer<u32>>,
    /// `[experts, N]`, in the kernel's order.
    pub bias: Option<Buffer<u16>>,
    /// `[experts]`, of e2m1 codes with e4m3 scales.
    pub global_scale: Option<Buffer<f32>>,
}

impl MarlinWeight {
    /// A weight of buffers that hold what [`MarlinWeight::new`] packs. Their contents are not read.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for types, groups and sizes that the kernels do not take, and for buffers of other
    /// lengths or of another device.
    pub fn from_parts(
        device: &Device,
        packed: Packed,
        parts: PackedParts,
    ) -> Result<Self, AccelError> {
        let Packed { shape, experts, dtype, codes, groups, .. } = packed;
        let PackedParts { qweight, scales, zeros, bias, global_scale } = parts;
        check::is_bf16(&ROW, "dtype", dtype)?;
        let on_device = [
            ("qweight", qweight.is_on(device)),
            ("scales", scales.is_on(device)),
            ("zeros", zeros.as_ref().is_none_or(|zeros| zeros.is_on(device))),
            ("bias", bias.as_ref().is_none_or(|bias| bias.is_on(device))),
            ("global_scale", global_scale.as_ref().is_none_or(|scale| scale.is_on(device))),
        ];
        check::same_device(&ROW, device, &on_device)?;
        let Shape { size_k, size_n } = shape;
        let fits = size_k > 0 && size_k.is_multiple_of(64) && i32::try_from(size_k).is_ok();
        if !fits || size_n == 0 || !size_n.is_multiple_of(64) || size_n / 64 > 65535 {
            let expected = "multiples of 64, K below 2^31, N below 64 * 2^16";
            return Err(ROW.refuse("shape", shape, expected));
        }
        check::positive(&ROW, "experts", experts)?;
        let form = Form::of_packed(&packed)?;
        let has_zeros = codes == ScalarType::UINT4;
        let is_global = packed.scales == PackedScales::E4m3;
        if zeros.is_some() != has_zeros || (global_scale.is_some() && !is_global) {
            let found =
                format!("zeros: {}, global_scale: {}", zeros.is_some(), global_scale.is_some());
            let expected = "zeros exactly of uint4, a global scale only with e4m3 scales";
            return Err(ROW.refuse("parts", found, expected));
        }
        let bits =
            if matches!(codes, ScalarType::UINT8B128 | ScalarType::FLOAT8_E4M3FN) { 8 } else { 4 };
        let lengths = [
            ("qweight", Some(qweight.len()), [size_k / 16, size_n * 16 / 32 * bits]),
            ("scales", Some(scales.len()), [groups * form.scale_size(), size_n]),
            ("zeros", zeros.as_ref().map(Buffer::len), [groups, size_n / 8]),
            ("bias", bias.as_ref().map(Buffer::len), [1, size_n]),
            ("global_scale", global_scale.as_ref().map(Buffer::len), [1, 1]),
        ];
        for (what, found, [rows, columns]) in lengths {
            let expected = experts.checked_mul(rows).and_then(|rows| rows.checked_mul(columns));
            if let Some(found) = found.filter(|&found| Some(found) != expected) {
                let found = format!("{found} elements");
                return Err(ROW.refuse(what, found, format!("[{experts}, {rows}, {columns}]")));
            }
        }
        let spec = Spec {
            shape,
            experts,
            dtype,
            input_dtype: None,
            form,
            group_size: size_k / groups,
            groups,
            input_global_scale: 1.0,
            split: None,
        };
        Ok(Self { spec, qweight, scales, zeros, bias, global_scale, g_idx: None, order: None })
    }

    /// The same weight, which has the rank's rows of the model's and the bias on every rank:
    /// [`MarlinWeight::of_part`] for what was packed elsewhere.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of rows than the rank's, act-order over several ranks, and
    /// 8-bit activations.
    pub fn of_rank(self, split: Split) -> Result<Self, AccelError> {
        let whole = self.by_version_2()?;
        let (found, rows) = (whole.shape().size_k, split.rows().len());
        if found != rows {
            let expected = format!("{rows}, those of {split:?}");
            return Err(ROW.refuse("weight", format!("{found} rows"), expected));
        }
        if split.ranks() > 1 && whole.g_idx.is_some() {
            return Err(ROW.refuse("weight", "act-order over ranks", "the whole K on each rank"));
        }
        Ok(whole.with_split(split))
    }

    /// Copies the weight to other memory of the device.
    ///
    /// # Errors
    /// [`AccelError::Driver`] where the device has too little memory.
    pub fn copy(&self, device: &Device) -> Result<Self, AccelError> {
        let zeros = self.zeros.as_ref().map(|zeros| device.copy(zeros));
        let bias = self.bias.as_ref().map(|bias| device.copy(bias));
        let global_scale = self.global_scale.as_ref().map(|scale| device.copy(scale));
        let g_idx = self.g_idx.as_ref().map(|g_idx| device.copy(g_idx));
        let copied = |order: &RowOrder| -> Result<RowOrder, AccelError> {
            let RowOrder { perm, on_device } = order;
            Ok(RowOrder { perm: perm.clone(), on_device: device.copy(on_device)? })
        };
        Ok(Self {
            spec: self.spec,
            qweight: device.copy(&self.qweight)?,
            scales: device.copy(&self.scales)?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
            global_scale: global_scale.transpose()?,
            g_idx: g_idx.transpose()?,
            order: self.order.as_ref().map(copied).transpose()?,
        })
    }
}
