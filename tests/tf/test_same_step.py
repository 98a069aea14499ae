"""From the same weights and the same batch, both frameworks compute the same losses, gradients and updates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("train_step.py")


def step(framework: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    out = folder / f"{framework}.npz"
    words = [framework, json.dumps(settings), str(folder / "weights.npz"), str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *words], check=True, capture_output=True, text=True)
    with np.load(out) as arrays:
        return dict(arrays)


def close(found: Any, expected: Any, name: str) -> None:
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype == np.float32, name
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [{}, {"sharing": "separate"}, {"policy": "feed_forward"}, {"buffer": "device"}, {"policy_width": 64, "seed": 3}],
    ids=str,
)
def test_losses_and_gradients_are_the_same_and_updates_follow(settings: dict[str, Any], tmp_path: Path) -> None:
    torch, tensorflow = (step(framework, settings, tmp_path) for framework in ("torch", "tensorflow"))
    assert torch.keys() == tensorflow.keys()
    with np.load(tmp_path / "weights.npz") as arrays:
        before = dict(arrays)
    for name, found in tensorflow.items():
        what, _, whose = name.partition(" ")
        if what != "after":
            assert np.abs(torch[name]).max() > 0, f"{name} says nothing"
            close(found, torch[name], name)
        elif whose.startswith("target "):
            network = tensorflow[f"after {whose.removeprefix('target ')}"]
            close(found, before[whose] + np.float32(0.01) * (network - before[whose]), name)
        else:
            # Keras and sonnet add epsilon under the root, torch beside it: the first update by the formula itself.
            gradient = tensorflow[f"gradient {whose}"].astype(np.float64)
            moved = before[whose] - 1e-3 * gradient / np.sqrt(0.1 * gradient**2 + 1e-10)
            close(found, moved.astype(np.float32), name)
