# SPDX-License-Identifier: BSD-3-Clause
"""Keys and values: what goes in comes out, and nothing from outside gets through unchecked."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exchanger.conftest import GID_A, as_json, qp_record
from shiftverbs.exchanger import (
    ControlEndpoint,
    QpRecord,
    RecordError,
    Route,
    ShadowRoute,
    mutual,
    new_instance_id,
    qp_key,
    qp_lid_key,
    records,
)

gids = st.integers(0, (1 << 128) - 1).map(lambda number: number.to_bytes(16, "big").hex(":", 2))
SHADOW = {"device": "nic0", "gid": GID_A, "lid": 0, "mtu": 3, "qpn": 7}
NO_SECRET = {"device": "nic0", "gid": GID_A, "lid": 0, "mtu": 3, "qpn": 7, "qkey": 9}
qpns = st.integers(0, (1 << 24) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
hex64 = u64.map(lambda number: f"{number:016x}")
jobs = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(str.isascii)
devices = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)
lids = st.integers(0, 0xFFFF)
routes = st.builds(Route, st.none() | gids, lids, qpns)
shadows = st.builds(ShadowRoute, devices, gids, lids, st.integers(1, 5), qpns)
hex128 = st.binary(min_size=16, max_size=16).map(bytes.hex)
endpoints = st.builds(
    ControlEndpoint, devices, gids, lids, st.integers(1, 5), qpns, st.integers(0, (1 << 31) - 1), hex128
)
qp_records = st.builds(
    QpRecord, jobs, hex64, st.builds(Route, gids, lids, qpns), st.none() | routes, st.none() | hex64,
    st.lists(shadows, max_size=16).map(tuple), st.lists(endpoints, max_size=16).map(tuple), hex64, u32,
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
)


@pytest.mark.parametrize(
    "gid", ["::ffff:192.0.2.1", "::ffff:c000:201", "0000:0000:0000:0000:0000:FFFF:c000:0201"]
)  # fmt: skip
def test_an_ipv4_mapped_gid_is_spelt_the_same_by_every_python(gid: str) -> None:
    assert records.canonical_gid(gid) == "0000:0000:0000:0000:0000:ffff:c000:0201"
    assert records.parse_key(qp_key("job", gid, 7)).gid == "0000:0000:0000:0000:0000:ffff:c000:0201"


@given(st.integers(0, (1 << 128) - 1))
def test_a_gid_in_a_key_reads_back_as_the_same_gid(number: int) -> None:
    key = qp_key("job", str(ipaddress.IPv6Address(number)), 7)
    assert int(str(records.parse_key(key).gid).replace(":", ""), 16) == number


@given(qp_records)
def test_qp_records_round_trip(record: QpRecord) -> None:
    key = qp_key(record.job, str(record.default.gid), record.default.qpn)
    text = records.encode_value(key, record)
    assert len(text) <= records.MAX_VALUE_BYTES
    assert text == json.dumps(json.loads(text), separators=(",", ":"), sort_keys=True)
    assert records.decode_value(key, text) == record
    if record.default.lid:
        by_lid = qp_lid_key(record.job, str(record.default.gid), record.default.lid, record.default.qpn)
        assert records.decode_value(by_lid, text) == record


@given(jobs, gids, qpns, st.integers(1, 0xFFFF))
def test_keys_can_be_taken_apart(job: str, gid: str, qpn: int, lid: int) -> None:
    prefix = records.subnet_prefix(gid)
    assert records.parse_key(qp_key(job, gid, qpn)) == records.Key(job, gid, None, None, qpn)
    assert records.parse_key(qp_lid_key(job, gid, lid, qpn)) == records.Key(job, None, lid, prefix, qpn)


def test_keys_read_as_documented() -> None:
    assert qp_key("j", "fe80::1", 17) == "/shiftverbs/j/qp/fe80:0000:0000:0000:0000:0000:0000:0001/17"
    assert qp_lid_key("j", "fe80::1", 5, 17) == "/shiftverbs/j/qp/fe80000000000000.5/17"
    assert qp_key("j", "FE80::1", 17) == qp_key("j", "fe80::1", 17)
    # pyverbs prints GIDs in full; so does the kernel.
    assert qp_key("j", "0000:0000:0000:0000:0000:ffff:7f00:0001", 1) == qp_key("j", "::ffff:127.0.0.1", 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: qp_key("a/b", GID_A, 1),
        lambda: qp_key("", GID_A, 1),
        lambda: qp_key("j", "nonsense", 1),
        lambda: qp_key("j", "fe80::1%eth0", 1),
        lambda: qp_key("j", GID_A, 1 << 24),
        lambda: qp_key("j", GID_A, -1),
        lambda: qp_key("j", GID_A, True),
        lambda: qp_lid_key("j", GID_A, 0, 1),
        lambda: qp_lid_key("j", GID_A, 1 << 16, 1),
    ],
)
def test_no_bad_key_is_made(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize(
    "key",
    [
        "", "/", "/shiftverbs/j/qp/", "/shiftverbs/j/qp/fe80::1/1", qp_key("j", GID_A, 1) + "\n",
        qp_key("j", GID_A, 1) + "/",
        "x" * 5000, "/shiftverbs/j/qp/fe80000000000000.65536/1", "/shiftverbs/j/qp/fe80000000000000.0/1",
        qp_key("j", GID_A, 1)[:-1] + "16777216", qp_key("j", GID_A, 1)[:-1] + "01", qp_key("j", GID_A, 1).upper(),
        qp_key("j", GID_A, 1).replace("/qp/", "/mr/"),
    ],
)  # fmt: skip
def test_bad_keys_are_refused(key: str) -> None:
    with pytest.raises(RecordError) as caught:
        records.parse_key(key)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@given(anything)
def test_arbitrary_json_never_crashes(value: Any) -> None:
    for key in (qp_key("j", GID_A, 1), qp_lid_key("j", GID_A, 1, 1)):
        with pytest.raises(RecordError) as caught:
            records.decode_value(key, json.dumps(value))
        assert str(caught.value).startswith(key)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    key = qp_key("j", GID_A, 1)
    with pytest.raises(RecordError, match=key):
        records.decode_value(key, data)


@given(st.data())
def test_a_record_with_one_field_spoilt_is_named_or_sound(data: st.DataObject) -> None:
    """Any change of one field is either refused with the key's name or gives a record that round-trips."""
    key = qp_key("j", GID_A, 5)
    value: Any = as_json(qp_record("j", 5))
    place = value
    name = data.draw(st.sampled_from(sorted(value)))
    while isinstance(place[name], dict | list) and place[name] and data.draw(st.booleans()):
        place = place[name]
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[name]
    else:
        place[name] = data.draw(anything)
    try:
        record = records.decode_value(key, json.dumps(value))
    except RecordError as error:
        assert str(error).startswith(key)
    else:
        assert records.decode_value(key, records.encode_value(key, record)) == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "version is 1, this release reads 2"),
        ({"version": "2"}, 'version is "2"'),
        ({"version": True}, "version is true"),
        ({"version": 3, "default": 5, "kind": "mr"}, "version is 3, this release reads 2"),
        ({"kind": "mr"}, 'kind is "mr", not "qp"'),
        ({"kind": None}, "kind is null"),
        ({"instance": "A" * 16}, r"Expected `str` matching regex .*\$.instance`"),
        ({"instance": "a" * 16 + "\n"}, r"matching regex .*\$.instance`"),
        ({"peer_life": 5}, r"got `int` - at `\$.peer_life`"),
        ({"default": None}, r"Expected `object`, got `null` - at `\$.default`"),
        ({"peer": {"gid": None, "lid": 0}}, r"missing required field `qpn` - at `\$.peer`"),
        ({"peer": {"gid": "x", "lid": 0, "qpn": 1}}, r"gid is not a GID - at `\$.peer`"),
        ({"shadows": "abc"}, r"Expected `array`, got `str` - at `\$.shadows`"),
        ({"shadows": [None]}, r"Expected `object`, got `null` - at `\$.shadows\[0\]`"),
        ({"shadows": [SHADOW] * 17}, r"of length <= 16 - at `\$.shadows`"),
        ({"control": [{"device": ""}]}, r"\$.control\[0\].device"),
        ({"control": [{**NO_SECRET, "device": "a\x07"}]}, r"missing required field `secret`"),
        (
            {"control": [{**NO_SECRET, "device": "a\x07", "secret": "0" * 32}]},
            r"device is not .*\$.control\[0\]`",
        ),
        ({"control": [NO_SECRET]}, r"missing required field `secret` - at `\$.control\[0\]`"),
        ({"control": [{**NO_SECRET, "secret": "0" * 16}]}, r"matching regex .*\$.control\[0\].secret`"),
        ({"qp_access_flags": -1}, r"Expected `int` >= 0 - at `\$.qp_access_flags`"),
        ({"qp_access_flags": True}, r"Expected `int`, got `bool` - at `\$.qp_access_flags`"),
        ({"qp_access_flags": 1.0}, r"Expected `int`, got `float` - at `\$.qp_access_flags`"),
        ({"job": "k"}, "belongs to job 'k'"),
        ({"default": {"gid": GID_A, "lid": 0, "qpn": 6}}, "the value is about QPN 6"),
    ],
)
def test_errors_say_key_and_field(change: dict[str, Any], words: str) -> None:
    key = qp_key("j", GID_A, 5)
    with pytest.raises(RecordError, match=words) as caught:
        records.decode_value(key, json.dumps({**as_json(qp_record("j", 5)), **change}))
    assert str(caught.value).startswith(key)
    assert caught.value.key == key


