"""Four models trained in turn by four workers, of which late ones are not waited for and one is killed.

    python examples/coded_training.py

Every worker is a Ray actor. In each round it computes the parts of batches that `fleet.MultiplexedCoding`
assigns to it, for the steps that have begun. Every gradient is compared with that of plain training. It takes
half a minute, most of it for Ray to start, and needs Ray (`pip install 'theodolite[ray]'`).
"""

import asyncio
import random

import torch
from torch import nn

from theodolite import fleet

WORKERS, MODELS, STEPS, EXAMPLES = 4, 4, 6, 56
SCHEME = fleet.MultiplexedCoding(WORKERS, burst=1, window=4, stragglers=1)
SHARE = 0.2  # of answers that are held back until their round is over, or cannot end without them
PATIENCE = 0.05  # seconds for which workers that are not needed are waited for
KILLED = 9  # the round in which a worker is killed


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def draw(model, step):
    """The batch of a step of one of the models: a function of both, so that every worker can make it."""
    generator = torch.Generator().manual_seed(1000 * model + step)
    inputs = torch.randn(EXAMPLES, 8, dtype=torch.float64, generator=generator)
    return inputs, inputs.prod(1, keepdim=True).tanh()


def gradient(model, inputs, targets):
    """Of a part's share in the mean loss over the batch: the shares of all parts add up."""
    loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum") / EXAMPLES
    return [value.numpy() for value in torch.autograd.grad(loss, list(model.parameters()))]


class Worker:
    """Computes parts of gradients. It is free for the next round while it is late with this one."""

    def __init__(self):
        self.held = {}

    async def compute(self, turn, minitasks, states, is_late):
        """By job and part, from the weights of each job's model."""
        if is_late:
            await self.held.setdefault(turn, asyncio.Event()).wait()
        found = {}
        for job, part in minitasks:
            model = build(0)
            model.load_state_dict({name: torch.tensor(value) for name, value in states[job].items()})
            inputs, targets = (
                values.tensor_split(SCHEME.parts)[part] for values in draw(job % MODELS, job // MODELS)
            )
            found[job, part] = gradient(model, inputs, targets)
        return found

    async def release(self, turn):
        """Let a late answer of this round go."""
        self.held.setdefault(turn, asyncio.Event()).set()


class Trainee:
    """A model with its optimizer, and the gradients of its steps."""

    def __init__(self, seed):
        self.model, self.gradients = build(seed), []
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self, found):
        """With this gradient."""
        self.gradients.append(found)
        for weight, value in zip(self.model.parameters(), found, strict=True):
            weight.grad = torch.tensor(value)
        self.optimizer.step()


def plain():
    """The same steps with whole batches, on one worker."""
    trainees = [Trainee(seed) for seed in range(MODELS)]
    for step in range(STEPS):
        for place, trainee in enumerate(trainees):
            trainee.step(gradient(trainee.model, *draw(place, step)))
    return trainees


def coded(ray):
    """All steps by coded workers; also the number of jobs lost, of late answers and of workers replaced."""
    hire = ray.remote(num_cpus=1, max_restarts=0)(Worker).remote
    workers, trainees = [hire() for _ in range(WORKERS)], [Trainee(seed) for seed in range(MODELS)]
    rounds, parts, luck = fleet.CodedRounds(SCHEME, jobs=MODELS * STEPS), {}, random.Random(0)
    late = replaced = 0
    while not rounds.is_over:
        turn, minitasks = rounds.turn, rounds.assignments()
        states = {
            job: {name: value.numpy() for name, value in trainees[job % MODELS].model.state_dict().items()}
            for job in rounds.missing
        }
        held = {place for place in range(WORKERS) if luck.random() < SHARE or (turn, place) == (KILLED, 0)}
        calls = {
            workers[place].compute.remote(turn, minitasks[place], states, place in held): place
            for place in range(WORKERS)
        }
        if turn == KILLED:
            ray.kill(workers[0])
        answers = {}
        while calls:
            # Whoever is needed is waited for; others for a moment.
            is_needed = not rounds.can_end(answers)
            if is_needed and held.issuperset(calls.values()):
                release(workers, held, turn)
            ended, _ = ray.wait(list(calls), timeout=None if is_needed else PATIENCE)
            if not ended:
                break
            place = calls.pop(ended[0])
            try:
                answers[place] = ray.get(ended[0])
            except ray.exceptions.RayActorError:
                replaced += 1
                workers[place] = hire()
                held.discard(place)
                calls[workers[place].compute.remote(turn, minitasks[place], states, False)] = place
        release(workers, held, turn)
        late += len(calls)
        for found in answers.values():
            for (job, part), value in found.items():
                parts.setdefault(job, {})[part] = value
        for job in rounds.end(answers):
            sent = parts.pop(job)
            trainees[job % MODELS].step([sum(values) for values in zip(*sent.values(), strict=True)])
    return trainees, len(rounds.lost), late, replaced


def release(workers, held, turn):
    """Let late workers go on."""
    while held:
        workers[held.pop()].release.remote(turn)


if __name__ == "__main__":
    import ray

    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init("local", num_cpus=WORKERS + 1, **quiet)
    trainees, lost, late, replaced = coded(ray)
    ray.shutdown()
    worst = 0.0
    for one, other in zip(trainees, plain(), strict=True):
        for found, wanted in zip(one.gradients, other.gradients, strict=True):
            for value, right in zip(found, wanted, strict=True):
                worst = max(worst, float(abs(value - right).max() / abs(right).max()))
    print(f"{sum(len(one.gradients) for one in trainees)} steps of {MODELS} models, {lost} lost")
    print(f"workers replaced: {replaced}; answers that came too late: {'several' if late > 1 else late}")
    print(f"gradients differ from those of plain training by less than {1e-6 if worst < 1e-6 else worst:g}")
    print(f"load of a worker: {SCHEME.load * WORKERS:.2f} times its share")
