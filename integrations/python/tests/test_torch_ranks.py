"""Row-parallel products over ranks, and experts over ranks, by ``marlinspike.torch``: one GPU's bits for every number."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import marlinspike  # noqa: E402
import marlinspike.torch  # noqa: E402, F401
from test_torch_operators import HAS_CUDA, KINDS, Layer, Packed, assert_same, drawn, same, words  # noqa: E402

ops = torch.ops.marlinspike
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device"))]


def part_of(packed, rank, ranks):
    """A rank's rows of the packed tensors: whole groups, or one for all k."""
    made = object.__new__(Packed)
    made.__dict__ = dict(packed.__dict__)
    rows = lambda t: t if t is None or len(t) == 1 else t.chunk(ranks)[rank].contiguous()  # noqa: E731
    made.q, made.s, made.z = rows(packed.q), rows(packed.s), rows(packed.z)
    return made


def sums_of(packed, x, size_k, rank, ranks):
    own = part_of(packed, rank, ranks)
    columns = x.chunk(ranks, dim=1)[rank].contiguous()
    return ops.marlin_gemm_part(
        columns, size_k, rank, ranks, own.q, own.s, own.z, own.bias, None, own.quant_type, own.bound
    )


def added(packed, sums, size_k, dtype, rank=0):
    own = part_of(packed, rank, len(sums))
    return ops.add_ranks(sums, size_k, dtype, own.q, own.s, own.z, own.bias, None, own.quant_type)


def over(packed, x, size_k, ranks):
    sums = torch.stack([sums_of(packed, x, size_k, rank, ranks) for rank in range(ranks)])
    made = [added(packed, sums, size_k, x.dtype, rank) for rank in range(ranks)]
    assert all(torch.equal(y, made[0]) for y in made)
    return made[0]


SPLIT = [(kind, group) for kind, row in KINDS.items() for group in row[2] if group != 128]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, group_size", [*SPLIT, ("int4", 128)])
def test_every_number_of_ranks_gives_the_bits_of_one(kind, group_size, device):
    size_k = 2048
    packed = Packed(kind, size_k, 128, group_size, torch.bfloat16, bias=True).to(device)
    for rows in (1, 20, 300) if device == "cuda" else (2,):
        x = torch.randn(rows, size_k).bfloat16().to(device)
        one = over(packed, x, size_k, 1)
        for ranks in (2, 4, 8):
            assert_same(over(packed, x, size_k, ranks), one, f"{ranks} ranks, {rows} rows")
        if device == "cuda":
            assert_same(one[:2], over(packed.to("cpu"), x[:2].cpu(), size_k, 1), "the reference")
            assert_same(over(packed, x[:1].contiguous(), size_k, 4), one[:1], "one row alone")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["uint4b8", "uint4"])
