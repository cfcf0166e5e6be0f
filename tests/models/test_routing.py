"""Cross-layer routing: the formula, the start as the plain network, memory, and the ways it is run."""

import copy

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError
from theodolite.models import GPT
from theodolite.models.routing import History, Route, Routed
from theodolite.models.transformer import FeedForward, make_norm


def small(depth=3, **options) -> GPT:
    return GPT(32, depth, vocab=50, context=16, head_dim=16, residual="routed", **options)


def with_random_queries(model, size=1.0):
    for name, parameter in model.named_parameters():
        if name.endswith("route.query"):
            torch.nn.init.normal_(parameter, std=size)
    return model


def history_of(values):
    history = History((), ())
    for value in values:
        history = history.then(value)
    return history


def in_one_shot(query, values):
    """The formula on the stacked history."""
    v_NBTD = torch.stack(list(values))
    k_NBTD = v_NBTD / (v_NBTD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    weights_NBT = torch.einsum("nbtd,d->nbt", k_NBTD, query).div(query.shape[0]).softmax(0)
    return torch.einsum("nbt,nbtd->btd", weights_NBT, v_NBTD)


def test_a_route_is_the_formula_and_so_is_its_gradient():
    values = [torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(7)]
    route = Route(8).double()
    torch.nn.init.normal_(route.query, std=3.0)
    mine, expected = route(history_of(values)), in_one_shot(route.query, values)
    torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-14)
    into = torch.randn_like(expected)
    gradients = (torch.autograd.grad(one, [route.query, *values], into) for one in (mine, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)


def test_a_token_is_mixed_by_its_own_weights():
    """Where a key points along the query, nearly all weight goes to it."""
    first, second = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    route = Route(2)
    route.query.data = torch.tensor([40.0, 0.0])
    expected = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    torch.testing.assert_close(route(history_of([first, second])), expected)


@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_at_the_start_it_computes_what_the_plain_network_does(placement):
    """The mean of the history is the stream over their number, which a norm takes away."""
    routed = small(norm_placement=placement).double()
    plain = GPT(32, 3, vocab=50, context=16, head_dim=16, norm_placement=placement).double()
    plain.load_state_dict({name: one for name, one in routed.state_dict().items() if "route." not in name})
    for model in (routed, plain):
        for module in model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.eps = 0.0
    tokens = torch.randint(50, (2, 9))
    torch.testing.assert_close(routed(tokens), plain(tokens), rtol=1e-12, atol=1e-12)
    assert (with_random_queries(routed)(tokens) - plain(tokens)).abs().max() > 1e-2


def test_there_is_a_query_for_every_branch_that_has_a_choice_and_for_the_readout():
    names = [name for name, _ in small(depth=2).named_parameters() if name.endswith("route.query")]
    assert names == [
        "blocks.0.feed_forward.route.query",
        "blocks.1.attention.route.query",
        "blocks.1.feed_forward.route.query",
        "route.query",
    ]


def test_every_query_gets_a_gradient():
    model = with_random_queries(small())
    model(torch.randint(50, (2, 8))).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_a_later_token_cannot_be_seen():
    model = with_random_queries(small())
    tokens = torch.randint(50, (3, 12))
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def kept(function):
    """Numbers that are kept for the way back, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()  # which holds on to what was kept, so that no place is used again
    return sum(storages.values()), result


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_the_history_is_kept_once_for_all_routes(precision):
    """L routes over L values keep values and keys once: not L²·B·T·D numbers, as stacking would."""
    num, features = 24, 256
    values = [torch.randn(1, 4, features, requires_grad=True) * 1 for _ in range(num)]
    if precision is not None:
        values = [value.to(precision) for value in values]
    history, routes = history_of(values), [Route(features) for _ in range(num)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
        mine, _ = kept(lambda: [route(history) for route in routes])
        stacked, _ = kept(lambda: [in_one_shot(route.query, values) for route in routes])
    history_size = 2 * num * 4 * features
    assert mine < 2 * history_size
    assert stacked > 10 * history_size


def test_scores_are_not_rounded_by_autocast():
    values = [torch.randn(1, 2, 64) for _ in range(3)]
    route = Route(64)
    torch.nn.init.normal_(route.query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = route(history_of(values))
    torch.testing.assert_close(half, in_one_shot(route.query, values), rtol=1e-5, atol=1e-6)


def test_many_models_at_once_are_each_of_them():
    models = [with_random_queries(small()) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    tokens = torch.randint(50, (2, 8))
    with sdpa_kernel(SDPBackend.MATH):
        together = vmap(lambda own, more: functional_call(models[0], (own, more), (tokens,)))(
            parameters, buffers
        )
    for model, output in zip(models, together, strict=True):
        torch.testing.assert_close(output, model(tokens), rtol=1e-5, atol=1e-5)


def test_a_branch_compiles_whole():
    branch = Routed(FeedForward(16), 16, "peri", make_norm("rms", shift=False), first=False)
    with_random_queries(branch)
    history = history_of(torch.randn(2, 3, 16) for _ in range(3))
    compiled = torch.compile(branch, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(history), branch(history))


def test_it_is_built_on_meta_and_materialised():
    with torch.device("meta"):
        hollow = small()
    assert hollow(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, 50)
    real = small()
    hollow.to_empty(device="cpu").load_state_dict(real.state_dict())
    tokens = torch.randint(50, (2, 8))
    assert torch.equal(hollow(tokens), real(tokens))


@pytest.mark.parametrize("placement", ["post", "out", "none"])
def test_a_placement_without_a_norm_before_the_branch_is_refused(placement):
    with pytest.raises(UseError, match=f"norm_placement is '{placement}'.*Give 'pre' or 'peri'"):
        small(norm_placement=placement)


def test_an_unknown_residual_is_refused():
    with pytest.raises(UseError, match=r"residual is 'mixed'\. It is one of add, routed"):
        GPT(32, 2, residual="mixed")


def test_blocks_are_in_the_same_order_as_of_the_plain_network():
    names = [name for name, _ in small().named_parameters() if "route." not in name]
    plain = GPT(32, 3, vocab=50, context=16, head_dim=16)
    assert names == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(block.attention, Routed) for block in small().blocks)


def test_a_network_in_halves_runs_in_halves() -> None:
    tokens = torch.arange(16).view(2, 8)
    model = GPT(32, 2, residual="routed")
    logits = model(tokens)
    rounded = copy.deepcopy(model).bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), logits, rtol=0.1, atol=0.1)


def test_a_query_that_depends_on_a_condition_is_the_formula():
    values = [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(4)]
    condition, route = torch.randn(2, 8, dtype=torch.float64), Route(8, conditioned=True).double()
    torch.nn.init.normal_(route.query)
    torch.nn.init.normal_(route.shift)
    mine = route(history_of(values), condition)
    for example in range(2):
        query = route.query + route.shift @ condition[example]
        expected = in_one_shot(query, [value[example : example + 1] for value in values])
        torch.testing.assert_close(mine[example : example + 1], expected, rtol=1e-12, atol=1e-13)
