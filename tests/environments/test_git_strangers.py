"""Repositories that would run commands, or read what is not theirs, of whoever builds from them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dsec.environments import build
from dsec.environments.sources.archives import Budget
from dsec.environments.sources.workbench import Workbench
from libdsec.errors import DSecError, InvalidArgument, QuotaExceeded

pytestmark = [pytest.mark.root, pytest.mark.slow]


def git(path, *arguments, data=None):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, "-C", path, *arguments], check=True, capture_output=True, input=data)
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    """One commit of one file."""
    path = tmp_path / "repository"
    path.mkdir()
    git(path, "init")
    (path / "code.py").write_text("new\n")
    git(path, "add", ".")
    git(path, "commit", "-m", "one")
    return path


@pytest.fixture
def evil(tmp_path):
    """A command that leaves a trace if anybody runs it."""
    command = tmp_path / "evil.sh"
    command.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    command.chmod(0o755)
    yield command
    assert not (tmp_path / "ran").exists()


def sign(repository):
    """The last commit, made anew with something for a signature."""
    head, _, message = git(repository, "cat-file", "commit", "HEAD").partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n iQ==\n -----END PGP SIGNATURE-----"
    made = git(repository, "hash-object", "-t", "commit", "-w", "--stdin", data=f"{head}\n{signature}\n\n{message}\n".encode())
    git(repository, "update-ref", "HEAD", made)


def test_a_signature_is_shown_to_nobody(store, repository, evil):
    sign(repository)
    git(repository, "config", "log.showSignature", "true")
    git(repository, "config", "gpg.program", str(evil))
    build(store, "code", source=f"git:{repository}")


@pytest.mark.parametrize("how", ["upload-pack", "ext", "helper"])
def test_what_a_partial_clone_lacks_is_not_fetched(store, repository, evil, how):
    blob = git(repository, "rev-parse", "HEAD:code.py")
    (repository / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "protocol.allow": "always",
        "protocol.file.allow": "always",
        "protocol.ext.allow": "always",
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": str(evil),
        "remote.origin.url": f"ext::{evil}" if how == "ext" else str(repository),
        **({"remote.origin.vcs": "ext"} if how == "helper" else {}),
    }.items():
        git(repository, "config", name, value)
    with pytest.raises(DSecError) as caught:
        build(store, "code", source=f"git:{repository}")
    assert caught.value.field == "source" or caught.value.cause == "tool-failed"


def test_a_pager_a_hook_and_an_alias_are_not_run(store, repository, evil):
    for name in ("core.pager", "pager.cat-file", "pager.ls-tree", "core.fsmonitor", "core.sshCommand", "diff.external", "core.editor"):
        git(repository, "config", name, str(evil))
    for name in ("cat-file", "ls-tree", "rev-parse"):
        git(repository, "config", f"alias.{name}", f"!{evil}")
    for hook in ("post-index-change", "post-checkout", "reference-transaction"):
        (repository / ".git/hooks" / hook).unlink(missing_ok=True)
        (repository / ".git/hooks" / hook).symlink_to(evil)
    build(store, "code", source=f"git:{repository}")


def test_it_is_the_repository_that_was_named(store, repository, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init")
    (other / "secret").write_text("secret")
    git(other, "add", ".")
    git(other, "commit", "-m", "other")
    for name, value in {"GIT_DIR": other / ".git", "GIT_OBJECT_DIRECTORY": other / ".git/objects"}.items():
        monkeypatch.setenv(name, str(value))
    build(store, "code", source=f"git:{repository}")
    monkeypatch.undo()
    assert store.show("code").provenance["commit"] == git(repository, "rev-parse", "HEAD")


def commit_of(repository, tree, head="committer a <a@b> 1700000000 +0000"):
    text = f"tree {tree}\nauthor a <a@b> 1 +0000\n{head}\n\nmessage\n"
    made = git(repository, "hash-object", "--literally", "-t", "commit", "-w", "--stdin", data=text.encode())
    git(repository, "update-ref", "HEAD", made)


@pytest.mark.parametrize("head", ["committer nobody", "comment none"])
def test_a_commit_without_a_time_is_refused(store, repository, head):
    commit_of(repository, git(repository, "rev-parse", "HEAD^{tree}"), head)
    with pytest.raises(InvalidArgument) as caught:
        build(store, "code", source=f"git:{repository}")
    assert caught.value.field == "source"


@pytest.mark.parametrize("seconds", [-5, 9999999999999999999])
def test_a_time_beyond_all_reason_is_brought_within_it(store, repository, seconds):
    commit_of(repository, git(repository, "rev-parse", "HEAD^{tree}"), f"committer a <a@b> {seconds} +0000")
    assert build(store, "code", source=f"git:{repository}").files == 1


def test_a_link_to_megabytes_is_refused(store, repository):
    blob = git(repository, "hash-object", "-w", "--stdin", data=b"x" * (4 << 20))
    commit_of(repository, git(repository, "mktree", data=f"120000 blob {blob}\tlink\n".encode()))
    with pytest.raises(InvalidArgument, match="link"):
        build(store, "code", source=f"git:{repository}")


def test_files_count_against_the_room_that_there_is(store, repository, monkeypatch):
    def small(self, *arguments, **options):
        made(self, *arguments, **options)
        self.budget = Budget(3)

    made = Workbench.__init__
    monkeypatch.setattr(Workbench, "__init__", small)
    with pytest.raises(QuotaExceeded):
        build(store, "code", source=f"git:{repository}")


# -- repositories that are not where they are said to be -----------------------------------------------------------------------------


def fake_file(secret, place):
    (place / ".git").write_text(f"gitdir: {secret / '.git'}\n")


def fake_link(secret, place):
    (place / ".git").symlink_to(secret / ".git")


def fake_common(secret, place):
    git(place, "init")
    (place / ".git/commondir").write_text(f"{secret / '.git'}\n")


def fake_parts(secret, place):
    git(place, "init")
    for part in ("objects", "refs"):
        shutil.rmtree(place / ".git" / part)
        (place / ".git" / part).symlink_to(secret / ".git" / part)


def fake_bare(secret, place):
    for part in ("objects", "refs", "HEAD", "config"):
        (place / part).symlink_to(secret / ".git" / part)


@pytest.mark.parametrize("fake", [fake_file, fake_link, fake_common, fake_parts, fake_bare])
def test_a_repository_that_names_another_is_refused(store, repository, tmp_path, fake):
    place = tmp_path / "stranger"
    place.mkdir()
    fake(repository, place)
    with pytest.raises(InvalidArgument, match="elsewhere"):
        build(store, "code", source=f"git:{place}")
    assert store.list() == []


def test_worktrees_submodules_bare_clones_and_folders_within_are_sources(store, repository, tmp_path):
    git(repository, "worktree", "add", str(tmp_path / "tree"), "-b", "other")
    git(tmp_path, "clone", "--bare", str(repository), "bare.git")
    git(tmp_path, "clone", "--shared", str(repository), "shared")
    (tmp_path / "outer").mkdir()
    git(tmp_path / "outer", "init")
    git(tmp_path / "outer", "-c", "protocol.file.allow=always", "submodule", "add", str(repository), "inner")
    (repository / "folder").mkdir()
    wanted = build(store, "code", source=f"git:{repository}").digest
    for place in (tmp_path / "tree", tmp_path / "bare.git", tmp_path / "shared", tmp_path / "outer/inner", repository / "folder"):
        assert build(store, "code", source=f"git:{place}").digest == wanted
