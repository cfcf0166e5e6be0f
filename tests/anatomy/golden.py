"""Golden tables: what every tensor of well-known networks does, read off their source code.

Each table was written from the architecture (transformers' modeling files, torch.nn, or the classes at the
end of this file) and never from what `dissect` printed. `d` is the width, `n` the number of layers; a
name in a branch is relative to that branch's prefix. A gain says who reads it (`read_by`: linear maps with
weights of their own, so an Input-Norm) or what it reaches instead (`reaches`: an Output-Norm).
`test_golden.py` checks the tables numerically too, with no help from `dissect`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.part import Attention, Branch, Norm, Part, Placement, Role
from theodolite.size import Size

VOCAB, CLASSES, HEAD, EXPERTS = 97, 10, 16, 4
TWO_LAYERS, THREE_LAYERS = Size(64, 2), Size(64, 3)

Ranges = tuple[tuple[int, int], ...]
Rows = tuple[Ranges, ...]


@dataclass(frozen=True)
class Fact:
    """What the source says about one tensor, wherever it sits."""

    shape: tuple[int, ...]
    op: str
    role: Role
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    grows: str
    """Which fans grow with width: `in`, `out`, `both` or `neither`."""
    norm: Norm | None = None
    read_by: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    rows: Rows = ()


@dataclass(frozen=True)
class Limb:
    """One residual branch as the source writes it; names may be relative to `prefix`."""

    prefix: str
    placement: Placement
    facts: dict[str, Fact]
    ends: tuple[str, ...]
    layers: int = 2
    attention: Attention | None = None


@dataclass(frozen=True)
class Table:
    """All tensors of a network: those on or beside the stream, and those in branches by block."""

    outside: dict[str, Fact]
    blocks: list[list[Limb]]

    def parts(self) -> dict[str, Part]:
        """The Part that `dissect` should give for every name; a name written twice raises."""
        parts: dict[str, Part] = {}
        for name, part in self._parts():
            if name in parts:
                raise ValueError(f"{name} is in the table twice")
            parts[name] = part
        return parts

    def _parts(self) -> Iterator[tuple[str, Part]]:
        for name, fact in self.outside.items():
            yield name, _part(name, fact)
        for b, limbs in enumerate(self.blocks):
            for r, limb in enumerate(limbs):
                unknown = [end for end in limb.ends if end not in limb.facts]
                if unknown:
                    raise ValueError(f"{limb.prefix}: ends {unknown} are no tensors of the branch")
                for name, fact in limb.facts.items():
                    part = _part(limb.prefix + name, fact)
                    ends = name in limb.ends
                    yield (
                        part.name,
                        replace(part, block=b, branch=r, ends_branch=ends, branch_layers=limb.layers),
                    )

    def branches(self) -> dict[tuple[int, int], Branch]:
        """The Branch expected at every (block, branch); parts and ends in alphabetical order."""
        return {
            (b, r): Branch(
                block=b,
                branch=r,
                placement=limb.placement,
                layers=limb.layers,
                parts=tuple(sorted(limb.prefix + name for name in limb.facts)),
                ends=tuple(sorted(limb.prefix + name for name in limb.ends)),
                attention=limb.attention,
            )
            for b, limbs in enumerate(self.blocks)
            for r, limb in enumerate(limbs)
        }

    def readers(self) -> dict[str, tuple[str, ...]]:
        """For every Input-Norm's gain: the weights that read it."""
        names = list(self.parts())
        facts = [("", name, fact) for name, fact in self.outside.items()]
        facts += [
            (limb.prefix, name, fact)
            for limbs in self.blocks
            for limb in limbs
            for name, fact in limb.facts.items()
        ]
        found: dict[str, tuple[str, ...]] = {}
        for prefix, name, fact in facts:
            if fact.norm == "input":
                patterns = [prefix + pattern for pattern in fact.read_by]
                found[prefix + name] = tuple(
                    reader for reader in names if any(fnmatchcase(reader, pattern) for pattern in patterns)
                )
        return found


@dataclass(frozen=True)
class Golden:
    """A network that can be built at any size, an input for it, and its table at a size."""

    build: Callable[[int, int], nn.Module]
    inputs: Callable[[], Any]
    table: Callable[[int, int], Table]
    size: Size = TWO_LAYERS
    silent: float = 0.0
    """The value of a branch's ends at which the branch adds nothing: 0, or -1 for gains stored as γ − 1."""
    shared: tuple[str, ...] = ()
    """Tensors that both branches of a block read; the table has them in the first."""


