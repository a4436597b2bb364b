"""Sweeps that hold, and sweeps that do not, each for a reason of its own."""

import os
import threading
import time

import pytest
import saver
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def folder(world):
    path = world.shared_tmp_path / "files"
    path.mkdir(exist_ok=True)
    return path


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def write_own(world, folder):
    (folder / f"{world.rank}").write_text("x")


def claim_whole(folder):
    def claim(crash):
        step, data = saver.load(folder)
        assert step == 2 or crash.kind is not None
        assert not crash.errors or crash.kind not in ("all", "power")
        assert data == bytes([step] * 16)

    return claim


def test_whole_or_absent(world, sweep, folder):
    def save():
        saver.save(folder, 2)

    kinds = ["kill", "torn", "all", "power", "fail", "full", "delay", "invisible"]
    sweep(save, prepare=lambda: saver.save(folder, 1), then=claim_whole(folder), files=folder, kinds=kinds)


def test_marker_first(world, sweep, folder):
    def save():
        saver.save(folder, 2, is_marked_first=True)

    sweep(save, prepare=lambda: saver.save(folder, 1), then=claim_whole(folder), files=folder, kinds=["torn"])


def test_published_alone(world, sweep, folder):
    def save():
        saver.save(folder, 2, is_agreed=False)

    sweep(save, prepare=lambda: saver.save(folder, 1), then=claim_whole(folder), files=folder, kinds=["fail"])


def test_written_in_place(world, sweep, folder):
    state = folder / "state"

    def claim(crash):
        assert state.read_text() in ("one", "three")

    sweep(
        lambda: state.write_text("three") if world.rank == 0 else None,
        prepare=lambda: state.write_text("one") if world.rank == 0 else None,
        then=claim,
        files=folder,
        kinds=["torn"],
    )


def test_appended(world, sweep, folder):
    """A line of a log is there or not for whom is killed between two operations."""

    def save():
        if world.rank == 0:
            with (folder / "log").open("a") as log:
                log.write("saved 12\n")

    def claim(crash):
        lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
        assert lines in ([], ["saved 12"])

    sweep(save, then=claim, files=folder, kinds=["kill", "torn"])


def test_unsynced(world, sweep, folder):
    def save():
        if world.rank == 0:
            (folder / "part").write_text("all of it")
            (folder / "done").write_text("")

    def claim(crash):
        assert "done" not in names(folder) or (folder / "part").read_text() == "all of it"

    sweep(save, then=claim, files=folder, kinds=["kill", "power"])


def test_polls_for_ever(world, sweep, folder):
    def save():
        if world.rank == 1:
            (folder / "1").touch()
        while world.rank == 0 and not (folder / "1").exists():
            time.sleep(0.01)

    sweep(save, then=lambda crash: names(folder), files=folder, kinds=["kill"])


def test_leaves_a_collective_out(world, sweep, folder):
    def save():
        try:
            write_own(world, folder)
        except OSError:
            return
        dist.barrier()

    sweep(save, then=lambda crash: names(folder), files=folder, kinds=["full"])


def test_looks_once(world, sweep, folder):
    def save():
        dist.barrier()  # rank 0 writes after it
        if world.rank == 0:
            write_own(world, folder)
        dist.barrier()
        assert (folder / "0").exists()

    def claim(crash):
        assert names(folder) == ["0"]
        assert not [error for error in crash.errors.values() if "AssertionError" in error]

    sweep(save, then=claim, files=folder, kinds=["invisible"])


def test_threads_share_a_group(world, sweep, folder):
    """KempnerForge#104: the thread that saves uses the group of the one that trains."""

    def save():
        sent = threading.Event()

        def write():
            saved = torch.tensor([10.0])
            work = dist.all_reduce(saved, async_op=True)
            sent.set()
            work.wait()
            (folder / f"saved-{world.rank}").write_text(str(saved.item()))

        thread = threading.Thread(target=write)
        trained = torch.tensor([1.0])
        work = dist.all_reduce(trained, async_op=True)
        thread.start()
        work.wait()
        sent.wait(0.08)  # the order of the undisturbed run; another thread waits longer for this one
        dist.all_reduce(trained)
        thread.join()
        (folder / f"trained-{world.rank}").write_text(str(trained.item()))

    def claim(crash):
        if not crash.errors:
            assert [(folder / name).read_text() for name in names(folder)] == [
                *("20.0", "20.0"),
                *("4.0", "4.0"),
            ]

    sweep(save, then=claim, files=folder, kinds=["order"])


