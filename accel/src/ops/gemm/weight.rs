//! A weight in Marlin's layout in a device's memory.

use marlinspike::act_order::Sorted;
use marlinspike::layouts::marlin::{InputDtype, Options, Prepared, ScalePermutation, prepare};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Cut, Part, Split};
use marlinspike::weight::{Table, Weight};

use super::{ManyRows, ROW, Tiling, form::Form, tiling::Width};
use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, bytes, halves},
};

/// One matrix, or a stack of experts of one shape, in Marlin's layout for 16-bit or 8-bit activations.
#[derive(Debug)]
pub struct MarlinWeight {
    pub(super) spec: Spec,
    /// `[experts, K / 16, N · 16 / pack]`.
    pub(crate) qweight: Buffer<u32>,
    /// `[experts, groups, N]`, of one or two bytes each.
    pub(crate) scales: Buffer<u8>,
    /// `[experts, groups, N / 8]`.
    pub(crate) zeros: Option<Buffer<u32>>,
    /// `[experts, N]`.
    pub(crate) bias: Option<Buffer<u16>>,
    /// `[experts]`.
    pub(crate) global_scale: Option<Buffer<f32>>,
    /// `[experts, K]`, where groups have several sizes.
    pub(crate) g_idx: Option<Buffer<u32>>,
    /// Present with act-order.
    pub(super) order: Option<RowOrder>,
}

/// Sizes and types of a weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spec {
    pub(super) shape: Shape,
    pub(super) experts: usize,
    pub(super) dtype: ScalarType,
    pub(super) input_dtype: Option<ScalarType>,
    pub(super) form: Form,
    /// k of a scale group; all of k where there is one.
    pub(super) group_size: usize,
    pub(super) groups: usize,
    pub(super) input_global_scale: f32,
    /// The rows of the model's weight that these are, for version 2 of the canonical schedule.
    pub(super) split: Option<Split>,
}

/// The order of the rows of act-order weights, `[experts, K]`, on the host and on the device.
#[derive(Debug)]
pub(super) struct RowOrder {
    pub(super) perm: Vec<u32>,
    pub(super) on_device: Buffer<u32>,
}

impl MarlinWeight {
    /// Packs `weights` for activations of `dtype` (float16 or bfloat16) and copies them to the
    /// device. K is a multiple of 64. Scales of 16 bits are converted to `dtype` first, as Marlin's
    /// preparation does. A slice of k with act-order, whose groups are of several sizes, is taken of
    /// `uint4b8` and `uint8b128`.
    ///
    /// | codes | scales | groups of k |
    /// | --- | --- | --- |
    /// | `uint4b8`, `uint4` with zero points, `uint8b128` | 16-bit | 32, multiples of 64, one |
    /// | `float8_e4m3fn`, no NaN | 16-bit, below 256 | multiples of 64, one |
    /// | `float8_e4m3fn`, no NaN; `float4_e2m1f` | e8m0 up to 2^126; `dtype` bfloat16 | 32 |
    /// | `float4_e2m1f` | e4m3, not negative; with or without a global scale | 16 |
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight that the kernel or the layout refuses;
    /// [`AccelError::Driver`] where the device has too little memory.
    pub fn new(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
    ) -> Result<Self, AccelError> {
        Self::sorted(device, weights, dtype, None)
    }

    /// Packs `weights` for activations of `input` (int8 or e4m3) and outputs of `dtype` (float16 or
    /// bfloat16) and copies them to the device. K is a multiple of 128, below 2^19; there is no act-order. Scales of 16
    /// bits are converted to `dtype` first, as Marlin's preparation does.
    ///
    /// | codes | scales | groups of k |
    /// | --- | --- | --- |
    /// | `uint4b8`, `uint4` with zero points | 16-bit; of e4m3 activations 512 times each is finite | 32, 64, 128, one |
    /// | `float4_e2m1f`; `input` e4m3, `dtype` bfloat16 | e8m0 up to 2^121 | 32 |
    ///
    /// # Errors
    /// As [`MarlinWeight::new`].
    pub fn for_8_bit(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
        input: ScalarType,
    ) -> Result<Self, AccelError> {
        let refuse = |what, found: String, expected: &str| Err(ROW.refuse(what, found, expected));
        let input_dtype = match input {
            ScalarType::INT8 => InputDtype::Int8,
            ScalarType::FLOAT8_E4M3FN => InputDtype::Fp8,
            _ => return refuse("input", input.to_string(), "int8 or float8_e4m3fn"),
        };
        let Some(first) = weights.first() else {
            return refuse("weight", "no matrix".into(), "1 or more");
        };
        let Shape { size_k, size_n } = first.shape();
        if !size_k.is_multiple_of(128) || size_k >= 1 << 19 {
            return refuse("size_k", size_k.to_string(), "a multiple of 128, below 2^19");
        }
        if size_n > i32::MAX as usize {
            return refuse("size_n", size_n.to_string(), "below 2^31");
        }
        let form = Form::of_bytes(weights, dtype, input)?;
        let prepared = prepared(weights, Options { input_dtype, ..Options::new(dtype) })?;
        let scales = bytes(&prepared.scales);
        let mut this = Self::upload(device, weights, dtype, &prepared, form, &scales)?;
        this.spec.input_dtype = Some(input);
        Ok(this)
    }

