import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from deepbregman.config import load_recipe
from deepbregman.data import (
    ArrayImages,
    Batch,
    FileImages,
    ResidentBatches,
    StreamingBatches,
    frames,
    open_batches,
    open_source,
    slots,
)
from deepbregman.data import batches as batches_module
from deepbregman.errors import UserError, explain_error
from deepbregman.training.faults import explain_faults

CPU = torch.device("cpu")
ORDER = torch.tensor([6, 0, 3, 3, 5, 1, 2])


@pytest.fixture
def files(tmp_path, save_picture) -> FileImages:
    """Seven pictures of different shapes in frames of 12."""
    for i in range(7):
        suffix = ".jpg" if i % 2 else ".png"
        save_picture(tmp_path / f"{i}{suffix}", height=5 + 3 * i, width=20 - i, seed=i)
    return FileImages(tuple(sorted(tmp_path.iterdir())), 12)


def _marked(num_images: int, padded: bool) -> ArrayImages:
    """Image i is filled with the value i, so that a batch tells which images it holds."""
    pixels = torch.arange(num_images, dtype=torch.uint8)[:, None, None, None].repeat(1, 3, 2, 4)
    sizes = torch.stack([torch.arange(num_images), torch.arange(num_images) + 1], 1)
    return ArrayImages(pixels, sizes if padded else None)