def _part(name: str, fact: Fact) -> Part:
    return Part(
        name=name,
        shape=fact.shape,
        op=fact.op,
        role=fact.role,
        fan_in=math.prod(fact.shape[axis] for axis in fact.in_axes),
        fan_out=math.prod(fact.shape[axis] for axis in fact.out_axes),
        width_in=fact.grows in ("in", "both"),
        width_out=fact.grows in ("out", "both"),
        in_axes=fact.in_axes,
        out_axes=fact.out_axes,
        norm=fact.norm,
        tied=fact.tied,
        rows=fact.rows,
    )


# The vocabulary of the tables.


def hidden(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """nn.Linear between two widths: weight (out, in)."""
    return Fact((fan_out, fan_in), "linear", "hidden", (1,), (0,), "both", rows=rows)


def conv1d(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """transformers' Conv1D (GPT-2), a Linear with weight (in, out)."""
    return Fact((fan_in, fan_out), "linear", "hidden", (0,), (1,), "both", rows=rows)


def experts(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """A stack of expert matrices (experts, out, in)."""
    return Fact((EXPERTS, fan_out, fan_in), "linear", "hidden", (2,), (1,), "both", rows=rows)


def readout(fan_in: int, fan_out: int) -> Fact:
    """nn.Linear onto something that keeps its size: classes, vocabulary, experts, fixed heads."""
    return Fact((fan_out, fan_in), "linear", "output", (1,), (0,), "in")


def entry(fan_in: int, fan_out: int) -> Fact:
    """nn.Linear from the data, whose size stays, onto the width."""
    return Fact((fan_out, fan_in), "linear", "input", (1,), (0,), "out")


def lookup(count: int, d: int, tied: tuple[str, ...] = ()) -> Fact:
    """nn.Embedding (count, d). A tied head does not change it: the first use names the part."""
    return Fact((count, d), "embedding", "input", (0,), (1,), "out", tied=tied)


def conv(fan_in: int, fan_out: int, kernel: int, role: Role = "hidden") -> Fact:
    """nn.Conv2d (out, in / groups, k, k)."""
    grows = {"hidden": "both", "input": "out"}[role]
    return Fact((fan_out, fan_in, kernel, kernel), "conv", role, (1, 2, 3), (0,), grows)


def bias(d: int, grows: bool = True, rows: Rows = (), tied: tuple[str, ...] = ()) -> Fact:
    """A vector that is added."""
    return Fact((d,), "add", "bias", (), (0,), "out" if grows else "neither", tied=tied, rows=rows)


def gain(
    *shape: int, read_by: tuple[str, ...] | str = (), reaches: str | None = None, grows: bool = True
) -> Fact:
    """A vector that multiplies what a norm returns: Input-Norm if `read_by`, Output-Norm if it `reaches`."""
    readers = (read_by,) if isinstance(read_by, str) else read_by
    if bool(readers) == bool(reaches):
        raise ValueError("a gain is either read by weights only, or reaches something else")
    axes = tuple(range(len(shape)))
    norm: Norm = "input" if readers else "output"
    return Fact(shape, "norm", "gain", (), axes, "out" if grows else "neither", norm=norm, read_by=readers)


def layer_scale(d: int) -> Fact:
    """A vector that multiplies what is no norm's output."""
    return Fact((d,), "scale", "gain", (), (0,), "out")


def thirds(d: int) -> Rows:
    """Query, key and value one after the other."""
    return (((0, d),), ((d, 2 * d),), ((2 * d, 3 * d),))


def halves(d: int) -> Rows:
    """Gate and up one after the other."""
    return (((0, d),), ((d, 2 * d),))


def heads_of_thirds(d: int) -> Rows:
    """GPT-NeoX: head by head, and in each head query, key and value."""
    starts = range(0, 3 * d, 3 * HEAD)
    return tuple(tuple((s + i * HEAD, s + (i + 1) * HEAD) for s in starts) for i in range(3))


def softmax(scale: float = HEAD**-0.5) -> Attention:
    """Heads of fixed size, as nearly all builds here have them: the scale stays too."""
    return Attention(head_dim=HEAD, head_dim_grows=False, scale=scale, scale_at_double_width=scale)


# GPT-2: pre-norm, Conv1D (in, out), fused QKV, learned positions, tied head.


def gpt2_build(width: int, depth: int, heads: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=width,
            n_layer=depth,
            n_head=heads or width // HEAD,
            n_positions=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gpt2(d: int, n: int, attention: Attention | None = None) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"transformer.h.{i}.",
                "pre",
                {
                    "ln_1.weight": gain(d, read_by="attn.c_attn.weight"),
                    "ln_1.bias": bias(d),
                    "attn.c_attn.weight": conv1d(d, 3 * d, rows=thirds(d)),
                    # The bias of a fused map is fused as the map is.
                    "attn.c_attn.bias": bias(3 * d, rows=thirds(d)),
                    "attn.c_proj.weight": conv1d(d, d),
                    "attn.c_proj.bias": bias(d),
                },
                ends=("attn.c_proj.weight", "attn.c_proj.bias"),
                attention=attention or softmax(),
            ),
            Limb(
                f"transformer.h.{i}.",
                "pre",
                {
                    "ln_2.weight": gain(d, read_by="mlp.c_fc.weight"),
                    "ln_2.bias": bias(d),
                    "mlp.c_fc.weight": conv1d(d, 4 * d),
                    "mlp.c_fc.bias": bias(4 * d),
                    "mlp.c_proj.weight": conv1d(4 * d, d),
                    "mlp.c_proj.bias": bias(d),
                },
                ends=("mlp.c_proj.weight", "mlp.c_proj.bias"),
            ),
        ]

    outside = {
        "transformer.wte.weight": lookup(VOCAB, d, tied=("lm_head.weight",)),
        "transformer.wpe.weight": lookup(32, d),
        # Its only reader is the tied head: folding γ into it would change the embedding.
        "transformer.ln_f.weight": gain(d, reaches="a tied head"),
        "transformer.ln_f.bias": bias(d),
    }
    return Table(outside, [block(i) for i in range(n)])


def gpt2_four_heads(d: int, n: int) -> Table:
    """Four heads at every width: their size grows, and the scale 1/√(d/4) with it."""
    return gpt2(d, n, Attention(d // 4, True, (d // 4) ** -0.5, (d // 2) ** -0.5))


# The Llama family: pre-norm, RMSNorm, gated MLP, no biases. What its members change are arguments.


def decoder_build(family: str, *, fixed_kv: int | None = None, **changes: Any) -> Callable[..., nn.Module]:
    def build(width: int, depth: int) -> nn.Module:
        import transformers

        heads = width // HEAD
        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": fixed_kv or heads // 2,
            "head_dim": HEAD,
            "max_position_embeddings": 32,
            "use_cache": False,
            "pad_token_id": None,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if family == "Qwen3Moe":
            settings["moe_intermediate_size"] = 2 * width
        config = getattr(transformers, f"{family}Config")(**settings | changes)
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return build


def llama_attention(d: int, keys: Fact) -> dict[str, Fact]:
    return {
        "self_attn.q_proj.weight": hidden(d, d),
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": keys,
        "self_attn.o_proj.weight": hidden(d, d),
    }


def gated_mlp(d: int) -> dict[str, Fact]:
    return {
        "mlp.gate_proj.weight": hidden(d, 2 * d),
        "mlp.up_proj.weight": hidden(d, 2 * d),
        "mlp.down_proj.weight": hidden(2 * d, d),
    }


def mixture(d: int) -> dict[str, Fact]:
    return {
        # The router: as many rows as experts at any width, so output-like, inside a branch. Its
        # softmax only weighs what the experts return; the path through it is one weight long.
        "mlp.gate.weight": readout(d, EXPERTS),
        "mlp.experts.gate_up_proj": experts(d, 4 * d, rows=halves(2 * d)),
        "mlp.experts.down_proj": experts(2 * d, d),
    }


# Per head: one gain of head_dim numbers for all heads; it feeds the softmax (through rotary, linear).
QK_NORM_PER_HEAD = {
    "self_attn.q_norm.weight": gain(HEAD, reaches="softmax", grows=False),
    "self_attn.k_norm.weight": gain(HEAD, reaches="softmax", grows=False),
}
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def llama(
    d: int, n: int, *, kv: int | None = None, qk_norm: dict[str, Fact] | None = None, moe: bool = False
) -> Table:
    # Keys and values from a fixed number of heads: only their input grows.
    keys = readout(d, kv * HEAD) if kv else hidden(d, d // 2)
    mlp = mixture(d) if moe else gated_mlp(d)
    # Router and experts read the second norm; both are linear maps (tokens are only picked in between).
    mlp_readers = ("mlp.gate.weight", "mlp.experts.gate_up_proj") if moe else tuple(list(mlp)[:2])

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "pre",
                {
                    "input_layernorm.weight": gain(d, read_by=QKV),
                    **llama_attention(d, keys),
                    **(qk_norm or {}),
                },
                ends=("self_attn.o_proj.weight",),
                attention=softmax(),
            ),
            Limb(
                f"model.layers.{i}.",
                "pre",
                # Despite its name it opens the MLP's branch.
                {"post_attention_layernorm.weight": gain(d, read_by=mlp_readers), **mlp},
                ends=("mlp.experts.down_proj" if moe else "mlp.down_proj.weight",),
            ),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d),
        "model.norm.weight": gain(d, read_by="lm_head.weight"),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])


def gemma2(d: int, n: int) -> Table:
    """A norm at both ends of each branch, gains stored as γ − 1, tied head, its own logit scale."""

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "peri",
                {
                    "input_layernorm.weight": gain(d, read_by=QKV),
                    **llama_attention(d, hidden(d, d // 2)),
                    "post_attention_layernorm.weight": gain(d, reaches="stream"),
                },
                # The norm undoes any scale of o_proj: what scales the branch is the norm's gain.
                ends=("post_attention_layernorm.weight",),
                attention=softmax(scale=64**-0.5),
            ),
            Limb(
                f"model.layers.{i}.",
                "peri",
                {
                    "pre_feedforward_layernorm.weight": gain(
                        d, read_by=("mlp.gate_proj.weight", "mlp.up_proj.weight")
                    ),
                    **gated_mlp(d),
                    "post_feedforward_layernorm.weight": gain(d, reaches="stream"),
                },
                ends=("post_feedforward_layernorm.weight",),
            ),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d, tied=("lm_head.weight",)),
        "model.norm.weight": gain(d, reaches="a tied head"),
    }
    return Table(outside, [block(i) for i in range(n)])


