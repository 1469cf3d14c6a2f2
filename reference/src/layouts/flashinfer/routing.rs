//! The routers in TensorRT-LLM's generated MoE kernels, and the router of each layer.

use crate::{Error, Result};

/// How logits become scores (`scoring_func` of a layer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// `softmax`.
    Softmax,
    /// `sigmoid`.
    Sigmoid,
    /// `sqrtsoftplus`: √ln(1 + eˣ).
    SqrtSoftplus,
}

impl Scoring {
    /// From a configuration's name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "softmax" => Ok(Self::Softmax),
            "sigmoid" => Ok(Self::Sigmoid),
            "sqrtsoftplus" => Ok(Self::SqrtSoftplus),
            _ => Err(Error::unsupported(
                format!("scoring_func `{name}`"),
                "softmax, sigmoid or sqrtsoftplus",
            )),
        }
    }
}

/// Upstream's `RoutingMethodType`: FlashInfer 0.6.8.post1 (0 to 8), and from 100 on what only vLLM
/// 0.21.0 has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i64)]
pub enum RoutingMethod {
    /// Softmax, then top-k.
    Default = 0,
    /// Top-k, then softmax of the chosen logits.
    Renormalize = 1,
    /// Sigmoid, bias, groups, top-k; weights divided by their sum and times the scaling factor.
    DeepSeekV3 = 2,
    /// The largest logit, then its sigmoid, which scales the expert's input.
    Llama4 = 3,
    /// Softmax, top-k, weights divided by their sum.
    RenormalizeNaive = 4,
    /// Top-k of the logits, used as weights.
    TopK = 5,
    /// Sigmoid, top-k, weights divided by their sum.
    SigmoidRenorm = 6,
    /// Sigmoid, bias, top-k; sigmoids divided by their sum + 1e-20.
    MiniMax2 = 7,
    /// Another router.
    Unspecified = 8,
    /// √softplus, bias, top-k, weights divided by their sum.
    DeepseekV4 = 100,
    /// A model-specific function.
    Custom = 101,
    /// Simulated ids for measurements.
    Simulated = 102,
}

use RoutingMethod::{
    Custom, DeepSeekV3, DeepseekV4, Default, Llama4, MiniMax2, Renormalize, RenormalizeNaive,
    SigmoidRenorm, Simulated, TopK, Unspecified,
};

impl RoutingMethod {
    /// Every method with upstream's name.
    pub const NAMED: [(&'static str, Self); 12] = [
        ("Default", Default),
        ("Renormalize", Renormalize),
        ("DeepSeekV3", DeepSeekV3),
        ("Llama4", Llama4),
        ("RenormalizeNaive", RenormalizeNaive),
        ("TopK", TopK),
        ("SigmoidRenorm", SigmoidRenorm),
        ("MiniMax2", MiniMax2),
        ("Unspecified", Unspecified),
        ("DeepseekV4", DeepseekV4),
        ("Custom", Custom),
        ("Simulated", Simulated),
    ];

    /// The number that is passed to a kernel.
    pub fn value(self) -> i64 {
        self as i64
    }

    /// Upstream's name.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, method)| *method == self).map_or("", |(name, _)| name)
    }

    /// The method of a layer (vLLM `get_routing_method_type`). `num_expert_group` is the number of
    /// groups, `None` or 0 without groups; `bias` states whether there is an
    /// `e_score_correction_bias`.
    ///
    /// The result does not determine every property of the layer: a bias is considered whether or
    /// not weights are renormalized, and `top_k` only distinguishes Llama 4 from the others.
    pub fn of(
        scoring: Scoring,
        top_k: usize,
        renormalize: bool,
        num_expert_group: Option<usize>,
        bias: bool,
    ) -> Self {
        let grouped = num_expert_group.is_some_and(|groups| groups > 0);
        match (scoring, bias, renormalize) {
            (Scoring::SqrtSoftplus, _, true) => DeepseekV4,
            (Scoring::SqrtSoftplus, _, false) => Unspecified,
            (Scoring::Sigmoid, true, _) if grouped => DeepSeekV3,
            (Scoring::Sigmoid, true, _) => MiniMax2,
            (Scoring::Softmax, true, _) => Unspecified,
            (Scoring::Sigmoid, false, _) if top_k == 1 => Llama4,
            (Scoring::Sigmoid, false, true) => SigmoidRenorm,
            (Scoring::Sigmoid, false, false) => Unspecified,
            (Scoring::Softmax, false, true) => Renormalize,
            (Scoring::Softmax, false, false) => Default,
        }
    }

