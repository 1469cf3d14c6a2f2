//! Wrong variants of the operations beside Marlin: the mistakes that `check` knows, and some that are no
//! change of an input.

use marlinspike::case::{CaseConfig, MethodConfig};
use marlinspike::check::{add_outputs, mistaken, mistakes};

use super::{Mutant, common, mutant};
use crate::ops::{self, MethodInput};
use crate::{Operation, Subject, SubjectError, run};

/// What the mistake `id` gives, and what is right where it does not show.
struct Mistaken(&'static str);

impl<O: Operation<Input = MethodInput, Element = u8>> Subject<O> for Mistaken {
    fn call(&self, input: &MethodInput, out: &mut [u8]) -> Result<(), SubjectError> {
        let made = mistaken(&input.case, self.0).map_err(|e| SubjectError(e.to_string()))?;
        out.copy_from_slice(&MethodInput::bytes(made.as_ref().unwrap_or(&input.case)));
        Ok(())
    }
}

fn known<O: Operation<Input = MethodInput, Element = u8>>() -> Vec<Mutant> {
    let op = marlinspike::case::Op::from_name(O::NAME);
    let all = op.map(mistakes).unwrap_or_default().into_iter().map(|id| Mutant {
        name: id,
        operation: O::NAME,
        run: Box::new(move |c| run::<O, _>(&Mistaken(id), c)),
    });
    all.chain(common::<O>()).collect()
}

/// A product whose K is cut otherwise in batches of one: right numbers, and a row that depends on its
/// batch.
fn split_by_batch() -> Mutant {
    mutant::<ops::ScaledMm>("K cut otherwise for a single row", |input| {
        let mut case = input.case.clone();
        if let CaseConfig::Method(MethodConfig::ScaledMm(c)) = &mut case.config
            && c.size_m == 1
        {
            let kernel = marlinspike::gemm::schedule::Fp8Kernel::Cutlass;
            let schedule = marlinspike::gemm::schedule::Schedule::w8a8_fp8(kernel, c.dtype, true)?;
            c.schedule = Some(marlinspike::case::ScheduleChoice::Given(Box::new(schedule)));
        }
        add_outputs(&mut case)?;
        Ok(MethodInput::bytes(&case))
    })
}

/// All of them, by operation; products take longer to try than layouts.
pub fn methods() -> Vec<Mutant> {
    let mut all = known::<ops::SwizzleBlockscale>();
    all.extend(known::<ops::TrtllmMxInt4>());
    all.extend(known::<ops::Nvfp4Experts>());
    all.extend(known::<ops::Fp8Requantize>());
    all.extend(known::<ops::NormalizeFnuz>());
    all.extend(known::<ops::GptOssMxfp4>());
    all.extend(known::<ops::ScaledFp4Quant>());
    all.extend(known::<ops::ScaledFp4Mm>());
    all.extend(known::<ops::ScaledMm>());
    all.extend(known::<ops::Fp8Moe>());
    all.push(split_by_batch());
    all
}
