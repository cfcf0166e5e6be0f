"""The transformer as a whole: counts, causality, ties, initial values and the ways it is run."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError
from theodolite.models import GPT

SHAPES = {
    "plain": {},
    "gpt2": {"positions": "learned", "norm": "layer", "bias": True, "tied": True},
    "peri": {"norm_placement": "peri", "gated": True, "qk_norm": True},
    "post": {"norm_placement": "post", "norm": "layer"},
    "out": {"norm_placement": "out", "kv_heads": 1},
    "none": {"norm_placement": "none"},
    "mixture": {"experts": 4, "active": 2, "gated": True, "kv_heads": 1},
}
every_shape = pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)


def small(**options) -> GPT:
    return GPT(32, 2, vocab=50, context=16, head_dim=16, **options)


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


D, V, T = 32, 50, 16
COUNTS = {
    # embedding and readout; per block attention, feed-forward and norms; what comes before and after
    "plain": 2 * V * D + 2 * (4 * D * D + 8 * D * D + 2 * D) + D,
    "gpt2": V * D + T * D + 2 * (4 * (D * D + D) + 8 * D * D + 5 * D + 4 * D) + 2 * D,
    "peri": 2 * V * D + 2 * (4 * D * D + 2 * 16 + 9 * D * D + 4 * D) + D,
    "post": 2 * V * D + 2 * (12 * D * D + 2 * D),
    "out": 2 * V * D + 2 * (2 * D * D + 2 * 16 * D + 8 * D * D + 2 * D) + D,
    "none": 2 * V * D + 2 * 12 * D * D,
    "mixture": 2 * V * D + 2 * (2 * D * D + 2 * 16 * D + 4 * D + 4 * 9 * D * D + 2 * D) + D,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_parameters_is_the_formula(shape):
    assert count(small(**SHAPES[shape])) == COUNTS[shape]


@every_shape
def test_a_later_token_cannot_be_seen(options):
    model = small(**options)
    tokens = torch.randint(50, (3, 12))
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_earlier_tokens_matters(positions):
    # In one block without positions the last token would see the earlier ones as a set.
    model = GPT(32, 1, vocab=50, context=16, head_dim=16, positions=positions)
    there, back = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert (there[:, -1] - back[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("norm_placement", ["pre", "post", "peri", "out"])
def test_the_readout_reads_a_normalised_stream(norm_placement):
    model = small(norm_placement=norm_placement)
    seen = []
    model.readout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.randint(50, (2, 8)))
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(2, 8), atol=1e-3, rtol=0)


def test_without_norms_the_stream_is_the_embedding_plus_the_branches():
    model = small(norm_placement="none").double()
    for block in model.blocks:
        block.attention.branch.out.weight.data.zero_()
        block.feed_forward.branch.down.weight.data.zero_()
    tokens = torch.randint(50, (2, 8))
    torch.testing.assert_close(model(tokens), model.embed.weight[tokens] @ model.readout.weight.T)


def test_tied_weights_are_one_tensor_that_both_ends_train():
    model = small(tied=True)
    assert model.readout.weight is model.embed.weight
    assert count(model) == count(small()) - V * D
    F.cross_entropy(model(torch.zeros(1, 4, dtype=torch.long)).flatten(0, 1), torch.ones(4).long()).backward()
    # Token 2 is neither read nor a target: only the readout moves it.
    assert model.embed.weight.grad[2].abs().max() > 0


@pytest.mark.parametrize("experts", [0, 8])
def test_initial_weights_have_variance_one_over_fan_in(experts):
    model = GPT(128, 3, experts=experts)
    checked = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            variance = 1.0 if name == "embed.weight" else 1 / parameter.shape[-1]
            # Five standard errors of a variance estimated from n normal numbers.
            error = 5 * (2 / parameter.numel()) ** 0.5
            assert parameter.var().item() == pytest.approx(variance, rel=error), name
            checked += 1
    assert checked == 2 + 3 * (7 if experts else 6)


def test_a_tied_embedding_starts_as_a_readout():
    variance = GPT(128, 1, tied=True).embed.weight.var().item()
    assert variance == pytest.approx(1 / 128, rel=0.05)


@pytest.mark.parametrize("experts", [0, 4])
def test_scaled_init_touches_the_ends_of_branches_only(experts):
    torch.manual_seed(1)
    plain = dict(small(experts=experts).named_parameters())
    torch.manual_seed(1)
    scaled = dict(small(experts=experts, scaled_init=True).named_parameters())
    ends = {name for name in plain if ".branch.out." in name or ".branch.down" in name}
    assert len(ends) == 4
    for name, parameter in plain.items():
        torch.testing.assert_close(scaled[name], parameter * (0.5 if name in ends else 1.0))


def test_initial_logits_keep_their_scale_with_width_and_depth():
    tokens = torch.randint(256, (4, 32))
    stds = [GPT(width, depth)(tokens).std().item() for width, depth in [(32, 1), (128, 1), (64, 8)]]
    assert stds == pytest.approx([1.0, 1.0, 1.0], rel=0.15)


@every_shape
def test_many_models_run_at_once(options):
    models = [small(**options) for _ in range(3)]
    parameters, _ = stack_module_state(models)
    tokens = torch.randint(50, (2, 8))
    with sdpa_kernel(SDPBackend.MATH):
        together = vmap(lambda one: functional_call(models[0], one, (tokens,)))(parameters)
    for number, model in enumerate(models):
        torch.testing.assert_close(together[number], model(tokens), atol=1e-5, rtol=1e-4)


@every_shape
def test_shapes_can_be_had_without_computing(options):
    with FakeTensorMode():
        logits = small(**options)(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, 50)


@every_shape
def test_a_model_made_on_meta_and_filled_later_is_the_same_model(options):
    model = small(**options)
    with torch.device("meta"):
        later = small(**options)
    later.to_empty(device="cpu").load_state_dict(model.state_dict())
    tokens = torch.randint(50, (2, 8))
    assert torch.equal(later(tokens), model(tokens))


def test_it_learns_the_next_token_of_a_cycle():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = (torch.arange(16) + torch.arange(8)[:, None]) % 5
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize(
    "options, message",
    [
        ({"width": 100}, "width is 100, not a multiple of 32 .*: give 96 or 128"),
        ({"depth": 0}, "depth is 0: a size is two positive whole numbers"),
        ({"norm": "batch"}, "norm is 'batch'. It is one of rms, layer"),
        (
            {"norm_placement": "both"},
            "norm_placement is 'both'. It is one of pre, post, peri, out, none",
        ),
        ({"positions": "alibi"}, "positions is 'alibi'. It is one of rotary, learned"),
        ({"head_dim": 1}, "head_dim is 1, not a multiple of 2"),
        ({"vocab": 0}, "vocab is 0: give an integer, at least 1"),
        ({"experts": -1}, "experts is -1: give at least 2, or 0"),
    ],
)
def test_impossible_options_are_refused_with_the_fix(options, message):
    with pytest.raises(UseError, match=message):
        GPT(**{"width": 64, "depth": 2, **options})


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(UseError, match="a sequence has 17 tokens, context is 16: build with context=17"):
        small()(torch.zeros(1, 17, dtype=torch.long))
