"""The format: a file is the very plan that was kept under the very key, or it is nothing."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cudnn_actor.plan_store.plan_file import VERSION, BadPlanFile, PlanKey, StoredPlan, decode, encode

from ..whole import more
from .kept_plans import key, plan

plans = st.builds(
    StoredPlan,
    data=st.binary(max_size=300),
    workspace=st.integers(0, 1 << 40),
    tuned=st.booleans(),
    provisional=st.booleans(),
)
keys = st.builds(
    PlanKey,
    graph=st.text("0123456789abcdef", min_size=64, max_size=64),
    fingerprint=st.text(max_size=40),
    workspace_limit=st.none() | st.integers(1 << 40, 1 << 50),
)
CONTENT = encode(key(), plan(b"the plan" * 8))


@given(key=keys, plan=plans)
def test_what_is_encoded_is_decoded(key: PlanKey, plan: StoredPlan) -> None:
    assert decode(key, encode(key, plan)) == plan


def test_a_flipped_byte_anywhere_makes_it_no_plan() -> None:
    for place, flip in itertools.product(range(len(CONTENT)), (0x01, 0x80, 0xFF)):
        corrupt = bytearray(CONTENT)
        corrupt[place] ^= flip
        with pytest.raises(BadPlanFile):
            decode(key(), bytes(corrupt))


def test_a_file_cut_off_anywhere_is_no_plan() -> None:
    for length in range(len(CONTENT)):
        with pytest.raises(BadPlanFile):
            decode(key(), CONTENT[:length])


@given(more=st.binary(min_size=1, max_size=64))
def test_a_file_that_goes_on_is_no_plan(more: bytes) -> None:
    with pytest.raises(BadPlanFile):
        decode(key(), CONTENT + more)


@given(plan=plans, data=st.data())
@settings(max_examples=more(300))
def test_whatever_happens_to_a_file_it_is_the_same_plan_or_none(
    plan: StoredPlan, data: st.DataObject
) -> None:
    content = bytearray(encode(key(), plan))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        content[start:end] = data.draw(st.binary(max_size=end - start + 3))
    with contextlib.suppress(BadPlanFile):
        assert decode(key(), bytes(content)) == plan


@given(junk=st.binary(max_size=200))
def test_junk_is_no_plan(junk: bytes) -> None:
    with pytest.raises(BadPlanFile):
        decode(key(), junk)


@given(key=keys, other=keys, plan=plans)
def test_a_plan_of_another_key_is_no_plan(key: PlanKey, other: PlanKey, plan: StoredPlan) -> None:
    if key != other:
        assert key.file_name() != other.file_name()
        with pytest.raises(BadPlanFile, match="another key"):
            decode(other, encode(key, plan))


@pytest.mark.parametrize(
    "other",
    [key(1), key(fingerprint="cudnn 9.20 on sm_90"), key(limit=1 << 20)],
    ids=["graph", "library", "limit"],
)
def test_each_part_of_the_key_counts(other: PlanKey) -> None:
    with pytest.raises(BadPlanFile, match="another key"):
        decode(other, CONTENT)


def test_a_plan_that_needs_more_workspace_than_allowed_is_no_plan() -> None:
    allowed = key(limit=1000)
    assert decode(allowed, encode(allowed, plan(workspace=1000))).workspace == 1000
    with pytest.raises(BadPlanFile, match="1001 bytes of workspace"):
        decode(allowed, encode(allowed, plan(workspace=1001)))


def test_another_version_of_the_format_is_named() -> None:
    changed = bytearray(CONTENT)
    struct.pack_into("<I", changed, 8, VERSION + 1)
    with pytest.raises(BadPlanFile, match=f"format {VERSION + 1}"):
        decode(key(), bytes(changed))


def signed(header: bytes, data: bytes = b"") -> bytes:
    """A file with a checksum that is right, whatever it says."""
    prefix = struct.pack("<8sII", b"CDNNPLAN", VERSION, len(header))
    return prefix + hashlib.blake2b(prefix + header + data, digest_size=32).digest() + header + data


def test_a_header_that_means_nothing_is_no_plan_although_its_checksum_is_right() -> None:
    with pytest.raises(BadPlanFile, match="invalid header"):
        decode(key(), signed(b"\x81\xa1x\x01"))


def test_a_length_that_is_not_the_plan_s_is_no_plan_although_its_checksum_is_right() -> None:
    header = CONTENT[48 : 48 + struct.unpack_from("<I", CONTENT, 12)[0]]
    assert decode(key(), signed(header, b"the plan" * 8)) == plan(b"the plan" * 8)
    with pytest.raises(BadPlanFile, match="bytes of plan"):
        decode(key(), signed(header, b"the plan" * 7))
