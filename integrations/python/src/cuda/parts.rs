//! A rank's part of a product, and the sum over ranks.

use marlinspike::products::schedule::Split;
use marlinspike_accel::ops::{gemm::marlin_gemm_part, ranks::add_gathered};
use pyo3::prelude::*;

use super::{Memory, Place, View, WeightParts};
use crate::error::{Failed, raised};
use crate::parts::SplitOf;
use crate::products::half_named;

fn split((size_k, rank, ranks): SplitOf) -> PyResult<Split> {
    Split::new(size_k, rank, ranks).map_err(|error| raised(error.to_string()))
}

/// The f32 sums `[M, N]` of x `[M, K / ranks]`. Without `work`, only the bytes and flags that it takes.
#[pyfunction]
pub(crate) fn cuda_gemm_part(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    weight: WeightParts,
    of: SplitOf,
    x: Memory,
    sums: Memory,
    work: Option<(u64, u64)>,
    flags: Option<Memory>,
) -> PyResult<(u64, usize)> {
    let (dtype, split) = (half_named(dtype)?, split(of)?);
    py.detach(|| {
        let mut view = View::new(place, work).failed()?;
        let weight = weight.load(&view, dtype)?.of_rank(split).failed()?;
        let size_m = x.1 / weight.shape().size_k;
        let mut count = 0;
        if weight.many_rows(view.device(), size_m).failed()?.is_some() {
            count = view.split(flags).failed()?;
        }
        if work.is_some() {
            let (x, mut sums) = (view.take(x), view.take(sums));
            marlin_gemm_part(view.device(), &x, &weight, &mut sums).failed()?;
        }
        Ok((view.device().scratch_bytes(), count))
    })
}

/// y `[M, N]` of the sums `[ranks, M, N]` of all ranks; the weight is any rank's part.
#[pyfunction]
pub(crate) fn cuda_add_ranks(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    weight: WeightParts,
    of: SplitOf,
    sums: Memory,
    y: Memory,
) -> PyResult<()> {
    let (dtype, split) = (half_named(dtype)?, split(of)?);
    py.detach(|| {
        let view = View::new(place, None).failed()?;
        let weight = weight.load(&view, dtype)?.of_rank(split).failed()?;
        let mut y = view.take(y);
        add_gathered(view.device(), &weight, &view.take(sums), &mut y).failed()
    })
}
