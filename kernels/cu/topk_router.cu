// Router logits to expert ids and weights. Upstream operators: vLLM `topk_softmax`, `topk_sigmoid`,
// `grouped_topk`.
//
//   logits        f32 [rows, experts] (16-bit logits widened), finite, or -inf for a masked expert
//   bias          f32 [experts], added for the selection only; null: none
//   topk_weights  f32 [rows, top_k]
//   topk_ids      int32 [rows, top_k], best first; of equal experts the lower id
//
// Softmax: m = largest logit, e_i = exp(x_i - m), s = sum of e_i from the first expert on, e_i * (1/s).
// With groups the topk_group best groups are kept, by the sum of their two best biased scores, or by
// the best score without a bias. Weights are divided by their sum, added in the order of the ids, where
// `renormalize` and the sum is positive; then multiplied by `factor`.
//
// Parameters:
//   IS_SIGMOID  0 softmax, 1 sigmoid
//   SCORES      type of the scores: 0 f32, 1 f16, 2 bf16
//
// One block of whole warps works on one row, with 2 * experts + num_groups floats of dynamic shared
// memory (num_groups: 1 without groups). Launch with a grid of `rows` blocks.

#include "block_max.cuh"
#include "math.cuh"

// Types that scores are rounded to.
enum ScoreType : unsigned { SCORES_F32 = 0, SCORES_F16 = 1, SCORES_BF16 = 2 };

// Rounded to the type of the scores, and back.
__device__ __forceinline__ float stored(float value) {
    [[maybe_unused]] unsigned short bits;
    if constexpr (SCORES == SCORES_F16) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    } else if constexpr (SCORES == SCORES_BF16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        value = __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
    return value;
}

// The id of the largest value, the lower one of equal ones; -1 where all are minus infinity.
__device__ __forceinline__ int block_best(const float *values, int count) {
    __shared__ float best_value[32];
    __shared__ int best_id[32];
    const float none = __uint_as_float(0xff800000u);
    float value = none;
    int id = -1;
    const auto offer = [&](float other, int other_id) {
        if (other_id >= 0 && (id < 0 || other > value || (other == value && other_id < id))) {
            value = other;
            id = other_id;
        }
    };
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        if (values[i] != none) {
            offer(values[i], i);
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, step);
        offer(other, __shfl_xor_sync(0xffffffffu, id, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        best_value[threadIdx.x / 32] = value;
        best_id[threadIdx.x / 32] = id;
    }
    __syncthreads();
    value = best_value[0];
    id = best_id[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
        offer(best_value[warp], best_id[warp]);
    }
    return id;
}

extern "C" __global__ void topk_router(const float *__restrict__ logits,
                                       const float *__restrict__ bias,
                                       float *__restrict__ topk_weights,
                                       int *__restrict__ topk_ids,
                                       unsigned experts,
                                       unsigned top_k,
                                       unsigned num_groups,
                                       unsigned topk_group,
                                       unsigned renormalize,
                                       float factor) {
    extern __shared__ float memory[];
    float *scores = memory, *choice = scores + experts, *group_scores = choice + experts;
    const float *row = logits + static_cast<unsigned long long>(blockIdx.x) * experts;
    const float none = __uint_as_float(0xff800000u);

    if constexpr (IS_SIGMOID) {
        for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
            scores[i] = stored(sigmoid_f32(row[i]));
        }
    } else {
        float max = none;
        for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
            max = fmaxf(max, row[i]);
        }
        max = block_max(max);
        for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
            scores[i] = exp_f32(__fsub_rn(row[i], max));
        }
        __syncthreads();
        // Each thread computes the sum itself, in the stated order.
        float sum = 0.0f;
        for (unsigned i = 0; i < experts; ++i) {
            sum = __fadd_rn(sum, scores[i]);
        }
        const float reciprocal = __fdiv_rn(1.0f, sum);
        __syncthreads();
        for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
            scores[i] = stored(__fmul_rn(scores[i], reciprocal));
        }
    }
    for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
        choice[i] = bias ? stored(__fadd_rn(scores[i], stored(bias[i]))) : scores[i];
    }
    __syncthreads();

    if (num_groups > 1) {
        const unsigned per = experts / num_groups;
        for (unsigned g = threadIdx.x; g < num_groups; g += blockDim.x) {
            float first = none, second = none;
            for (unsigned i = g * per; i < (g + 1) * per; ++i) {
                const float c = choice[i];
                if (c > first) {
                    second = first;
                    first = c;
                } else if (c > second) {
                    second = c;
                }
            }
            group_scores[g] = bias ? stored(__fadd_rn(first, second)) : first;
        }
        __syncthreads();
        // The selected groups are marked; experts of other groups are excluded.
        for (unsigned j = 0; j < topk_group; ++j) {
            const int best = block_best(group_scores, num_groups);
            __syncthreads();
            if (threadIdx.x == 0) {
                group_scores[best] = none;
            }
            __syncthreads();
        }
        for (unsigned i = threadIdx.x; i < experts; i += blockDim.x) {
            if (group_scores[i / per] != none) {
                choice[i] = none;
            }
        }
        __syncthreads();
    }

    const unsigned long long out = static_cast<unsigned long long>(blockIdx.x) * top_k;
    float total = 0.0f;
    for (unsigned j = 0; j < top_k; ++j) {
        const int best = block_best(choice, experts);
        __syncthreads();
        total = __fadd_rn(total, scores[best]);
        if (threadIdx.x == 0) {
            topk_ids[out + j] = best;
            topk_weights[out + j] = scores[best];
            choice[best] = none;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const float divisor = total > 0.0f ? total : 1.0f;
        for (unsigned j = 0; j < top_k; ++j) {
            float weight = topk_weights[out + j];
            weight = renormalize ? __fdiv_rn(weight, divisor) : weight;
            topk_weights[out + j] = __fmul_rn(weight, factor);
        }
    }
}
