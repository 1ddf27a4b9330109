"""Small parts of the wire: stream messages, signals, ranges, owners and modes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.apiserver.paths import parse_mode, parse_owner
from dsec.apiserver.ranges import parse_range
from libdsec import InvalidArgument, streaming
from libdsec.api import with_query
from libdsec.signals import signal_number


@given(st.sampled_from([1, 2]), st.integers(0, 2**64 - 1), st.binary(max_size=300))
def test_data_and_credit_come_back(stream, number, data):
    assert streaming.decode_data(streaming.encode_data(stream, number, data)) == (stream, number, data)
    assert streaming.decode_credit(streaming.encode_credit(stream, number)) == (stream, number)
    assert streaming.decode_stdin_credit(streaming.encode_stdin_credit(number)) == number


@given(st.binary(min_size=1, max_size=20))
def test_any_bytes_of_a_client_are_decoded_or_refused(message):
    for decode in (streaming.decode_credit, streaming.decode_resize):
        try:
            first, second = decode(message)
        except InvalidArgument:
            continue
        assert first >= 1
        assert second >= 0


def test_signals_have_the_numbers_of_this_system():
    for each in signal.Signals:
        if not each.name.startswith("SIGRT"):
            assert signal_number(each.name) == each.value
            assert signal_number(each.name.removeprefix("SIG").lower()) == each.value
    assert signal_number(9) == signal_number(" 9 ") == 9
    for wrong in (0, 65, -1, "", "SIG", "NOPE", "0"):
        with pytest.raises(InvalidArgument):
            signal_number(wrong)


@pytest.mark.parametrize(
    ("header", "size", "span"),
    [
        (None, 10, None),
        ("bytes=0-4", 10, (0, 5)),
        ("bytes=5-", 10, (5, 10)),
        ("bytes=-3", 10, (7, 10)),
        ("bytes=-30", 10, (0, 10)),
        ("bytes=8-100", 10, (8, 10)),
        ("bytes=1-2,4-5", 10, None),
        ("lines=1-2", 10, None),
    ],
)
def test_ranges(header, size, span):
    assert parse_range(header, size) == span


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=-0", "bytes=5-2", "bytes=-", "bytes=", "bytes=a-b", f"bytes={2**62}-"])
def test_a_range_that_is_none_or_beyond_the_file_is_refused(header):
    with pytest.raises(InvalidArgument) as caught:
        parse_range(header, 10)
    assert caught.value.field == "range"


@pytest.mark.parametrize(("text", "mode"), [("0644", 0o644), ("755", 0o755), ("0o7777", 0o7777), ("0", 0), (None, None)])
def test_modes(text, mode):
    assert parse_mode(text) == mode


@pytest.mark.parametrize("text", ["8", "rw", "", "12345", "-1", "0x1", "7 "])
def test_what_is_no_mode(text):
    with pytest.raises(InvalidArgument):
        parse_mode(text)


def test_owners():
    assert parse_owner("5") == (5, None)
    assert parse_owner("5:6") == (5, 6)
    for wrong in ("root", "", "5:", ":6", "4294967295", "5:4294967295", "-1"):
        with pytest.raises(InvalidArgument):
            parse_owner(wrong)


def test_queries_leave_out_what_is_none():
    assert with_query("/p", {"a": None, "b": True, "c": ["x", "y"], "d": b"\xff"}) == "/p?b=true&c=x&c=y&d=%FF"
    assert with_query("/p", {"a": None}) == "/p"