def olmo2(d: int, n: int) -> Table:
    """A norm at the end of each branch only, and QK-norm over all heads at once, so as wide as q and k."""

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "out",
                {
                    **llama_attention(d, hidden(d, d)),
                    "self_attn.q_norm.weight": gain(d, reaches="softmax"),
                    "self_attn.k_norm.weight": gain(d, reaches="softmax"),
                    # Named like Llama's, which is an Input-Norm of the other branch.
                    "post_attention_layernorm.weight": gain(d, reaches="stream"),
                },
                ends=("post_attention_layernorm.weight",),
                attention=softmax(),
            ),
            Limb(
                f"model.layers.{i}.",
                "out",
                {**gated_mlp(d), "post_feedforward_layernorm.weight": gain(d, reaches="stream")},
                ends=("post_feedforward_layernorm.weight",),
            ),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d),
        "model.norm.weight": gain(d, read_by="lm_head.weight"),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])


def cohere(d: int, n: int) -> Table:
    """x + attention(Nx) + mlp(Nx) with one norm for both, QK-norm with a gain per head, tied head."""

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "pre",
                {
                    # Read by both branches; the table counts it with the first. All readers are linear.
                    "input_layernorm.weight": gain(
                        d, read_by=(*QKV, "mlp.gate_proj.weight", "mlp.up_proj.weight")
                    ),
                    **llama_attention(d, hidden(d, d // 2)),
                    # (heads, head_dim): normalised over the last, a number of its own for each head.
                    "self_attn.q_norm.weight": gain(d // HEAD, HEAD, reaches="softmax"),
                    "self_attn.k_norm.weight": gain(d // HEAD // 2, HEAD, reaches="softmax"),
                },
                ends=("self_attn.o_proj.weight",),
                attention=softmax(),
            ),
            Limb(f"model.layers.{i}.", "pre", gated_mlp(d), ends=("mlp.down_proj.weight",)),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d, tied=("lm_head.weight",)),
        "model.norm.weight": gain(d, reaches="a tied head"),
    }
    return Table(outside, [block(i) for i in range(n)])


# GPT-NeoX: x + attention(N₁x) + mlp(N₂x), fused QKV interleaved by head, untied head.


def gpt_neox_build(width: int, depth: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gpt_neox(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"gpt_neox.layers.{i}.",
                "pre",
                {
                    "input_layernorm.weight": gain(d, read_by="attention.query_key_value.weight"),
                    "input_layernorm.bias": bias(d),
                    "attention.query_key_value.weight": hidden(d, 3 * d, rows=heads_of_thirds(d)),
                    "attention.query_key_value.bias": bias(3 * d, rows=heads_of_thirds(d)),
                    "attention.dense.weight": hidden(d, d),
                    "attention.dense.bias": bias(d),
                },
                ends=("attention.dense.weight", "attention.dense.bias"),
                attention=softmax(),
            ),
            Limb(
                f"gpt_neox.layers.{i}.",
                "pre",
                {
                    # Reads the block's input, not the attention's result, whatever its name says.
                    "post_attention_layernorm.weight": gain(d, read_by="mlp.dense_h_to_4h.weight"),
                    "post_attention_layernorm.bias": bias(d),
                    "mlp.dense_h_to_4h.weight": hidden(d, 2 * d),
                    "mlp.dense_h_to_4h.bias": bias(2 * d),
                    "mlp.dense_4h_to_h.weight": hidden(2 * d, d),
                    "mlp.dense_4h_to_h.bias": bias(d),
                },
                ends=("mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"),
            ),
        ]

    outside = {
        "gpt_neox.embed_in.weight": lookup(VOCAB, d),
        "gpt_neox.final_layer_norm.weight": gain(d, read_by="lm_head.weight"),
        "gpt_neox.final_layer_norm.bias": bias(d),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])


