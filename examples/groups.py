"""Which tensors go to Muon, at which rate; and how far AdamW's and Muon's updates really move a weight.

    python examples/groups.py

Put your own network, batches and loss in the place of the workload. Takes a few seconds.
"""

import torch

import theodolite as th

WIDTH, DEPTH, STEPS = 64, 2, 60
ADAMW_LR = 3e-3  # the one you have
torch.set_num_threads(1)  # a network this small only waits for threads
workload = th.workload("gpt-sotu")


def groups_for(optimizer_name):
    torch.manual_seed(0)
    model = workload.build(WIDTH, DEPTH)
    inputs, _ = workload.batch(0, 0)
    return th.groups(model, inputs, optimizer=optimizer_name, adamw_lr=ADAMW_LR)


print(groups_for("muon").translation)
print()

for name in ("adamw", "muon-kimi"):
    groups = groups_for(name)
    model, optimizer = groups.model, groups.optimizer()
    hidden = [row for row in groups.trained if row.role == "hidden"]
    for step in range(STEPS):
        inputs, targets = workload.batch(0, step)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        before = {row.name: model.get_parameter(row.name).detach().clone() for row in hidden}
        optimizer.step()
    # The last update of each weight, in units of its learning rate.
    updates = [(before[row.name] - model.get_parameter(row.name).detach()) / row.lr for row in hidden]
    rms = [update.square().mean().sqrt().item() for update in updates]
    ranks = [(one.square().sum() / torch.linalg.matrix_norm(one, 2) ** 2).item() for one in updates]
    print(
        f"{name}: RMS {sum(rms) / len(rms):.2f} ({min(rms):.2f} to {max(rms):.2f}), "
        f"stable rank {sum(ranks) / len(ranks):.1f}"
    )
