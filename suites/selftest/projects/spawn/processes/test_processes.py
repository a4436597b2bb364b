"""Processes that tests start themselves, whose semantics must be those of new interpreters."""

import atexit
import concurrent.futures
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from multiprocessing import shared_memory

import numpy
import pytest
import torch
import torch.multiprocessing as mp


@pytest.fixture(params=["spawn", "forkserver"])
def context(request):
    return multiprocessing.get_context(request.param)


def tell(queue):
    state = {
        "pid": os.getpid(),
        "parent": (os.getppid(), multiprocessing.parent_process().pid),
        "name": multiprocessing.current_process().name,
        "argv": sys.argv,
        "path": sys.path,
        "directory": os.getcwd(),
        "variable": os.environ.get("SET_BY_THE_TEST"),
        "umask": os.umask(0),
        "ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "random": (random.random(), float(numpy.random.rand()), torch.initial_seed()),
        "cuda": torch.cuda.is_initialized(),
    }
    queue.put(state)


def state_in(context):
    queue = context.SimpleQueue()
    process = context.Process(target=tell, args=(queue,), name="named")
    process.start()
    state = queue.get()
    process.join()
    assert (process.exitcode, process.pid) == (0, state["pid"])
    return state


def test_state_is_that_of_the_parent(context, monkeypatch, tmp_path):
    monkeypatch.setenv("SET_BY_THE_TEST", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["given"])
    monkeypatch.setattr(sys, "path", [*sys.path, "/added"])
    before, umask = signal.signal(signal.SIGHUP, signal.SIG_IGN), os.umask(0o027)
    try:
        state = state_in(context)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.umask(umask)
    assert state["parent"] == (os.getpid(), os.getpid())
    assert state["name"] == "named"
    assert state["argv"] == ["given"]
    assert state["path"][-1] == "/added"
    assert state["directory"] == str(tmp_path)
    assert state["variable"] == "1"
    assert state["umask"] == 0o027
    assert state["ignored"]
    assert state["interrupt"]
    assert not state["cuda"]


def test_generators_are_seeded_for_each(context):
    first, second = state_in(context)["random"], state_in(context)["random"]
    assert not set(first).intersection(second)


def leave(code, flush):
    atexit.register(print, "at exit", flush=flush)
    sys.exit(code)


def test_exit_codes_and_handlers(context, capfd):
    is_spawn = context.get_start_method() == "spawn"
    # An interpreter that ends writes out what handlers printed; a fork of multiprocessing's server runs none
    # before Python 3.13.
    process = context.Process(target=leave, args=(3, not is_spawn))
    process.start()
    process.join()
    assert process.exitcode == 3
    runs_handlers = is_spawn or sys.version_info >= (3, 13)
    assert ("at exit" in capfd.readouterr().out) == runs_handlers


def test_terminate_at_once(context):
    process = context.Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def work(pipe, event, lock, queue, tensor, number, name):
    event.wait(60)
    with lock:
        number.value += 1
    tensor.add_(1)
    memory = shared_memory.SharedMemory(name=name)
    memory.buf[0] = 5
    memory.close()
    queue.put(tensor)
    pipe.send("sent")
    pipe.recv()


def test_shared_objects(context):
    ours, theirs = context.Pipe()
    event, lock, queue, number = context.Event(), context.Lock(), context.Queue(), context.Value("i", 0)
    tensor, memory = torch.zeros(2), shared_memory.SharedMemory(create=True, size=4)
    process = context.Process(target=work, args=(theirs, event, lock, queue, tensor, number, memory.name))
    process.start()
    assert process.is_alive()
    assert not multiprocessing.connection.wait([process.sentinel], 0)
    event.set()
    assert ours.recv() == "sent"
    assert torch.equal(queue.get(), tensor)
    ours.send("end")
    process.join()
    assert (process.exitcode, number.value, tensor.tolist(), memory.buf[0]) == (0, 1, [1, 1], 5)
    memory.close()
    memory.unlink()


def square(number):
    return number * number


def test_pools():
    context = mp.get_context("spawn")
    with context.Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(square, range(4))) == [0, 1, 4, 9]
    with context.Manager() as manager:
        assert dict(manager.dict({"a": 1})) == {"a": 1}


def sleep(rank, queue):
    queue.put(os.getpid())
    time.sleep(1000)


def nest(rank, queue):
    queue.put(os.getpid())
    mp.spawn(sleep, (queue,), nprocs=2)


def test_the_end_of_a_parent_ends_processes_of_spawn():
    queue = mp.get_context("spawn").Queue()
    context = mp.spawn(nest, (queue,), nprocs=1, join=False)
    parent, *others = [queue.get() for _ in range(3)]
    os.kill(parent, signal.SIGTERM)
    with pytest.raises(mp.ProcessExitedException, match="process 0 terminated with signal SIGTERM"):
        context.join()
    until = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in others):
        assert time.monotonic() < until
        time.sleep(0.01)


def start_one(queue):
    try:
        mp.get_context("spawn").Process(target=print).start()
    except AssertionError as error:
        queue.put(str(error))


def test_daemons_have_no_children(context):
    queue = context.SimpleQueue()
    process = context.Process(target=start_one, args=(queue,), daemon=True)
    process.start()
    process.join()
    assert queue.get() == "daemonic processes are not allowed to have children"


def tell_variable(queue):
    queue.put((os.environ.get("PYTHONHASHSEED"), hash("text")))


def test_variables_that_are_read_early_get_new_interpreters(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    for _ in range(2):
        process = context.Process(target=tell_variable, args=(queue,))
        process.start()
        process.join()
    first, second = queue.get(), queue.get()
    assert first == second
    assert first[0] == "7"


def put(queue):
    queue.put(1)


def test_threads_start_processes():
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=put, args=(queue,)) for _ in range(4)]
    threads = [threading.Thread(target=process.start) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def fail(rank, tensor):
    tensor[rank] = 1
    if rank == 1:
        assert [1, 2] == [1, 3]
    time.sleep(1000)


def test_fails():
    mp.spawn(fail, (torch.zeros(2),), nprocs=2)
