"""The networks of og-marl's online MADDPG (f4eb8f0, og_marl/baselines/tf2_systems): a recurrent policy, twin critics.

Every one of them serves all agents, as published, or comes in one copy for each agent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.mamujoco import ACTION, AGENTS, OBSERVATION, STATE


class SingleBiasGRUCell(nn.GRUCell):
    """A GRU cell with the one bias per gate that sonnet's GRU has, hence the published parameter count.

    torch's cell has a second, recurrent bias. The fused CUDA cell takes both or none, so it stays as a buffer of zeros.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        zeros = torch.zeros_like(self.bias_hh, requires_grad=False)
        del self.bias_hh
        self.register_buffer("bias_hh", zeros)


class PolicyStep(nn.Module):
    """One agent's policy for one time step: linear, GRU, linear, tanh. 25,665 parameters at the published width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Linear(OBSERVATION + AGENTS, width)
        self.memory = SingleBiasGRUCell(width, width)
        self.action = nn.Linear(width, ACTION)

    def forward(self, observation: Tensor, memory: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Act.

        Args:
            observation: [rows, 12], the agent's one-hot number behind it.
            memory: [rows, width], forgotten where an episode starts.
            start: [rows, 1], boolean.

        Returns:
            Actions [rows, 1] in [-1, 1], and the next memory.
        """
        memory = self.memory(torch.relu(self.embedding(observation)), memory.masked_fill(start, 0))
        return torch.tanh(self.action(torch.relu(memory))), memory


class FeedForwardStep(nn.Module):
    """One agent's policy without memory: a linear layer stands where the GRU does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(OBSERVATION + AGENTS, width)
        self.hidden = nn.Linear(width, width)
        self.action = nn.Linear(width, ACTION)

    def forward(self, observation: Tensor) -> Tensor:
        """Actions [..., 1] in [-1, 1] on observations [..., 12]."""
        return torch.tanh(self.action(torch.relu(self.hidden(torch.relu(self.embedding(observation))))))


class Policy(nn.Module):
    """The agents' policies; recurrent ones are unrolled over time.

    Attributes:
        steps: One for all agents, or one each.
    """

    identities: Tensor

    def __init__(self, width: int, copies: int, recurrent: bool = True) -> None:
        super().__init__()
        kind = PolicyStep if recurrent else FeedForwardStep
        self.steps = nn.ModuleList(kind(width) for _ in range(copies))
        self.register_buffer("identities", torch.eye(AGENTS))

    def forward(
        self, observations: Tensor, start: Tensor, memories: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Act on sequences.

        Args:
            observations: [time, batch, agents, 9].
            start: [time, batch, 1], 1 where an episode starts.
            memories: What an earlier call returned, to go on from; None to begin with empty ones.

        Returns:
            Actions [time, batch, agents, 1], and the memories after the last of them, one for each of `steps`; without
            memory, none.
        """
        time, batch, agents, _ = observations.shape
        inputs = torch.cat([observations, self.identities.expand(time, batch, agents, agents)], dim=-1)
        starts = start.bool().unsqueeze(2).expand(time, batch, agents, 1)
        actions: list[Tensor] = []
        last: list[Tensor] = []
        for index, step in enumerate(self.steps):
            rows = _share(inputs, index, len(self.steps)).flatten(1, 2)  # [time, batch * agents of this step, 12]
            if isinstance(step, PolicyStep):
                row_starts = _share(starts, index, len(self.steps)).flatten(1, 2)
                memory = rows.new_zeros(rows.shape[1], step.width) if memories is None else memories[index]
                acts, memory = _unrolled(step, rows, row_starts, memory)
                last.append(memory)
            else:
                acts = step(rows)
            actions.append(acts.view(time, batch, -1, ACTION))
        return torch.cat(actions, dim=2), last


def _unrolled(step: PolicyStep, rows: Tensor, starts: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The step at every time: actions [time, rows, 1], and the last memory."""
    acts = []
    for row, start in zip(rows, starts, strict=True):
        act, memory = step(row, memory, start)
        acts.append(act)
    return torch.stack(acts), memory


class Critic(nn.Module):
    """The value of a state and a joint action. 18,561 parameters at the published width.

    Attributes:
        values: One for all agents, or one each.
    """

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self.values = nn.ModuleList(
            nn.Sequential(
                nn.Linear(STATE + AGENTS * ACTION, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, 1),
            )
            for _ in range(copies)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Values [time, batch, agents] of inputs [time, batch, agents, 14]."""
        copies = len(self.values)
        return torch.cat([value(_share(inputs, i, copies)) for i, value in enumerate(self.values)], dim=2).squeeze(-1)


class TwinCritics(nn.Module):
    """Two critics that differ in their initial weights only."""

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self.first = Critic(width, copies)
        self.second = Critic(width, copies)

    def forward(self, state: Tensor, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Both critics' values, each [time, batch, agents].

        Args:
            state: [time, batch, 11].
            own: [time, batch, agents, 1], the actions through which each agent is taught.
            others: [time, batch, agents, 1], the actions that each agent finds the others taking.
        """
        inputs = torch.cat([state.unsqueeze(2).expand(-1, -1, AGENTS, -1), joint_actions(own, others)], dim=-1)
        return self.first(inputs), self.second(inputs)


def joint_actions(own: Tensor, others: Tensor) -> Tensor:
    """The joint action as each agent sees it: its own action among those of the others, which take no gradient.

    Args:
        own: [time, batch, agents, 1].
        others: [time, batch, agents, 1].

    Returns:
        [time, batch, agents, agents * 1].
    """
    mine = torch.eye(AGENTS, dtype=torch.bool, device=own.device).unsqueeze(-1)  # [viewer, actor, 1]
    return torch.where(mine, own.unsqueeze(2), others.detach().unsqueeze(2)).flatten(-2)


def _share(inputs: Tensor, index: int, copies: int) -> Tensor:
    """The agents (dimension 2) that network `index` of `copies` serves: all of them, or one."""
    return inputs if copies == 1 else inputs[:, :, index : index + 1]
