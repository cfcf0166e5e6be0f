"""Scale vectors put into a network in the middle of its training, and folded away at the end.

    python examples/scale_vectors.py

Put your own model and batches in the place of those below. Takes a few seconds.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

model = th.models.GPT(64, 2, gated=True, tied=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog. " * 60), dtype=torch.uint8)
batches = [text[n : n + 8 * 65].view(8, 65).long() for n in range(0, 2000, 40)]
tokens = batches[0][:, :-1]


def train(count):
    """Some steps, and the last loss."""
    for batch in batches[:count]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return loss.item()


def size():
    return f"{sum(one.numel() for one in model.parameters()):,} parameters"


names = set(model.state_dict())
print(f"plain: loss {train(20):.2f}, {size()}")

# The vectors go into the weights, and AdamW's moments follow: training goes on where it was.
model, proof = th.surgery.scale_vectors(model, tokens, optimizer=optimizer)
print(proof)
print(f"converted: loss {train(20):.2f}, {size()}")
for name, one in model.blocks[0].attention.branch.query.named_parameters():
    print(f"    {name} {tuple(one.shape)}")

# Back to the plain architecture, with what the vectors have learned.
model, proof = th.surgery.fold(model, tokens, optimizer=optimizer)
print(proof)
print(f"folded: {size()}, the names are the plain ones: {set(model.state_dict()) == names}")

with tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder) / "model.safetensors")
    save_model(model, path)
    plain = th.models.GPT(64, 2, gated=True, tied=True)
    load_model(plain, path)
    print("saved, and loaded into a plain network, the logits are equal:", plain(tokens).equal(model(tokens)))
