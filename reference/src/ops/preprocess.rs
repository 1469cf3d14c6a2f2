//! int4 codes for fp8 activations.

use serde_json::{Value, json};

use crate::formats::integers::IntFormat;
use crate::formats::{self, Format};
use crate::judge::compare::{Candidate, Elements, Plain, Rows, Subject};
use crate::judge::{Declared, OutputReport};
use crate::layouts::marlin::{int4_to_fp8_asymmetric, int4_to_fp8_symmetric};
use crate::num::dims::GroupSize;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::draw::Rng;
use crate::ops::quant::keys::divisible;
use crate::ops::quant::lattice::LINEAR_SHAPES;
use crate::ops::schema::{CaseError, Demand, Dim, Inputs, Reader, TensorRule, rule};
use crate::ops::tensors::{I32, bytes_of};
use crate::{Error, Result};

/// Config of `int4_fp8_preprocess`.
#[derive(Debug, Clone, PartialEq)]
pub struct PreprocessConfig {
    /// One of the integer formats.
    pub checkpoint_format: &'static IntFormat,
    /// Input features.
    pub size_k: usize,
    /// Output features.
    pub size_n: usize,
}

/// The formats whose 4-bit codes kernels rewrite.
fn formats() -> impl Iterator<Item = &'static IntFormat> {
    formats::ALL.iter().filter_map(|format| match format {
        Format::Int(format) => Some(*format),
        _ => None,
    })
}

impl Operation for PreprocessConfig {
    fn keys() -> &'static [&'static str] {
        &["checkpoint_format", "size_k", "size_n"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let names: Vec<_> = formats().map(|format| (format.name, format)).collect();
        let checkpoint_format = r.name("checkpoint_format", &names)?;
        let (size_k, size_n) = (r.size("size_k")?, r.size("size_n")?);
        match checkpoint_format.is_packed_along_n() {
            true => divisible("size_n", size_n, 8, "codes of a packed word")?,
            false => divisible("size_k", size_k, 8, "codes of a packed word")?,
        }
        Ok(PreprocessConfig { checkpoint_format, size_k, size_n })
    }

    fn lattice() -> Result<Vec<Self>> {
        let config = |checkpoint_format| {
            LINEAR_SHAPES.map(|(size_k, size_n)| PreprocessConfig {
                checkpoint_format,
                size_k,
                size_n,
            })
        };
        Ok(formats().flat_map(config).collect())
    }

    fn json(&self) -> Value {
        json!({
            "checkpoint_format": self.checkpoint_format.name,
            "size_k": self.size_k, "size_n": self.size_n,
        })
    }

    fn describe(&self) -> String {
        format!("{} k{} n{}", self.checkpoint_format, self.size_k, self.size_n)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let shape = self.checkpoint_format.words_shape(self.size_k, self.size_n, 8).map(Dim::Is);
        let mut rules =
            vec![rule("in.qweight", I32, &shape).required(true), rule("out.qweight", I32, &shape)];
        if self.checkpoint_format.is_packed_along_n() {
            let zeros = [Dim::Some, Dim::Is(self.size_n / 8)];
            rules.push(rule("in.qzeros", I32, &zeros).required(true));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        if let Some(zeros) = inputs.get("qzeros") {
            let [groups, _] = zeros.dims2()?;
            if !self.size_k.is_multiple_of(groups.max(1)) {
                let rule = format!("a number of groups that divides size_k {}", self.size_k);
                return Err(Error::shape(zeros.name(), zeros.shape(), rule));
            }
        }
        Ok(())
    }

    fn demands(&self, _case: &Case<'_>) -> Result<Vec<Demand>> {
        Ok(Vec::new())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let Some(found) = case.output("qweight") else { return Ok(Vec::new()) };
        let input = case.input("qweight")?.elements::<u32>().into_owned();
        let symmetric = int4_to_fp8_symmetric(&input);
        let expected = self.rewritten(case)?;
        let candidate =
            |id, text: &str, made: Elements| Candidate::new(id, text, move |()| Some(made.clone()));
        let candidates = vec![
            candidate("preprocess-missing", "the codes were not rewritten", input.clone()),
            candidate(
                "preprocess-twice",
                "the codes were rewritten twice",
                int4_to_fp8_symmetric(&expected),
            ),
            candidate(
                "preprocess-symmetric",
                "the zero points were ignored: 8 was used",
                symmetric,
            ),
        ];
        let layout = Plain { len: expected.len(), width: 4 };
        let subject = Subject {
            name: "qweight".to_owned(),
            found,
            shape: [1, expected.len()],
            expected,
            layout: Box::new(layout),
            rows: Rows::List,
            width: 4,
            experts: 1,
            stacked: false,
            candidates,
        };
        Ok(vec![subject.judge()])
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        let shape = case.input("qweight")?.shape().to_vec();
        let rewritten = Tensor::new("", DType::I32, shape, bytes_of(&self.rewritten(case)?))?;
        case.add_output("qweight", rewritten);
        Ok(())
    }

    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let words: Vec<u32> = (0..self.size_k * self.size_n / 8).map(|_| rng.next_u32()).collect();
        let per_row = self.size_n / 8;
        let shape = self.checkpoint_format.words_shape(self.size_k, self.size_n, 8).to_vec();
        let group = rng.pick(&[GroupSize::Channel, GroupSize::Of(32), GroupSize::Of(128)]);
        let groups = group.groups(crate::num::dims::LogicalK(self.size_k))?;
        let tensor =
            |shape: Vec<usize>, words: &[u32]| Tensor::new("", DType::I32, shape, bytes_of(words));
        case.add_input("qweight", tensor(shape, &words)?);
        if self.checkpoint_format.is_packed_along_n() {
            let zeros: Vec<u32> = (0..groups * per_row).map(|_| rng.next_u32()).collect();
            case.add_input("qzeros", tensor(vec![groups, per_row], &zeros)?);
        }
        self.add_staged_outputs(case)
    }
}

impl PreprocessConfig {
    /// The rewritten codes of a case.
    fn rewritten(&self, case: &Case<'_>) -> Result<Elements> {
        let input = case.input("qweight")?.elements::<u32>();
        match self.checkpoint_format.is_packed_along_n() {
            true => {
                let zeros = case.input("qzeros")?.elements::<u32>();
                int4_to_fp8_asymmetric(&input, &zeros, self.size_n / 8)
            }
            false => Ok(int4_to_fp8_symmetric(&input)),
        }
    }
}
