"""From mountinfo and limits to files, for hosts with v2, v1 and both."""

import pytest

from dsec.resources.hierarchies import Hierarchies, parse_mountinfo
from dsec.resources.plan import Limits, instance_dirs, instance_name, plan_cgroups

LIMITS = Limits(cpu_cores=1.5, memory_bytes=256 << 20, pids=100)

PURE_V2 = "25 30 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def v2_host():
    return Hierarchies(v2="/cg", v2_controllers=frozenset({"cpu", "memory", "pids", "io"}))


def hybrid_host(**changes):
    v1 = {"cpu": "/cg/cpu,cpuacct", "cpuacct": "/cg/cpu,cpuacct", "memory": "/cg/memory", "pids": "/cg/pids"}
    return Hierarchies(v2="/cg/unified", v1=v1, **changes)


def v1_host():
    return Hierarchies(v1={"cpu": "/cg/cpu", "cpuacct": "/cg/acct", "memory": "/cg/memory", "pids": "/cg/pids", "freezer": "/cg/freezer"})


def test_mountinfo_of_a_v2_host():
    assert parse_mountinfo(PURE_V2) == ("/sys/fs/cgroup", {})


def test_mountinfo_of_a_hybrid_host_with_controllers_mounted_together():
    v2, v1 = parse_mountinfo(HYBRID)
    assert v2 == "/sys/fs/cgroup/unified"
    assert v1 == {
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
        "memory": "/sys/fs/cgroup/memory",
        "pids": "/sys/fs/cgroup/pids",
    }


def test_mountinfo_with_escaped_paths_and_torn_lines():
    v2, v1 = parse_mountinfo("torn\n1 2 0:1 / /a\\040b rw - cgroup2 none rw\n1 2 0:1 / /c rw - cgroup none\n")
    assert (v2, v1) == ("/a b", {})


def test_v2_has_one_folder_no_joins_and_its_limits():
    plan = plan_cgroups(v2_host(), "dsec-i", "sb", LIMITS)
    assert plan.dirs == ("/cg/dsec-i/sb",)
    assert plan.joins == ()
    assert plan.v2 == "/cg/dsec-i/sb"
    assert dict(plan.writes) == {
        "/cg/dsec-i/sb/memory.max": str(256 << 20),
        "/cg/dsec-i/sb/memory.swap.max": "0",
        "/cg/dsec-i/sb/cpu.max": "150000 100000",
        "/cg/dsec-i/sb/pids.max": "100",
    }
    assert plan.oom_file == "/cg/dsec-i/sb/memory.events"
    assert plan.freeze_file == "/cg/dsec-i/sb/cgroup.freeze"


def test_v2_without_swap_accounting_leaves_swap_alone():
    host = Hierarchies(v2="/cg", v2_controllers=frozenset({"memory"}), v2_swap=False)
    assert [path for path, _ in plan_cgroups(host, "i", "sb", LIMITS).writes] == ["/cg/i/sb/memory.max"]


def test_hybrid_limits_by_v1_and_freezes_by_v2():
    plan = plan_cgroups(hybrid_host(), "dsec-i", "sb", LIMITS)
    assert plan.dirs == ("/cg/cpu,cpuacct/dsec-i/sb", "/cg/memory/dsec-i/sb", "/cg/pids/dsec-i/sb", "/cg/unified/dsec-i/sb")
    assert plan.joins == ("/cg/cpu,cpuacct/dsec-i/sb/tasks", "/cg/memory/dsec-i/sb/tasks", "/cg/pids/dsec-i/sb/tasks")
    writes = dict(plan.writes)
    assert writes["/cg/cpu,cpuacct/dsec-i/sb/cpu.cfs_quota_us"] == "150000"
    assert writes["/cg/memory/dsec-i/sb/memory.limit_in_bytes"] == str(256 << 20)
    assert plan.oom_file == "/cg/memory/dsec-i/sb/memory.oom_control"
    assert plan.freeze_file == "/cg/unified/dsec-i/sb/cgroup.freeze"
    assert plan.cpu_usage_file == "/cg/unified/dsec-i/sb/cpu.stat"


def test_v1_limits_swap_after_memory_where_it_is_accounted():
    names = [path.rpartition("/")[2] for path, _ in plan_cgroups(hybrid_host(v1_memsw=True), "i", "sb", LIMITS).writes]
    assert names.index("memory.limit_in_bytes") < names.index("memory.memsw.limit_in_bytes")
    assert "memory.swappiness" not in names


def test_v1_alone_freezes_by_its_freezer_which_comes_last():
    plan = plan_cgroups(v1_host(), "dsec-i", "sb", LIMITS)
    assert plan.dirs[-1] == "/cg/freezer/dsec-i/sb"
    assert plan.freeze_file == "/cg/freezer/dsec-i/sb/freezer.state"
    assert plan.cpu_usage_file == "/cg/acct/dsec-i/sb/cpuacct.usage"
    assert plan.v2 is None


def test_a_tiny_cpu_limit_stays_above_what_the_kernel_takes():
    writes = dict(plan_cgroups(v2_host(), "i", "sb", Limits(cpu_cores=0.001)).writes)
    assert writes == {"/cg/i/sb/cpu.max": "1000 100000"}


def test_no_limits_write_nothing():
    assert plan_cgroups(hybrid_host(), "i", "sb", Limits()).writes == ()


@pytest.mark.parametrize("host", [v2_host(), hybrid_host(), v1_host()], ids=["v2", "hybrid", "v1"])
def test_every_folder_lies_in_the_instance(host):
    for folder in plan_cgroups(host, "dsec-i", "sb", LIMITS).dirs:
        assert any(folder == f"{parent}/sb" for parent in instance_dirs(host, "dsec-i"))


def test_instances_differ_by_run_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert instance_name(tmp_path / "a") == instance_name(tmp_path / "link")
    assert instance_name(tmp_path / "a") != instance_name(tmp_path / "b")
