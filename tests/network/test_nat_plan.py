"""Addresses, rules and resolver files of NAT networks."""

from ipaddress import IPv4Address, IPv4Network

import pytest

from dsec.network.plan import (
    POOLS,
    choose_pool,
    gateway,
    link_prefix,
    parse_resolvers,
    parse_routes,
    resolv_conf,
    ruleset,
    sandbox_address,
    table_name,
)
from dsec.resources.uid_ranges import BLOCK_RANGES, BLOCKS
from libdsec.errors import Unsupported

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_every_pool_has_an_address_for_every_uid_range():
    for pool in POOLS:
        addresses = {sandbox_address(pool, index) for index in (0, 1, BLOCKS * BLOCK_RANGES - 1)}
        assert len(addresses) == 3
        assert all(address in pool for address in addresses)
        assert gateway(pool) not in addresses


def test_an_index_beyond_the_pool_is_refused():
    with pytest.raises(ValueError, match="beyond"):
        sandbox_address(POOLS[0], 1 << 17)


def test_routes_of_the_host_are_read_from_its_table():
    assert [(route.device, str(route.network)) for route in parse_routes(ROUTES)] == [("eth0", "0.0.0.0/0"), ("eth0", "192.0.2.0/24")]


def test_a_pool_that_meets_a_network_of_the_host_is_passed_over():
    assert choose_pool([IPv4Network("0.0.0.0/0")]) == POOLS[0]
    assert choose_pool([IPv4Network("100.64.3.0/24")]) == POOLS[1]
    assert choose_pool([IPv4Network("100.64.0.0/10")]).subnet_of(IPv4Network("10.192.0.0/10"))
    with pytest.raises(Unsupported):
        choose_pool([IPv4Network("100.64.0.0/10"), IPv4Network("10.0.0.0/8"), IPv4Network("198.18.0.0/15")])


def test_name_servers_on_loopback_are_reached_by_the_gateway():
    resolvers = parse_resolvers(
        "# c\nnameserver 127.0.0.53\nnameserver 192.0.2.1\nnameserver fd00::1\nnameserver x\nsearch a b\noptions edns0\n"
    )
    assert resolvers.local == IPv4Address("127.0.0.53")
    assert resolvers.remote == (IPv4Address("192.0.2.1"),)
    text = resolv_conf(resolvers, IPv4Network("100.64.0.0/15"))
    assert text == "search a b\nnameserver 100.64.0.1\nnameserver 192.0.2.1\n"


def test_a_host_without_name_servers_gives_a_comment():
    assert resolv_conf(parse_resolvers(""), POOLS[0]).startswith("#")


def test_names_fit_the_kernels_bounds_and_tell_the_instance():
    prefix = link_prefix("dsec-0123abcd")
    assert len(f"{prefix}{BLOCKS * BLOCK_RANGES - 1:x}") <= 15
    assert link_prefix("dsec-0123abce") != prefix
    assert "-" not in table_name("dsec-0123abcd")


def test_rules_replace_the_whole_table_and_drop_before_they_accept():
    text = ruleset("dsec-0123abcd", POOLS[0], parse_resolvers("nameserver 127.0.0.1\nnameserver 192.0.2.9\n"))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1] == "delete table ip dsec_0123abcd"
    incoming = lines[lines.index("chain incoming {") : lines.index("chain forwarded {")]
    assert incoming[-2] == 'iifname "d0123abcdx*" drop'
    assert any("dnat to 127.0.0.1:53" in line for line in lines)
    assert any("169.254.0.0/16" in line and "drop" in line for line in lines)
