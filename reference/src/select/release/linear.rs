//! Kernels of linear layers with integer weights and 16-bit activations, by release.

use super::super::{Capability, LinearDesc, Platform, check_marlin_supported};
use super::{Kernel, Release, has_act_order, linear_padding};
use crate::config::{Scheme, Wna16Scheme};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

const fn kernel(backend: &'static str) -> Kernel {
    Kernel { backend, class: "" }
}

/// The kernel of a linear layer with bf16 activations (`choose_mp_linear_kernel`). The candidates are
/// `CutlassW4A8LinearKernel`, which takes only quantized activations, Machete on 9.0, AllSpark
/// (0.21.0), Humming (0.33.0, before Marlin on 9.0 and last elsewhere) and Marlin. `Some(None)` is a
/// layer that every kernel refuses. `None` for other schemes and platforms, for compute
/// capabilities below 7.5 and for group sizes that Marlin does not take.
pub fn linear_kernel(
    release: Release,
    scheme: &Scheme,
    desc: &LinearDesc,
    device: &Capability,
) -> Option<Option<Kernel>> {
    let Scheme::Wna16(w) = scheme else { return None };
    check_marlin_supported(w.weight_type, w.group_size, !w.symmetric(), device).ok()?;
    if device.platform != Platform::Cuda {
        return None;
    }
    let hopper = *device == Capability::cuda(9, 0);
    if hopper && machete(w, desc, has_act_order(scheme)) {
        return Some(Some(kernel("MacheteLinearKernel")));
    }
    if release == Release::V0_21 && all_spark(w, desc, device) {
        return Some(Some(kernel("AllSparkLinearKernel")));
    }
    let marlin = linear_padding(release, desc, w.group_size).is_ok();
    Some(match release {
        Release::V0_33 if hopper || !marlin => Some(kernel("HummingLinearKernel")),
        _ => marlin.then_some(kernel("MarlinLinearKernel")),
    })
}

/// Machete: groups of 64, 128 or all of K, K a multiple of 64, N of 128; with act-order on one rank
/// only.
fn machete(w: &Wna16Scheme, desc: &LinearDesc, act_order: bool) -> bool {
    let part = desc.input_size_per_partition != desc.input_size;
    matches!(w.group_size, GroupSize::Channel | GroupSize::Of(64 | 128))
        && desc.input_size_per_partition.is_multiple_of(64)
        && desc.output_size_per_partition.is_multiple_of(128)
        && !(act_order && part)
}

/// AllSpark: 8-bit integers without zero points, one scale for each column, on 8.x.
fn all_spark(w: &Wna16Scheme, desc: &LinearDesc, device: &Capability) -> bool {
    let ampere = device.compute.is_some_and(|(major, _)| major == 8);
    let sizes = [desc.input_size_per_partition, desc.output_size_per_partition];
    ampere
        && !w.desc_act
        && w.weight_type == ScalarType::UINT8B128
        && w.group_size == GroupSize::Channel
        && sizes.iter().all(|size| size.is_multiple_of(16))
}
