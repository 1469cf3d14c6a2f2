//! The table of weights that the CUDA products read, compared with a separate list.
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::{CUDA_WEIGHTS, CudaScales, CudaWeight};

/// Whether a product reads groups of this size; 0 is all of k.
fn takes(weight: &CudaWeight, group: usize) -> bool {
    weight.groups.contain(if group == 0 { GroupSize::Channel } else { GroupSize::Of(group) })
}

#[test]
fn kinds_and_their_groups() {
    use CudaScales::{E4m3, E8m0, SixteenBit};
    // Type, scales, zero points, act-order, and the supported group sizes of the list below.
    let expected: [(_, _, _, _, &[usize]); 7] = [
        (ScalarType::UINT4B8, SixteenBit, false, true, &[0, 32, 64, 128, 192]),
        (ScalarType::UINT8B128, SixteenBit, false, true, &[0, 32, 64, 128, 192]),
        (ScalarType::UINT4, SixteenBit, true, false, &[0, 32, 64, 128, 192]),
        (ScalarType::FLOAT8_E4M3FN, SixteenBit, false, false, &[0, 64, 128, 192]),
        (ScalarType::FLOAT8_E4M3FN, E8m0, false, false, &[32]),
        (ScalarType::FLOAT4_E2M1F, E8m0, false, false, &[32]),
        (ScalarType::FLOAT4_E2M1F, E4m3, false, false, &[16]),
    ];
    let groups = [0, 8, 16, 32, 48, 64, 96, 128, 192];
    assert_eq!(CUDA_WEIGHTS.len(), expected.len());
    for (weight, (ty, scales, zeros, act_order, taken)) in CUDA_WEIGHTS.iter().zip(expected) {
        let found = (weight.ty, weight.scales, weight.zeros, weight.act_order);
        assert_eq!(found, (ty, scales, zeros, act_order));
        let found: Vec<usize> = groups.into_iter().filter(|&g| takes(weight, g)).collect();
        assert_eq!(found, taken, "{ty}");
    }
}