# ViT: pre-norm; patches by a convolution, a token put in front, positions added as a table.


def vit_build(width: int, depth: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
        )
    )


def vit(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"vit.layers.{i}.",
                "pre",
                {
                    "layernorm_before.weight": gain(
                        d,
                        read_by=(
                            "attention.q_proj.weight",
                            "attention.k_proj.weight",
                            "attention.v_proj.weight",
                        ),
                    ),
                    "layernorm_before.bias": bias(d),
                    "attention.q_proj.weight": hidden(d, d),
                    "attention.q_proj.bias": bias(d),
                    "attention.k_proj.weight": hidden(d, d),
                    "attention.k_proj.bias": bias(d),
                    "attention.v_proj.weight": hidden(d, d),
                    "attention.v_proj.bias": bias(d),
                    "attention.o_proj.weight": hidden(d, d),
                    "attention.o_proj.bias": bias(d),
                },
                ends=("attention.o_proj.weight", "attention.o_proj.bias"),
                attention=softmax(),
            ),
            Limb(
                f"vit.layers.{i}.",
                "pre",
                {
                    "layernorm_after.weight": gain(d, read_by="mlp.fc1.weight"),
                    "layernorm_after.bias": bias(d),
                    "mlp.fc1.weight": hidden(d, 2 * d),
                    "mlp.fc1.bias": bias(2 * d),
                    "mlp.fc2.weight": hidden(2 * d, d),
                    "mlp.fc2.bias": bias(d),
                },
                ends=("mlp.fc2.weight", "mlp.fc2.bias"),
            ),
        ]

    outside = {
        # One vector, put in front of the patches: nothing to look up, so no input fan.
        "vit.embeddings.cls_token": Fact((1, 1, d), "concat", "input", (), (2,), "out"),
        # One vector for each of 4 patches and the token: an embedding whose indices are always all.
        "vit.embeddings.position_embeddings": Fact((1, 5, d), "add", "input", (1,), (2,), "out"),
        "vit.embeddings.patch_embeddings.projection.weight": conv(3, d, 4, role="input"),
        "vit.embeddings.patch_embeddings.projection.bias": bias(d),
        # The classifier reads the first token of it; picking a token is linear.
        "vit.layernorm.weight": gain(d, read_by="classifier.weight"),
        "vit.layernorm.bias": bias(d),
        "classifier.weight": readout(d, CLASSES),
        "classifier.bias": bias(CLASSES, grows=False),
    }
    return Table(outside, [block(i) for i in range(n)])


