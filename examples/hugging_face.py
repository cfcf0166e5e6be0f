"""What every tensor of a Hugging Face model does, from a config made in code; nothing is downloaded.

    pip install -c constraints.txt -e '.[hf]'
    python examples/hugging_face.py

Prints the table of a small Qwen3. Norms of queries and keys come out as Output-Norms: what they scale
goes into a softmax. The names do not show this.
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import theodolite as th

HEAD_DIM = 32


def build(width: int, depth: int) -> nn.Module:
    """The config at this size: heads keep their dimension and grow in number."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=width // (2 * HEAD_DIM),
        head_dim=HEAD_DIM,
        intermediate_size=3 * width,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    tokens = torch.zeros(1, 16, dtype=torch.long)
    anatomy = th.dissect(build, {"input_ids": tokens, "use_cache": False}, size=th.Size(128, 4))
    print(anatomy)

    decay = [part.name for part in anatomy.values() if part.norm == "input"]
    spare = [part.name for part in anatomy.values() if part.norm == "output"]
    print(f"\nOf {len(decay) + len(spare)} norm gains, by the scale-vector paper {len(decay)} should decay")
    print(f"(Input-Norms) and {len(spare)} should not (Output-Norms).")
