//! The choice of tiles and runs, compared with cases computed by hand from upstream's host code.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Cta, Launches};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use ndarray::Array2;

fn weight(size_k: usize, size_n: usize, group: usize) -> Weight<'static> {
    let shape = Shape::new(size_k, size_n);
    let groups = size_k / group;
    let scales = TableData::B16(vec![0x3c00; groups * size_n]);
    Weight {
        name: "w".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_fn(4, shape, |_, _| 0).unwrap(),
        scales: Table::new(ScalarType::FLOAT16, groups, size_n, scales).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(group)),
        global_scale: None,
        bias: None,
    }
}

fn launches(weight: &Weight<'_>, input: ScalarType, size_m: usize) -> Launches {
    Launches::new(weight, ScalarType::FLOAT16, input, size_m, 132).unwrap()
}

#[test]
fn rows_tiles_and_runs() {
    let f16 = ScalarType::FLOAT16;
    let cta = |tile_k, tile_n, warps_k, run, rows, whole| Cta {
        tile_k,
        tile_n,
        warps_k,
        run,
        rows,
        whole,
    };
    // 8 blocks of 64 rows, 32 columns of tiles each: 256 on 132 multiprocessors. After one full
    // wave, 124 columns of 16 tiles remain: 1984 tiles, 16 each with whole groups.
    let w = weight(1024, 8192, 128);
    let all = launches(&w, f16, 512);
    assert_eq!(all.all().len(), 1);
    assert_eq!(all.all()[0].cta, cta(64, 256, 2, 16, Some(64), 132));
    // At most 16 blocks, since N > 4096; the remaining 64 rows use narrow tiles, because 32 columns
    // of wide tiles times 4 are fewer than 132.
    let all = launches(&w, f16, 1090);
    let rows: Vec<_> = all.all().iter().map(|l| l.rows.clone()).collect();
    assert_eq!(rows, [0..1024, 1024..1088, 1088..1090]);
    assert_eq!(all.all()[1].cta, cta(128, 64, 4, 8, None, 0));
    // 64 columns of 128, 8 tiles each: 4 for each of 132.
    assert_eq!(all.all()[2].cta, cta(128, 128, 4, 4, None, 0));
    // A warp computes 32 columns with int8 activations.
    let int8 = launches(&w, ScalarType::INT8, 130);
    assert_eq!(int8.all()[0].cta, cta(64, 256, 1, 8, Some(64), 0));
    assert_eq!(int8.all()[1].cta, cta(128, 128, 2, 4, None, 0));
    // k that 128 does not divide.
    let w = weight(1088, 512, 64);
    assert_eq!(launches(&w, f16, 8).all()[0].cta, cta(64, 128, 2, 1, None, 0));
}

#[test]
fn what_no_tile_divides_is_refused() {
    let w = weight(64, 64, 32);
    let refused = Launches::new(&w, ScalarType::FLOAT16, ScalarType::FLOAT16, 1, 132);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("weight") && text.contains("64"), "{text}");
    let w = weight(1024, 256, 128);
    let all = launches(&w, ScalarType::FLOAT16, 65);
    let x = |size_m: usize| Array2::<u32>::zeros((size_m, 1024));
    let short = all.execute(x(1).view(), &w, Default::default()).unwrap_err().to_string();
    assert!(short.contains('x') && short.contains("[65, 1024]"), "{short}");
    let none = launches(&w, ScalarType::FLOAT16, 0);
    assert_eq!(none.execute(x(0).view(), &w, Default::default()).unwrap().dim(), (0, 256));
}
