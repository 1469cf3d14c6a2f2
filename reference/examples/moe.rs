//! A Mixture-of-Experts layer with a fault inside: the check says which stage went wrong, and how.
//!
//! `cargo run --release -p marlinspike --example moe`

use marlinspike::case::CaseConfig;
use marlinspike::vectors::{Rng, case_of};
use marlinspike::{Op, Result, Tensor, Verdict, check_case};
use serde_json::json;

/// Changes the rows of a stage; the number is that of their columns.
type Fault = fn(&mut [u16], usize);

fn main() -> Result<()> {
    // A GPTQ layer; `marlinspike schema --op moe` lists the keys.
    let config = json!({
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "bfloat16", "input_dtype": null,
        "group_size": 32, "desc_act": false, "is_k_full": true, "has_bias": false,
        "tensor_parallel": { "size": 1, "rank": 0, "style": "column" },
        "size_m": 8, "num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 64,
        "activation": "silu", "scoring_func": "softmax", "renormalize": true,
        "apply_router_weight_on_input": false, "block_size_m": 16, "ep_size": 1, "ep_rank": 0,
    });
    let keys = config.as_object().cloned().unwrap_or_default();
    // Routing, w13, activation, w2 and the sum over top-k, from a seed.
    let case = case_of(CaseConfig::from_json(Op::Moe, &keys)?, &mut Rng::new(7))?;
    assert_eq!(check_case(&case)?.verdict, Verdict::Pass);

    // A kernel that takes gate for up, and one that writes the tokens in another order.
    let faults: [(&str, Fault); 2] = [
        ("gate_up", |values, cols| {
            values.chunks_exact_mut(cols).for_each(|row| row.rotate_left(cols / 2))
        }),
        ("y", |values, cols| values.rotate_left(cols)),
    ];
    for (name, fault) in faults {
        let stage = &case.outputs[name];
        let (dtype, shape) = (stage.dtype(), stage.shape().to_vec());
        let mut values = stage.elements::<u16>().into_owned();
        fault(&mut values, shape[1]);
        let mut wrong = case.clone();
        wrong.add_output(name, Tensor::from_vec(name, dtype, shape, values)?);
        let report = check_case(&wrong)?;
        for output in report.outputs.iter().filter(|output| output.verdict == Verdict::Fail) {
            let cause = output.diagnosis.as_ref().map_or("no known cause", |cause| &cause.text);
            println!("{}: {} values are wrong: {cause}", output.name, output.mismatches);
        }
    }
    Ok(())
}
