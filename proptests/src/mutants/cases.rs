//! Mutants of operations over whole cases: the known mistakes of `check`, and some that are not a
//! change of an input.

use marlinspike::case::Op;
use marlinspike::check::{add_outputs, mistaken, mistakes};
use marlinspike::vectors::lattice;

use crate::mutant::{Mutant, common, mutant};
use crate::ops::{self, CaseInput};
use crate::{Operation, Subject, SubjectError, run};

/// The outputs with mistake `id`, or the right outputs if the mistake changes nothing.
struct Mistaken(&'static str);

impl<O: Operation<Input = CaseInput, Element = u8>> Subject<O> for Mistaken {
    fn call(&self, input: &CaseInput, out: &mut [u8]) -> Result<(), SubjectError> {
        let made = mistaken(&input.case, self.0).map_err(|e| SubjectError(e.to_string()))?;
        out.copy_from_slice(&CaseInput::bytes(made.as_ref().unwrap_or(&input.case)));
        Ok(())
    }
}

fn known<O: Operation<Input = CaseInput, Element = u8>>() -> Vec<Mutant> {
    let Some(op) = Op::from_name(O::NAME) else { return Vec::new() };
    let wrong = mistakes(op).into_iter().map(|id| Mutant {
        name: id,
        operation: O::NAME,
        run: Box::new(move |c| run::<O, _>(&Mistaken(id), c)),
    });
    let mut all: Vec<Mutant> = wrong.chain(common::<O>()).collect();
    let configs = lattice(op).unwrap_or_default();
    if configs.first().is_some_and(|c| c.with_k_cut_otherwise().is_some()) {
        all.push(split_by_batch::<O>());
    }
    all
}

/// A product whose K is cut differently in batches of one: the values are right, but a row depends
/// on its batch.
fn split_by_batch<O: Operation<Input = CaseInput, Element = u8>>() -> Mutant {
    mutant::<O>("K cut otherwise for a single row", |input| {
        let mut case = input.case.clone();
        if let (Some(1), Some(config)) = (input.tokens(), case.config.with_k_cut_otherwise()) {
            case.config = config;
        }
        add_outputs(&mut case)?;
        Ok(CaseInput::bytes(&case))
    })
}

macro_rules! all {
    (staged { $($_staged:tt)* } computed {
        $($(#[$_doc:meta])* $name:ident $_file:tt $_module:ident::$_config:ident,)+
    }) => { [$(known::<ops::$name>()),+] };
}

/// All mutants by operation; products take longer than layouts.
pub fn cases() -> Vec<Mutant> {
    marlinspike::operations!(all).into_iter().flatten().collect()
}
