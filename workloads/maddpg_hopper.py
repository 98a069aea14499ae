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
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from workloads.maddpg import PRESETS, Experience, MaddpgSettings
from workloads.maddpg_networks import Policy, TwinCritics
from workloads.mamujoco import Floats, Hopper, Transition

Batch = Transition[Tensor]


class MaddpgHopper(Experience):
    """The train step, as the harness drives it, and `collect` and `evaluate` for real training.

    Attributes:
        networks: "critic" (both twins) and "policy".
        targets: Their slowly following copies, under the same names.
    """

    presets: ClassVar[Mapping[str, MaddpgSettings]] = PRESETS
    baseline: ClassVar[Mapping[str, object]] = {"sharing": "shared"}
    unit: ClassVar[str] = "transitions"

    def __init__(self, settings: MaddpgSettings) -> None:
        super().__init__(settings)
        self.critic, self.policy = _networks(settings)
        self.target_critic, self.target_policy = _networks(settings)
        self.networks: Mapping[str, nn.Module] = {"critic": self.critic, "policy": self.policy}
        self.targets: Mapping[str, nn.Module] = {"critic": self.target_critic, "policy": self.target_policy}
        for name, target in self.targets.items():
            target.load_state_dict(self.networks[name].state_dict())
            target.requires_grad_(False)
        self.device = torch.device("cpu")

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
        for positions in self.drawn(count):
            if self.settings.buffer == "device":
                index = torch.from_numpy(positions).to(self.device)
                yield Batch(*(field[index] for field in self.ring))
            else:
                yield Batch(*(self._to_device(field) for field in self.replay.at(positions)))

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
    def ring(self) -> Batch:
        """The replay buffer on the device."""
        return Batch(*(self._to_device(field) for field in self.replay.fields))

    @torch.no_grad()
    def act(self, environment: Hopper, memories: list[Tensor] | None) -> tuple[Floats, list[Tensor]]:
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
    critics = TwinCritics(settings.critic_width, settings.copies)
    return critics, Policy(settings.policy_width, settings.copies, settings.policy == "recurrent")