    /// Checks that `kernel`, which includes the router, supports this method.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the method and those that the kernel supports.
    pub fn expect_in(self, kernel: MoeKernel) -> Result<()> {
        let taken = kernel.routing_methods();
        if taken.contains(&self) {
            return Ok(());
        }
        let names: Vec<&str> = taken.iter().map(|method| method.name()).collect();
        Err(Error::unsupported(
            format!("routing method {} in {kernel:?}", self.name()),
            format!("it takes {}", names.join(", ")),
        ))
    }
}

/// The sizes that a kernel's router limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RoutingSizes {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Groups of experts; 0 and 1 mean none.
    pub n_group: usize,
    /// Groups that are kept.
    pub topk_group: usize,
}

impl RoutingMethod {
    /// Checks that FlashInfer's routing kernels support these sizes (the checks of
    /// `trtllm_fused_moe_runner.cu` and of the three `trtllm_fused_moe_routing_*.cu`).
    ///
    /// All methods: num_experts a multiple of 4, top_k from 1 to num_experts.
    /// [`RoutingMethod::Llama4`]: top_k 1, at most 128 experts. [`RoutingMethod::DeepSeekV3`] with
    /// groups: top_k at most 22, at most 512 experts in at most 8 groups of at most 32, 1 to 4
    /// groups kept. Others: top_k at most 32, at most 2048 experts.
    ///
    /// # Errors
    /// [`Error::Size`] naming the size; [`Error::Unsupported`] for a method without a kernel.
    pub fn expect_sizes(self, sizes: RoutingSizes) -> Result<()> {
        self.expect_in(MoeKernel::MxInt4)?;
        let RoutingSizes { num_experts, top_k, n_group, topk_group } = sizes;
        let expect = |what: &str, found: usize, fine: bool, expected: String| match fine {
            true => Ok(()),
            false => Err(Error::size(format!("{what} of {}", self.name()), found, expected)),
        };
        let grouped = self == DeepSeekV3 && n_group > 1;
        let (experts, most) = match self {
            Llama4 => (128, 1),
            _ if grouped => (512, 22),
            _ => (2048, 32),
        };
        let fine = num_experts.is_multiple_of(4) && num_experts <= experts;
        expect("num_experts", num_experts, fine, format!("a multiple of 4, at most {experts}"))?;
        let most = most.min(num_experts);
        expect("top_k", top_k, (1..=most).contains(&top_k), format!("1 to {most}"))?;
        if grouped {
            let fine = n_group <= 8 && num_experts.is_multiple_of(n_group);
            expect("n_group", n_group, fine, format!("at most 8, a divisor of {num_experts}"))?;
            let each = num_experts / n_group;
            expect("experts per group", each, each <= 32, "at most 32".to_owned())?;
            let most = n_group.min(4);
            let fine = (1..=most).contains(&topk_group);
            expect("topk_group", topk_group, fine, format!("1 to {most}"))?;
        }
        Ok(())
    }
}

/// TensorRT-LLM's generated MoE kernels that include the router (upstream's monolithic ones).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoeKernel {
    /// `trtllm_mxint4_block_scale_moe`.
    MxInt4,
    /// `trtllm_fp4_block_scale_moe` with blocks of 16 (NVFP4).
    Fp4Block16,
    /// The same with blocks of 32 (MXFP4).
    Fp4Block32,
    /// `trtllm_fp8_block_scale_moe`: 128 x 128 blocks, or MXFP8.
    Fp8Block,
    /// `trtllm_fp8_per_tensor_scale_moe`.
    Fp8Tensor,
    /// `trtllm_bf16_moe`.
    Bf16,
}

impl MoeKernel {
    /// The methods that vLLM 0.21.0 passes to the kernel (`_supports_routing_method`).
    ///
    /// For mxint4 vLLM checks nothing: the list is what FlashInfer's runner implements, which fails
    /// in the first product on anything else.
    pub fn routing_methods(self) -> &'static [RoutingMethod] {
        match self {
            Self::MxInt4 => &[
                Default,
                Renormalize,
                DeepSeekV3,
                Llama4,
                RenormalizeNaive,
                TopK,
                SigmoidRenorm,
                MiniMax2,
            ],
            Self::Fp4Block16 | Self::Fp8Tensor => &[
                DeepSeekV3,
                Renormalize,
                RenormalizeNaive,
                Llama4,
                SigmoidRenorm,
                MiniMax2,
                Simulated,
            ],
            Self::Fp8Block => {
                &[DeepSeekV3, Renormalize, RenormalizeNaive, SigmoidRenorm, MiniMax2, Simulated]
            }
            Self::Fp4Block32 => &[Renormalize, RenormalizeNaive],
            Self::Bf16 => &[DeepSeekV3, Llama4, Renormalize, RenormalizeNaive],
        }
    }
}
