"""Which tensors should decay, which do under your optimizer, and how to put it right.

    python examples/decay.py

Put your own model, optimizer and inputs in the place of the three below. Takes a second or two.
"""

import torch

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

# Any module; this one has norms before its branches, behind them, and on queries and keys.
model = th.models.GPT(64, 4, norm_placement="peri", qk_norm=True)
# What the model is called with.
inputs = torch.zeros(1, 32, dtype=torch.long)
# Any optimizer with parameter groups. This is the usual rule: matrices decay, vectors do not.
matrices = [tensor for tensor in model.parameters() if tensor.dim() > 1]
vectors = [tensor for tensor in model.parameters() if tensor.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)

decay = th.probes.decay(model, inputs, optimizer)
print(decay)
print()

# Follow the paper's advice, in place: state and all other options stay. Do it before you make a schedule.
# Without inputs=True only what is wrong for sure is mended.
decay.apply(inputs=True)
for group in optimizer.param_groups:
    print(f"{len(group['params'])} tensors, weight decay {group['weight_decay']}")
print()

# The other usual rule: everything decays.
print(th.probes.decay(model, inputs, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)))
