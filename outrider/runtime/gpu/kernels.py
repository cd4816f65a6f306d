"""Triton kernels that every model shares: attention over the cache in parts, products of few
tokens, products with experts.

Attention is flash decoding (Dao et al., 2023): the keys of a row are divided among programs, each
keeps its largest score, the sum of weights and the weighted values, and a second kernel joins the
parts, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_parts(
    query,
    keys,
    values,
    mask,
    indices,
    bases,
    parts,
    sums,
    num_tokens,
    capacity,
    num_keys,
    mask_keys,
    num_parts,
    scale,
    SHORT: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    QUERY_OFFSET: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    IN_KEYS: tl.constexpr,
    REST_PAD: tl.constexpr,
    MASKED: tl.constexpr,
    MASK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SEES_ALL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    """One part of the keys for some queries of one row and key head: grid (rows * KV heads, parts,
    blocks of queries).

    IN_KEYS: a key is its value and, after it, at most REST_PAD numbers more; both halves are read
    once. A short slot, and its mask, begin at a base of the row; a key is in the same part wherever
    it lies.
    """
    row = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    line = tl.program_id(2) * LINES + tl.arange(0, LINES)  # tokens times heads of the group
    is_line = line < num_tokens * GROUP
    token = line // GROUP
    head = kv_head * GROUP + line % GROUP
    at = (row * num_tokens + token).to(tl.int64)
    start = (tl.load(indices + row * num_tokens) % capacity).to(tl.int32)
    base = 0
    if SHORT:
        base = tl.load(bases + row).to(tl.int32)
        start += base
    position = start + token
    d = tl.arange(0, SIZE_PAD)
    dv = tl.arange(0, VALUE_PAD)
    FIRST: tl.constexpr = VALUE_SIZE if IN_KEYS else SIZE
    where = query + at[:, None] * QUERY_WIDTH + QUERY_OFFSET + head[:, None] * QUERY_STEP
    q = tl.load(where + d[None, :], mask=is_line[:, None] & (d < FIRST)[None, :], other=0.0)
    if IN_KEYS:
        rest = VALUE_SIZE + tl.arange(0, REST_PAD)
        q_rest = tl.load(
            where + rest[None, :], mask=is_line[:, None] & (rest < SIZE)[None, :], other=0.0
        )
    peak = tl.full([LINES], -1.0e30, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    out = tl.zeros([LINES, VALUE_PAD], tl.float32)
    begin = part * PART
    end = tl.minimum(tl.minimum(begin + PART, start + num_tokens), num_keys)
    if WINDOW > 0 and not MASKED:
        begin = tl.maximum(begin, (start - WINDOW + 1) // BLOCK * BLOCK)
    begin = tl.maximum(begin, base)
    store = row.to(tl.int64) * capacity - base
    for first in range(begin, end, BLOCK):
        key = first + tl.arange(0, BLOCK)
        is_key = key < end
        line_of_key = (store + key) * KV_HEADS + kv_head
        k = tl.load(
            keys + line_of_key[:, None] * SIZE + d[None, :],
            mask=is_key[:, None] & (d < FIRST)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if IN_KEYS:
            k_rest = tl.load(
                keys + line_of_key[:, None] * SIZE + rest[None, :],
                mask=is_key[:, None] & (rest < SIZE)[None, :],
                other=0.0,
            )
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale
        if SOFTCAP > 0.0:
            scores = (2.0 / (1.0 + tl.exp(-2.0 * scores / SOFTCAP)) - 1.0) * SOFTCAP
        if MASKED:
            allowed = (
                (row * MASK_TOKENS + token).to(tl.int64)[:, None] * mask_keys + key[None, :] - base
            )
            is_seen = is_line[:, None] & is_key[None, :]
            scores += tl.load(mask + allowed, mask=is_seen, other=float("-inf")).to(tl.float32)
        else:
            is_seen = is_key[None, :]
            if not SEES_ALL:
                is_seen = is_seen & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > (position - WINDOW)[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - larger)
        weights = tl.exp(scores - larger[:, None])
        if IN_KEYS:
            v = k
        else:
            is_number = is_key[:, None] & (dv < VALUE_SIZE)[None, :]
            v = tl.load(
                values + line_of_key[:, None] * VALUE_SIZE + dv[None, :], mask=is_number, other=0.0
            )
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = larger
    entry = (at * HEADS + head) * num_parts + part
    tl.store(sums + entry * 2, peak, mask=is_line)
    tl.store(sums + entry * 2 + 1, total, mask=is_line)
    tl.store(
        parts + entry[:, None] * VALUE_SIZE + dv[None, :],
        out,
        mask=is_line[:, None] & (dv < VALUE_SIZE)[None, :],
    )


@triton.jit
def attention_joined(
    parts,
    sums,
    sinks,
    out,
    num_parts,
    HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of one token and head made one: grid (tokens * heads). A head's sink takes a share
    that carries no value."""
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, VALUE_PAD)
    peak = tl.full([1], -1.0e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    joined = tl.zeros([VALUE_PAD], tl.float32)
    if HAS_SINKS:
        peak = tl.zeros([1], tl.float32) + tl.load(sinks + line % HEADS).to(tl.float32)
        total = tl.full([1], 1.0, tl.float32)
    for first in range(0, num_parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        is_part = part < num_parts
        entry = line * num_parts + part
        own = tl.load(sums + entry * 2, mask=is_part, other=-1.0e30)
        weight = tl.load(sums + entry * 2 + 1, mask=is_part, other=0.0)
        larger = tl.maximum(peak, tl.max(own, axis=0))
        shrink = tl.exp(peak - larger)
        share = tl.exp(own - larger)
        values = tl.load(
            parts + entry[:, None] * VALUE_SIZE + d[None, :],
            mask=is_part[:, None] & (d < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(share * weight, axis=0)
        joined = joined * shrink + tl.sum(values * share[:, None], axis=0)
        peak = larger
    tl.store(
        out + line * VALUE_SIZE + d, (joined / total).to(out.dtype.element_ty), mask=d < VALUE_SIZE
    )


@triton.jit
def narrow_product(
    x,
    weight,
    bias,
    out,
    num_tokens,
    x_width,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    LINES: tl.constexpr,
):
    """x (tokens, INPUTS) times weight (OUTPUTS, INPUTS): grid (blocks of tokens, blocks of
    outputs).

    Each token's sums run in the same order however many there are, which no library promises.
    Programs that read the same part of the weight run side by side, so that memory is read once.
    """
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_output = n < OUTPUTS
    is_token = token < num_tokens
    lines = token.to(tl.int64) * x_width
    rows = n.to(tl.int64) * INPUTS
    total = tl.zeros([LINES, BLOCK], tl.float32)
    for first in range(0, INPUTS, STEP):
        k = first + tl.arange(0, STEP)
        if INPUTS % STEP == 0:
            numbers = tl.load(x + lines[:, None] + k[None, :], mask=is_token[:, None], other=0.0)
            matrix = tl.load(
                weight + rows[:, None] + k[None, :], mask=is_output[:, None], other=0.0
            )
        else:
            is_input = k < INPUTS
            numbers = tl.load(
                x + lines[:, None] + k[None, :],
                mask=is_token[:, None] & is_input[None, :],
                other=0.0,
            )
            matrix = tl.load(
                weight + rows[:, None] + k[None, :],
                mask=is_output[:, None] & is_input[None, :],
                other=0.0,
            )
        total = tl.dot(numbers, tl.trans(matrix), total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    where = token.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(
        out + where, total.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :]
    )


@triton.jit
def expert_products(
    x,
    chosen,
    weight,
    bias,
    out,
    X_WIDTH: tl.constexpr,
    X_OFFSET: tl.constexpr,
    X_STEP: tl.constexpr,
    CHOSEN_WIDTH: tl.constexpr,
    CHOSEN_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    NAMED: tl.constexpr,
):
    """A vector times the matrix of the expert that it names: grid (tokens * ROWS, blocks of
    outputs).

    Not NAMED: the matrix of its row.
    """
    line = tl.program_id(0).to(tl.int64)
    token = line // ROWS
    row = line % ROWS
    expert = row
    if NAMED:
        expert = tl.load(chosen + token * CHOSEN_WIDTH + CHOSEN_OFFSET + row).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < OUTPUTS
    total = tl.zeros([BLOCK, STEP], tl.float32)
    expert_weight = weight + expert * WEIGHT_STEP
    for first in range(0, INPUTS, STEP):
        k = first + tl.arange(0, STEP)
        is_input = k < INPUTS
        numbers = tl.load(
            x + token * X_WIDTH + X_OFFSET + row * X_STEP + k, mask=is_input, other=0.0
        ).to(tl.float32)
        where = (
            k[None, :] * OUTPUTS + n[:, None] if TRANSPOSED else n[:, None] * INPUTS + k[None, :]
        )
        matrix = tl.load(
            expert_weight + where, mask=is_output[:, None] & is_input[None, :], other=0.0
        ).to(tl.float32)
        total += matrix * numbers[None, :]
    product = tl.sum(total, axis=1)
    if BIASED:
        product += tl.load(bias + expert * OUTPUTS + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + line * OUTPUTS + n, product.to(out.dtype.element_ty), mask=is_output)
