"""Expandable segments: address ranges that grow by pages where cudaMalloc would make one segment after another.

Rules from c10/cuda/CUDACachingAllocator.cpp, torch 2.13: each function names the one that it follows.
"""

from __future__ import annotations

from bench.vgpu.segments import FREE, UNMAPPED, Block, Card, FreeList, absorb, link


def grow(card: Card, free_list: FreeList, size_bytes: int, page_bytes: int, address_space_bytes: int) -> Block | None:
    """Map pages until a free block of at least `size_bytes` exists, and take it out of its list.

    None: the card has not enough memory left; what was mapped on the way stays cached (try_allocate_expandable_block).
    """
    block = _place(card, free_list, size_bytes, page_bytes, address_space_bytes)
    if block.state == UNMAPPED and not _map(card, block, min(block.size_bytes, size_bytes)):
        return None
    while block.size_bytes < size_bytes:
        unmapped = block.next
        assert unmapped is not None
        if not _map(card, unmapped, min(size_bytes - block.size_bytes, unmapped.size_bytes)):
            return None
        block = unmapped  # which has merged with what was before it
    free_list.remove(block)
    return block


def _place(card: Card, free_list: FreeList, size_bytes: int, page_bytes: int, address_space_bytes: int) -> Block:
    """The lowest unmapped block, or free block before one, from which there is room; else that of a new segment.

    A segment spans 9/8 of the card's memory, in whole pages (find_expandable_block).
    """
    for unmapped in free_list.unmapped:
        block = unmapped
        if block.prev is not None and block.prev.state == FREE:
            block = block.prev
        room_bytes = 0
        at: Block | None = block
        while room_bytes < size_bytes and at is not None and at.state in (FREE, UNMAPPED):
            room_bytes += at.size_bytes
            at = at.next
        if room_bytes >= size_bytes:
            return block
    pages = -(-address_space_bytes // page_bytes)
    segment = card.new_segment(free_list, pages * page_bytes, page_bytes, UNMAPPED)
    free_list.insert_unmapped(segment.head)
    return segment.head


def _map(card: Card, block: Block, size_bytes: int) -> bool:
    """Put memory behind the first pages of an unmapped block; False: there is not enough (map_block)."""
    segment = block.segment
    free_list = segment.free_list
    mapped_bytes = -(-size_bytes // segment.page_bytes) * segment.page_bytes
    if not card.take(free_list.pool, mapped_bytes):
        return False
    if card.observer is not None:
        card.observer("segment_map", block.address, mapped_bytes, free_list.stream)
    free_list.unmapped.remove(block)
    block.state = FREE
    if mapped_bytes < block.size_bytes:
        rest = _cut(block, block.size_bytes - mapped_bytes)
        rest.state = UNMAPPED
        free_list.insert_unmapped(rest)
    absorb(block, block.prev)
    absorb(block, block.next)
    free_list.insert(block)
    return True


def release(card: Card, block: Block) -> None:
    """Unmap the whole pages in a free block, and give up the segment if nothing of it stays mapped.

    (unmap_block, release_expandable_segment)
    """
    segment = block.segment
    free_list = segment.free_list
    before_bytes = (segment.address - block.address) % segment.page_bytes
    unmapped_bytes = (block.size_bytes - before_bytes) // segment.page_bytes * segment.page_bytes
    if unmapped_bytes <= 0:
        return
    free_list.remove(block)
    after_bytes = block.size_bytes - before_bytes - unmapped_bytes
    if after_bytes:
        free_list.insert(_cut(block, after_bytes))
    if before_bytes:
        middle = _cut(block, unmapped_bytes)
        free_list.insert(block)
        block = middle
    if card.observer is not None:
        card.observer("segment_unmap", block.address, unmapped_bytes, free_list.stream)
    block.state = UNMAPPED
    absorb(block, block.prev)
    absorb(block, block.next)
    free_list.insert_unmapped(block)
    card.give_back(free_list.pool, unmapped_bytes)
    if block.prev is None and block.next is None:
        free_list.unmapped.remove(block)
        del card.segments[segment.address]


def _cut(block: Block, size_bytes: int) -> Block:
    """Cut the last `size_bytes` off a block into one of their own, in no list."""
    block.size_bytes -= size_bytes
    rest = Block(block.address + block.size_bytes, size_bytes, 0, block.state, block.segment, block, None)
    link(rest, block.next, block.segment)
    link(block, rest, block.segment)
    return rest
