"""The replay buffer: a ring of transitions on the host, drawn as sequences that follow each other in time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workloads.mamujoco import ACTION, AGENTS, OBSERVATION, STATE, Floats, Transition


class ReplayBuffer:
    """A ring of the latest transitions: 44 numbers each, 1.76 MB for the published 10,000.

    A sequence may run over the end of an episode into the next one, as in og-marl's flashbax trajectory buffer
    (og_marl/replay_buffers.py, f4eb8f0); `Transition.start` marks where.

    Attributes:
        capacity: Transitions that it holds at most.
        size: Transitions that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._next = 0
        shapes = Transition((AGENTS, OBSERVATION), (STATE,), (AGENTS, ACTION), (1,), (1,), (1,))
        self._fields: Transition[Floats] = Transition(*(np.zeros((capacity, *shape), np.float32) for shape in shapes))

    def add(self, transition: Transition[Floats]) -> None:
        """Append a transition; when full, in place of the oldest."""
        for field, value in zip(self._fields, transition, strict=True):
            field[self._next] = value
        self._next = (self._next + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def draw(self, rng: np.random.Generator, count: int, length: int) -> NDArray[np.int64]:
        """Where `count` sequences of `length` transitions begin, [count]; drawn with replacement, so they may overlap.

        Raises:
            ValueError: The buffer holds fewer than `length` transitions.
        """
        if self.size < length:
            raise ValueError(f"a sequence of {length} does not fit a buffer that holds {self.size} transitions")
        oldest = self._next - self.size  # sequences never run over the write position from the newest to the oldest
        return (oldest + rng.integers(self.size - length + 1, size=count)) % self.capacity

    @property
    def fields(self) -> Transition[Floats]:
        """The whole ring, fields [capacity, ...]; rows that hold no transition yet are zeros."""
        return self._fields

    def positions(self, begins: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Where the transitions of the sequences that begin at `begins` [count] stand in the ring: [length, count]."""
        return (begins + np.arange(length)[:, None]) % self.capacity

    def sequences(self, begins: NDArray[np.int64], length: int) -> Transition[Floats]:
        """The sequences that begin at `begins` [count]: time-major copies, fields [length, count, ...]."""
        return self.at(self.positions(begins, length))

    def at(self, positions: NDArray[np.int64]) -> Transition[Floats]:
        """The transitions at `positions`, copied: fields [*positions.shape, ...]."""
        return Transition(*(field[positions] for field in self._fields))