def test_a_lid_key_must_be_about_its_own_route() -> None:
    text = json.dumps(as_json(qp_record("j", 5, default=Route(GID_A, 9, 5))))
    records.decode_value(qp_lid_key("j", GID_A, 9, 5), text)
    with pytest.raises(RecordError, match="LID 9"):
        records.decode_value(qp_lid_key("j", GID_A, 8, 5), text)
    with pytest.raises(RecordError, match="another subnet"):
        records.decode_value(qp_lid_key("j", "fe81::a", 9, 5), text)


def test_a_full_record_fits() -> None:
    gid, qpn = "ffff:" * 7 + "ffff", (1 << 24) - 1
    shadows = tuple(ShadowRoute("d" * 64, gid, 65535, 5, qpn) for _ in range(records.MAX_NICS))
    control = tuple(ControlEndpoint("d" * 64, gid, 65535, 5, qpn, (1 << 31) - 1, "f" * 32) for _ in shadows)
    record = qp_record("j" * 64, 5, shadows=shadows, control=control)
    assert len(records.encode_value(qp_key("j" * 64, GID_A, 5), record)) < records.MAX_VALUE_BYTES


def test_what_is_not_ascii_is_escaped() -> None:
    record = qp_record("j", 5, shadows=(ShadowRoute("bücher\U0001f4da", GID_A, 0, 3, 7),))
    text = records.encode_value(qp_key("j", GID_A, 5), record)
    assert r'{"device":"b\u00fccher\ud83d\udcda","gid"' in text
    assert records.decode_value(qp_key("j", GID_A, 5), text) == record


