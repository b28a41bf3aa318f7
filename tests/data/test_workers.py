import threading
import time

import pytest

from kasoku.data.loading.workers import Autotuner, ThreadPool


def test_threads_are_as_many_as_asked_for_and_end():
    pool = ThreadPool(2)
    gate = threading.Event()
    busy = threading.Semaphore(0)

    def work():
        busy.release()
        gate.wait(10)

    def running():
        count = 0
        while busy.acquire(timeout=0.3):
            count += 1
        return count

    begun = [pool.submit(work) for _ in range(12)]
    assert running() == 2
    pool.resize(5)
    assert running() == 3
    pool.resize(1)
    gate.set()
    for one in begun:
        one.result(10)
    assert running() == 7  # that had not begun
    gate.clear()
    begun = [pool.submit(work) for _ in range(3)]
    assert running() == 1
    gate.set()
    for one in begun:
        one.result(10)
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kasoku-decode"]


def test_a_task_that_fails_tells_whoever_waits_for_it():
    pool = ThreadPool(1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(10)
    assert pool.submit(lambda: 7).result(10) == 7
    pool.close()


def test_tasks_not_begun_are_not_done_after_close():
    pool = ThreadPool(1)
    done = []
    first = pool.submit(lambda: time.sleep(0.2))
    rest = [pool.submit(done.append, i) for i in range(5)]
    pool.close()
    assert first.done()
    assert all(one.cancelled() for one in rest)
    assert not done


def settled(autotuner, batch_s, wait_s, batches=2000):
    """The size after so many batches, by what a batch takes with how many threads."""
    sizes = []
    for _ in range(batches):
        size = autotuner.size
        autotuner.batch(batch_s(size), wait_s(size))
        sizes.append(size)
    return sizes


def test_more_threads_are_taken_while_the_input_is_waited_for():
    autotuner = Autotuner(2, 32, shared=False)
    settled(autotuner, lambda n: max(1.0, 8 / n), lambda n: max(0.0, 8 / n - 1.0))
    assert 7 <= autotuner.size <= 10


def test_threads_that_slow_computing_are_given_up():
    autotuner = Autotuner(8, 32, shared=True)
    settled(autotuner, lambda n: 1.0 + 0.1 * n, lambda n: 0.0)
    assert autotuner.size == 1


def test_what_does_not_help_is_tried_ever_more_rarely():
    autotuner = Autotuner(4, 32, shared=False)
    sizes = settled(autotuner, lambda n: 1.0, lambda n: 0.5, 4000)
    away = [i for i, size in enumerate(sizes) if size != 4]
    assert autotuner.size == 4
    assert len([i for i in away if i < 500]) > 2 * len([i for i in away if i >= 3500]) > 0
