"""Capabilities and paths: what must be in the lists, and what must not."""

from pathlib import Path

from dsec.isolation.walls import CAPABILITIES, MASKED, READ_ONLY, capability_mask, masked_here, sysctls

FORBIDDEN = {"SYS_ADMIN": 21, "SYS_PTRACE": 19, "NET_RAW": 13, "NET_ADMIN": 12, "MKNOD": 27, "SYS_MODULE": 16, "AUDIT_WRITE": 29, "BPF": 39}


def test_the_mask_has_the_named_capabilities_and_no_other():
    assert [number for number in range(64) if capability_mask() >> number & 1] == sorted(CAPABILITIES.values())
    assert not set(FORBIDDEN.values()) & set(CAPABILITIES.values())


def test_paths_are_absolute_clean_and_listed_once():
    paths = [*MASKED, *READ_ONLY]
    assert len(set(paths)) == len(paths)
    assert all(path.startswith(("/proc/", "/sys/")) and "//" not in path and not path.endswith("/") for path in paths)


def test_nothing_masked_lies_below_another_mask():
    assert not [path for path in MASKED if any(path.startswith(f"{other}/") for other in MASKED)]


def test_ping_is_for_the_sandboxes_own_groups():
    assert sysctls(0x10010000, 65536)["net/ipv4/ping_group_range"] == "268500992 268566527"


def test_what_this_kernel_has_to_hide_is_known_by_its_kind():
    here = masked_here()
    assert sorted([*here.files, *here.folders, *here.unknown]) == sorted(MASKED)
    assert all(Path(path).is_file() for path in here.files)
    assert all(Path(path).is_dir() for path in here.folders)
    assert not any(Path(path).exists() for path in here.unknown)