def test_rank_dies_in_the_claim(world, sweep, folder):
    def claim(crash):
        names(folder)
        if crash.kind == "delay" and world.rank == 1:
            os._exit(3)

    sweep(dist.barrier, then=claim, files=folder, kinds=["delay"])


def test_claim_hangs(world, sweep, folder):
    def claim(crash):
        names(folder)
        if crash.point == "delay rank 1 end 1" and world.rank == 0:
            dist.barrier()

    sweep(dist.barrier, then=claim, files=folder, kinds=["delay"])


def test_own_folders_and_torch_save(world, sweep, tmp_path):
    def save():
        torch.save(torch.ones(1), str(tmp_path / "state.pt"))
        (tmp_path / "done").touch()

    def claim(crash):
        if (tmp_path / "done").exists():
            assert torch.load(str(tmp_path / "state.pt")).item() == 1
        elif crash.kind == "torn" and crash.rank == world.rank:
            with pytest.raises(RuntimeError, match="central directory"):
                torch.load(str(tmp_path / "state.pt"))

    sweep(save, then=claim, files=tmp_path, kinds=["torn", "full"])


def test_polled(world, sweep, folder):
    """C++ makes and maps a file; each point is to be reported."""

    def save():
        if world.rank == 0:
            torch.UntypedStorage.from_file(str(folder / "mapped"), shared=True, nbytes=8).fill_(1)
        dist.barrier()  # after C++

    def claim(crash):
        names(folder)
        assert crash.kind is None, "found"

    sweep(save, then=claim, files=folder, kinds=["fail"])


def test_divided(world, sweep, folder):
    def claim(crash):
        names(folder)
        with open(f"claimed-{world.rank}", "a") as log:
            print(crash.point, file=log)

    sweep(lambda: saver.save(folder, 1), then=claim, files=folder, kinds=["fail", "full"])


def test_no_point(world, sweep, folder):
    sweep(lambda: None, then=lambda crash: names(folder), files=folder)


def test_nothing_read(world, sweep, folder):
    sweep(dist.barrier, then=lambda crash: None, files=folder)


def test_nothing_struck(world, sweep, folder):
    runs = []

    def save():
        runs.append(1)
        if len(runs) == 1:
            dist.barrier()

    sweep(save, then=lambda crash: names(folder), files=folder, kinds=["fail"])


def test_prepare_fails(world, sweep, folder):
    def prepare():
        assert world.rank == 0, "not here"

    sweep(dist.barrier, prepare=prepare, then=lambda crash: names(folder), files=folder)


def test_undisturbed_claim_fails(world, sweep, folder):
    def claim(crash):
        assert names(folder) == ["never"]

    sweep(dist.barrier, then=claim, files=folder)


def test_one_sweep_a_test(world, sweep, folder):
    sweep(dist.barrier, then=lambda crash: names(folder), files=folder, kinds=["delay"])
    with pytest.raises(RuntimeError, match="a test has one sweep"):
        sweep(dist.barrier, then=lambda crash: names(folder), files=folder)


def test_refusals(world, sweep, folder):
    def refused(error, match, **changes):
        given = {"then": print, "files": folder, **changes}
        with pytest.raises(error, match=match):
            sweep(dist.barrier, **given)

    refused(ValueError, "there is no kind 'explode'; the kinds are kill, torn, all", kinds=["explode"])
    refused(ValueError, 'kinds=\'kill\': a list, such as \\["kill", "fail"\\]', kinds="kill")
    refused(ValueError, "name the directory below which", files=[])
    refused(TypeError, "files=3: it is a directory", files=3)
    refused(TypeError, "then is 3; it is a function", then=3)
    refused(ValueError, "is no directory", files=__file__)


@pytest.mark.ranks(2, group=False)
def test_without_a_group(world, sweep, folder):
    match = r"starts without a default process group \(group=False\)"
    with pytest.raises(RuntimeError, match=match):
        sweep(dist.barrier, then=print, files=folder)


@pytest.mark.ranks(2, backend="fake")
def test_in_a_fake_world(world, sweep, folder):
    with pytest.raises(RuntimeError, match="a fake world is one process, and loses no rank"):
        sweep(dist.barrier, then=print, files=folder)


def test_after_all(world):
    world.barrier()
