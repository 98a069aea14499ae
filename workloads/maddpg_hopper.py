"""MADDPG on MaMuJoCo's Hopper 3x1: one train step of og-marl's online system, and the loop around it.

MADDPG is Lowe et al. 2017 (arXiv:1706.02275): each agent acts on what it sees, and a critic that sees the whole state
and every agent's action teaches it. The system is og-marl f4eb8f0, og_marl/baselines/tf2_systems/online/maddpg.py with
base.py, configs/maddpg.yaml and ../networks.py: recurrent policy, every network shared by the agents, twin critics of
which the smaller value counts (TD3, Fujimoto et al. 2018, arXiv:1802.09477).

Where this differs from og-marl, at the same sizes: torch's GRU cell applies the reset gate behind the matrix product,
sonnet's before it; weights start from torch's initialisers; the targets start as copies of the networks; torch's
RMSProp has no momentum slot when momentum is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from workloads.maddpg_networks import Policy, TwinCritics
from workloads.mamujoco import ACTION, AGENTS, Floats, Hopper, Transition
from workloads.replay import ReplayBuffer

Batch = Transition[Tensor]


@dataclass(frozen=True)
class MaddpgSettings:
    """Sizes and constants; the defaults are the published ones (og-marl f4eb8f0, configs/maddpg.yaml).

    Attributes:
        batch_size: Sequences in a train step (FlashbaxReplayBuffer's default).
        sequence_length: Transitions in a sequence.
        sharing: "shared": one policy and one pair of critics for all agents, as published. "separate": one each.
        policy_width: Units of the policy's linear layer and of its GRU.
        critic_width: Units of each of a critic's two hidden layers.
        buffer_size: Transitions that the replay buffer holds.
        random_steps: Transitions in it before the first train step, from uniformly random actions.
        learning_rate: Of both RMSProp optimizers.
        discount: Of the reward, per transition.
        target_update_rate: Share of a network that its target takes over in each train step.
        action_penalty: Weight of the mean squared action in the policy's loss.
        exploration: Standard deviation of the noise on an action, in units of the action's limit.
        seed: Of everything but the networks' weights, which follow torch's seed.
    """

    batch_size: int = 32
    sequence_length: int = 10
    sharing: str = "shared"
    policy_width: int = 64
    critic_width: int = 128
    buffer_size: int = 10_000
    random_steps: int = 10_000
    learning_rate: float = 1e-3
    discount: float = 0.99
    target_update_rate: float = 0.01
    action_penalty: float = 1e-3
    exploration: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sharing not in ("shared", "separate"):
            raise ValueError(f"sharing={self.sharing!r}: choose 'shared' or 'separate'")


class MaddpgHopper:
    """The train step, as the harness drives it, and `collect` and `evaluate` for real training.

    Attributes:
        networks: "critic" (both twins) and "policy".
        targets: Their slowly following copies, under the same names.
    """

    # "scaled" is ours, not published: 8 times the widths, 32 times the batch and 12.8 times the length, so that a plain
    # fp32 step holds about 20 GiB, most of a 24 GB card. Its 131,072 transitions come from 10,000 real ones: sequences
    # overlap.
    presets: ClassVar[Mapping[str, MaddpgSettings]] = {
        "scaled": MaddpgSettings(batch_size=1024, sequence_length=128, policy_width=512, critic_width=1024),
        "stock": MaddpgSettings(),
        "tiny": MaddpgSettings(batch_size=16, policy_width=16, critic_width=32, random_steps=1000),
    }
    baseline: ClassVar[Mapping[str, object]] = {"sharing": "shared"}
    unit: ClassVar[str] = "transitions"

    def __init__(self, settings: MaddpgSettings) -> None:
        self.settings = settings
        self.critic, self.policy = _networks(settings)
        self.target_critic, self.target_policy = _networks(settings)
        self.networks: Mapping[str, nn.Module] = {"critic": self.critic, "policy": self.policy}
        self.targets: Mapping[str, nn.Module] = {"critic": self.target_critic, "policy": self.target_policy}
        for name, target in self.targets.items():
            target.load_state_dict(self.networks[name].state_dict())
            target.requires_grad_(False)
        self.device = torch.device("cpu")
        self._rng = np.random.default_rng(settings.seed)

    def place(self, device: torch.device) -> None:
        """Move the networks and their targets to `device`."""
        self.device = device
        for network in (*self.networks.values(), *self.targets.values()):
            network.to(device)

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """RMSProp with sonnet's constants: decay 0.9, and 1e-10 under the root, which is 1e-5 beside it."""
        return {
            name: torch.optim.RMSprop(network.parameters(), lr=self.settings.learning_rate, alpha=0.9, eps=1e-5)
            for name, network in self.networks.items()
        }

    def micro_batches(self, count: int) -> Iterator[Batch]:
        """Draw `batch_size` sequences and yield them as `count` equal slices, fields [time, slice, ...], on the device.

        Raises:
            ValueError: The batch does not divide by `count`.
        """
        size, length = self.settings.batch_size, self.settings.sequence_length
        if size % count:
            raise ValueError(f"a batch of {size} sequences does not divide into {count} equal slices")
        begins = self.replay.draw(self._rng, size, length)
        for part in np.split(begins, count):
            yield Batch(*(self._to_device(field) for field in self.replay.sequences(part, length)))

    def losses(self, micro_batch: Batch) -> Iterator[Tensor]:
        """Yield the critics' loss, then the policy's; both read the weights from before the update."""
        yield self._critic_loss(micro_batch)
        self.critic.requires_grad_(False)  # the policy's loss runs through the critics but must not train them
        try:
            yield self._policy_loss(micro_batch)
        finally:
            self.critic.requires_grad_(True)

    def finish_step(self) -> None:
        """Let every target follow its network: target <- (1 - rate) * target + rate * network."""
        with torch.no_grad():
            for name, network in self.networks.items():
                pairs = zip(self.targets[name].parameters(), network.parameters(), strict=True)
                for target, parameter in pairs:
                    target.lerp_(parameter, self.settings.target_update_rate)

    @property
    def items_per_step(self) -> int:
        """Transitions in a batch."""
        return self.settings.batch_size * self.settings.sequence_length

    def blocks(self) -> Iterable[nn.Module]:
        """Every policy step, called once per time step, and every critic's value network."""
        return [*self.policy.steps, *self.critic.first.values, *self.critic.second.values]

    def phases(self) -> Mapping[str, nn.Module]:
        """The modules of `blocks` and the same of the targets, by name; with separate networks, by agent."""
        phases: dict[str, nn.Module] = {}
        for prefix, policy, critic in (
            ("", self.policy, self.critic),
            ("target ", self.target_policy, self.target_critic),
        ):
            roles = {"policy step": policy.steps, "critic 1": critic.first.values, "critic 2": critic.second.values}
            for role, modules in roles.items():
                for agent, module in enumerate(modules):
                    phases[f"{prefix}{role}" + (f" agent {agent}" if len(modules) > 1 else "")] = module
        return phases

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

    def collect(self, steps: int) -> None:
        """Add `steps` transitions to the buffer, acting with the policy and exploration noise."""
        replay, environment = self.replay, self.environment
        memories = None
        for _ in range(steps):
            actions, memories = self._act(environment, memories)
            noise = self._rng.normal(0, self.settings.exploration, actions.shape)
            replay.add(environment.step(np.clip(actions + noise, -1, 1).astype(np.float32)))

    def evaluate(self, episodes: int) -> float:
        """The mean undiscounted return of the policy without noise; every call starts from the same robot poses."""
        environment = Hopper(self.settings.seed + 1)
        total = 0.0
        for _ in range(episodes):
            memories = None
            ended = False
            while not ended:
                actions, memories = self._act(environment, memories)
                total += environment.step(actions).reward.item()
                ended = environment.start
        return total / episodes

    @torch.no_grad()
    def _act(self, environment: Hopper, memories: list[Tensor] | None) -> tuple[Floats, list[Tensor]]:
        """The policy's actions [agents, 1] on what the environment shows now."""
        observations = self._to_device(environment.observations[None, None])
        start = observations.new_full((1, 1, 1), float(environment.start))
        actions, memories = self.policy(observations, start, memories)
        return actions[0, 0].float().cpu().numpy(), memories

    def _to_device(self, array: Floats) -> Tensor:
        tensor: Tensor = torch.from_numpy(array).to(torch.get_default_dtype())
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _critic_loss(self, batch: Batch) -> Tensor:
        """Half the mean squared TD error, averaged over the twins.

        As in og-marl, the transition after one cut at 1,000 steps is the next episode's first.
        """
        with torch.no_grad():
            next_actions, _ = self.target_policy(batch.observations, batch.start)
            following = torch.minimum(*self.target_critic(batch.state, next_actions, next_actions))[1:]
            targets = batch.reward[:-1] + self.settings.discount * (1 - batch.terminal[:-1]) * following
        first, second = self.critic(batch.state, batch.actions, batch.actions)
        loss: Tensor = ((targets - first[:-1]) ** 2 + (targets - second[:-1]) ** 2).mean() / 4
        return loss

    def _policy_loss(self, batch: Batch) -> Tensor:
        """The negative value of the policy's actions, and the penalty on their size, both means over every action."""
        actions, _ = self.policy(batch.observations, batch.start)
        values = torch.minimum(*self.critic(batch.state, actions, batch.actions))
        values = values.to(batch.reward.dtype)  # the mean in full precision under autocast too
        loss: Tensor = (self.settings.action_penalty * actions.squeeze(-1) ** 2 - values).mean()
        return loss


def _networks(settings: MaddpgSettings) -> tuple[TwinCritics, Policy]:
    copies = 1 if settings.sharing == "shared" else AGENTS
    return TwinCritics(settings.critic_width, copies), Policy(settings.policy_width, copies)