# BERT: N(x + f(x)), so its norms are on the stream; a head of its own with a tied matrix.


def bert_build(width: int, depth: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def bert(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"bert.encoder.layer.{i}.attention.",
                "post",
                {
                    "self.query.weight": hidden(d, d),
                    "self.query.bias": bias(d),
                    "self.key.weight": hidden(d, d),
                    "self.key.bias": bias(d),
                    "self.value.weight": hidden(d, d),
                    "self.value.bias": bias(d),
                    "output.dense.weight": hidden(d, d),
                    "output.dense.bias": bias(d),
                },
                ends=("output.dense.weight", "output.dense.bias"),
                attention=softmax(),
            ),
            Limb(
                f"bert.encoder.layer.{i}.",
                "post",
                {
                    "intermediate.dense.weight": hidden(d, 2 * d),
                    "intermediate.dense.bias": bias(2 * d),
                    "output.dense.weight": hidden(2 * d, d),
                    "output.dense.bias": bias(d),
                },
                ends=("output.dense.weight", "output.dense.bias"),
            ),
        ]

    outside = {
        "bert.embeddings.word_embeddings.weight": lookup(VOCAB, d, tied=("cls.predictions.decoder.weight",)),
        "bert.embeddings.position_embeddings.weight": lookup(32, d),
        "bert.embeddings.token_type_embeddings.weight": lookup(2, d),
        "bert.embeddings.LayerNorm.weight": gain(d, reaches="stream"),
        "bert.embeddings.LayerNorm.bias": bias(d),
        "cls.predictions.transform.dense.weight": hidden(d, d),
        "cls.predictions.transform.dense.bias": bias(d),
        "cls.predictions.transform.LayerNorm.weight": gain(d, reaches="a tied head"),
        "cls.predictions.transform.LayerNorm.bias": bias(d),
        "cls.predictions.bias": bias(VOCAB, grows=False, tied=("cls.predictions.decoder.bias",)),
    }
    for i in range(n):
        layer = f"bert.encoder.layer.{i}."
        outside |= {
            layer + "attention.output.LayerNorm.weight": gain(d, reaches="stream"),
            layer + "attention.output.LayerNorm.bias": bias(d),
            layer + "output.LayerNorm.weight": gain(d, reaches="stream"),
            layer + "output.LayerNorm.bias": bias(d),
        }
    # After the last norm nothing is added any more: only the head's first matrix reads it.
    outside[f"bert.encoder.layer.{n - 1}.output.LayerNorm.weight"] = gain(
        d, read_by="cls.predictions.transform.dense.weight"
    )
    return Table(outside, [block(i) for i in range(n)])


