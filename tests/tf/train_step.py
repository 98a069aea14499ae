"""One MADDPG step in either framework, as a script: python train_step.py FRAMEWORK SETTINGS WEIGHTS OUT

FRAMEWORK is torch or tensorflow, SETTINGS a JSON object of fields to replace, WEIGHTS a file of numpy arrays that torch
writes and TensorFlow reads; OUT gets losses, gradients and the weights after the update.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np

from workloads.maddpg import PRESETS


def in_torch(settings: Any, weights: str) -> dict[str, Any]:
    import torch

    from bench.techniques import make_plan
    from bench.trainer import Trainer
    from workloads.maddpg_hopper import MaddpgHopper

    torch.manual_seed(1)
    trainer = Trainer(MaddpgHopper, settings, make_plan({}), torch.device("cpu"))
    workload = trainer.workload
    for target in workload.targets.values():  # the targets start as copies, which would hide a mix-up
        for parameter in target.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    everything = {**named(workload.networks), **{f"target {k}": v for k, v in named(workload.targets).items()}}
    np.savez(weights, **{name: array(p) for name, p in everything.items()})
    losses: dict[str, Any] = {}
    compute = workload.losses

    def kept(batch: Any) -> Any:
        for name, loss in zip(workload.networks, compute(batch), strict=True):
            losses[f"loss {name}"] = loss.detach().numpy()
            yield loss

    workload.losses = kept
    trainer.gradients()
    found = {f"gradient {name}": array(p.grad) for name, p in named(workload.networks).items()}
    trainer.update()
    return {**losses, **found, **{f"after {name}": array(p) for name, p in everything.items()}}


def named(networks: Any) -> dict[str, Any]:
    """Every parameter by network and number: the order is the same in both frameworks."""
    return {f"{n} {i}": p for n, network in networks.items() for i, p in enumerate(network.parameters())}


def array(tensor: Any) -> Any:
    """As TensorFlow has it: a layer's matrix is [inputs, outputs] there."""
    return tensor.detach().numpy().T


def in_tensorflow(settings: Any, weights: str) -> dict[str, Any]:
    import tensorflow as tf

    from bench.techniques import make_plan
    from bench.tf.trainer import Trainer
    from workloads.tf.maddpg_hopper import MaddpgHopper

    trainer = Trainer(MaddpgHopper, settings, make_plan({}, "tensorflow"))
    workload = trainer.workload
    everything = {**variables(workload.networks), **{f"target {k}": v for k, v in variables(workload.targets).items()}}
    with np.load(weights) as arrays:
        assert set(arrays.files) == set(everything)
        for name, variable in everything.items():
            variable.assign(arrays[name])
    [batch] = workload.micro_batches(1)
    batch = tf.nest.map_structure(tf.constant, batch)
    found = {f"loss {name}": loss().numpy() for name, loss in workload.losses(batch).items()}
    for name, gradients in trainer.gradients(batch).items():
        found |= {f"gradient {name} {i}": gradient.numpy() for i, gradient in enumerate(gradients)}
    workload._rng = np.random.default_rng(settings.seed)  # the same batch again
    trainer.step()
    return {**found, **{f"after {name}": variable.numpy() for name, variable in everything.items()}}


def variables(networks: Any) -> dict[str, Any]:
    return {f"{n} {i}": v for n, network in networks.items() for i, v in enumerate(network.variables)}


if __name__ == "__main__":
    framework, changes, weights, out = sys.argv[1:]
    settings = dataclasses.replace(PRESETS["tiny"], **json.loads(changes))
    np.savez(out, **(in_torch if framework == "torch" else in_tensorflow)(settings, weights))
    assert ("torch" in sys.modules, "tensorflow" in sys.modules) == (framework == "torch", framework == "tensorflow")
