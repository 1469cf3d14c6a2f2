//! Kernels of experts, by release.

use super::super::oracle::blocks::{self, STORED_STACKS};
use super::super::oracle::class::Newer;
use super::super::oracle::methods;
use super::super::{
    ActivationKey, Backend, Capability, MoeDeployment, MoeDesc, MoeQuestion, Platform, WeightKey,
    select_moe, select_moe_backend,
};
use super::{Kernel, Release, experts_padding};
use crate::config::Scheme;

/// The kernel of experts on one of `ep_size` expert-parallel ranks; `Some(None)` if the release
/// refuses the layer. `None` if the tables do not cover the scheme or the device.
///
/// vLLM 0.21.0 selects for FP8, NVFP4, MXFP8, MXFP4 and GPTQ experts; AWQ, compressed-tensors'
/// integers and W4A8 have one kernel each. In 0.33.0 all of them select.
pub fn experts_kernel(
    release: Release,
    scheme: &Scheme,
    desc: &MoeDesc,
    ep_size: usize,
    device: &Capability,
) -> Option<Option<Kernel>> {
    if let Scheme::W4A8Int8 { .. } = scheme {
        return on_cpu(release, device);
    }
    if device.platform != Platform::Cuda || !device.at_least(7, 5) {
        return None;
    }
    if let Scheme::Wna16(w) = scheme
        && experts_padding(release, desc, w.group_size).is_err()
    {
        // Kernels other than these take some of the sizes.
        return None;
    }
    match release {
        Release::V0_21 => first(scheme, desc, ep_size, device),
        Release::V0_33 => newer(scheme, ep_size, device),
    }
}

/// The integer path on CPUs: on Arm alone since 0.33.0.
fn on_cpu(release: Release, device: &Capability) -> Option<Option<Kernel>> {
    let kernel = Kernel { backend: "CPU_INT4", class: "dynamic_4bit_int_moe" };
    match (device.platform, release) {
        (Platform::CpuX86, Release::V0_33) => Some(None),
        (Platform::CpuX86 | Platform::CpuArm, _) => Some(Some(kernel)),
        _ => None,
    }
}

/// vLLM 0.21.0.
fn first(
    scheme: &Scheme,
    desc: &MoeDesc,
    ep_size: usize,
    device: &Capability,
) -> Option<Option<Kernel>> {
    if let Some(question) = MoeQuestion::of(scheme) {
        let MoeQuestion { method, weights, activations, allow_vllm_cutlass } = question;
        let deployment = MoeDeployment { allow_vllm_cutlass, ep_size, ..MoeDeployment::new(*desc) };
        let found = select_moe_backend(method, weights, activations, &deployment, device);
        let chosen = found.chosen.ok().flatten();
        return Some(chosen.map(|c| Kernel { backend: c.backend.name(), class: c.experts }));
    }
    match scheme {
        Scheme::Wna16(_) => {
            let chosen = select_moe(scheme, desc, device).chosen;
            let own = Kernel { backend: "MARLIN", class: Backend::FusedMarlinMoe.name() };
            Some(chosen.map(|_| own))
        }
        Scheme::W4A8Fp8 { .. } => {
            Some(Some(Kernel { backend: "CUTLASS", class: "cutlass_w4a8_moe" }))
        }
        // gpt-oss.
        Scheme::Block { .. } => STORED_STACKS[0].iter().find_map(|row| {
            let here = row.cuda.contains(device.compute?);
            here.then_some(Some(Kernel { backend: row.backend, class: row.class }))
        }),
        _ => None,
    }
}

/// vLLM 0.33.0.
fn newer(scheme: &Scheme, ep_size: usize, device: &Capability) -> Option<Option<Kernel>> {
    let (weights, activations, cutlass) = match (MoeQuestion::of(scheme), scheme) {
        (Some(q), _) => (q.weights, q.activations, q.allow_vllm_cutlass),
        (None, Scheme::W4A8Fp8 { .. }) => (WeightKey::Int4, ActivationKey::Fp8DynamicToken, false),
        // GPTQ with zero points has a separate kernel.
        (None, Scheme::Wna16(w)) if !w.symmetric() && w.checkpoint_format.moe_oracle => {
            return None;
        }
        (None, Scheme::Wna16(_) | Scheme::Block { .. }) => {
            (WeightKey::of(scheme)?, ActivationKey::None, false)
        }
        _ => return None,
    };
    let ask = |row: &&Newer| {
        let here = device.compute.is_some_and(|c| row.cuda.contains(c));
        let scheme_fits = row.only.is_none_or(|only| only(scheme));
        let keys = row.keys.iter().any(|&(w, a)| w == weights && a == activations);
        here && keys && scheme_fits && (cutlass || !row.cutlass) && (ep_size > 1 || !row.ep)
    };
    let mut rows = methods::NEWER.iter().chain(blocks::NEWER);
    let own =
        rows.clone().any(|row| row.keys.iter().any(|&(w, a)| w == weights && a == activations));
    let found = match own {
        true => rows.find(ask),
        // gpt-oss.
        false if matches!(scheme, Scheme::Block { .. }) => {
            STORED_STACKS[1].iter().find(|row| device.compute.is_some_and(|c| row.cuda.contains(c)))
        }
        false => return None,
    };
    Some(found.map(|row| {
        let class = match (row.class, ep_size > 1) {
            ("Humming", true) => "HummingGroupedExperts",
            ("Humming", false) => "HummingIndexedExperts",
            (class, _) => class,
        };
        Kernel { backend: row.backend, class }
    }))
}