# T5: two stacks, pre-norm; the decoder's blocks have a third branch, which reads the encoder too.


def t5_build(width: int, depth: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=width,
            d_kv=HEAD,
            d_ff=2 * width,
            num_layers=depth,
            num_heads=width // HEAD,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            use_cache=False,
        )
    )


def t5(d: int, n: int) -> Table:
    def attention(prefix: str, kind: str, norm_readers: str) -> Limb:
        return Limb(
            prefix,
            "pre",
            {
                "layer_norm.weight": gain(d, read_by=f"{kind}.[{norm_readers}].weight"),
                # In cross-attention k and v read the encoder, but nothing except this branch reads them.
                **{f"{kind}.{x}.weight": hidden(d, d) for x in "qkvo"},
            },
            ends=(f"{kind}.o.weight",),
            # T5 folds the usual 1/√head_dim into the initial size of q.
            attention=softmax(scale=1.0),
        )

    def mlp(prefix: str) -> Limb:
        return Limb(
            prefix,
            "pre",
            {
                "layer_norm.weight": gain(d, read_by="DenseReluDense.wi.weight"),
                "DenseReluDense.wi.weight": hidden(d, 2 * d),
                "DenseReluDense.wo.weight": hidden(2 * d, d),
            },
            ends=("DenseReluDense.wo.weight",),
        )

    encoder = [
        [attention(f"encoder.block.{i}.layer.0.", "SelfAttention", "qkv"), mlp(f"encoder.block.{i}.layer.1.")]
        for i in range(n)
    ]
    decoder = [
        [
            attention(f"decoder.block.{i}.layer.0.", "SelfAttention", "qkv"),
            attention(f"decoder.block.{i}.layer.1.", "EncDecAttention", "q"),
            mlp(f"decoder.block.{i}.layer.2."),
        ]
        for i in range(n)
    ]
    # Position biases are looked up in the first layer and added to the logits of every layer: they
    # belong to no single block. (buckets, heads): the heads grow.
    position = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    outside = {
        "shared.weight": lookup(
            VOCAB, d, tied=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        ),
        f"encoder.{position}": lookup(8, d // HEAD),
        f"decoder.{position}": lookup(8, d // HEAD),
        # Read by the keys and values of every decoder block. (The model also hands it out beside the
        # logits, which no loss reads.)
        "encoder.final_layer_norm.weight": gain(
            d, read_by="decoder.block.*.layer.1.EncDecAttention.[kv].weight"
        ),
        "decoder.final_layer_norm.weight": gain(d, reaches="a tied head"),
    }
    return Table(outside, encoder + decoder)


# ConvNeXt: x + γ∘W₂gelu(W₁N(depthwise x)), two stages, a convolution between them.


def convnext_build(width: int, depth: int) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(
            num_stages=2,
            hidden_sizes=[width, 2 * width],
            depths=[depth, depth],
            patch_size=2,
            num_labels=CLASSES,
        )
    )


def convnext(d: int, n: int) -> Table:
    def block(stage: int, layer: int, d: int) -> list[Limb]:
        return [
            Limb(
                f"convnext.encoder.stages.{stage}.layers.{layer}.",
                # There is a norm, but inside: the branch reads the bare stream and adds no normed thing.
                "none",
                {
                    # groups = channels: 49 inputs for each output at every width.
                    "dwconv.weight": conv(1, d, 7, role="input"),
                    "dwconv.bias": bias(d),
                    "layernorm.weight": gain(d, read_by="pwconv1.weight"),
                    "layernorm.bias": bias(d),
                    "pwconv1.weight": hidden(d, 4 * d),
                    "pwconv1.bias": bias(4 * d),
                    "pwconv2.weight": hidden(4 * d, d),
                    "pwconv2.bias": bias(d),
                    "layer_scale_parameter": layer_scale(d),
                },
                # It alone scales the branch, pwconv2 and its bias included.
                ends=("layer_scale_parameter",),
                layers=3,
            )
        ]

    between = "convnext.encoder.stages.1.downsampling_layer."
    outside = {
        "convnext.embeddings.patch_embeddings.weight": conv(3, d, 2, role="input"),
        "convnext.embeddings.patch_embeddings.bias": bias(d),
        "convnext.embeddings.layernorm.weight": gain(d, reaches="stream"),
        "convnext.embeddings.layernorm.bias": bias(d),
        # The stream itself passes through these two, so nothing but the convolution reads the norm.
        between + "0.weight": gain(d, read_by=between + "1.weight"),
        between + "0.bias": bias(d),
        between + "1.weight": conv(d, 2 * d, 2),
        between + "1.bias": bias(2 * d),
        "convnext.layernorm.weight": gain(2 * d, read_by="classifier.weight"),
        "convnext.layernorm.bias": bias(2 * d),
        "classifier.weight": readout(2 * d, CLASSES),
        "classifier.bias": bias(CLASSES, grows=False),
    }
    first = [block(0, layer, d) for layer in range(n)]
    return Table(outside, first + [block(1, layer, 2 * d) for layer in range(n)])


# torch.nn.TransformerEncoder between two Linears.


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD, 2 * width, batch_first=True, norm_first=norm_first
        )
        final = nn.LayerNorm(width) if norm_first else None
        self.embed = nn.Linear(8, width)
        self.encoder = nn.TransformerEncoder(layer, depth, norm=final, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def torch_encoder(d: int, n: int, norm_first: bool) -> Table:
    attention_norm = {
        "norm1.weight": gain(d, read_by="self_attn.in_proj_weight"),
        "norm1.bias": bias(d),
    }
    mlp_norm = {"norm2.weight": gain(d, read_by="linear1.weight"), "norm2.bias": bias(d)}

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"encoder.layers.{i}.",
                "pre" if norm_first else "post",
                {
                    **(attention_norm if norm_first else {}),
                    "self_attn.in_proj_weight": hidden(d, 3 * d, rows=thirds(d)),
                    "self_attn.in_proj_bias": bias(3 * d, rows=thirds(d)),
                    "self_attn.out_proj.weight": hidden(d, d),
                    "self_attn.out_proj.bias": bias(d),
                },
                ends=("self_attn.out_proj.weight", "self_attn.out_proj.bias"),
                attention=softmax(),
            ),
            Limb(
                f"encoder.layers.{i}.",
                "pre" if norm_first else "post",
                {
                    **(mlp_norm if norm_first else {}),
                    "linear1.weight": hidden(d, 2 * d),
                    "linear1.bias": bias(2 * d),
                    "linear2.weight": hidden(2 * d, d),
                    "linear2.bias": bias(d),
                },
                ends=("linear2.weight", "linear2.bias"),
            ),
        ]

    outside = {
        "embed.weight": entry(8, d),
        "embed.bias": bias(d),
        "head.weight": readout(d, CLASSES),
        "head.bias": bias(CLASSES, grows=False),
    }
    if norm_first:
        outside |= {"encoder.norm.weight": gain(d, read_by="head.weight"), "encoder.norm.bias": bias(d)}
    else:
        for i in range(n):
            for norm in ("norm1", "norm2"):
                outside[f"encoder.layers.{i}.{norm}.weight"] = gain(d, reaches="stream")
                outside[f"encoder.layers.{i}.{norm}.bias"] = bias(d)
        # The stream ends at the last norm: only the head reads it.
        outside[f"encoder.layers.{n - 1}.norm2.weight"] = gain(d, read_by="head.weight")
    return Table(outside, [block(i) for i in range(n)])


