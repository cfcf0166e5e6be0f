"""ViT and ConvNeXt, as transformers has them."""

from __future__ import annotations

from torch import nn

from .table import Fact, Limb, Table
from .vocabulary import CLASSES, HEAD, bias, conv, gain, hidden, layer_scale, readout, softmax

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
                # The norm stands inside: the branch reads the bare stream and adds no normed thing.
                "inner",
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
    return Table(outside, first + [block(1, layer, 2 * d) for layer in range(n)], ("*.downsampling_layer.*",))
