//! Checks the output of a kernel: a verdict, and the place and cause of a wrong one.
//!
//! `cargo run --release -p marlinspike --example check`

use marlinspike::{Case, Generator, Op, Result, Tensor, Verdict, check_case};

/// A kernel under test: it exchanges columns 0 and 1 of the product.
fn kernel(case: &Case<'_>) -> Result<Tensor<'static>> {
    let y = &case.outputs["y"];
    let (dtype, shape) = (y.dtype(), y.shape().to_vec());
    let mut values = y.elements::<u16>().into_owned();
    values.chunks_exact_mut(shape[1]).for_each(|row| row.swap(0, 1));
    Tensor::from_vec("y", dtype, shape, values)
}

fn main() -> Result<()> {
    // Inputs and right outputs of a linear layer, from a seed. A case of your own is a safetensors file:
    // `Case::parse(&std::fs::read(path)?)`.
    let generator = Generator::new(Op::Linear, 1)?;
    let with_product = |case: &Case<'_>| case.outputs.get("y").is_some_and(|y| y.shape()[0] > 1);
    let mut index = 0;
    let mut case = loop {
        let case = generator.case(index)?;
        if with_product(&case) {
            break case;
        }
        index += 1;
    };
    assert_eq!(check_case(&case)?.verdict, Verdict::Pass);

    let y = kernel(&case)?;
    case.add_output("y", y);
    let report = check_case(&case)?;
    println!("{}: {:?}", report.name, report.verdict);
    for output in report.outputs.iter().filter(|output| output.verdict == Verdict::Fail) {
        println!("{}: {} of {} values are wrong", output.name, output.mismatches, output.elements);
        println!("first: {:?}", output.first_mismatch);
        println!("cause: {:?}", output.diagnosis.as_ref().map(|diagnosis| &diagnosis.text));
    }
    Ok(())
}