# A ResNet in torchvision's manner: relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))).


class BasicBlock(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.downsample = None
        if stride != 1 or fan_in != fan_out:
            shortcut = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.bn1(out).relu()
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return out.relu()


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(*(BasicBlock(width, width, 1) for _ in range(depth)))
        self.layer2 = nn.Sequential(
            BasicBlock(width, 2 * width, 2), *(BasicBlock(2 * width, 2 * width, 1) for _ in range(depth - 1))
        )
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def resnet(d: int, n: int) -> Table:
    def block(prefix: str, fan_in: int, d: int) -> list[Limb]:
        return [
            Limb(
                prefix,
                "out",
                {
                    "conv1.weight": conv(fan_in, d, 3),
                    "bn1.weight": gain(d, reaches="relu"),
                    "bn1.bias": bias(d),
                    "conv2.weight": conv(d, d, 3),
                    "bn2.weight": gain(d, reaches="stream"),
                    "bn2.bias": bias(d),
                },
                ends=("bn2.weight", "bn2.bias"),
            )
        ]

    first = [block(f"layer1.{i}.", d, d) for i in range(n)]
    second = [block(f"layer2.{i}.", 2 * d if i else d, 2 * d) for i in range(n)]
    outside = {
        "conv1.weight": conv(3, d, 3, role="input"),
        "bn1.weight": gain(d, reaches="relu"),
        "bn1.bias": bias(d),
        # The shortcut carries the stream into the second stage: no branch.
        "layer2.0.downsample.0.weight": conv(d, 2 * d, 1),
        "layer2.0.downsample.1.weight": gain(2 * d, reaches="stream"),
        "layer2.0.downsample.1.bias": bias(2 * d),
        "fc.weight": readout(2 * d, CLASSES),
        "fc.bias": bias(CLASSES, grows=False),
    }
    return Table(outside, first + second)


# A ResNet with pre-activation: x + conv(relu(bn(conv(relu(bn(x)))))).


class PreActivationBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.bn1(x).relu())
        return x + self.conv2(self.bn2(out).relu())


class PreActivationResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*(PreActivationBlock(width) for _ in range(depth)))
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.blocks(self.stem(x))).relu().mean((2, 3)))


def preactivation(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"blocks.{i}.",
                "pre",
                {
                    # At the start of the branch, but a ReLU stands between it and the convolution.
                    "bn1.weight": gain(d, reaches="relu"),
                    "bn1.bias": bias(d),
                    "conv1.weight": conv(d, d, 3),
                    "bn2.weight": gain(d, reaches="relu"),
                    "bn2.bias": bias(d),
                    "conv2.weight": conv(d, d, 3),
                },
                ends=("conv2.weight",),
            )
        ]

    outside = {
        "stem.weight": conv(3, d, 3, role="input"),
        "bn.weight": gain(d, reaches="relu"),
        "bn.bias": bias(d),
        "fc.weight": readout(d, CLASSES),
        "fc.bias": bias(CLASSES, grows=False),
    }
    return Table(outside, [block(i) for i in range(n)])


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def sequence() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


GOLDENS: dict[str, Golden] = {
    # Three layers here: a first, a last and one that is neither.
    "gpt2": Golden(gpt2_build, tokens, gpt2, size=THREE_LAYERS),
    "gpt2-four-heads": Golden(lambda d, n: gpt2_build(d, n, heads=4), tokens, gpt2_four_heads),
    "llama": Golden(decoder_build("Llama", tie_word_embeddings=False), tokens, llama, size=THREE_LAYERS),
    "llama-two-kv-heads": Golden(
        decoder_build("Llama", fixed_kv=2, tie_word_embeddings=False),
        lambda: {"input_ids": tokens()},
        lambda d, n: llama(d, n, kv=2),
    ),
    # Attention as matrix products and a softmax, experts in a loop over those that were chosen.
    "llama-eager": Golden(
        decoder_build("Llama", tie_word_embeddings=False, attn_implementation="eager"), tokens, llama
    ),
    "mixtral-eager": Golden(
        decoder_build(
            "Mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
            experts_implementation="eager",
        ),
        tokens,
        lambda d, n: llama(d, n, moe=True),
    ),
    "qwen3": Golden(
        decoder_build("Qwen3", tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, qk_norm=QK_NORM_PER_HEAD),
    ),
    "gemma2": Golden(
        decoder_build("Gemma2", query_pre_attn_scalar=64, tie_word_embeddings=True),
        tokens,
        gemma2,
        silent=-1.0,
    ),
    "olmo2": Golden(
        lambda d, n: decoder_build("Olmo2", fixed_kv=d // HEAD, tie_word_embeddings=False)(d, n),
        tokens,
        olmo2,
    ),
    "mixtral": Golden(
        decoder_build("Mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, moe=True),
    ),
    "qwen3-moe": Golden(
        decoder_build("Qwen3Moe", num_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, qk_norm=QK_NORM_PER_HEAD, moe=True),
    ),
    "gpt-neox": Golden(gpt_neox_build, tokens, gpt_neox),
    "cohere": Golden(
        decoder_build("Cohere", use_qk_norm=True, tie_word_embeddings=True),
        tokens,
        cohere,
        shared=("model.layers.*.input_layernorm.weight",),
    ),
    "vit": Golden(vit_build, image, vit),
    "bert": Golden(bert_build, tokens, bert, size=THREE_LAYERS),
    "t5": Golden(t5_build, lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :7]}, t5),
    "convnext": Golden(convnext_build, image, convnext),
    "resnet": Golden(ResNet, image, resnet),
    "resnet-preactivation": Golden(PreActivationResNet, image, preactivation),
    "torch-encoder-post": Golden(
        lambda d, n: Encoder(d, n, norm_first=False),
        sequence,
        lambda d, n: torch_encoder(d, n, norm_first=False),
    ),
    "torch-encoder-pre": Golden(
        lambda d, n: Encoder(d, n, norm_first=True),
        sequence,
        lambda d, n: torch_encoder(d, n, norm_first=True),
    ),
}