def test_what_repeats_is_read_as_one_object() -> None:
    """And what is only equal to it in Python is still refused."""
    first, second = (
        records.decode_value(qp_key("j", GID_A, qpn), json.dumps(as_json(qp_record("j", qpn))))
        for qpn in (5, 6)
    )
    assert [a is b for a, b in zip(first.control, second.control, strict=True)] == [True] * 3
    assert first.job is second.job and first.instance is second.instance
    assert first.default.gid is second.default.gid
    assert first.shadows[0].device is second.shadows[0].device
    one = {**NO_SECRET, "qkey": 1, "secret": "0" * 32}
    key, value = qp_key("j", GID_A, 5), as_json(qp_record("j", 5))
    records.decode_value(key, json.dumps({**value, "control": [one]}))
    for other in (True, 1.0):
        with pytest.raises(RecordError, match="qkey"):
            records.decode_value(key, json.dumps({**value, "control": [{**one, "qkey": other}]}))
    for number in range(2 * records.KEPT_ENDPOINTS):
        records.decode_value(key, json.dumps({**value, "control": [{**one, "qpn": number}]}))
    assert len(records._endpoints) <= records.KEPT_ENDPOINTS


def test_a_secret_is_not_shown() -> None:
    endpoint = ControlEndpoint("nic0", GID_A, 0, 3, 7, 9, "5ec2e7" * 5 + "ab")
    assert repr(endpoint).startswith("ControlEndpoint(device='nic0', gid='fe80:0000:")
    assert "5ec2e7" not in repr(endpoint) + repr(endpoint.__rich_repr__())


def test_pairing_is_mutual_or_not_at_all() -> None:
    a = qp_record("j", 1, default=Route("fe80::a", 3, 1), peer=Route("fe80::b", 4, 2), life="a" * 16)
    b = qp_record("j", 2, default=Route("fe80::b", 4, 2), peer=Route("fe80::a", 3, 1), life="b" * 16)
    a, b = replace(a, peer_life=b.life), replace(b, peer_life=a.life)
    assert mutual(a, b)
    assert mutual(b, a)
    # A ghost's entry, from before a crash or a RESET: same routes, another life.
    assert not mutual(a, replace(b, peer_life="0" * 16))
    assert not mutual(a, replace(b, life="0" * 16))
    assert not mutual(a, replace(b, peer=Route("fe80::a", 3, 7)))
    assert not mutual(a, replace(b, peer=None))
    assert not mutual(a, replace(b, job="k"))
    # InfiniBand without GRH: the peer is known by LID.
    assert mutual(replace(a, peer=Route(None, 4, 2)), b)
    assert not mutual(replace(a, peer=Route(None, 5, 2)), b)
    # No GID and no LID names nobody.
    assert not Route(None, 0, 1).matches(Route("fe80::a", 0, 1))


def test_instance_ids_are_random() -> None:
    made = {new_instance_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in made)


def test_a_key_of_no_gid_is_none() -> None:
    """Whatever the value says of itself."""
    record = QpRecord("j", "0" * 16, Route(None, 4, 9), None, None, (), (), "1" * 16, 0)
    with pytest.raises(RecordError, match="not a key"):
        records.encode_value("/shiftverbs/j/qp/None/9", record)
