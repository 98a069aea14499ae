"""MaMuJoCo's Hopper, split into three agents with one joint each (scenario "Hopper", agent_conf "3x1", agent_obsk 1).

gymnasium-robotics' `mamujoco_v1` does the physics; og-marl f4eb8f0 calls this task "3hopper" and wraps it in
og_marl/wrapped_environments/gymnasium_mamujoco.py. The environment is stepped and kept in numpy only.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

AGENTS = 3
OBSERVATION = 9  # agents see 8, 9 and 8 numbers; padded to the longest, as og-marl's PadObsandActs does
ACTION = 1  # torque of the agent's joint, in [-1, 1] of its limit
STATE = 11  # the single-agent Hopper's observation: positions but x, and velocities

Floats = NDArray[np.float32]
Array = TypeVar("Array")


class Transition(NamedTuple, Generic[Array]):
    """What was seen before an action, the action, and its outcome.

    The shapes are of one transition. A sampled batch has the same fields with [time, sequence] in front.

    Attributes:
        observations: [agents, 9], zeros behind the shorter ones.
        state: [11], the whole robot.
        actions: [agents, 1], in [-1, 1].
        reward: [1], the same for all agents.
        terminal: [1], 1 where the robot fell, 0 where the episode went on or was cut at 1,000 steps.
        start: [1], 1 in the first transition of an episode.
    """

    observations: Array
    state: Array
    actions: Array
    reward: Array
    terminal: Array
    start: Array


class Hopper:
    """The environment, restarted by itself after each episode.

    Attributes:
        observations: [agents, 9], what the agents see now.
        start: Whether an episode begins now.
    """

    observations: Floats
    start: bool

    def __init__(self, seed: int) -> None:
        self._environment = _make()
        self._agents: list[str] = list(self._environment.possible_agents)
        self._reset(seed)

    def step(self, actions: Floats) -> Transition[Floats]:
        """Act, and restart the episode if that ended it.

        Args:
            actions: [agents, 1], in [-1, 1].
        """
        observations, state, start = self.observations, self._state, self.start
        seen, rewards, terminals, truncations, _ = self._environment.step(dict(zip(self._agents, actions, strict=True)))
        first = self._agents[0]  # reward and end are the same for all
        if terminals[first] or truncations[first]:
            self._reset()
        else:
            self._observe(seen, start=False)
        return Transition(
            observations, state, actions, _number(rewards[first]), _number(terminals[first]), _number(start)
        )

    def _reset(self, seed: int | None = None) -> None:
        seen, _ = self._environment.reset(seed=seed)
        self._observe(seen, start=True)

    def _observe(self, seen: dict[str, NDArray[np.float64]], start: bool) -> None:
        self.observations = np.zeros((AGENTS, OBSERVATION), np.float32)
        for row, agent in zip(self.observations, self._agents, strict=True):
            row[: len(seen[agent])] = seen[agent]
        self._state: Floats = self._environment.state().astype(np.float32)
        self.start = start


def _make() -> Any:
    """The environment of gymnasium-robotics."""
    # Imported on use: it takes a third of a second. Release 1.4.2 prints a notice about the Adroit hand, not used here.
    with contextlib.redirect_stderr(io.StringIO()):
        from gymnasium_robotics import mamujoco_v1

    return mamujoco_v1.parallel_env(scenario="Hopper", agent_conf="3x1", agent_obsk=1)


def _number(value: float) -> Floats:
    return np.array([value], np.float32)
