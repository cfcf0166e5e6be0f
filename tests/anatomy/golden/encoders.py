"""Encoders, with and without a decoder behind them: BERT, T5 and torch.nn.TransformerEncoder."""

from __future__ import annotations

from torch import Tensor, nn

from .table import Limb, Table
from .vocabulary import CLASSES, HEAD, VOCAB, bias, entry, gain, hidden, lookup, readout, softmax, thirds

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
    return Table(outside, [block(i) for i in range(n)], on_stream=("bert.encoder.layer.*LayerNorm.*",))


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
            VOCAB,
            d,
            tied=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
            factor=d**-0.5,  # on what the head reads
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
    return Table(outside, [block(i) for i in range(n)], on_stream=("encoder.layers.*.norm*",))
