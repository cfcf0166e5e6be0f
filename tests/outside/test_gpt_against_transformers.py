"""With the weights of a Hugging Face model, the same logits in float64."""

import pytest
import torch

from theodolite.models import GPT

transformers = pytest.importorskip("transformers", reason="pip install 'theodolite[hf]'")

WIDTH, DEPTH, HEAD, VOCAB, CONTEXT = 64, 2, 16, 50, 24

LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": WIDTH // HEAD,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}


def peers():
    llama = transformers.LlamaConfig(**LLAMA_LIKE)
    qwen = transformers.Qwen3Config(**LLAMA_LIKE, head_dim=HEAD)
    # The grouped kernel has no float64.
    mixtral = transformers.MixtralConfig(
        **LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=WIDTH, n_layer=DEPTH, n_head=WIDTH // HEAD,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    rotary = {"kv_heads": 2, "gated": True}
    return {
        "llama": (transformers.LlamaForCausalLM, llama, rotary),
        "qwen3": (transformers.Qwen3ForCausalLM, qwen, dict(**rotary, qk_norm=True)),
        "mixtral": (transformers.MixtralForCausalLM, mixtral, dict(**rotary, experts=4, active=2)),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            gpt2,
            {"positions": "learned", "norm": "layer", "bias": True, "tied": True},
        ),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2"])
def test_the_same_weights_give_the_same_logits(name):
    make, config, options = peers()[name]
    peer = make(config).double().eval()
    # Gains of 1 and biases of 0 would hide a gain or a bias in the wrong place.
    for parameter in peer.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model = GPT(WIDTH, DEPTH, vocab=VOCAB, context=CONTEXT, head_dim=HEAD, **options).double()
    model.load_state_dict(from_gpt2(peer) if name == "gpt2" else from_llama(peer))
    tokens = torch.randint(VOCAB, (3, 20))
    torch.testing.assert_close(model(tokens), peer(tokens).logits, atol=1e-6, rtol=1e-6)


def from_llama(peer):
    state = {
        "embed.weight": peer.model.embed_tokens.weight,
        "norm.weight": peer.model.norm.weight,
        "readout.weight": peer.lm_head.weight,
    }
    for number, theirs in enumerate(peer.model.layers):
        attention, feed_forward = f"blocks.{number}.attention", f"blocks.{number}.feed_forward"
        state[f"{attention}.norm_in.weight"] = theirs.input_layernorm.weight
        state[f"{feed_forward}.norm_in.weight"] = theirs.post_attention_layernorm.weight
        for ours, their in zip(("query", "key", "value", "out"), "qkvo", strict=True):
            state[f"{attention}.branch.{ours}.weight"] = getattr(theirs.self_attn, f"{their}_proj").weight
        if hasattr(theirs.self_attn, "q_norm"):
            state[f"{attention}.branch.query_norm.weight"] = theirs.self_attn.q_norm.weight
            state[f"{attention}.branch.key_norm.weight"] = theirs.self_attn.k_norm.weight
        if hasattr(theirs.mlp, "experts"):
            gate, up = theirs.mlp.experts.gate_up_proj.chunk(2, dim=1)
            state[f"{feed_forward}.branch.router.weight"] = theirs.mlp.gate.weight
            state[f"{feed_forward}.branch.gate"] = gate
            state[f"{feed_forward}.branch.up"] = up
            state[f"{feed_forward}.branch.down"] = theirs.mlp.experts.down_proj
        else:
            for ours in ("gate", "up", "down"):
                state[f"{feed_forward}.branch.{ours}.weight"] = getattr(theirs.mlp, f"{ours}_proj").weight
    return state


def from_gpt2(peer):
    state = {
        "embed.weight": peer.transformer.wte.weight,
        "readout.weight": peer.transformer.wte.weight,
        "position.weight": peer.transformer.wpe.weight,
        "norm.weight": peer.transformer.ln_f.weight,
        "norm.bias": peer.transformer.ln_f.bias,
    }
    for number, theirs in enumerate(peer.transformer.h):
        attention, feed_forward = f"blocks.{number}.attention", f"blocks.{number}.feed_forward"
        for kind in ("weight", "bias"):
            state[f"{attention}.norm_in.{kind}"] = getattr(theirs.ln_1, kind)
            state[f"{feed_forward}.norm_in.{kind}"] = getattr(theirs.ln_2, kind)
            # Conv1D stores (in, out).
            fused = (
                getattr(theirs.attn.c_attn, kind).T.chunk(3)
                if kind == "weight"
                else theirs.attn.c_attn.bias.chunk(3)
            )
            for ours, part in zip(("query", "key", "value"), fused, strict=True):
                state[f"{attention}.branch.{ours}.{kind}"] = part
            for ours, their in (
                (f"{attention}.branch.out", theirs.attn.c_proj),
                (f"{feed_forward}.branch.up", theirs.mlp.c_fc),
                (f"{feed_forward}.branch.down", theirs.mlp.c_proj),
            ):
                state[f"{ours}.{kind}"] = their.weight.T if kind == "weight" else their.bias
    return state