    /// [`MarlinWeight::new`] with the permutation that sorts each matrix's `g_idx`; stable ones where
    /// absent.
    pub(crate) fn sorted(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
        perms: Option<&[Vec<u32>]>,
    ) -> Result<Self, AccelError> {
        let refuse = |what, found: String, expected: &str| Err(ROW.refuse(what, found, expected));
        // The kernel's order, which does not depend on the configuration's group size for a slice.
        let scale_permutation = weights.first().map(|weight| match weight.scales.rows() {
            1 => ScalePermutation::Single,
            _ => ScalePermutation::Grouped,
        });
        let options = Options { perms, scale_permutation, ..Options::new(dtype) };
        let prepared = prepared(weights, options)?;
        let shape = weights[0].shape();
        if !shape.size_k.is_multiple_of(64) {
            return refuse("size_k", shape.size_k.to_string(), "a multiple of 64");
        }
        if shape.size_k > i32::MAX as usize || shape.size_n / 64 > 65535 {
            return refuse("shape", shape.to_string(), "K below 2^31, N below 64 * 2^16");
        }
        let group_size = shape.size_k / prepared.groups();
        let sorted = prepared.sorted.as_deref().unwrap_or_default();
        let whole = |g_idx: &[u32]| {
            g_idx.iter().enumerate().all(|(k, &g)| g as usize == k / group_size.max(1))
        };
        let uneven = !sorted.iter().all(|sorted| whole(&sorted.g_idx));
        let form = Form::of_halves(weights, dtype, uneven)?;
        let scales = match form.scale_size() {
            // The checkpoint's own bytes: Marlin's preparation flushes small scales of NVFP4.
            1 => {
                let layout = prepared.scale_layout.with_quads();
                let packed: Result<Vec<Table>, _> =
                    weights.iter().map(|weight| layout.pack(&weight.scales)).collect();
                match packed {
                    Ok(packed) => packed.iter().flat_map(bytes).collect(),
                    Err(error) => return refuse("scales", error.to_string(), "[groups, N]"),
                }
            }
            _ => bytes(&prepared.scales),
        };
        let of_experts: Vec<f32> =
            weights.iter().filter_map(|weight| weight.global_scale).collect();
        // All have one, or `prepare` would have failed.
        let global_scale =
            (!of_experts.is_empty()).then(|| device.upload(&of_experts)).transpose()?;
        let all = |of: fn(&Sorted) -> &[u32]| sorted.iter().flat_map(of).copied().collect();
        let (perm, g_idx): (Vec<u32>, Vec<u32>) = (all(|s| &s.perm), all(|s| &s.g_idx));
        Ok(Self {
            global_scale,
            g_idx: uneven.then(|| device.upload(&g_idx)).transpose()?,
            order: match perm.is_empty() {
                true => None,
                false => Some(RowOrder { on_device: device.upload(&perm)?, perm }),
            },
            ..Self::upload(device, weights, dtype, &prepared, form, &scales)?
        })
    }

    /// What every weight has, in the device's memory.
    fn upload(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
        prepared: &Prepared,
        form: Form,
        scales: &[u8],
    ) -> Result<Self, AccelError> {
        let shape = weights[0].shape();
        let groups = prepared.groups();
        let zeros = prepared.zero_words().map(|words| device.upload(&words));
        let bias = prepared.bias.as_ref().map(|bias| device.upload(halves(bias)));
        Ok(Self {
            spec: Spec {
                shape,
                experts: prepared.experts,
                dtype,
                input_dtype: None,
                form,
                group_size: shape.size_k / groups,
                groups,
                input_global_scale: prepared.input_global_scale.unwrap_or(1.0),
                split: None,
            },
            qweight: device.upload(&prepared.qweight_words())?,
            scales: device.upload(scales)?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
            global_scale: None,
            g_idx: None,
            order: None,
        })
    }

    /// [`MarlinWeight::new`] of a rank's part of the model's weight, for products by version 2 of the
    /// canonical schedule, whose bits no tensor-parallel size changes:
    /// [`marlin_gemm_part`](super::marlin_gemm_part), [`Rank`](crate::ops::Rank).
    ///
    /// # Errors
    /// As [`MarlinWeight::new`].
    pub fn of_part(device: &Device, part: &Part, dtype: ScalarType) -> Result<Self, AccelError> {
        let weight = Self::new(device, std::slice::from_ref(part.weight()), dtype)?;
        Ok(weight.with_split(part.split()))
    }

