"""What may be a name, and what a reference means."""

from __future__ import annotations

import pytest

from dsec.environments.names import check_owner, parse_reference
from libdsec.errors import InvalidArgument

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize("text", ["debian", "swe/django-1.2", "a", "G++", "x" * 200])
def test_a_plain_name_means_its_latest_tag(text):
    reference = parse_reference(text)
    assert (reference.name, reference.tag, reference.digest) == (text, "latest", None)


def test_a_tag_and_a_digest_are_read():
    assert parse_reference("debian:12").tag == "12"
    assert parse_reference(f"a/b@{DIGEST}").digest == DIGEST
    assert str(parse_reference("debian:12")) == "debian:12"


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "../x", "a/../b", "/a", "a/", "a//b", "-a", ".a", "a/.b", "a b", "a\0b", "a\nb", "a%b", "é", "x" * 201,
        "a:", "a:.t", "a:b:c", "a:" + "t" * 129, "a:../x", "a@", "a@sha256:12", "a@" + DIGEST.upper(), "a:t@" + DIGEST, "@" + DIGEST, "a\n",
    ],
)  # fmt: skip
def test_anything_else_is_refused_and_the_field_named(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_reference(text, field="container_image")
    assert caught.value.field == "container_image"
    assert caught.value.ran == "not-run"


@pytest.mark.parametrize("owner", ["", ".", "..", "a/b", ".tmp", "-x", "a\0", "x" * 129])
def test_an_owner_is_a_file_name(owner):
    with pytest.raises(InvalidArgument):
        check_owner(owner)
