import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

pids = []


@pytest.mark.ranks(2)
def test_what_fits_on_one_host(world):
    assert world.gather((world.host, world.hosts)) == [("a", ("a",))] * 2


@pytest.mark.ranks(3)
def test_what_fills_hosts_in_order(world):
    assert world.gather((world.host, world.local_rank, world.local_size)) == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
    ]


@pytest.mark.ranks(2, hosts=2)
def test_what_is_spread(world):
    place = world.host, world.hosts, world.local_rank, world.local_size
    assert world.gather(place) == [("a", ("a", "b"), 0, 1), ("b", ("a", "b"), 0, 1)]
    variables = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["RANK"]
    assert variables == ("0", "1", str(world.rank))
    pids.append(os.getpid())


@pytest.mark.ranks(2, hosts=2)
def test_a_warm_world(world):
    assert pids == [os.getpid()]
    os.environ["LEFT_BEHIND"] = "1"


@pytest.mark.ranks(2, hosts=2)
def test_state_is_restored(world):
    assert "LEFT_BEHIND" not in os.environ


@pytest.mark.ranks(2, hosts=2, fresh=True)
def test_a_fresh_world(world):
    assert pids == []


@pytest.mark.ranks(4, hosts=2)
def test_a_mesh_over_hosts(world):
    mesh = world.mesh(names=("hosts", "local"))
    assert mesh.get_local_rank("hosts") == (world.host == "b")
    assert mesh.get_local_rank("local") == world.local_rank
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=mesh.get_group("hosts"))
    assert total.item() == {0: 2, 1: 4}[world.local_rank]


@pytest.mark.ranks(2, hosts=2)
def test_no_rank_listens_at_all_addresses(world):
    world.barrier()
    listening = [
        line.split()[1].split(":")[0]
        for kind in ("tcp", "tcp6")
        for line in open(f"/proc/net/{kind}").readlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in own_inodes()
    ]
    assert all(set(address) != {"0"} for address in listening), listening


def own_inodes():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


@pytest.mark.ranks(2, hosts=2, group=False)
def test_a_group_of_its_own(world):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2, hosts=2)
def test_the_port_of_the_environment(world):
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world.rank == 0:
        with socket.create_server(address) as server:
            world.barrier()
            server.accept()[0].close()
    else:
        world.barrier()
        socket.create_connection(address).close()


@pytest.mark.ranks(2, hosts=2)
def test_subtests(world, run_subtests):
    def case(number):
        dist.all_reduce(torch.ones(1))
        assert (world.host, number) != ("b", 1)

    run_subtests({"number": [0, 1, 2]}, case)


@pytest.mark.ranks(2, hosts=2)
@settings(max_examples=100, deadline=None)
@given(number=st.integers(0, 1000))
def test_a_property(world, number):
    dist.all_reduce(torch.tensor([float(number)]))
    assert number < 50 or world.rank == 0


@pytest.mark.ranks(2, hosts=2)
def test_collectives_are_recorded(world, collectives):
    dist.all_reduce(torch.ones(2))
    assert len(collectives) == 1


@pytest.mark.ranks(2, hosts=2)
def test_what_is_printed(world):
    print("printed on", world.host)
    assert world.host == "a"


@pytest.mark.ranks(2, hosts=2)
def test_a_death_behind_what_is_printed(world):
    print("last words on", world.host)
    if world.host == "b":
        os._exit(7)
    world.barrier()


@pytest.mark.ranks(2, hosts=2)
def test_a_shared_path(world):
    (world.shared_tmp_path / world.host).touch()
    world.barrier()
    assert sorted(path.name for path in world.shared_tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.ranks(3, hosts=3)
def test_three_hosts(world):
    raise AssertionError


@pytest.mark.ranks(2, hosts=3)
def test_more_hosts_than_ranks(world):
    raise AssertionError


def test_off_ranks():
    assert in_environment() == [False, False]


SECRET = "LOCKSTEP_HOSTS_SECRET"


def in_environment():
    """Return whether the secret is in the environment of this process, and of a program that it starts."""
    code = f"import os; print({SECRET!r} in os.environ)"
    return [SECRET in os.environ, subprocess.check_output([sys.executable, "-c", code]) != b"False\n"]


@pytest.mark.ranks(2, hosts=2)
def test_the_secret_is_not_on_ranks(world):
    assert in_environment() == [False, False]
    assert SECRET.encode() not in pathlib.Path("/proc/self/environ").read_bytes()


@pytest.mark.layouts(dp=(1, 2), tp=(1, 2), hosts=2, at_most=4)
def test_a_layout(layout, world):
    assert world.hosts == ("a", "b")
    assert layout.across_hosts == (layout.large[0],)
    total = torch.ones(1)
    dist.all_reduce(total, group=layout.group(layout.large[-1]))
    assert total.item() == 2
