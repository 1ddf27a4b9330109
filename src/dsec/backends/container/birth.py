"""What a new sandbox is to be, as the payload of LAUNCH. Pure."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dsec.backends.container import wire
from dsec.backends.container.frames import FieldValue, encode_fields
from dsec.backends.protocol import SandboxSpec
from dsec.isolation.seccomp import host_filter
from dsec.isolation.walls import READ_ONLY, SYS_SHOWN, Masked, capability_mask, sysctls
from dsec.resources.plan import CgroupPlan, Limits
from dsec.resources.uid_ranges import RANGE_IDS, range_base

__all__ = ["Host", "launch_payload", "layers_payload", "limits_of", "machine_id"]

SESSION_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True)
class Host:
    """What there is to share out, and to hide."""

    cpus: int
    memory_bytes: int
    masked: Masked


def limits_of(spec: SandboxSpec, host: Host) -> Limits:
    """The limits in force: what was asked, lowered to what the host has. All its CPUs are no limit and not written as one: the kernel walks
    every group of the host for each quota."""
    args = spec.args
    return Limits(
        cpu_cores=args.cpu_cores_limit if args.cpu_cores_limit < host.cpus else None,
        memory_bytes=min(args.memory_limit_mb << 20, host.memory_bytes),
        pids=args.pids_limit,
    )


@functools.cache
def _walls(masked: Masked) -> bytes:
    fields: list[tuple[int, FieldValue]] = [(wire.T_CAPS, capability_mask()), (wire.T_SECCOMP, host_filter())]
    fields += [(wire.T_MASK_FILE, path) for path in masked.files]
    fields += [(wire.T_MASK_FOLDER, path) for path in masked.folders]
    fields += [(wire.T_MASK, path) for path in masked.unknown]
    fields += [(wire.T_READONLY, path) for path in READ_ONLY]
    fields += [(wire.T_SYS_SHOWN, path) for path in SYS_SHOWN]
    return encode_fields(fields)


def _files(spec: SandboxSpec, resolv_conf: str | None) -> dict[str, str]:
    files = {
        "/etc/hostname": f"{spec.hostname}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {spec.hostname}\n",
    }
    if resolv_conf is not None:
        files["/etc/resolv.conf"] = resolv_conf
    if spec.renewed:
        files["/etc/machine-id"] = files["/var/lib/dbus/machine-id"] = machine_id(spec) + "\n"
    return files


def _asked(spec: SandboxSpec) -> list[tuple[int, FieldValue]]:
    """What must be there, else the sandbox is refused. A fork has its parent's wishes, and what has become of its files."""
    wishes = ((wire.T_CWD_ASKED, spec.args.workdir), (wire.T_USER_ASKED, spec.args.init_user))
    return [] if spec.parent else [(tag, 1) for tag, wish in wishes if wish]


def machine_id(spec: SandboxSpec) -> str:
    """The sandbox's own, shown over the file that its image or its parent brings, where there is one. The same after a restart of ours."""
    return hashlib.blake2b(f"{spec.sandbox_id} {spec.generation}".encode(), digest_size=16, person=b"dsec machine id").hexdigest()


def layers_payload(layers: Sequence[str]) -> bytes:
    """The payload of LAYERS: mounted roots from the bottom. The scratch folder has its `upper` and `work` then."""
    return encode_fields([(wire.T_LAYER, path) for path in layers])


def launch_payload(
    spec: SandboxSpec,
    *,
    host: Host,
    plan: CgroupPlan,
    layers: Sequence[str],
    scratch: str,
    socket_path: str,
    resolv_conf: str | None = None,
) -> bytes:
    """`layers` are mounted roots from the bottom, `scratch` the folder with `upper` and `work`.

    Without layers, `layers_payload` follows on the birth connection when they, and what is in `scratch`, are there.
    """
    limits = limits_of(spec, host)
    base = range_base(spec.range_index)
    fields: list[tuple[int, FieldValue]] = [
        (wire.T_SANDBOX_ID, spec.sandbox_id),
        (wire.T_GENERATION, spec.generation),
        (wire.T_SOCKET_PATH, socket_path),
        (wire.T_HOSTNAME, spec.hostname),
        (wire.T_UID_BASE, base),
        (wire.T_UID_COUNT, RANGE_IDS),
        (wire.T_SCRATCH, scratch),
        (wire.T_USER, spec.user),
        (wire.T_CWD, spec.workdir),
        (wire.T_SESSION_LIMIT, SESSION_LIMIT),
    ]
    fields += [(wire.T_LAYER, path) for path in layers]
    fields += _asked(spec)
    fields += [(wire.T_ENV, f"{name}={value}") for name, value in spec.env.items()]
    fields += [(wire.T_CGROUP_DIR, path) for path in plan.dirs]
    fields += [(wire.T_CGROUP_WRITE, f"{path}\0{value}") for path, value in plan.writes]
    fields += [(wire.T_CGROUP_JOIN, path) for path in plan.joins]
    if plan.v2 is not None:
        fields.append((wire.T_CGROUP_V2, plan.v2))
    if plan.oom_file is not None:
        fields.append((wire.T_OOM_FILE, plan.oom_file))
    if plan.memory_usage_file is not None:
        fields.append((wire.T_MEMORY_USAGE_FILE, plan.memory_usage_file))
    if limits.memory_bytes is not None:
        fields += [(wire.T_MEMORY_BYTES, limits.memory_bytes), (wire.T_SHM_BYTES, max(1 << 20, limits.memory_bytes // 2))]
    if limits.cpu_cores is not None:
        fields.append((wire.T_CPUS, min(host.cpus, max(1, math.ceil(limits.cpu_cores)))))
    fields += [(wire.T_FILE, f"{path}\000644\0{text}") for path, text in _files(spec, resolv_conf).items()]
    fields += [(wire.T_SYSCTL, f"{path}\0{value}") for path, value in sysctls(base, RANGE_IDS).items()]
    return encode_fields(fields) + _walls(host.masked)