def test_ranks_may_have_a_group_each(kind, device):
    """Whose scales are in the order of channels' then, as vLLM permutes them."""
    size_k, size_n, group = 1024, 128, 128
    q, z = words(size_k // 16, size_n * 2), words(size_k // group, size_n // 8, seed=1)
    raw, x = (drawn(8, size_n, low=0.001) / 64).bfloat16(), torch.randn(3, size_k).bfloat16()

    def over_ranks(ranks):
        sums = []
        for rank in range(ranks):
            s = ops.marlin_permute_scales(raw.chunk(ranks)[rank].contiguous(), size_k // ranks, size_n, group)
            own = (q.chunk(ranks)[rank], s, z.chunk(ranks)[rank].contiguous() if kind == "uint4" else None)
            own = [t if t is None else t.to(device) for t in own]
            columns = x.chunk(ranks, 1)[rank].contiguous().to(device)
            sums.append(ops.marlin_gemm_part(columns, size_k, rank, ranks, *own, None, None, kind))
        return ops.add_ranks(torch.stack(sums), size_k, torch.bfloat16, *own, None, None, kind)

    for ranks in (2, 4, 8):
        assert_same(over_ranks(ranks), over_ranks(1), f"{ranks} ranks")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_sum_is_the_balanced_tree_in_f32_then_the_bias_and_one_rounding(ranks, dtype, device):
    packed = Packed("int4", 128 * ranks, 128, -1, dtype, bias=True, seed=ranks)
    packed.bias[64:] = 0
    sums = drawn(ranks, 5, 128, seed=ranks).numpy()
    if ranks > 1:
        # Ranks that nearly cancel, so that the order shows.
        sums[ranks // 2 :] = -sums[: ranks // 2][::-1] * np.float32(1 + 2**-18)
    tree, chain = list(sums), sums[0]
    while len(tree) > 1:
        tree = [tree[i] + tree[i + 1] for i in range(0, len(tree), 2)]
    for part in sums[1:]:
        chain = chain + part
    assert tree[0].dtype == chain.dtype == np.float32
    # The packed bias has each 32 columns as 0, 1, 8, 9, 16, 17, 24, 25, 2, 3 ...
    plain = torch.empty(4, 32)
    plain[:, [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]] = packed.bias.float().reshape(-1, 32)
    rounded = lambda sum_: (torch.from_numpy(sum_) + plain.reshape(1, -1)).to(dtype)  # noqa: E731
    y = added(packed.to(device), torch.from_numpy(sums).to(device), 128 * ranks, dtype)
    assert_same(y, rounded(tree[0]))
    assert ranks < 4 or not same(rounded(chain), rounded(tree[0]))


def test_parts_as_engines_add_them_have_other_bits():
    """The rank's own K, rounded to 16 bits, added to the others'."""
    size_k = 2048
    packed = Packed("int4", size_k, 128, 64, torch.bfloat16)
    x = torch.randn(8, size_k).bfloat16()
    one = over(packed, x, size_k, 1)
    parts = []
    for rank in range(2):
        own = part_of(packed, rank, 2)
        parts.append(own.times(x.chunk(2, dim=1)[rank].contiguous()))
    assert not same((parts[0].float() + parts[1].float()).bfloat16(), one)


PART_ERRORS = {
    "ranks: found 3": lambda a, q, s: ops.marlin_gemm_part(a, 1024, 0, 3, q, s),
    "rank: found 2": lambda a, q, s: ops.marlin_gemm_part(a, 1024, 2, 2, q, s),
    "size_k: found 1024, expected 512": lambda a, q, s: ops.marlin_gemm_part(a, 1024, 0, 1, q, s),
    "`a`: found shape [3, 64]": lambda a, q, s: ops.marlin_gemm_part(a[:, :64], 1024, 0, 2, q, s),
    "size_k: found 1024": lambda a, q, s: ops.add_ranks(torch.ones(4, 3, 64), 1024, torch.half, q, s.half()),
    "`sums`: found torch.bfloat16": lambda a, q, s: ops.add_ranks(a.reshape(1, 3, 512), 512, torch.half, q, s.half()),
    "dtype: found torch.float32": lambda a, q, s: ops.add_ranks(torch.ones(2, 3, 64), 1024, torch.float, q, s),
    "`sums`: found shape [2, 3, 32]": lambda a, q, s: ops.add_ranks(torch.ones(2, 3, 32), 1024, torch.half, q, s.half()),
}


@pytest.mark.parametrize("message", PART_ERRORS)
def test_errors_name_what_does_not_fit(message):
    packed = Packed("int4", 512, 64, 64, torch.bfloat16)
    a = torch.randn(3, 512).bfloat16()
    with pytest.raises(marlinspike.Error) as error:
        PART_ERRORS[message](a, packed.q, packed.s)
    assert message in str(error.value)
    assert ops.marlin_gemm_part(a, 1024, 1, 2, packed.q, packed.s).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_over_ranks_by_rows_of_slots_have_one_ranks_bits(ranks, device):
    """As the plugin for vLLM does: a row for each slot, the exact sum of all ranks' rows, the sum over slots."""
    experts, top_k = 16, 4
    layer = Layer("int4", torch.bfloat16, experts=experts, hidden=128, inner=64).to(device)
    x, weights, ids = (t.to(device) for t in layer.inputs(7, top_k))
    # Slots of any sign, and one of nothing but zeros.
    weights = weights - 0.5
    weights[0, 1] = -0.0
    whole = layer.forward(x, weights, ids)
    rows, engines = 0, 0
    w1, w2 = layer.w1, layer.w2
    for rank in range(ranks):
        here = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
        map_ = torch.full((experts,), -1, dtype=torch.int32)
        map_[here] = torch.arange(experts // ranks, dtype=torch.int32)
        own = (w1.q[here], w2.q[here], None, None, w1.s[here], w2.s[here])
        rest = ("uint4b8", False, experts, "silu", map_.to(device))
        slots = x.repeat_interleave(top_k, 0)
        made = ops.fused_marlin_moe(slots, *own, weights.reshape(-1, 1), ids.reshape(-1, 1), *rest)
        rows = rows + made
        engines = engines + ops.fused_marlin_moe(x, *own, weights, ids, *rest)
    assert_same(ops.moe_sum(rows.reshape(7, top_k, -1)), whole)
    assert not same(engines, whole)
