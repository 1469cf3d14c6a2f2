//! Bugs that no single output shows: results that differ from run to run, or with the batch.

use marlinspike::Result;
use marlinspike::case::{Case, Op, ScheduleChoice};
use marlinspike::check::{MatrixSource, add_outputs};
use marlinspike::num::dims::Shape;
use marlinspike::products::schedule::{Chunks, Order, Schedule};

use crate::bug::{Bug, Wrong, edit};
use crate::campaign::Laws;

const INT4: &str = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                    tensor_parallel.size=null,size_k=256|384,size_n=64|128|192";

const LONG: &str = "checkpoint_format=gptq,weight_type=uint4b8,dtype=float16,input_dtype=null,\
                    desc_act=false,tensor_parallel.size=null,size_k=384,size_n=192|320";

const DETERMINISTIC: Laws = Laws { deterministic: true, batch_invariant: false };

pub(super) fn bugs() -> Vec<Bug> {
    let bug = |number, name, seen, laws, causes, wrong| {
        let (op, filter, outputs) = (Op::Linear, INT4, &[] as &[_]);
        Bug { number, name, seen, op, filter, keys: &[], outputs, laws, causes, wrong }
    };
    vec![
        bug(
            17,
            "race: a barrier missing between pipeline stages",
            "V#11205",
            DETERMINISTIC,
            &["nondeterminism"],
            Wrong::Calls(stale_stage),
        ),
        bug(
            18,
            "split-K partial sums added by atomics in any order (right, not reproducible)",
            "V#56887, S#39455",
            DETERMINISTIC,
            &["nondeterminism"],
            Wrong::Calls(|call, case| {
                split(case, if call % 2 == 0 { Order::Ascending } else { Order::Descending })
            }),
        ),
        Bug {
            // Long sums in float16, of many columns: elsewhere the rounding of y hides most orders.
            filter: LONG,
            ..bug(
                29,
                "result depends on M (a row alone differs from the row in a batch)",
                "V#46639 tests for it",
                Laws { deterministic: true, batch_invariant: true },
                &["batch dependence"],
                Wrong::Case(|case| {
                    // K is split for large M only.
                    let rows = edit::linear(case)?.size_m;
                    if rows > 1 { split(case, Order::Ascending) } else { add_outputs(case) }
                }),
            )
        },
    ]
}

/// In every second run, the product reads the tile of k 64 to 127 from the stage before it.
fn stale_stage(call: u32, case: &mut Case<'static>) -> Result<()> {
    if call % 2 == 1 {
        edit::input::<u16>(case, "x", |x, shape| {
            if shape[1] >= 128 {
                x.chunks_exact_mut(shape[1]).for_each(|row| row.copy_within(0..64, 64));
            }
        })?;
    }
    add_outputs(case)
}

/// The canonical product with K split in parts of 64, whose f32 sums are added in an order.
fn split(case: &mut Case<'static>, order: Order) -> Result<()> {
    let mut c = edit::linear(case)?;
    let weights =
        MatrixSource::new(case, &c.quant, "", Shape::new(c.size_k, c.size_n)).weights()?;
    let mut schedule = Schedule::canonical(&weights[0], c.quant.dtype, c.quant.dtype)?;
    schedule.chunks = Chunks::Size(64);
    schedule.chunk_sum.order = order;
    c.schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
    case.config = c.into();
    add_outputs(case)
}
