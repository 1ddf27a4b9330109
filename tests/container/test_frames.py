"""The codec of the channel: round trips, any split of the stream, malformed input."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.backends.container import wire
from dsec.backends.container.frames import (
    Fields,
    FrameDecoder,
    MalformedFrame,
    decode_number,
    encode_data,
    encode_fields,
    encode_frame,
    encode_number,
)

kinds = st.sampled_from([k for k in range(1, wire.LAST_KIND + 1) if k != wire.DATA])
frames = st.one_of(
    st.tuples(kinds, st.integers(0, 2), st.binary(max_size=300), st.just(0)),
    st.tuples(st.just(wire.DATA), st.integers(0, 2), st.binary(max_size=300), st.integers(0, 2**64 - 1)),
)
field_lists = st.lists(
    st.tuples(
        st.integers(0, 65535),
        st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(alphabet=st.characters(codec="utf-8")), st.binary(max_size=80)),
    )
)


def encode(frame):
    kind, stream, payload, offset = frame
    return encode_data(stream, offset, payload) if kind == wire.DATA else encode_frame(kind, payload, stream)


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 3000)))
def test_any_split_of_the_stream_gives_the_same_frames(sent, cuts):
    stream = b"".join(map(encode, sent))
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    decoder = FrameDecoder()
    received = []
    for start, stop in itertools.pairwise(edges):
        received += decoder.feed(stream[start:stop])
    assert received == sent
    assert decoder.pending == 0


@given(st.lists(frames, min_size=1, max_size=3))
def test_byte_by_byte_gives_the_same_frames(sent):
    decoder = FrameDecoder()
    received = []
    for byte in b"".join(map(encode, sent)):
        received += decoder.feed(bytes([byte]))
    assert received == sent


@given(field_lists)
def test_fields_round_trip_with_repeats_in_order(pairs):
    decoded = Fields(encode_fields(pairs))
    for tag in {tag for tag, _ in pairs}:
        values = [value for other, value in pairs if other == tag]
        assert len(decoded.all(tag)) == len(values)
        last = values[-1]
        if isinstance(last, int):
            assert decoded.number(tag) == last
        elif isinstance(last, str):
            assert decoded.text(tag) == last
        else:
            assert decoded.raw(tag) == last


def test_undecodable_file_names_survive():
    assert Fields(encode_fields([(wire.T_PATH, "/a\udcff")])).raw(wire.T_PATH) == b"/a\xff"
    assert Fields(encode_fields([(wire.T_PATH, b"/a\xff")])).text(wire.T_PATH) == "/a\udcff"


def test_credit_carries_one_unsigned_number():
    [(kind, stream, payload, _)] = FrameDecoder().feed(encode_number(wire.CREDIT, 2, 2**63))
    assert (kind, stream, decode_number(payload)) == (wire.CREDIT, 2, 2**63)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<BBHI", 2, wire.OK, 0, 0),
        struct.pack("<BBHI", 1, 0, 0, 0),
        struct.pack("<BBHI", 1, wire.LAST_KIND + 1, 0, 0),
        struct.pack("<BBHI", 1, wire.DATA, 3, 8) + bytes(8),
        struct.pack("<BBHI", 1, wire.OK, 0, wire.MAX_PAYLOAD + 1),
        struct.pack("<BBHI", 1, wire.DATA, 1, 7) + bytes(7),
    ],
    ids=["version", "kind-zero", "kind-high", "stream", "length", "data-without-offset"],
)
def test_malformed_headers_are_refused(header):
    with pytest.raises(MalformedFrame):
        FrameDecoder().feed(header)


@pytest.mark.parametrize(
    "payload",
    [b"\0", struct.pack("<HHI", 1, 0, 1), struct.pack("<HHI", 1, 1, 0), struct.pack("<HHI", 1, 0, 2**32 - 1)],
    ids=["short-header", "cut-value", "nonzero-pad", "huge-length"],
)
def test_malformed_fields_are_refused(payload):
    with pytest.raises(MalformedFrame):
        Fields(payload)


@given(st.binary(max_size=600))
def test_no_input_raises_anything_but_the_typed_error(data):
    decoder = FrameDecoder()
    try:
        for kind, _, payload, _ in decoder.feed(data):
            if kind != wire.DATA:
                Fields(payload)
    except MalformedFrame:
        pass


def test_a_number_of_the_wrong_size_is_refused():
    fields = Fields(encode_fields([(wire.T_PID, b"1234")]))
    with pytest.raises(MalformedFrame):
        fields.number(wire.T_PID)


def test_payloads_beyond_the_limit_are_refused_at_the_sender():
    with pytest.raises(ValueError, match="exceeds"):
        encode_frame(wire.EXEC, bytes(wire.MAX_PAYLOAD + 1))
    with pytest.raises(ValueError, match="exceeds"):
        encode_data(1, 0, bytes(wire.MAX_DATA + 1))
