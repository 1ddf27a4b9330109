"""What cannot be sent is refused by the name of its field, before anything is sent."""

import math

import msgspec
import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.bodies import encode_body
from libdsec.errors import DSecError, InvalidArgument
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest

LONE = "caf\udce9"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("argv", ExecRequest(argv=["cat", LONE])),
        ("shell", ExecRequest(shell=LONE)),
        ("env", ExecRequest(argv=["true"], env={"A": LONE})),
        ("cwd", ExecRequest(argv=["true"], cwd=LONE)),
        ("rlimits", ExecRequest(argv=["true"], rlimits={"nofile": [1 << 70, 1]})),
        ("output_limit_bytes", ExecRequest(argv=["true"], output_limit_bytes=1 << 64)),
        ("memory_limit_mb", CreateRequest(args=ContainerRunArgs(container_image="x", memory_limit_mb=1 << 80))),
        ("labels", CreateRequest(args=ContainerRunArgs(container_image="x", labels={"a": LONE}))),
        ("user", ExecRequest(argv=["true"], user=object())),
    ],
)
def test_the_field_that_cannot_be_sent_is_named(field, body):
    with pytest.raises(InvalidArgument, match=field) as refused:
        encode_body(body)
    assert (refused.value.field, refused.value.ran) == (field, "not-run")


def test_what_can_be_sent_is():
    body = ExecRequest(argv=["true", "é", ""], timeout=5)
    assert msgspec.msgpack.decode(encode_body(body), type=ExecRequest) == body


@pytest.mark.parametrize(
    ("url", "token", "field"), [("http://127.0.0.1:99999", None, "url"), ("http://127.0.0.1:1", "long-enough-token\n", "token")]
)
async def test_an_address_and_a_token_that_are_none(url, token, field):
    with pytest.raises(InvalidArgument) as refused:
        DSecClient(url, token)
    assert refused.value.field == field


@pytest.mark.parametrize(("name", "value"), [("timeout", math.nan), ("timeout", "5"), ("kill_grace", math.inf)])
async def test_seconds_that_are_no_number(client, name, value):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
    with pytest.raises(InvalidArgument) as refused:
        await sandbox.exec(["true"], **{name: value})
    assert refused.value.field == name


async def test_calls_with_such_values_are_typed(client):
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
    for call in (
        lambda: sandbox.result("x", wait=math.nan),
        lambda: sandbox.result(LONE),
        lambda: client.get(LONE),
        lambda: client.run_container(DSecContainerRunArgs(container_image="debian"), timeout=math.nan),
        lambda: sandbox.exec(["true"], stdin=LONE),
    ):
        with pytest.raises(DSecError) as refused:
            await call()
        assert isinstance(refused.value, InvalidArgument)
