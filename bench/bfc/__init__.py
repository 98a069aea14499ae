"""TensorFlow's BFC allocator, simulated: knows no TensorFlow, no torch, no workload and no target."""

from bench.bfc.allocator import BfcAllocator, BfcExhausted
from bench.bfc.policy import GRAB, GROWTH, MemoryPolicy, allocator_on_card, jax_pool_bytes
from bench.bfc.replay import Event, Outcome, replay
from bench.bfc.sub_allocator import Card, SubAllocator

__all__ = [
    "GRAB",
    "GROWTH",
    "BfcAllocator",
    "BfcExhausted",
    "Card",
    "Event",
    "MemoryPolicy",
    "Outcome",
    "SubAllocator",
    "allocator_on_card",
    "jax_pool_bytes",
    "replay",
]
