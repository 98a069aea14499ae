"""What MADDPG on MaMuJoCo's Hopper 3x1 is in every framework: its settings, and the experience that it learns from.

The system is og-marl f4eb8f0, og_marl/baselines/tf2_systems/online/maddpg.py with base.py and configs/maddpg.yaml.
Nothing here imports a framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.mamujoco import ACTION, AGENTS, Floats, Hopper
from workloads.replay import ReplayBuffer

CHOICES = {
    "sharing": ("shared", "separate"),
    "policy": ("recurrent", "feed_forward"),
    "buffer": ("host", "device"),
}


@dataclass(frozen=True)
class MaddpgSettings:
    """Sizes and constants; the defaults are the published ones (og-marl f4eb8f0, configs/maddpg.yaml).

    Attributes:
        batch_size: Sequences in a train step (FlashbaxReplayBuffer's default).
        sequence_length: Transitions in a sequence.
        sharing: "shared": one policy and one pair of critics for all agents, as published. "separate": one each.
        policy: "recurrent", as published, or "feed_forward": a second linear layer in the GRU's place.
        policy_width: Units of the policy's linear layer and of its GRU.
        critic_width: Units of each of a critic's two hidden layers.
        buffer: Where the replay buffer lives: on the "host", or on the "device" with the networks.
        buffer_size: Transitions that the replay buffer holds.
        random_steps: Transitions in it before the first train step, from uniformly random actions.
        learning_rate: Of both RMSProp optimizers.
        discount: Of the reward, per transition.
        target_update_rate: Share of a network that its target takes over in each train step.
        action_penalty: Weight of the mean squared action in the policy's loss.
        exploration: Standard deviation of the noise on an action, in units of the action's limit.
        seed: Of everything but the networks' weights, which follow the framework's seed.
    """

    batch_size: int = 32
    sequence_length: int = 10
    sharing: str = "shared"
    policy: str = "recurrent"
    policy_width: int = 64
    critic_width: int = 128
    buffer: str = "host"
    buffer_size: int = 10_000
    random_steps: int = 10_000
    learning_rate: float = 1e-3
    discount: float = 0.99
    target_update_rate: float = 0.01
    action_penalty: float = 1e-3
    exploration: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r}: choose {' or '.join(map(repr, known))}")

    @property
    def copies(self) -> int:
        """How many of each network there are."""
        return 1 if self.sharing == "shared" else AGENTS


# "scaled" is ours, not published: 8 times the widths, 32 times the batch, 12.8 times the length, so that a plain fp32
# step holds about 20 GiB, most of a 24 GB card. Its 131,072 transitions come from 10,000 real ones: sequences overlap.
PRESETS: Mapping[str, MaddpgSettings] = {
    "scaled": MaddpgSettings(batch_size=1024, sequence_length=128, policy_width=512, critic_width=1024),
    "stock": MaddpgSettings(),
    "tiny": MaddpgSettings(batch_size=16, policy_width=16, critic_width=32, random_steps=1000),
}


class Experience(ABC):
    """The environment, the replay buffer, and what is drawn from it; a framework adds the networks that act."""

    settings: MaddpgSettings

    def __init__(self, settings: MaddpgSettings) -> None:
        self.settings = settings
        self._rng = np.random.default_rng(settings.seed)

    @abstractmethod
    def act(self, environment: Hopper, memories: Any) -> tuple[Floats, Any]:
        """The policy's actions [agents, 1] on what the environment shows now, and what it wants to be given next."""

    @property
    def items_per_step(self) -> int:
        """Transitions in a batch."""
        return self.settings.batch_size * self.settings.sequence_length

    @cached_property
    def environment(self) -> Hopper:
        """The environment that fills the buffer."""
        return Hopper(self.settings.seed)

    @cached_property
    def replay(self) -> ReplayBuffer:
        """The replay buffer, with `random_steps` real transitions taken at its first use (about 8,000 a second)."""
        replay = ReplayBuffer(self.settings.buffer_size)
        rng = np.random.default_rng(self.settings.seed)
        for _ in range(self.settings.random_steps):
            replay.add(self.environment.step(rng.uniform(-1, 1, (AGENTS, ACTION)).astype(np.float32)))
        return replay

    def drawn(self, count: int) -> Iterator[NDArray[np.int64]]:
        """Draw `batch_size` sequences and yield, in `count` equal slices, which transitions they are: [time, slice].

        Raises:
            ValueError: The batch does not divide by `count`.
        """
        size, length = self.settings.batch_size, self.settings.sequence_length
        if size % count:
            raise ValueError(f"a batch of {size} sequences does not divide into {count} equal slices")
        begins = self.replay.draw(self._rng, size, length)
        for part in np.split(begins, count):
            yield self.replay.positions(part, length)

    def collect(self, steps: int) -> None:
        """Add `steps` transitions to the buffer, acting with the policy and exploration noise."""
        replay, environment = self.replay, self.environment
        memories = None
        for _ in range(steps):
            actions, memories = self.act(environment, memories)
            noise = self._rng.normal(0, self.settings.exploration, actions.shape)
            replay.add(environment.step(np.clip(actions + noise, -1, 1).astype(np.float32)))
        self.__dict__.pop("ring", None)  # a copy of the buffer on the device has become stale

    def evaluate(self, episodes: int) -> float:
        """The mean undiscounted return of the policy without noise; every call starts from the same robot poses."""
        environment = Hopper(self.settings.seed + 1)
        total = 0.0
        for _ in range(episodes):
            memories = None
            ended = False
            while not ended:
                actions, memories = self.act(environment, memories)
                total += environment.step(actions).reward.item()
                ended = environment.start
        return total / episodes