    /// The same weight, the model's, for products by version 2 of the canonical schedule.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for 8-bit activations.
    pub fn by_version_2(self) -> Result<Self, AccelError> {
        if let Some(input) = self.spec.input_dtype {
            let found = format!("packed for {input} activations");
            return Err(ROW.refuse("weight", found, "packed for 16-bit activations"));
        }
        let split = Split::whole(self.spec.shape.size_k);
        Ok(self.with_split(split))
    }

    pub(super) fn with_split(self, split: Split) -> Self {
        Self { spec: Spec { split: Some(split), ..self.spec }, ..self }
    }

    /// How products cut k.
    pub fn cut(&self) -> Cut {
        let v1 = Cut::version_1(self.spec.shape.size_k);
        self.spec.split.map_or(v1, Cut::version_2)
    }

    /// The rows of the model's weight that these are, in version 2 of the canonical schedule.
    pub fn split(&self) -> Option<Split> {
        self.spec.split
    }

    /// Shape of each matrix.
    pub fn shape(&self) -> Shape {
        self.spec.shape
    }

    /// Number of matrices.
    pub fn experts(&self) -> usize {
        self.spec.experts
    }

    /// Type of bias and outputs, and of 16-bit activations.
    pub fn dtype(&self) -> ScalarType {
        self.spec.dtype
    }

    /// Type of 8-bit activations: int8 or `float8_e4m3fn`.
    pub fn input_dtype(&self) -> Option<ScalarType> {
        self.spec.input_dtype
    }

    /// The factor by which a product multiplies the scales of x. With int8 activations the scales of groups are
    /// integers up to 4096, in units of this factor; else it is 1.
    pub fn input_global_scale(&self) -> f32 {
        self.spec.input_global_scale
    }

    /// How many k share a scale; in a slice of k with act-order, on average.
    pub fn group_size(&self) -> GroupSize {
        if self.spec.groups == 1 { GroupSize::Channel } else { GroupSize::Of(self.spec.group_size) }
    }

    /// With act-order: column k of the x that a product with this matrix takes is column
    /// `perm[k]` of the model's.
    pub fn perm(&self, expert: usize) -> Option<&[u32]> {
        self.order.as_ref()?.perm.chunks_exact(self.spec.shape.size_k).nth(expert)
    }

    /// With act-order: the permutations of all experts in the device's memory.
    pub(crate) fn device_perm(&self) -> Option<&Buffer<u32>> {
        self.order.as_ref().map(|order| &order.on_device)
    }

    /// Bytes of codes, scales and zero points of one matrix: what a product must read at least.
    pub fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| zeros.len() * 4);
        (self.qweight.len() * 4 + self.scales.len() + zeros) / self.spec.experts
    }

    /// The tiling for a product of `size_m` rows.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub fn tiling(&self, device: &Device, size_m: usize) -> Result<Tiling, AccelError> {
        self.tiling_of_experts(device, size_m, 1, false)
    }

    /// The plan for a product of `size_m` rows, if they are enough for one to be faster than a tiling.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub fn many_rows(
        &self,
        device: &Device,
        size_m: usize,
    ) -> Result<Option<ManyRows>, AccelError> {
        let (size_n, form) = (self.spec.shape.size_n, self.spec.form);
        ManyRows::choose(
            device.arch(),
            size_m,
            (self.cut(), size_n),
            form,
            device.multiprocessors(),
        )
    }

    /// Plans for both products of a layer, with blocks of equally many rows, if `experts` experts have enough rows on
    /// average (`rows`).
    pub(crate) fn many_rows_of_experts(
        [w13, w2]: [&Self; 2],
        device: &Device,
        rows: f64,
        experts: usize,
    ) -> Result<Option<[ManyRows; 2]>, AccelError> {
        let product = |weight: &Self| ((weight.cut(), weight.spec.shape.size_n), weight.spec.form);
        let products = [product(w13), product(w2)];
        ManyRows::choose_experts(device.arch(), rows, experts, products, device.multiprocessors())
    }

    /// The tiling for products of `size_m` rows with each of `experts` experts at once; `paired`: a thread block
    /// computes 64 columns of each half of N.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub fn tiling_of_experts(
        &self,
        device: &Device,
        size_m: usize,
        experts: usize,
        paired: bool,
    ) -> Result<Tiling, AccelError> {
        let width = Width::new(self.spec.shape.size_n, experts, device.multiprocessors());
        Tiling::choose(device.arch(), size_m, self.cut(), width, paired, self.spec.form)
    }

    /// k of a group, or with `g_idx` the number of groups, as the kernel takes it.
    pub(crate) fn group_k(&self) -> u32 {
        if self.g_idx.is_some() { self.spec.groups as u32 } else { self.spec.group_size as u32 }
    }

    /// The parameters that follow from the weight.
    pub(crate) fn form(&self) -> Form {
        self.spec.form
    }

    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.qweight.is_on(device)
    }
}

/// The weights in Marlin's layout.
fn prepared(weights: &[Weight<'_>], options: Options<'_>) -> Result<Prepared, AccelError> {
    prepare(weights, options)
        .map_err(|error| ROW.refuse("weight", error, "a weight that Marlin supports"))
}
