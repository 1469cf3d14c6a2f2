//! KleidiAI's packed buffers and outputs: every bit, by every kernel, from packed and from
//! unpacked data.

use marlinspike::case::{Case, CaseConfig, DynQuantConfig};
use marlinspike::check::{Verdict, check_case};
use marlinspike::layouts::kleidi::{Columns, LhsLayout, PackedLhs, PackedRhs, RhsLayout};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::w4a8::{self, Values, kernels, multiply, quantize, scalar};
use marlinspike_golden::Manifest;

/// Calls `test` for every golden case of the operation.
fn every_case(test: impl Fn(&str, &Case<'_>, &DynQuantConfig)) {
    let golden = Manifest::load().expect("the golden manifest");
    let mut seen = 0;
    for path in golden.case_paths("dyn_quant_linear") {
        let bytes = std::fs::read(&path).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        let CaseConfig::DynQuant(config) = &case.config else { panic!("another operation") };
        test(&case.name, &case, config);
        seen += 1;
    }
    assert!(seen >= 40, "only {seen} cases");
}

fn columns(case: &Case<'_>, c: &DynQuantConfig) -> Columns {
    let nibbles = case.input("weight_u4").unwrap().elements::<u8>().into_owned();
    let codes = (0..2 * nibbles.len()).map(|i| (nibbles[i / 2] >> (4 * (i % 2)) & 15) as i8 - 8);
    let bias = c.has_bias.then(|| case.input("bias").unwrap().elements::<f32>().into_owned());
    let scales = case.input("weight_scale").unwrap();
    let shape = Shape::new(c.size_k, c.size_n);
    match c.group_size {
        GroupSize::Channel => {
            let scales = scales.elements::<f32>();
            Columns::channel_wise(shape, codes.collect(), &scales, bias.as_deref())
        }
        GroupSize::Of(g) => {
            let scales = scales.elements::<u16>().into_owned();
            Columns::group_wise(shape, g, codes.collect(), scales, bias.as_deref())
        }
    }
    .unwrap()
}

#[test]
fn every_output_of_every_case_is_right() {
    every_case(|name, case, _| {
        let report = check_case(case).unwrap();
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        assert_eq!(report.outputs.len(), 3, "{name}");
    });
}

#[test]
fn packing_and_products_by_every_kernel() {
    every_case(|name, case, c| {
        let x = Values::from_tensor(case.input("x").unwrap()).unwrap();
        let rows = quantize(&x, c.size_k, c.activation_rounding).unwrap();
        let columns = columns(case, c);
        let lhs = LhsLayout::new(c.size_m, c.size_k, c.packing.mr).unwrap().pack(&rows).unwrap();
        let layout = RhsLayout::new(columns.shape(), c.group_size, c.packing.nr).unwrap();
        let rhs = layout.pack(&columns).unwrap();
        assert_eq!(lhs.bytes(), case.output("lhs_packed").unwrap().bytes(), "{name}");
        assert_eq!(rhs.bytes(), case.output("rhs_packed").unwrap().bytes(), "{name}");
        assert_eq!(lhs.unpack(), rows, "{name}");
        assert_eq!(rhs.unpack(), columns, "{name}");
        let y = Values::from_tensor(case.output("y").unwrap()).unwrap();
        assert_eq!(scalar::product(&rows, &columns, c.dtype).unwrap().bits(), y.bits(), "{name}");
        for kernel in kernels() {
            let found = multiply(kernel.as_ref(), &lhs, &rhs, c.dtype).unwrap();
            assert_eq!(found.bits(), y.bits(), "{name} by {}", kernel.name());
        }
        let linear = w4a8::linear(w4a8::fastest().as_ref(), &x, &rhs, c.activation_rounding);
        assert_eq!(linear.unwrap().bits(), y.bits(), "{name}");
    });
}

/// Upstream's blocks of one row and of four hold the same rows.
#[test]
fn rows_do_not_depend_on_their_block() {
    every_case(|name, case, c| {
        let packed = case.output("lhs_packed").unwrap();
        let layout = LhsLayout::new(c.size_m, c.size_k, c.packing.mr).unwrap();
        let rows = PackedLhs::new(layout, packed.bytes()).unwrap().unpack();
        let layout = RhsLayout::new(Shape::new(c.size_k, c.size_n), c.group_size, c.packing.nr);
        let rhs = case.output("rhs_packed").unwrap();
        let rhs = PackedRhs::new(layout.unwrap(), rhs.bytes()).unwrap();
        let y = Values::from_tensor(case.output("y").unwrap()).unwrap();
        for mr in [1, 4] {
            let lhs = LhsLayout::new(c.size_m, c.size_k, mr).unwrap().pack(&rows).unwrap();
            let found = multiply(w4a8::fastest().as_ref(), &lhs, &rhs, c.dtype).unwrap();
            assert_eq!(found.bits(), y.bits(), "{name} in blocks of {mr}");
        }
    });
}
