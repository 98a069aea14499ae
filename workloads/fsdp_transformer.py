"""The actor update of RLHF on a Qwen3 transformer, as verl runs it: PPO's clipped loss over response tokens.

Modules are transformers' own; sizes are Qwen3-4B's (config.json of Qwen/Qwen3-4B: 4,022,468,096 parameters). The step
follows verl b178a3c, verl/workers/actor/dp_actor.py: no entropy term (entropy_coeff 0), no KL loss, token-mean
aggregation, AdamW at 1e-6, master weights in float32. Prompts and responses of 512 tokens are verl's defaults
(verl/trainer/config/data). What verl shards, checkpoints or offloads is left to techniques.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM


@dataclass(frozen=True)
class TransformerSettings:
    """Sizes of the model and of one update.

    Attributes:
        batch_size: Sequences of one rank's mini-batch.
        prompt: Prompt tokens a sequence.
        response: Response tokens a sequence; the loss is over these.
        sharing: "shared" ties the output head to the embedding, as Qwen3-4B does; "separate" does not.
        learning_rate: AdamW's; verl's actor default.
        clip_ratio: PPO's epsilon; verl's default.
    """

    batch_size: int = 4
    prompt: int = 512
    response: int = 512
    vocab_size: int = 151_936
    hidden: int = 2560
    intermediate: int = 9728
    layers: int = 36
    heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128
    sharing: Literal["shared", "separate"] = "shared"
    learning_rate: float = 1e-6
    clip_ratio: float = 0.2
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens a sequence."""
        return self.prompt + self.response


def _config(settings: TransformerSettings) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=settings.sharing == "shared",
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return config


class FsdpTransformer:
    """One PPO update of the actor on a mini-batch of `batch_size` sequences a rank."""

    presets: ClassVar[Mapping[str, TransformerSettings]] = {
        "qwen3_4b": TransformerSettings(),
        # What a 24 GB card can train whole: config.json of Qwen/Qwen3-0.6B, 596,049,920 parameters.
        "qwen3_0_6b": TransformerSettings(hidden=1024, intermediate=3072, layers=28, heads=16),
        "tiny": TransformerSettings(
            batch_size=8,
            prompt=8,
            response=8,
            vocab_size=64,
            hidden=32,
            intermediate=64,
            layers=2,
            heads=4,
            key_value_heads=2,
            head_dim=8,
            learning_rate=3e-3,
        ),
    }
    baseline: ClassVar[Mapping[str, Any]] = {"precision": "bf16", "sharding": "fsdp"}
    unit: ClassVar[str] = "tokens"

    def __init__(self, settings: TransformerSettings) -> None:
        self.settings = settings
        with torch.device("meta"):
            self.actor = Qwen3ForCausalLM(_config(settings)).to(torch.get_default_dtype())
        self.actor.train()
        self.networks: Mapping[str, nn.Module] = {"actor": self.actor}
        self._device = torch.device("meta")
        self._random = np.random.default_rng(settings.seed)

    def place(self, device: torch.device) -> None:
        """Materialise parameters and buffers on `device` and initialise them as transformers does."""
        self._device = device
        self.actor.to_empty(device=device)
        self.actor.tie_weights()  # leaving meta, tied parameters become two
        torch.manual_seed(self.settings.seed)
        with torch.no_grad():
            self.actor.apply(self._initialise)

    def _initialise(self, module: Any) -> None:
        """Normal weights of deviation 0.02 (Qwen3Config.initializer_range), unit norms, and the rotary frequencies."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif hasattr(module, "inv_freq"):
            head_dim, base = self.settings.head_dim, 1_000_000.0
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=module.inv_freq.device) / head_dim
            module.inv_freq.copy_(base**-exponents)
            module.original_inv_freq.copy_(module.inv_freq)
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            nn.init.ones_(module.weight)

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """AdamW with verl's betas and weight decay."""
        rate = self.settings.learning_rate
        return {"actor": torch.optim.AdamW(self.actor.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01)}

    def blocks(self) -> Iterable[nn.Module]:
        """The decoder layers, which verl checkpoints."""
        return list(self.actor.model.layers)

    def shards(self) -> Iterable[nn.Module]:
        """Decoder layers, then the model: embedding, head and final norm stay with the root, as verl wraps them."""
        return [*self.actor.model.layers, self.actor]

    def phases(self) -> Mapping[str, nn.Module]:
        """The layers, first to last."""
        return {f"layer {index}": layer for index, layer in enumerate(self.actor.model.layers)}

    def micro_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Slices of a mini-batch: tokens [n, T], and advantages and old log-probabilities [n, response].

        Rewards are drawn, not earned: a rollout engine is not part of the step. Every response has one advantage, as in
        GRPO; the old policy is uniform over the vocabulary.
        """
        settings = self.settings
        shape = (settings.batch_size, settings.response)
        tokens = self._random.integers(0, settings.vocab_size, (settings.batch_size, settings.tokens))
        advantages = np.broadcast_to(self._advantages(tokens[:, settings.prompt :])[:, None], shape)
        old = np.full(shape, -np.log(settings.vocab_size))
        size = settings.batch_size // count
        for start in range(0, settings.batch_size, size):
            rows = slice(start, start + size)
            yield {
                "tokens": torch.from_numpy(tokens[rows]).to(self._device),
                "advantages": self._floats(advantages[rows]),
                "old_log_probs": self._floats(old[rows]),
            }

    def _advantages(self, responses: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Standardised share of tokens in the lower half of the vocabulary: a reward that a policy can learn."""
        rewards = (responses < self.settings.vocab_size // 2).mean(axis=1)
        return np.asarray((rewards - 0.5) / 0.5, dtype=np.float64)

    def _floats(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.get_default_dtype()).to(self._device)

    def losses(self, micro_batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """PPO's clipped loss, mean over response tokens (Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
        log_probs = self.log_probs(micro_batch["tokens"])
        ratio = torch.exp(log_probs - micro_batch["old_log_probs"])
        clipped = ratio.clamp(1 - self.settings.clip_ratio, 1 + self.settings.clip_ratio)
        advantages = micro_batch["advantages"]
        yield -torch.minimum(ratio * advantages, clipped * advantages).mean()

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [n, response] of the response tokens of `tokens` [n, T], in float32 or wider.

        As verl does without padding: of all tokens, prompts too, against the tokens rolled by one; the response is cut
        out afterwards.
        """
        logits = self.actor(input_ids=tokens).logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rolled = torch.roll(tokens, -1, dims=1).flatten()
        negative = F.cross_entropy(logits, rolled, reduction="none")
        return -negative.view_as(tokens)[:, self.settings.prompt - 1 : -1]

    def finish_step(self) -> None:
        """Nothing follows the optimizer."""

    @property
    def items_per_step(self) -> int:
        """Tokens, prompts and responses, of one rank's mini-batch."""
        return self.settings.batch_size * self.settings.tokens
