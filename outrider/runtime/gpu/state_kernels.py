"""Triton kernels of running states: short convolutions, delta rules and scans, brought forward and
gone on from in one order.

`moves` has eight numbers for each row: the six of `Move` (`kv/state_slots.py`), the position that
the pass begins at, and whether states and records are written. In a tree each token continues from
the state of the one that `parents` names, -1 for none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def source_of(moves, row):
    """The pointers of one row's move in a pass: base, begin, end and source in the state buffer."""
    move = moves + row * 8
    return tl.load(move), tl.load(move + 1), tl.load(move + 2), tl.load(move + 3)


@triton.jit
def target_of(moves, row):
    """The buffer that a pass leaves its state in, its start, and whether it writes states, and
    records."""
    move = moves + row * 8
    is_written = tl.load(move + 7) > 0
    return tl.load(move + 4), tl.load(move + 6), is_written, (tl.load(move + 5) > 0) & is_written


@triton.jit
def window_before(
    states,
    records,
    moves,
    window,
    num_records,
    CHANNELS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The LAST inputs in front of a pass, the newest last: grid (rows, blocks of channels). Brings
    the base forward."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    base, begin, end, source = source_of(moves, row)
    _, start, is_written, _ = target_of(moves, row)
    slot = states + row * 2 * LAST * CHANNELS
    lines = records + row * num_records * CHANNELS
    for i in tl.static_range(LAST):
        position = end - LAST + i
        is_recorded = position >= begin
        line = tl.maximum(position, 0) % num_records
        recorded = tl.load(
            lines + line * CHANNELS + c, mask=is_channel & is_recorded, other=0.0
        ).to(tl.float32)
        is_held = (position < begin) & (begin > 0)
        held = tl.load(
            slot + (base * LAST + i + end - begin) * CHANNELS + c,
            mask=is_channel & is_held,
            other=0.0,
        )
        forward = tl.where(is_recorded, recorded, held)
        is_moved = (end > begin) & is_written
        tl.store(slot + (base * LAST + i) * CHANNELS + c, forward, mask=is_channel & is_moved)
        other = tl.load(
            slot + (source * LAST + i) * CHANNELS + c, mask=is_channel & (source != base), other=0.0
        )
        before = tl.where(start > 0, tl.where(source != base, other, forward), 0.0)
        tl.store(window + (row * LAST + i) * CHANNELS + c, before, mask=is_channel)


@triton.jit
def convolution(
    x,
    weight,
    bias,
    window,
    parents,
    states,
    records,
    moves,
    out,
    num_tokens,
    num_records,
    X_WIDTH: tl.constexpr,
    X_OFFSET: tl.constexpr,
    X_STEP: tl.constexpr,
    CHANNELS: tl.constexpr,
    LAST: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    IN_TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each channel of a token with the LAST ones before it: grid (tokens, blocks of channels).
    `weight` (LAST + 1, channels)."""
    at = tl.program_id(0).to(tl.int64)
    row = at // num_tokens
    token = at % num_tokens
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    target, start, is_written, is_recorded = target_of(moves, row)
    inputs = x + row * num_tokens * X_WIDTH + X_OFFSET + c * X_STEP
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + c, mask=is_channel, other=0.0)
    for i in tl.static_range(LAST):
        node = token
        for _ in tl.static_range(LAST - i):
            following = node - 1
            if IN_TREE:
                parent = tl.load(parents + row * num_tokens + tl.maximum(node, 0)).to(tl.int64)
                following = tl.where(node >= 0, parent, following)
            node = following
        inside = tl.load(
            inputs + tl.maximum(node, 0) * X_WIDTH, mask=is_channel & (node >= 0), other=0.0
        ).to(tl.float32)
        outside = window + ((row + 1) * LAST + tl.minimum(node, -1)) * CHANNELS
        before = tl.load(outside + c, mask=is_channel & (node < 0), other=0.0)
        total += tl.load(weight + i * CHANNELS + c, mask=is_channel, other=0.0) * tl.where(
            node >= 0, inside, before
        )
        if not IN_TREE:  # the last token's predecessors, and itself, are the window after it
            is_last = (token == num_tokens - 1) & is_written
            newer = token - LAST + 1 + i
            later = tl.load(
                inputs + tl.maximum(newer, 0) * X_WIDTH, mask=is_channel & (newer >= 0), other=0.0
            ).to(tl.float32)
            outside = window + ((row + 1) * LAST + tl.minimum(newer, -1)) * CHANNELS
            older = tl.load(outside + c, mask=is_channel & (newer < 0), other=0.0)
            latest = tl.where(newer >= 0, later, older)
            tl.store(
                states + ((row * 2 + target) * LAST + i) * CHANNELS + c,
                latest,
                mask=is_channel & is_last,
            )
    now = tl.load(inputs + token * X_WIDTH, mask=is_channel, other=0.0)
    total += tl.load(weight + LAST * CHANNELS + c, mask=is_channel, other=0.0) * now.to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + at * CHANNELS + c, total.to(out.dtype.element_ty), mask=is_channel)
    line = records + (row * num_records + (start + token) % num_records) * CHANNELS
    tl.store(line + c, now, mask=is_channel & is_recorded)


@triton.jit
def normed(x, EPSILON: tl.constexpr):
    """Numbers of length 1, where there is an epsilon."""
    if EPSILON > 0.0:
        x = x / tl.sqrt(tl.sum(x * x, axis=0) + EPSILON)
    return x


@triton.jit
def updated(state, key, value, decay, beta, CORRECTS: tl.constexpr):
    """A state (keys, values) that has decayed and taken in a token; CORRECTS: what it had for the
    key is taken from the value."""
    state = state * tl.exp(decay)[:, None]
    if CORRECTS:
        value = (value - tl.sum(state * key[:, None], axis=0)) * beta
    return state + key[:, None] * value[None, :]


@triton.jit
def delta_rule(
    query,
    key,
    value,
    decay,
    beta,
    key_records,
    decay_records,
    states,
    branches,
    parents,
    moves,
    out,
    num_tokens,
    num_records,
    scale,
    QUERY_WIDTH: tl.constexpr,
    QUERY_OFFSET: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    KEY_STEP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    DECAY_WIDTH: tl.constexpr,
    DECAY_OFFSET: tl.constexpr,
    DECAY_STEP: tl.constexpr,
    DECAYS: tl.constexpr,
    BETA_WIDTH: tl.constexpr,
    BETA_OFFSET: tl.constexpr,
    BETA_STEP: tl.constexpr,
    CORRECTS: tl.constexpr,
    KEY_LINE: tl.constexpr,
    DECAY_LINE: tl.constexpr,
    DECAYS_AT: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    OWN_DECAYS: tl.constexpr,
    IN_TREE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of one head's state: grid (rows * heads, blocks of a value).

    A record has keys and values, KEY_LINE numbers of their type in all, and after them decays and
    betas, fp32.
    """
    line = tl.program_id(0).to(tl.int64)
    row = line // HEADS
    head = line % HEADS
    group = head // (HEADS // KEY_HEADS)
    k = tl.arange(0, SIZE_PAD)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_key = k < SIZE
    is_value = v < VALUE_SIZE
    is_cell = is_key[:, None] & is_value[None, :]
    cells = (k * VALUE_SIZE)[:, None] + v[None, :]
    is_first = tl.program_id(1) == 0
    base, begin, end, source = source_of(moves, row)
    target, start, is_written, is_recorded = target_of(moves, row)
    slot = states + (row * 2 * HEADS + head) * SIZE * VALUE_SIZE
    in_keys = key_records + row * num_records * KEY_LINE
    in_decays = decay_records + row * num_records * DECAY_LINE
    own_decays = head * DECAYS + k * OWN_DECAYS
    state = tl.load(
        slot + base * HEADS * SIZE * VALUE_SIZE + cells, mask=is_cell & (begin > 0), other=0.0
    )
    for position in range(begin, end):
        keys = in_keys + position % num_records * KEY_LINE
        decays = in_decays + position % num_records * DECAY_LINE + DECAYS_AT
        one_key = normed(
            tl.load(keys + group * SIZE + k, mask=is_key, other=0.0).to(tl.float32), EPSILON
        )
        one_value = tl.load(
            keys + KEY_HEADS * SIZE + head * VALUE_SIZE + v, mask=is_value, other=0.0
        ).to(tl.float32)
        one_decay = tl.load(decays + own_decays, mask=is_key, other=0.0)
        one_beta = tl.load(decays + HEADS * DECAYS + head)
        state = updated(state, one_key, one_value, one_decay, one_beta, CORRECTS)
    is_moved = (end > begin) & is_written
    tl.store(slot + base * HEADS * SIZE * VALUE_SIZE + cells, state, mask=is_cell & is_moved)
    other = tl.load(
        slot + source * HEADS * SIZE * VALUE_SIZE + cells,
        mask=is_cell & (source != base),
        other=0.0,
    )
    state = tl.where(start > 0, tl.where(source != base, other, state), 0.0)
    held = branches + line * (num_tokens + 1) * SIZE * VALUE_SIZE
    if IN_TREE:
        tl.store(held + num_tokens * SIZE * VALUE_SIZE + cells, state, mask=is_cell)
    for token in range(0, num_tokens):
        at = row * num_tokens + token
        if IN_TREE:
            tl.debug_barrier()
            parent = tl.load(parents + at)
            before = tl.where(parent < 0, num_tokens, parent)
            state = tl.load(held + before * SIZE * VALUE_SIZE + cells, mask=is_cell, other=0.0)
        key_now = tl.load(
            key + at * KEY_WIDTH + KEY_OFFSET + group * KEY_STEP + k, mask=is_key, other=0.0
        )
        value_now = tl.load(
            value + at * VALUE_WIDTH + VALUE_OFFSET + head * VALUE_STEP + v,
            mask=is_value,
            other=0.0,
        )
        decay_now = tl.load(
            decay + at * DECAY_WIDTH + DECAY_OFFSET + head * DECAY_STEP + k * OWN_DECAYS,
            mask=is_key,
            other=0.0,
        ).to(tl.float32)
        beta_now = 1.0
        if CORRECTS:
            beta_now = tl.load(beta + at * BETA_WIDTH + BETA_OFFSET + head * BETA_STEP).to(
                tl.float32
            )
        state = updated(
            state,
            normed(key_now.to(tl.float32), EPSILON),
            value_now.to(tl.float32),
            decay_now,
            beta_now,
            CORRECTS,
        )
        one_query = tl.load(
            query + at * QUERY_WIDTH + QUERY_OFFSET + group * QUERY_STEP + k, mask=is_key, other=0.0
        )
        read = tl.sum(state * (normed(one_query.to(tl.float32), EPSILON) * scale)[:, None], axis=0)
        tl.store(
            out + (at * HEADS + head) * VALUE_SIZE + v, read.to(out.dtype.element_ty), mask=is_value
        )
        if IN_TREE:
            tl.store(held + token * SIZE * VALUE_SIZE + cells, state, mask=is_cell)
        keys = in_keys + (start + token) % num_records * KEY_LINE
        decays = in_decays + (start + token) % num_records * DECAY_LINE + DECAYS_AT
        tl.store(
            keys + KEY_HEADS * SIZE + head * VALUE_SIZE + v, value_now, mask=is_value & is_recorded
        )
        is_groups = is_first & (head % (HEADS // KEY_HEADS) == 0)
        tl.store(keys + group * SIZE + k, key_now, mask=is_key & is_recorded & is_groups)
        tl.store(
            decays + own_decays,
            decay_now,
            mask=is_key & is_recorded & is_first & ((k == 0) | (OWN_DECAYS > 0)),
        )
        if CORRECTS:
            tl.store(decays + HEADS * DECAYS + head, beta_now, mask=is_recorded & is_first)
    if not IN_TREE:
        tl.store(
            slot + target * HEADS * SIZE * VALUE_SIZE + cells, state, mask=is_cell & is_written
        )


@triton.jit
def scan(
    value,
    step,
    key,
    query,
    rates,
    value_records,
    step_records,
    key_records,
    states,
    branches,
    parents,
    moves,
    out,
    num_tokens,
    num_records,
    VALUE_WIDTH: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    STEP_OFFSET: tl.constexpr,
    STEP_STEP: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    KEY_STEP: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    QUERY_OFFSET: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    VALUE_LINE: tl.constexpr,
    STEP_LINE: tl.constexpr,
    STEP_AT: tl.constexpr,
    KEY_LINE: tl.constexpr,
    KEY_AT: tl.constexpr,
    CHANNELS: tl.constexpr,
    EACH: tl.constexpr,
    RATED: tl.constexpr,
    KEYED: tl.constexpr,
    IN_TREE: tl.constexpr,
    EACH_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels, EACH numbers of a state for each: grid (rows, blocks of channels). `rates`
    (EACH, channels) fp32.

    Not RATED: steps are the factors of decays. Not KEYED: a state is one number, and is what is
    read.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EACH_PAD)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = e < EACH
    is_channel = c < CHANNELS
    is_cell = is_number[:, None] & is_channel[None, :]
    cells = (e * CHANNELS)[:, None] + c[None, :]
    is_first = tl.program_id(1) == 0
    base, begin, end, source = source_of(moves, row)
    target, start, is_written, is_recorded = target_of(moves, row)
    slot = states + row * 2 * EACH * CHANNELS
    in_values = value_records + row * num_records * VALUE_LINE
    in_steps = step_records + row * num_records * STEP_LINE + STEP_AT
    in_keys = key_records + row * num_records * KEY_LINE + KEY_AT
    rate = tl.full([EACH_PAD, BLOCK], 0.0, tl.float32)
    if RATED:
        rate = tl.load(rates + cells, mask=is_cell, other=0.0)
    one_key = tl.full([EACH_PAD], 1.0, tl.float32)
    one_query = tl.full([EACH_PAD], 1.0, tl.float32)
    state = tl.load(slot + base * EACH * CHANNELS + cells, mask=is_cell & (begin > 0), other=0.0)
    for position in range(begin, end):
        line = position % num_records
        one_value = tl.load(in_values + line * VALUE_LINE + c, mask=is_channel, other=0.0).to(
            tl.float32
        )
        one_step = tl.load(in_steps + line * STEP_LINE + c, mask=is_channel, other=0.0).to(
            tl.float32
        )
        if KEYED:
            one_key = tl.load(in_keys + line * KEY_LINE + e, mask=is_number, other=0.0).to(
                tl.float32
            )
        state = scanned(state, one_key, one_value, one_step, rate, RATED)
    is_moved = (end > begin) & is_written
    tl.store(slot + base * EACH * CHANNELS + cells, state, mask=is_cell & is_moved)
    other = tl.load(
        slot + source * EACH * CHANNELS + cells, mask=is_cell & (source != base), other=0.0
    )
    state = tl.where(start > 0, tl.where(source != base, other, state), 0.0)
    held = branches + row * (num_tokens + 1) * EACH * CHANNELS
    if IN_TREE:
        tl.store(held + num_tokens * EACH * CHANNELS + cells, state, mask=is_cell)
    for token in range(0, num_tokens):
        at = row * num_tokens + token
        if IN_TREE:
            tl.debug_barrier()
            parent = tl.load(parents + at)
            before = tl.where(parent < 0, num_tokens, parent)
            state = tl.load(held + before * EACH * CHANNELS + cells, mask=is_cell, other=0.0)
        value_now = tl.load(
            value + at * VALUE_WIDTH + VALUE_OFFSET + c * VALUE_STEP, mask=is_channel, other=0.0
        )
        step_now = tl.load(
            step + at * STEP_WIDTH + STEP_OFFSET + c * STEP_STEP, mask=is_channel, other=0.0
        )
        if KEYED:
            key_now = tl.load(
                key + at * KEY_WIDTH + KEY_OFFSET + e * KEY_STEP, mask=is_number, other=0.0
            )
            one_key = key_now.to(tl.float32)
            one_query = tl.load(
                query + at * QUERY_WIDTH + QUERY_OFFSET + e * QUERY_STEP, mask=is_number, other=0.0
            ).to(tl.float32)
        state = scanned(
            state, one_key, value_now.to(tl.float32), step_now.to(tl.float32), rate, RATED
        )
        read = tl.sum(tl.where(is_cell, state * one_query[:, None], 0.0), axis=0)
        tl.store(out + at * CHANNELS + c, read.to(out.dtype.element_ty), mask=is_channel)
        if IN_TREE:
            tl.store(held + token * EACH * CHANNELS + cells, state, mask=is_cell)
        line = (start + token) % num_records
        tl.store(in_values + line * VALUE_LINE + c, value_now, mask=is_channel & is_recorded)
        tl.store(in_steps + line * STEP_LINE + c, step_now, mask=is_channel & is_recorded)
        if KEYED:
            tl.store(
                in_keys + line * KEY_LINE + e, key_now, mask=is_number & is_recorded & is_first
            )
    if not IN_TREE:
        tl.store(slot + target * EACH * CHANNELS + cells, state, mask=is_cell & is_written)


@triton.jit
def scanned(state, key, value, step, rate, RATED: tl.constexpr):
    """A state (numbers, channels) that has decayed and taken in a token."""
    decay = step[None, :]
    if RATED:
        decay = tl.exp(rate * step[None, :])
    return state * decay + key[:, None] * value[None, :]
