//! AWQ: codes packed along N in an interleaved order, always with zero points.
//!
//! Source: AutoAWQ's GEMM tensors as vLLM 0.21.0 `awq_marlin.py` loads them. Upstream does not read a
//! config's `version`; the `gemv` layouts store other tensors under the same names.

use crate::formats::gptq;
use crate::formats::integers::{
    IntConfig, IntFormat, IntTensors, Interleave, Packing, along_k, along_n,
};
use crate::formats::mistake::MistakeName;
use crate::formats::parts::{
    bias_table, bias_tensor, check_bits, expect_type, float_tensor, full, scale_table, sizes,
    unpacked, zero_codes, zero_table,
};
use crate::formats::words::{int_tensor, int_words, pack_rows, unpack_rows};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// The descriptor for configs, selection, cases and loaders.
pub static FORMAT: IntFormat = IntFormat {
    name: "awq",
    case_types: &[ScalarType::UINT4, ScalarType::UINT8],
    names: &gptq::NAMES,
    kernel_names: &gptq::NAMES,
    columns_first: false,
    packing: Packing::AlongN(&INTERLEAVE),
    act_order: false,
    symmetric_zero: |bits| 1 << (bits - 1),
    moe_zero_points: true,
    moe_oracle: false,
    config: Some(&IntConfig {
        methods: &["awq", "awq_marlin"],
        bits: &["bits", "w_bit"],
        group_size: &["group_size", "q_group_size"],
        zero_point: "zero_point",
        versions: &["gemm", "exllama", "ipex"],
    }),
    unpack: |t: IntTensors<'_>, name, storage| {
        let Some(qzeros) = t.zeros else {
            return Err(Error::missing(full(name, "qzeros"), "the scheme"));
        };
        AwqTensors { qweight: t.weight, scales: t.scales, qzeros, bias: t.bias }.unpack(
            name,
            storage.bits,
            storage.group_size,
        )
    },
};

/// The order of columns in a word.
static INTERLEAVE: Interleave = Interleave {
    order: column_order,
    words_kept: MistakeName {
        id: "awq-interleave",
        text: "the words still hold AWQ's order 0, 2, 4, 6, 1, 3, 5, 7",
    },
    forward: MistakeName {
        id: "awq-interleave-forward",
        text: "AWQ's column order was undone with the permutation instead of its inverse",
    },
    kept: MistakeName { id: "awq-interleave-kept", text: "AWQ's column order was not undone" },
    product_inverted: MistakeName {
        id: "awq-interleave-inverted",
        text: "AWQ's interleave was undone with the permutation instead of its inverse",
    },
    product_not_undone: MistakeName {
        id: "awq-interleave-not-undone",
        text: "AWQ's interleave was not undone",
    },
};

/// The column, within a group of eight (four for 8 bits), of each field of a word.
pub fn column_order(bits: u32) -> &'static [usize] {
    if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] }
}

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct AwqTensors<'a> {
    /// `[size_k, size_n / pack]` int32.
    pub qweight: Tensor<'a>,
    /// `[groups, size_n]` f16, bf16 or f32.
    pub scales: Tensor<'a>,
    /// `[groups, size_n / pack]` int32, interleaved like `qweight`.
    pub qzeros: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl AwqTensors<'_> {
    /// The weight, of type `uint4` or `uint8` with zero points, `bits` per code.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for scales that are not finite;
    /// [`Error::Size`] if K does not fill whole words or groups.
    pub fn unpack(self, name: &str, bits: u32, group_size: GroupSize) -> Result<Weight<'static>> {
        check_bits("AWQ", bits)?;
        let pack = (32 / bits) as usize;
        let [size_k, packed_n] = sizes(&self.qweight)?;
        let shape = Shape::new(size_k, unpacked(&self.qweight, packed_n, pack)?);
        let groups = group_size.groups(shape.k())?;
        let scales = scale_table(&self.scales, Some(groups), shape.size_n)?;
        let packed = [groups, packed_n];
        self.qzeros.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&packed)?;
        let ty = if bits == 4 { ScalarType::UINT4 } else { ScalarType::UINT8 };
        let zeros = self.qzeros.elements::<u32>();
        let zeros = unpack_rows(&zeros, shape.size_n, bits, column_order(bits));
        let weight = Weight {
            name: name.to_owned(),
            ty,
            bias: bias_table(self.bias.as_ref(), shape.size_n)?,
            zeros: Some(zero_table(ty, groups, shape.size_n, zeros)?),
            codes: along_k(bits, shape, &int_words(self.qweight)?, column_order(bits))?,
            scales,
            groups: Groups::Uniform(group_size),
            global_scale: None,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types without zero points and for act-order, [`Error::Size`] if N
    /// does not fill whole words, and the errors of [`Weight::validate`].
    pub fn pack(weight: &Weight<'_>) -> Result<AwqTensors<'static>> {
        let name = &weight.name;
        expect_type("AWQ", name, weight.ty, &[ScalarType::UINT4, ScalarType::UINT8])?;
        weight.validate()?;
        if matches!(weight.groups, Groups::Indexed { .. }) {
            return Err(Error::unsupported(format!("{name}: act-order"), "AWQ has no g_idx"));
        }
        let (Shape { size_k, size_n }, bits) = (weight.shape(), weight.codes.bits());
        let (pack, groups) = (weight.codes.pack(), weight.scales.rows());
        if !size_n.is_multiple_of(pack) {
            let expected = format!("a multiple of {pack}");
            return Err(Error::size(format!("{name}: size_n"), size_n, expected));
        }
        let order = column_order(bits);
        let words = along_n(&weight.codes, order);
        let zeros = pack_rows(zero_codes(name, weight.zeros.as_ref())?, size_n, bits, order);
        Ok(AwqTensors {
            qweight: int_tensor(full(name, "qweight"), vec![size_k, size_n / pack], words)?,
            scales: float_tensor(name, "scales", &weight.scales)?,
            qzeros: int_tensor(full(name, "qzeros"), vec![groups, size_n / pack], zeros)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}