def _same(first: Iterator[Batch], second: Iterator[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(
        torch.equal(a.images, b.images)
        and ((a.sizes is None and b.sizes is None) or torch.equal(a.sizes, b.sizes))
        for a, b in pairs
    )


@pytest.mark.parametrize("kind", [ResidentBatches, StreamingBatches])
@pytest.mark.parametrize("padded", [False, True])
def test_arrays_come_in_the_order_asked_for(kind, padded):
    batches = kind(_marked(8, padded), CPU)
    got = list(batches.iterate(ORDER, 3))
    assert [batch.images[:, 2, 1, 3].tolist() for batch in got] == [[6, 0, 3], [3, 5, 1], [2]]
    assert all(batch.images.dtype == torch.uint8 for batch in got)
    if padded:
        assert [b.sizes.tolist() for b in got if b.sizes is not None][2] == [[2, 3]]
        assert got[0].sizes[0].tolist() == [6, 7]
    else:
        assert all(batch.sizes is None for batch in got)
    assert batches.num_images == 8
    assert batches.resident is (kind is ResidentBatches)
    assert list(batches.iterate(torch.empty(0, dtype=torch.int64), 3)) == []


def test_resident_and_streaming_agree_bit_for_bit(files):
    resident = ResidentBatches(files, CPU)
    for num_workers in (0, 2):
        streaming = StreamingBatches(files, CPU, num_workers=num_workers)
        for order in (ORDER, ORDER.flip(0)):  # the second pass reuses the workers
            assert _same(resident.iterate(order, 3), streaming.iterate(order, 3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_stay_as_they_were_while_their_memory_is_used_again(files, num_workers):
    """Images of other shapes are decoded over those before, and leave nothing of them."""
    order = torch.cat([ORDER, ORDER.flip(0)]).repeat(6)
    expected = list(ResidentBatches(files, CPU).iterate(order, 2))
    streaming = StreamingBatches(files, CPU, num_workers=num_workers)
    held = list(streaming.iterate(order, 2))
    assert len(held) > 4 * len(streaming._slots.frames)
    assert _same(iter(held), iter(expected))


def test_a_pass_of_larger_batches_follows_one_of_smaller(files):
    streaming, resident = StreamingBatches(files, CPU, num_workers=1), ResidentBatches(files, CPU)
    workers = []
    for size in (2, 5, 3, 7):
        assert _same(streaming.iterate(ORDER, size), resident.iterate(ORDER, size))
        workers += streaming._loader._iterator._workers
    assert workers[1] is workers[2]  # which need no more room
    gc.collect()
    for worker in workers[:-1]:
        worker.join(60)
    assert [worker.is_alive() for worker in workers] == [False, False, False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
def test_workers_need_no_room_in_dev_shm(files):
    """In many containers it has 64 MB, less than one batch of photographs."""
    streaming = StreamingBatches(files, CPU, num_workers=1)
    list(streaming.iterate(ORDER, 2))
    address = streaming._slots.frames.data_ptr()
    maps = Path("/proc/self/maps").read_text().splitlines()
    (found,) = (
        line
        for line in maps
        if (ends := [int(end, 16) for end in line.split()[0].split("-")])[0] <= address < ends[1]
    )
    assert found.split()[1] == "rw-s"
    assert "/dev/shm" not in found


def test_each_slot_begins_a_page(files):
    streaming = StreamingBatches(files, CPU, num_workers=1)
    list(streaming.iterate(ORDER, 3))  # 1,296 bytes a batch
    starts = [frames.data_ptr() for frames in streaming._slots.frames]
    assert len({start // mmap.PAGESIZE for start in starts}) == len(starts) == 4
    assert all(start % mmap.PAGESIZE == 0 for start in starts)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_locked_leaves_no_error_behind(monkeypatch, code):
    """CUDA keeps the error that a call returned; the next kernel of torch would raise it."""
    pending, cudart = [], SimpleNamespace()

    def register(address: int, count: int, flags: int) -> int:
        pending.extend([code] * (code != 0))
        return code

    def launch(device: torch.device) -> None:
        raise RuntimeError(f"CUDA error {pending.pop()}")

    cudart.cudaHostRegister = register
    monkeypatch.setattr(slots, "_cudart", lambda: cudart)
    monkeypatch.setattr(slots, "_launch_kernel", launch)
    frames = slots.FrameSlots(2, 3, 4)
    for _ in range(2):
        frames._lock(1, CPU)
    assert frames._locked == {1: code == 0}
    assert pending == []


@pytest.mark.slow  # a new process imports torch
def test_workers_that_are_not_forked_see_the_same_memory(files, monkeypatch):
    monkeypatch.setattr(slots, "START_METHOD", "spawn")
    monkeypatch.setattr(batches_module, "START_METHOD", "spawn")
    streaming = StreamingBatches(files, CPU, num_workers=1)
    order = ORDER.repeat(4)
    assert _same(streaming.iterate(order, 2), ResidentBatches(files, CPU).iterate(order, 2))


def test_frames_hold_what_pillow_reads(tmp_path, save_picture):
    tall = save_picture(tmp_path / "0.png", height=7, width=3, seed=1)
    wide = save_picture(tmp_path / "1.png", height=2, width=5, seed=2)
    images = open_source(str(tmp_path), image_size=32).train.images
    (batch,) = ResidentBatches(images, CPU).iterate(torch.tensor([1, 0]), 2)
    assert batch.sizes.tolist() == [[2, 5], [7, 3]]
    assert batch.images.shape == (2, 3, 7, 7)
    assert np.array_equal(batch.images[0, :, :2, :5].numpy(), wide.transpose(2, 0, 1))
    assert np.array_equal(batch.images[1, :, :7, :3].numpy(), tall.transpose(2, 0, 1))
    assert int(batch.images[0].sum()) == int(wide.sum())  # so the rest is zero


def test_sizes_are_left_out_when_every_image_fills_its_frame(tmp_path, save_picture):
    for i in range(3):
        save_picture(tmp_path / f"{i}.png", 6, 6, seed=i)
    images = open_source(str(tmp_path), image_size=32).train.images
    for batches in (ResidentBatches(images, CPU), StreamingBatches(images, CPU, num_workers=0)):
        assert all(batch.sizes is None for batch in batches.iterate(torch.arange(3), 2))


def test_a_pass_can_be_left_early_and_the_next_is_whole(files):
    streaming = StreamingBatches(files, CPU, num_workers=2)
    expected = list(StreamingBatches(files, CPU, num_workers=0).iterate(ORDER, 2))
    abandoned = streaming.iterate(ORDER.flip(0), 1)
    next(abandoned)
    assert _same(streaming.iterate(ORDER, 2), iter(expected))
    with pytest.raises(RuntimeError, match="another pass"):
        next(abandoned)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pass_that_was_not_begun_takes_nothing_of_the_next(files, num_workers):
    streaming = StreamingBatches(files, CPU, num_workers=num_workers)
    first, second = streaming.iterate(ORDER.flip(0), 2), streaming.iterate(ORDER, 2)
    with pytest.raises(RuntimeError, match="another pass"):
        next(first)
    assert _same(second, ResidentBatches(files, CPU).iterate(ORDER, 2))


def test_workers_end_at_once_even_when_the_garbage_collector_ends_them(files, monkeypatch):
    # For so long torch waits for one that hangs: longer than a busy machine takes.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 120.0)
    streaming = StreamingBatches(files, CPU, num_workers=2)
    next(streaming.iterate(ORDER, 1))
    streaming.itself = streaming
    del streaming
    before = time.monotonic()
    gc.collect()
    assert time.monotonic() - before < 100


def test_a_pass_left_early_does_not_keep_its_owner_and_workers(files):
    # Torch waits 5 seconds at the program's end for each worker that is still there.
    class Owner:
        def __init__(self) -> None:
            self.batches = StreamingBatches(files, CPU, num_workers=2)

        def feed(self) -> Iterator[Batch]:
            return self.batches.chain((ORDER for _ in range(9) if self), 1)

    owner = Owner()
    feed = owner.feed()
    next(feed)
    kept = weakref.ref(owner)
    del owner, feed
    gc.collect()
    assert kept() is None


def test_global_random_state_is_left_alone(files):
    before = torch.get_rng_state()
    list(StreamingBatches(files, CPU, num_workers=0).iterate(ORDER, 2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_broken_image_while_streaming(files, truncate, num_workers):
    good = next(StreamingBatches(files, CPU, num_workers=0).iterate(torch.arange(7), 7))
    truncate(files.paths[3])
    files.paths[4].write_bytes(b"")
    strict = StreamingBatches(files, CPU, num_workers=num_workers)
    with pytest.raises(UserError) as caught:
        list(strict.iterate(torch.arange(7), 4))
    assert str(files.paths[3]) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert strict.skipped == frozenset()

    lenient = StreamingBatches(files, CPU, num_workers=num_workers, skip_unreadable=True)
    for _ in range(2):  # the second pass meets the same two files
        got = list(lenient.iterate(torch.tensor([2, 3, 4, 6, 0, 1, 4]), 4))
        assert torch.equal(got[0].images, good.images[[2, 6, 6, 6]])
        assert torch.equal(got[1].images, good.images[[0, 1, 0]])  # after the last comes the first
        assert got[0].sizes is not None
        assert torch.equal(got[0].sizes, good.sizes[[2, 6, 6, 6]])
        assert lenient.skipped == {3, 4}
    with pytest.raises(UserError, match="cannot be read"):  # nothing to put in their place
        list(lenient.iterate(torch.tensor([3, 4]), 2))


def test_broken_image_when_resident(files, truncate):
    good = ResidentBatches(files, CPU)
    truncate(files.paths[3])
    with pytest.raises(UserError, match=files.paths[3].name):
        ResidentBatches(files, CPU)
    lenient = ResidentBatches(files, CPU, skip_unreadable=True)
    assert (lenient.skipped, lenient.num_images) == ({3}, 7)
    replaced = torch.tensor([0, 1, 2, 4, 4, 5, 6])
    assert _same(lenient.iterate(torch.arange(7), 7), good.iterate(replaced, 7))
    with pytest.raises(UserError, match=files.paths[3].name):  # nothing to put in its place
        ResidentBatches(files.select(torch.tensor([3])), CPU, skip_unreadable=True)


def test_decoding_in_pieces(files, truncate, monkeypatch):
    whole = ResidentBatches(files, CPU)
    monkeypatch.setattr(batches_module, "_CHUNK", 3)
    pieces = ResidentBatches(files, CPU)
    assert _same(whole.iterate(ORDER, 7), pieces.iterate(ORDER, 7))
    truncate(files.paths[4])
    assert ResidentBatches(files, CPU, skip_unreadable=True).skipped == {4}


@pytest.mark.parametrize("count", [0, 5, 6, 7])
def test_files_in_pieces_are_all_there_in_their_order(monkeypatch, count):
    monkeypatch.setattr(frames, "_CHUNK", 3)
    seen: list[tuple[int, int]] = []
    found = frames.map_files(lambda i: 2 * i, range(count), lambda *done: seen.append(done))
    assert found == [2 * i for i in range(count)]
    assert seen == [(min(stop, count), count) for stop in range(3, count + 3, 3)]


def test_residence_follows_free_memory(files, monkeypatch):
    free = {"bytes": files.nbytes * 10 // 4}
    monkeypatch.setattr(batches_module, "_find_free_memory", lambda device: free["bytes"])
    assert open_batches(files, CPU).resident
    free["bytes"] -= 4
    assert not open_batches(files, CPU, num_workers=0).resident
    assert open_batches(files, CPU, resident="yes").resident
    assert open_batches(_marked(200, False), CPU).resident  # it is there already
    assert not open_batches(_marked(4, False), CPU, resident="no").resident
    free["bytes"] = files.nbytes - 1
    with pytest.raises(UserError, match=r"data\.resident 'yes'.*GB free"):
        open_batches(files, CPU, resident="yes")


def test_free_memory_of_this_machine_is_sane():
    assert 1 << 20 < batches_module._find_free_memory(CPU) < 1 << 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_bits_arrive_without_a_wait(files, no_host_sync):
    device = torch.device("cuda")
    order = ORDER.repeat(6)  # memory is used again
    expected = list(ResidentBatches(files, CPU).iterate(order, 3))
    whole = next(ResidentBatches(files, CPU).iterate(torch.arange(7), 7))
    arrays = ArrayImages(whole.images, whole.sizes)
    makers = [
        ResidentBatches(files, device),
        ResidentBatches(arrays, device),
        StreamingBatches(files, device, num_workers=2),
        StreamingBatches(files, device, num_workers=0),
        StreamingBatches(arrays, device),
    ]
    for batches in makers:
        got = [
            Batch(b.images.cpu(), b.sizes.cpu())
            for b in batches.iterate(order, 3)
            if b.sizes is not None
        ]
        assert _same(iter(got), iter(expected))
    with no_host_sync():
        list(makers[0].iterate(order, 3))
        list(makers[-1].iterate(order, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_also_copies_from_memory_that_it_cannot_lock(files):
    device = torch.device("cuda")
    streaming = StreamingBatches(files, device, num_workers=0)
    frames = streaming._open_slots(files, 3).frames
    whole = frames.untyped_storage()
    torch.cuda.init()
    assert int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes(), 0)) == 0
    got = [Batch(b.images.cpu(), b.sizes.cpu()) for b in streaming.iterate(ORDER.repeat(3), 3)]
    assert not any(streaming._slots._locked.values())  # it is locked already: refused
    assert _same(iter(got), ResidentBatches(files, CPU).iterate(ORDER.repeat(3), 3))
    torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_orders_in_a_chain_are_passes_one_after_the_other(files, num_workers):
    orders = [ORDER, ORDER.flip(0), ORDER[:4]]
    one_by_one = ResidentBatches(files, CPU)
    expected = [batch for order in orders for batch in one_by_one.iterate(order, 3)]
    for batches in (one_by_one, StreamingBatches(files, CPU, num_workers=num_workers)):
        assert _same(batches.chain(iter(orders), 3), iter(expected))


def test_a_chain_draws_its_orders_only_as_it_gets_there(files):
    """An endless run has endless orders: none may be drawn far ahead of its use."""
    drawn = []

    def orders() -> Iterator[torch.Tensor]:
        for epoch in range(1000):
            drawn.append(epoch)
            yield ORDER

    passes = StreamingBatches(files, CPU, num_workers=2).chain(orders(), 3)
    for _ in range(4):
        next(passes)
    assert len(drawn) < 10


@pytest.mark.parametrize(
    ("machine", "allowed", "processes", "expected"),
    [
        (96, 96, 8, 12),  # torchrun: all processes may use all CPUs
        (96, 12, 8, 12),  # srun --cpus-per-task=12 binds each process to its own
        (192, 96, 8, 12),  # half a machine, shared by all
        (64, 4, 1, 4),  # a container
        (2, 2, 8, 1),
    ],
)
def test_each_process_decodes_with_its_share_of_the_cpus(
    files, monkeypatch, machine, allowed, processes, expected
):
    monkeypatch.setattr(batches_module.os, "cpu_count", lambda: machine)
    monkeypatch.setattr(
        batches_module.os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False
    )
    for asked in (0, 1, 16):
        batches = open_batches(
            files, CPU, resident="no", num_workers=asked, local_processes=processes
        )
        assert batches.num_workers == min(asked, expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_every_process_of_a_job_ends_no_worker(files, number):
    """SLURM sends it to all. The training process saves, and needs its workers until then."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells who sent a signal")
    batches = StreamingBatches(files, CPU, num_workers=1)
    streamed = batches.iterate(ORDER.repeat(4), 2)
    next(streamed)
    (worker,) = batches._loader._iterator._workers
    subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
    assert len(list(streamed)) == 13
    assert worker.is_alive()
    worker.terminate()  # SIGTERM of its own parent
    worker.join(240)
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        # As where /dev/shm cannot be written to, and where a user has too many processes.
        (errno.EROFS, r"no room in /dev/shm .*Read-only .*--data.workers 0"),
        (errno.EAGAIN, r"cannot be started .*unavailable.*use fewer"),
        (errno.ENOMEM, r"cannot be started .*use fewer .*or a smaller batch"),
    ],
)
def test_workers_that_cannot_start_are_explained(files, monkeypatch, error, words):
    def start(loader: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(DataLoader, "__iter__", start)
    with pytest.raises(UserError, match=words):
        StreamingBatches(files, CPU, num_workers=1).iterate(ORDER, 2)


@pytest.mark.parametrize(
    ("said", "is_explained"),
    [
        ("unable to open shared memory object </torch_7_1> in read-write mode: Too many", True),
        ("unable to allocate shared memory(shm): No space left on device (28)", True),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory.",
            True,
        ),
        (
            "OutOfResources: out of resource: shared memory, Required: 147456",
            False,
        ),
    ],
)
def test_shared_memory_of_a_gpu_is_another(said, is_explained):
    words, code = explain_error(RuntimeError(said)) or ("", 0)
    assert ("no room in /dev/shm" in words) == is_explained
    assert (code == 2) == is_explained


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 7, 8) exited unexpectedly",
    ],
)
def test_a_worker_that_is_killed_is_explained(said, tmp_path):
    """As the system does where memory ran out; torch says so at any place of the program."""
    with (
        pytest.raises(UserError, match=r"has died .*--data.workers, .*then continue with"),
        explain_faults(load_recipe("digits"), tmp_path),
    ):
        raise RuntimeError(said)
