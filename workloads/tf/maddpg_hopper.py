"""MADDPG on MaMuJoCo's Hopper 3x1 in TensorFlow 2: the train step of workloads.maddpg_hopper, as og-marl runs it.

The same system, losses and update, so that one table compares the frameworks. As there, the GRU applies its reset gate
behind the matrix product; RMSProp's epsilon is under the root, as sonnet's is and torch's is not; weights start from
torch's range in the GRU and from Keras' initialisers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from workloads.maddpg import PRESETS, Experience, MaddpgSettings
from workloads.mamujoco import Floats, Hopper, Transition

if TYPE_CHECKING:
    from workloads.tf.maddpg_networks import Policy, TwinCritics

Tensor = Any
Batch = Transition[Tensor]


class MaddpgHopper(Experience):
    """The train step, as the harness drives it, and `collect` and `evaluate` for real training.

    Attributes:
        networks: "critic" (both twins) and "policy".
        targets: Their slowly following copies, under the same names.
    """

    framework: ClassVar[str] = "tensorflow"
    presets: ClassVar[Mapping[str, MaddpgSettings]] = PRESETS
    # og-marl compiles its train step with XLA and lets the allocator grow (set_growing_gpu_memory at import).
    baseline: ClassVar[Mapping[str, object]] = {"sharing": "shared", "allocation": "growth", "xla": True}
    unit: ClassVar[str] = "transitions"

    def __init__(self, settings: MaddpgSettings) -> None:
        super().__init__(settings)
        self.critic, self.policy = _networks(settings)
        self.target_critic, self.target_policy = _networks(settings)
        self.networks: Mapping[str, Any] = {"critic": self.critic, "policy": self.policy}
        self.targets: Mapping[str, Any] = {"critic": self.target_critic, "policy": self.target_policy}
        for name, target in self.targets.items():
            target.trainable = False
            for variable, source in zip(target.variables, self.networks[name].variables, strict=True):
                variable.assign(source)

    def optimizers(self) -> Mapping[str, Any]:
        """RMSProp with sonnet's constants: decay 0.9, and 1e-10 under the root."""
        import keras

        rate = self.settings.learning_rate
        return {name: keras.optimizers.RMSprop(rate, rho=0.9, epsilon=1e-10) for name in self.networks}

    def micro_batches(self, count: int) -> Iterator[Batch]:
        """Draw `batch_size` sequences and yield them as `count` equal slices, fields [time, slice, ...].

        From a buffer on the host they are arrays of numpy, which the harness puts on the device.

        Raises:
            ValueError: The batch does not divide by `count`.
        """
        import tensorflow as tf

        for positions in self.drawn(count):
            if self.settings.buffer == "device":
                yield Batch(*(tf.gather(field, positions) for field in self.ring))
            else:
                yield self.replay.at(positions)

    def losses(self, batch: Batch) -> Mapping[str, Callable[[], Tensor]]:
        """What computes each network's loss, a mean over the samples; all read the weights from before the update."""
        return {"critic": lambda: self._critic_loss(batch), "policy": lambda: self._policy_loss(batch)}

    def finish_step(self) -> None:
        """Let every target follow its network: target <- (1 - rate) * target + rate * network."""
        rate = self.settings.target_update_rate
        for name, network in self.networks.items():
            for target, variable in zip(self.targets[name].variables, network.variables, strict=True):
                target.assign_add(rate * (variable.value - target.value))

    def blocks(self) -> list[Any]:
        """Every policy step, called once per time step, and every critic's value network."""
        return [*self.policy.steps, *self.critic.first.values, *self.critic.second.values]

    @cached_property
    def ring(self) -> Batch:
        """The replay buffer on the device."""
        import tensorflow as tf

        return Batch(*(tf.Variable(field, trainable=False) for field in self.replay.fields))

    def act(self, environment: Hopper, memories: list[Tensor] | None) -> tuple[Floats, list[Tensor]]:
        """The policy's actions [agents, 1] on what the environment shows now."""
        import tensorflow as tf

        start = tf.fill((1, 1, 1), float(environment.start))
        actions, memories = self.policy(tf.constant(environment.observations[None, None]), start, memories)
        return tf.cast(actions[0, 0], tf.float32).numpy(), memories

    def _critic_loss(self, batch: Batch) -> Tensor:
        """Half the mean squared TD error, averaged over the twins.

        As in og-marl, the transition after one cut at 1,000 steps is the next episode's first.
        """
        import tensorflow as tf

        next_actions, _ = self.target_policy(batch.observations, batch.start)
        following = tf.minimum(*_full(self.target_critic(batch.state, next_actions, next_actions)))[1:]
        reward, terminal = batch.reward[:-1], batch.terminal[:-1]
        targets = tf.stop_gradient(reward + self.settings.discount * (1 - terminal) * following)
        first, second = _full(self.critic(batch.state, batch.actions, batch.actions))
        return tf.reduce_mean((targets - first[:-1]) ** 2 + (targets - second[:-1]) ** 2) / 4

    def _policy_loss(self, batch: Batch) -> Tensor:
        """The negative value of the policy's actions, and the penalty on their size, both means over every action."""
        import tensorflow as tf

        actions, _ = self.policy(batch.observations, batch.start)
        values = tf.minimum(*_full(self.critic(batch.state, actions, batch.actions)))
        (full,) = _full([actions])
        return tf.reduce_mean(self.settings.action_penalty * full[..., 0] ** 2 - values)


def _full(tensors: Any) -> list[Tensor]:
    """In full precision, whatever the policy of the layers computes in."""
    import tensorflow as tf

    return [tf.cast(tensor, tf.float32) for tensor in tensors]


def _networks(settings: MaddpgSettings) -> tuple[TwinCritics, Policy]:
    """Both networks, built: every variable exists."""
    import tensorflow as tf

    from workloads.mamujoco import ACTION, AGENTS, OBSERVATION, STATE
    from workloads.tf.maddpg_networks import Policy, TwinCritics

    critic = TwinCritics(settings.critic_width, settings.copies)
    policy = Policy(settings.policy_width, settings.copies, settings.policy == "recurrent")
    actions = tf.zeros((1, 1, AGENTS, ACTION))
    critic(tf.zeros((1, 1, STATE)), actions, actions)
    policy(tf.zeros((1, 1, AGENTS, OBSERVATION)), tf.zeros((1, 1, 1)))
    return critic, policy
