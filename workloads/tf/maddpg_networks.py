"""The networks of workloads.maddpg_networks in Keras: the same layers, sizes and parameter counts.

Every network serves all agents, or comes in one copy for each agent.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from workloads.mamujoco import ACTION, AGENTS

Tensor = Any  # tf.Tensor; TensorFlow has no types that a strict checker accepts


class SingleBiasGRUCell(keras.layers.Layer):
    """torch's GRU cell with the one bias per gate that sonnet's GRU has: the reset gate acts behind the product.

    Keras' own cell has two biases where the reset gate acts so (`reset_after=True`). Gates in the order of torch:
    reset, update, new.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def build(self, shape: Any) -> None:
        """Make the weights: [inputs, 3 * width], [width, 3 * width], [3 * width]."""
        initial = keras.initializers.RandomUniform(-(self.width**-0.5), self.width**-0.5)  # torch.nn.GRUCell's
        self.kernel = self.add_weight(shape=(shape[-1], 3 * self.width), initializer=initial, name="kernel")
        self.recurrent = self.add_weight(shape=(self.width, 3 * self.width), initializer=initial, name="recurrent")
        self.bias = self.add_weight(shape=(3 * self.width,), initializer=initial, name="bias")

    def call(self, inputs: Tensor, memory: Tensor) -> Tensor:
        """The next memory [rows, width] of inputs [rows, ...] and a memory [rows, width]."""
        given = tf.split(tf.matmul(inputs, self.kernel) + self.bias, 3, axis=-1)
        kept = tf.split(tf.matmul(memory, self.recurrent), 3, axis=-1)
        reset, update = tf.sigmoid(given[0] + kept[0]), tf.sigmoid(given[1] + kept[1])
        new = tf.tanh(given[2] + reset * kept[2])
        return new + update * (memory - new)


class PolicyStep(keras.layers.Layer):
    """One agent's policy for one time step: linear, GRU, linear, tanh. 25,665 parameters at the published width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = keras.layers.Dense(width)
        self.memory = SingleBiasGRUCell(width)
        self.action = keras.layers.Dense(ACTION)

    def call(self, observation: Tensor, memory: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Act on [rows, 12] with a memory [rows, width] that is forgotten where `start` [rows, 1] is true."""
        memory = tf.where(start, tf.zeros_like(memory), memory)
        memory = self.memory(tf.nn.relu(self.embedding(observation)), memory)
        return tf.tanh(self.action(tf.nn.relu(memory))), memory


class FeedForwardStep(keras.layers.Layer):
    """One agent's policy without memory: a linear layer stands where the GRU does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = keras.layers.Dense(width)
        self.hidden = keras.layers.Dense(width)
        self.action = keras.layers.Dense(ACTION)

    def call(self, observation: Tensor) -> Tensor:
        """Actions [..., 1] in [-1, 1] on observations [..., 12]."""
        return tf.tanh(self.action(tf.nn.relu(self.hidden(tf.nn.relu(self.embedding(observation))))))


class Policy(keras.layers.Layer):
    """The agents' policies; recurrent ones are unrolled over time, statically, as og-marl's `unroll_rnn` does.

    Attributes:
        steps: One for all agents, or one each.
    """

    def __init__(self, width: int, copies: int, recurrent: bool = True) -> None:
        super().__init__()
        kind = PolicyStep if recurrent else FeedForwardStep
        self.steps = [kind(width) for _ in range(copies)]

    def call(self, observations: Tensor, start: Tensor, memories: list[Tensor] | None = None) -> tuple[Tensor, Any]:
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
        identities = tf.broadcast_to(tf.eye(AGENTS, dtype=observations.dtype), (time, batch, agents, agents))
        inputs = tf.concat([observations, identities], axis=-1)
        starts = tf.broadcast_to(tf.cast(start, tf.bool)[:, :, None], (time, batch, agents, 1))
        actions, last = [], []
        for index, step in enumerate(self.steps):
            rows = _rows(inputs, index, len(self.steps))  # [time, batch * agents of this step, 12]
            if isinstance(step, PolicyStep):
                memory = tf.zeros((rows.shape[1], step.width), rows.dtype) if memories is None else memories[index]
                acts, memory = _unrolled(step, rows, _rows(starts, index, len(self.steps)), memory)
                last.append(memory)
            else:
                acts = step(rows)
            actions.append(tf.reshape(acts, (time, batch, -1, ACTION)))
        return tf.concat(actions, axis=2), last


def _unrolled(step: PolicyStep, rows: Tensor, starts: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The step at every time: actions [time, rows, 1], and the last memory."""
    acts = []
    for row, start in zip(tf.unstack(rows), tf.unstack(starts), strict=True):
        act, memory = step(row, memory, start)
        acts.append(act)
    return tf.stack(acts), memory


def _rows(inputs: Tensor, index: int, copies: int) -> Tensor:
    """The agents (dimension 2) that network `index` of `copies` serves, joined with the batch."""
    share = inputs if copies == 1 else inputs[:, :, index : index + 1]
    return tf.reshape(share, (share.shape[0], share.shape[1] * share.shape[2], share.shape[3]))


class Value(keras.layers.Layer):
    """A critic's network: two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = [
            keras.layers.Dense(size, activation) for size, activation in ((width, "relu"),) * 2 + ((1, None),)
        ]

    def call(self, inputs: Tensor) -> Tensor:
        """Values [..., 1] of inputs [..., 14]."""
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Critic(keras.layers.Layer):
    """The value of a state and a joint action. 18,561 parameters at the published width.

    Attributes:
        values: One for all agents, or one each.
    """

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self.values = [Value(width) for _ in range(copies)]

    def call(self, inputs: Tensor) -> Tensor:
        """Values [time, batch, agents] of inputs [time, batch, agents, 14]."""
        if len(self.values) == 1:
            return tf.squeeze(self.values[0](inputs), -1)
        return tf.concat([value(inputs[:, :, i : i + 1]) for i, value in enumerate(self.values)], axis=2)[..., 0]


class TwinCritics(keras.layers.Layer):
    """Two critics that differ in their initial weights only."""

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self.first = Critic(width, copies)
        self.second = Critic(width, copies)

    def call(self, state: Tensor, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Both critics' values, each [time, batch, agents].

        Args:
            state: [time, batch, 11].
            own: [time, batch, agents, 1], the actions through which each agent is taught.
            others: [time, batch, agents, 1], the actions that each agent finds the others taking.
        """
        time, batch, size = state.shape
        joint = joint_actions(own, others)
        inputs = tf.concat([tf.broadcast_to(state[:, :, None], (time, batch, AGENTS, size)), joint], axis=-1)
        return self.first(inputs), self.second(inputs)


def joint_actions(own: Tensor, others: Tensor) -> Tensor:
    """The joint action as each agent sees it: its own action among those of the others, which take no gradient.

    Args:
        own: [time, batch, agents, 1].
        others: [time, batch, agents, 1].

    Returns:
        [time, batch, agents, agents * 1].
    """
    mine = tf.eye(AGENTS, dtype=tf.bool)[..., None]  # [viewer, actor, 1]
    joint = tf.where(mine, own[:, :, None], tf.stop_gradient(others)[:, :, None])
    return tf.reshape(joint, (*own.shape[:3], AGENTS * ACTION))
