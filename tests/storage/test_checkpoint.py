"""Checkpoints: the same bits on any number of ranks; an interrupted save leaves the last checkpoint intact."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fdp import tree
from fdp.storage import checkpoint
from fdp.storage.checkpoint import (
    finish_save,
    latest,
    list_published,
    load,
    make_group,
    save,
    set_aside,
    start_save,
    verify,
)
from fdp.storage.checkpoint_record import Damaged
from fdp.storage.safetensors import export_safetensors, import_safetensors
from fdp.types import FdpError, TrainState
from tests.faults import CORRUPTIONS, rewrite
from tests.ranks import run_on_ranks

META = {"key": [1, 2**31], "history": {"steps": 10, "epsilon": 1.5}, "config": {"model": "gpt-nano", "clip": None}}


class Moments(NamedTuple):
    """Optimizer state in its usual form: NamedTuples in tuples."""

    count: Tensor
    first: Any


# path: (shape, dtype, which dim the axes tensor and shard cut). 13, 5 and 1 rows: uneven, and some ranks hold none.
LEAVES: dict[str, tuple[tuple[int, ...], torch.dtype, int | None, int | None]] = {
    "embed": ((13, 4), torch.float32, None, 0),
    "wide": ((6, 7), torch.float32, 1, 0),
    "down": ((4, 9), torch.bfloat16, None, 1),
    "twice": ((5, 3), torch.float32, 0, 0),
    "one": ((1, 3), torch.float64, None, 0),
    "whole": ((3,), torch.float32, None, None),
    "scalar": ((), torch.float32, None, None),
    "none": ((0, 4), torch.float32, None, 0),
}


def values(name: str, step: int) -> Tensor:
    shape, dtype, *_ = LEAVES[name]
    draw = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
    return torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype)


def state_of(step: int, mesh: DeviceMesh | None = None, *, scale: float = 1.0) -> TrainState:
    """Every kind of leaf in every field, whole without a mesh; ``scale`` makes another of the same kind."""

    def leaf(name: str, moment: int) -> Tensor:
        whole = values(name, step + moment) * scale
        if mesh is None:
            return whole
        cuts = LEAVES[name][2:]
        wanted: dict[str, Placement] = {
            axis: Replicate() if dim is None else Shard(dim) for axis, dim in zip(("tensor", "shard"), cuts)
        }
        placements = [wanted.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
        sizes, starts = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        part = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes))].clone()
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    tensors = {"blocks": [{name: leaf(name, 0) for name in LEAVES}]}
    moments = {"blocks": [{name: leaf(name, 1) for name in LEAVES}]}
    count = torch.tensor(step, dtype=torch.int64)
    return TrainState(tensors, (Moments(count.clone(), moments), (), None), torch.tensor(0.5), count)


def mesh_of(axes: dict[str, int] | None) -> DeviceMesh | None:
    return axes and init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))  # type: ignore[return-value]


def assert_same(got: TrainState, expected: TrainState) -> None:
    """Check for the same structure, placements and bits, shard by shard."""
    left, right = tree.flatten(got), tree.flatten(expected)
    assert list(left) == list(right)
    for path in left:
        a, b = left[path], right[path]
        assert type(a) is type(b), path
        assert a.shape == b.shape, path
        assert a.dtype == b.dtype, path
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            assert a.placements == b.placements, path
            a, b = a.to_local(), b.to_local()
        assert torch.equal(a, b), path


def failure(act: Callable[[], Any]) -> str:
    with pytest.raises(FdpError) as caught:
        act()
    return str(caught.value)


def contents(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


# ---------------------------------------------------------------------------------------------------- one process


def test_one_process_reads_back_what_it_wrote(tmp_path):
    path = save(tmp_path / "run", state_of(10), meta=META, keep=2)
    assert path == tmp_path / "run" / "step-00000010" == latest(tmp_path / "run")
    like = state_of(3, scale=0)
    got = load(path, like)
    assert_same(got, state_of(10))
    assert_same(like, state_of(3, scale=0))
    assert verify(path).meta == META


def test_nobody_else_can_read_a_checkpoint(tmp_path):
    before = os.umask(0)
    try:
        path = save(tmp_path / "run", state_of(10), meta=META, keep=2)
    finally:
        os.umask(before)
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in [tmp_path / "run", path, *path.iterdir()]}
    assert len(modes) == 5
    assert all(mode == (0o700 if entry.is_dir() else 0o600) for entry, mode in modes.items()), modes


def test_the_state_may_be_overwritten_as_soon_as_a_save_has_started(tmp_path, monkeypatch):
    gate, write = threading.Event(), FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *args: gate.wait(10) and write(*args))
    group, state, meta = make_group(), state_of(10), {"history": [1]}
    saving = start_save(tmp_path, state, meta=meta, keep=2, group=group)
    tree.map(lambda leaf: leaf.zero_(), state)
    meta["history"].append(2)
    later = start_save(tmp_path, state_of(20), meta=meta, keep=2, group=group)
    assert latest(tmp_path) is None
    gate.set()
    assert finish_save(saving).name == "step-00000010"
    assert finish_save(later).name == "step-00000020"
    assert_same(load(tmp_path / "step-00000010", state_of(0)), state_of(10))
    assert_same(load(tmp_path / "step-00000020", state_of(0)), state_of(20))
    assert verify(tmp_path / "step-00000010").meta == {"history": [1]}


def test_a_failed_background_save_raises_in_finish_save(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path, state_of(5), meta=META, keep=2)
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    saving = start_save(tmp_path, state_of(10), meta=META, keep=2, group=make_group())
    assert "No space left" in failure(lambda: finish_save(saving))
    assert contents(tmp_path) == ["step-00000005"]


def test_older_checkpoints_are_deleted_after_the_new_one_is_published(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000099").mkdir()  # no record in it: foreign
    for step in (1, 2, 3, 10, 100):
        save(tmp_path, state_of(step), meta=META, keep=2)
        if step == 3:
            shutil.rmtree(tmp_path / "step-00000099")
    assert contents(tmp_path) == ["notes", "step-00000010", "step-00000100"]
    assert latest(tmp_path) == tmp_path / "step-00000100"
    monkeypatch.setattr(checkpoint, "sync_folder", lambda folder: (_ for _ in ()).throw(OSError("disk gone")))
    assert "disk gone" in failure(lambda: save(tmp_path, state_of(101), meta=META, keep=1))
    assert {"step-00000010", "step-00000100"} < set(contents(tmp_path))


def test_nothing_is_overwritten(tmp_path):
    save(tmp_path, state_of(10), meta=META, keep=2)
    for step in (10, 9):
        assert "got step 10" in failure(lambda step=step: save(tmp_path, state_of(step), meta={}, keep=2))
    (tmp_path / "step-00000020").mkdir()
    assert "got step 20" in failure(lambda: save(tmp_path, state_of(20), meta={}, keep=2))
    assert verify(tmp_path / "step-00000010").meta == META


def test_wrong_arguments_are_refused(tmp_path):
    assert "at least 1, got 0" in failure(lambda: save(tmp_path, state_of(1), meta={}, keep=0))
    assert "JSON" in failure(lambda: save(tmp_path, state_of(1), meta={"key": torch.zeros(2)}, keep=1))
    assert "JSON" in failure(lambda: save(tmp_path, state_of(1), meta={"epsilon": float("nan")}, keep=1))
    message = failure(lambda: save(tmp_path, state_of(1)._replace(clip={"norm": 0.5}), meta={}, keep=1))
    assert message.startswith("clip.norm: expected a tensor, got a float")
    assert latest(tmp_path / "nowhere") is None
    assert contents(tmp_path) == []


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    path = save(tmp_path, state_of(10), meta=META, keep=2)
    fits = state_of(0, scale=0)

    def refused(params: dict[str, Tensor]) -> str:
        return failure(lambda: load(path, fits._replace(params={"blocks": [params]})))

    block = fits.params["blocks"][0]
    less = {name: leaf for name, leaf in block.items() if name != "wide"}
    assert "params.blocks.0.wide: expected no such leaf, got float32 of shape (6, 7)" in refused(less)
    more = {**block, "bias": torch.zeros(2)}
    assert "params.blocks.0.bias: expected float32 of shape (2,), got no such leaf" in refused(more)
    other = {**block, "embed": torch.zeros(12, 4)}
    assert "params.blocks.0.embed: expected float32 of shape (12, 4), got float32 of shape (13, 4)" in refused(other)
    other = {**block, "embed": torch.zeros(13, 4, dtype=torch.bfloat16)}
    assert "params.blocks.0.embed: expected bfloat16 of shape (13, 4), got float32" in refused(other)
    assert "and 4 more" in refused({})
    assert_same(fits, state_of(0, scale=0))
    assert_same(load(path, fits), state_of(10))


def edit(path: Path, **fields: Any) -> None:
    """Change the record and its digest, as someone who knows the format could."""
    rewrite(path, lambda record: record.update(fields))


def test_truncated_or_foreign_files_are_refused(tmp_path):
    good = save(tmp_path / "good", state_of(10), meta=META, keep=2)
    like = state_of(0, scale=0)

    def refused(spoil: Callable[[Path], Any]) -> str:
        path = tmp_path / "bad"
        shutil.copytree(good, path)
        spoil(path)
        message = failure(lambda: load(path, like))
        shutil.rmtree(path)
        return message

    data = (good / "__0_0.distcp").read_bytes()
    assert f"__0_0.distcp: expected {len(data)} bytes, got 100" in refused(
        lambda path: (path / "__0_0.distcp").write_bytes(data[:100])
    )
    assert "got no file" in refused(lambda path: (path / "__0_0.distcp").unlink())
    assert "__0_0.distcp: is not what was saved, by its SHA-256" in refused(
        lambda path: (path / "__0_0.distcp").write_bytes(bytes(len(data)))
    )
    assert "found no complete.json" in refused(lambda path: (path / "complete.json").unlink())
    assert "could not read" in refused(lambda path: (path / "complete.json").write_text('{"format": "fdp'))
    assert "is not a record of fdp" in refused(lambda path: (path / "complete.json").write_text("[]"))
    assert "is not a record of fdp" in refused(lambda path: edit(path, format="other"))
    assert "lacks ['counters', 'files'" in refused(
        lambda path: (path / "complete.json").write_text('{"format": "fdp-checkpoint", "version": 2}')
    )
    assert "version 2, got version 3" in refused(lambda path: edit(path, version=3))
    assert "found no complete.json" in failure(lambda: load(tmp_path / "nowhere", like))
    # A record and an index that do not belong together.
    leaves = json.loads((good / "complete.json").read_text())["leaves"]
    like = like._replace(clip=torch.zeros(2))
    leaves["clip"]["shape"] = [2]
    assert "clip: expected float32 of shape (2,), got float32 of shape ()" in refused(lambda p: edit(p, leaves=leaves))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "complete.json"])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_changed_file_is_refused_before_any_value_is_used(name, corruption, tmp_path):
    like, chance = state_of(0, scale=0), random.Random(0)
    good = save(tmp_path, state_of(10), meta=META, keep=2)
    kept = (good / name).read_bytes()
    for _ in range(6):
        CORRUPTIONS[corruption](good / name, chance)
        with pytest.raises(Damaged):
            load(good, like)
        (good / name).write_bytes(kept)
    assert_same(load(good, like), state_of(10))


def test_a_state_under_the_name_of_another_step_is_refused(tmp_path):
    good = save(tmp_path, state_of(10), meta=META, keep=2)
    other = good.rename(good.with_name("step-00000004"))
    with pytest.raises(Damaged, match="holds the state after step 10, under the name of another"):
        load(other, state_of(0))


def test_a_counter_that_disagrees_with_its_leaf_is_refused(tmp_path):
    good = save(tmp_path, state_of(10), meta=META, keep=2)
    counters = json.loads((good / "complete.json").read_text())["counters"]
    assert counters["step"] == 10
    edit(good, counters=counters | {"step": 4})
    with pytest.raises(Damaged, match=r"step: 4 by its complete.json, 10 by its leaf"):
        load(good, state_of(0))


def test_digests_are_computed_from_memory_not_from_disk(tmp_path):
    good = save(tmp_path, state_of(10), meta=META, keep=2)
    files = json.loads((good / "complete.json").read_text())["files"]
    assert {path.name for path in good.iterdir()} == {*files, "complete.json"}
    for name, entry in files.items():
        data = (good / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_damaged_checkpoint_is_set_aside_and_not_listed(tmp_path):
    save(tmp_path, state_of(10), meta=META, keep=2)
    newest = save(tmp_path, state_of(12), meta=META, keep=2)
    assert [path.name for path in list_published(tmp_path)] == ["step-00000012", "step-00000010"]
    aside = set_aside(newest)
    assert aside.name == "step-00000012.damaged"
    assert latest(tmp_path) == tmp_path / "step-00000010"
    save(tmp_path, state_of(12), meta=META, keep=2)  # its name is free again
    assert set_aside(tmp_path / "step-00000012").name == "step-00000012.damaged-1"


def test_a_full_disk_is_reported_as_such(tmp_path, monkeypatch):
    def full(self: Any, data: Any) -> int:
        self._files.refused = OSError(28, "No space left on device")
        raise self._files.refused

    monkeypatch.setattr("fdp.storage.dcp._HashingFile.write", full)
    message = failure(lambda: save(tmp_path, state_of(10), meta=META, keep=2))
    assert "could not be written" in message
    assert "No space left on device" in message
    assert "MiB free" in message
    assert "unexpected pos" not in message
    assert latest(tmp_path) is None


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def reference(module: str, name: str) -> bytes:
    """A pickle that calls ``module.name("owned")``."""
    words = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    return (
        pickle.PROTO + b"\x04" + words + pickle.STACK_GLOBAL + b"\x8c\x05owned" + pickle.TUPLE1 + pickle.REDUCE + b"."
    )


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (pickle.dumps(Attack()), "a reference to posix.mkdir"),
        (reference("os", "mkdir"), "a reference to os.mkdir"),
        (reference("torch", "load"), "a reference to torch.load"),
        (reference("torch", "os.mkdir"), "a reference to torch.os.mkdir"),
        (reference("torch.distributed.checkpoint.metadata", "field"), "metadata.field"),
        (pickle.dumps({"step": 1}), "has no attribute"),
        (b"", "Ran out of input"),
    ],
    ids=range(7),
)
def test_an_index_cannot_run_anything(tmp_path, monkeypatch, pickled, words):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "run", state_of(10), meta=META, keep=2)
    (path / ".metadata").write_bytes(pickled)
    edit(path, files={})
    message = failure(lambda: load(path, state_of(0)))
    assert ".metadata: expected an index of parts" in message
    assert words in message
    assert not (tmp_path / "owned").exists()


# ------------------------------------------------------------------------------------------------------ killed


def die_after_data(root: Path) -> None:
    """Killed when all data files are written and nothing is published."""
    checkpoint.__dict__["_publish"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(root, state_of(20), meta=META, keep=1)


def die_half_way(root: Path) -> None:
    """Killed in the middle of a data file."""
    write = torch.save

    def half(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        half.left -= 1  # type: ignore[attr-defined]
        if not half.left:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    half.left = 5  # type: ignore[attr-defined]
    torch.save = half
    save(root, state_of(20), meta=META, keep=1)


def die_at_the_rename(root: Path) -> None:
    """Killed when everything is written, the record too, just before it is published."""
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = die  # type: ignore[assignment]
    save(root, state_of(20), meta=META, keep=1)


def die_while_deleting(root: Path) -> None:
    """Killed when the new one is published and the old one half deleted."""

    def half(path: Path, **_: Any) -> None:
        next(path.glob("*.distcp")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = half  # type: ignore[assignment]
    save(root, state_of(20), meta=META, keep=1)


DEATHS = (die_after_data, die_half_way, die_at_the_rename, die_while_deleting)


def one_rank_dies(root: Path, rank: int) -> None:
    """Killed when its own data is written, before the other rank has heard of it."""
    dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=2)
    write = FileSystemWriter.write_data

    def die(*args: Any) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.write_data = die if rank == 1 else write  # type: ignore[assignment]
    save(root, state_of(20, mesh_of({"shard": 2})), meta=META, keep=1)


def killed(_: int, root: Path) -> None:
    """Each in a process of its own, forked from this one, which has imported everything."""
    for die in DEATHS:
        assert os.waitpid(fork(die, root / die.__name__), 0)[1] == signal.SIGKILL, die.__name__
    ranks = [fork(one_rank_dies, root / "one_rank_dies", rank) for rank in range(2)]
    survivor, victim = (os.waitpid(rank, 0)[1] for rank in ranks)
    assert victim == signal.SIGKILL
    assert os.waitstatus_to_exitcode(survivor) == 1, "it must neither succeed nor wait"


def fork(act: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            act(*args)
        except RuntimeError:  # gloo: the connection was closed by the peer
            os._exit(1)
        os._exit(0)
    return child


@pytest.mark.long
@pytest.mark.ranks
def test_a_process_killed_in_the_middle_of_a_save_leaves_the_last_good_one(tmp_path):
    for die in (*DEATHS, one_rank_dies):
        save(tmp_path / die.__name__, state_of(10), meta=META, keep=1)
    mp.spawn(killed, args=(tmp_path,), nprocs=1)
    for die in (*DEATHS, one_rank_dies):
        root, good = tmp_path / die.__name__, 20 if die is die_while_deleting else 10
        left = [name for name in contents(root) if name.startswith(".")]
        assert len(left) == 1, "killed too early or too late to mean anything"
        assert latest(root) == root / f"step-{good:08d}"
        assert_same(load(root / f"step-{good:08d}", state_of(0)), state_of(good))
        save(root, state_of(30), meta=META, keep=1)
        assert contents(root) == ["step-00000030"]
        assert_same(load(root / "step-00000030", state_of(0)), state_of(30))


# -------------------------------------------------------------------------------------------------- several ranks


def save_everywhere(root: Path) -> list[str]:
    """On four ranks: every mesh, in the foreground and in the background; then what must fail."""
    for number, axes in enumerate(({"shard": 4}, {"replicate": 2, "shard": 2}, {"tensor": 2, "shard": 2})):
        mesh = mesh_of(axes)
        save(root / f"{number}", state_of(10, mesh), meta=META, keep=2)
        assert_same(load(root / f"{number}" / "step-00000010", state_of(0, mesh, scale=0)), state_of(10, mesh))
        export_safetensors(state_of(10, mesh).params, root / f"{number}.safetensors")

    mesh, group = mesh_of({"replicate": 1, "tensor": 2, "shard": 2}), make_group()
    state = state_of(10, mesh)
    saving = start_save(root / "3", state, meta=META, keep=2, group=group)
    tree.map(lambda leaf: leaf.zero_() if not isinstance(leaf, DTensor) else leaf.to_local().zero_(), state)
    for _ in range(20):  # the training's own collectives, at the same time, over the group of all ranks
        dist.all_reduce(torch.ones(1))
    finish_save(saving)
    export_safetensors(state_of(10, mesh).params, root / "3.safetensors", group=group.ranks)

    rank, write, said = dist.get_rank(), FileSystemWriter.write_data, []

    def late(*args: Any) -> Any:
        time.sleep(0.3)
        said.append(str(latest(root / "late")))
        return write(*args)

    def broken(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    FileSystemWriter.write_data = late if rank == 2 else write  # type: ignore[assignment]
    save(root / "late", state_of(10, mesh), meta=META, keep=2)
    assert said == (["None"] if rank == 2 else [])
    FileSystemWriter.write_data = broken if rank == 2 else write  # type: ignore[assignment]
    said = [failure(lambda: save(root / "late", state_of(20, mesh), meta=META, keep=2))]
    FileSystemWriter.write_data = write
    assert contents(root / "late") == ["step-00000010"]

    # One rank alone is wrong: every rank must raise, and none may hang.
    like = state_of(0, mesh, scale=0)
    if rank == 1:
        like = like._replace(clip=torch.zeros(2))
    said.append(failure(lambda: load(root / "late" / "step-00000010", like)))
    if rank == 0:
        (root / "late" / "step-00000010" / "__3_0.distcp").write_bytes(b"short")
    dist.barrier()
    said.append(failure(lambda: load(root / "late" / "step-00000010", state_of(0, mesh))))
    said.append(failure(lambda: export_safetensors(like.params, root / "0.safetensors")))
    params = {"blocks": [{**like.params["blocks"][0], "whole": torch.zeros(4)}]} if rank == 3 else like.params
    said.append(failure(lambda: import_safetensors(root / "0.safetensors", params)))
    said.append(failure(lambda: export_safetensors(like.params, root / "nowhere" / "model.safetensors")))
    return said


def load_everywhere(root: Path, meshes: list[dict[str, int]]) -> None:
    for axes in meshes:
        mesh = mesh_of(axes)
        expected, like = state_of(10, mesh), state_of(0, mesh, scale=0)
        for number in range(4):
            path = latest(root / f"{number}")
            assert path is not None
            assert_same(load(path, like), expected)
            assert_imported(import_safetensors(root / f"{number}.safetensors", like.params), expected)
    export_safetensors(state_of(10, mesh_of(meshes[0])).params, root / "two.safetensors")


def assert_imported(params: Any, expected: TrainState) -> None:
    for path, leaf in tree.flatten(expected.params).items():
        got = tree.flatten(params)[path]
        part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        assert torch.equal(got.to_local() if isinstance(got, DTensor) else got, part.float().to(part.dtype)), path
        assert got.dtype == leaf.dtype, path


@pytest.mark.long
@pytest.mark.ranks
def test_a_checkpoint_of_four_ranks_loads_on_two_and_on_one(tmp_path):
    for rank, (full, unfit, short, exists, shape, folder) in enumerate(run_on_ranks(save_everywhere, 4, tmp_path)):
        assert "No space left on device" in full, rank
        assert "rank 2" in full, rank
        assert "clip: expected float32 of shape (2,), got float32 of shape ()" in unfit, rank
        assert "__3_0.distcp" in short, rank
        assert "expected no file of this name" in exists, rank
        assert "whole: expected shape (4,), got (3,)" in shape, rank
        assert "No such file" in folder, rank
    run_on_ranks(load_everywhere, 2, tmp_path, [{"shard": 2}, {"replicate": 2, "shard": 1}, {"tensor": 2, "shard": 1}])
    read_alone(tmp_path)


def read_alone(root: Path) -> None:
    expected = state_of(10)
    for number in range(4):
        path = latest(root / f"{number}")
        assert path is not None
        assert_same(load(path, state_of(0, scale=0)), expected)
        assert verify(path).meta == META
    for name in ("0", "1", "2", "3", "two"):
        flat = load_file(root / f"{name}.safetensors")
        assert sorted(flat) == sorted(tree.flatten(expected.params))
        for path, leaf in tree.flatten(expected.params).items():
            assert flat[path].dtype == torch.float32
            assert torch.equal(flat[path], leaf.float()), path


# ---------------------------------------------------------------------------------------------------- safetensors


def test_safetensors_round_trip_and_are_readable_by_the_library(tmp_path):
    file, params = tmp_path / "model.safetensors", state_of(10).params
    export_safetensors(params, file)
    flat = load_file(file)
    for path, leaf in tree.flatten(params).items():
        assert torch.equal(flat[path], leaf.float()), path
    assert_imported(import_safetensors(file, state_of(0).params), state_of(10))
    assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 8 == 0
    assert "expected no file of this name" in failure(lambda: export_safetensors(params, file))
    assert contents(tmp_path) == ["model.safetensors"]


def test_an_imported_leaf_does_not_change_with_the_file(tmp_path):
    file = tmp_path / "model.safetensors"
    export_safetensors({"w": torch.ones(4)}, file)
    got = import_safetensors(file, {"w": torch.zeros(4)})
    with file.open("r+b") as values:
        values.seek(-16, os.SEEK_END)
        values.write(bytes(16))
    assert torch.equal(got["w"], torch.ones(4))


def test_a_disk_that_is_full_leaves_no_safetensors(tmp_path, monkeypatch):
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "ab":
            raise OSError(28, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    assert "No space" in failure(lambda: export_safetensors(state_of(1).params, tmp_path / "model.safetensors"))
    assert contents(tmp_path) == []


def test_safetensors_that_do_not_fit_are_refused(tmp_path):
    file, like = tmp_path / "model.safetensors", {"w": torch.zeros(2, 3)}
    assert "expected a complete safetensors file" in failure(lambda: import_safetensors(file, like))
    for flat, words in (
        ({"v": torch.zeros(2, 3)}, "expected leaves ['w']"),
        ({"w": torch.zeros(2, 3), "v": torch.zeros(1)}, "got also ['v']"),
        ({"w": torch.zeros(3, 2)}, "w: expected shape (2, 3), got (3, 2)"),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, "got I32"),
    ):
        save_file(flat, file)
        assert words in failure(lambda: import_safetensors(file, like))
    save_file(like, file)
    file.write_bytes(file.read_bytes()[:-1])
    assert "expected a complete safetensors file" in failure(lambda: import_safetensors(file, like))
