"""As a script: how far the gradients under a technique lie from the plain ones, by network, as JSON.

python technique_gradients.py '{"accumulation": 4}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from bench.techniques import make_plan
from bench.tf.trainer import Trainer
from workloads.maddpg import PRESETS
from workloads.tf.maddpg_hopper import MaddpgHopper


def gradients(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Of one step on the same weights and batch."""
    tf.keras.utils.set_random_seed(0)
    trainer = Trainer(MaddpgHopper, PRESETS["tiny"], make_plan(values, "tensorflow"))
    count = values.get("accumulation", 1)
    batches = [tf.nest.map_structure(tf.constant, batch) for batch in trainer.workload.micro_batches(count)]
    if count == 1:
        found = tf.function(trainer.gradients, jit_compile=values.get("xla", False))(batches[0])
    else:
        for batch in batches:
            trainer._add(batch)
        found = trainer._sums
    return {name: [gradient.numpy() for gradient in of_network] for name, of_network in found.items()}


plain, changed = gradients({}), gradients(json.loads(sys.argv[1]))
errors = {
    name: max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(plain[name], changed[name], strict=True))
    for name in plain
}
print(json.dumps(errors))
