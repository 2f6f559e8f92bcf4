"""Tar shards and Parquet tables keep what a folder of files promises."""

import io
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import (
    Source,
    check_source,
    fingerprint,
    open_batches,
    open_source,
    typical_side,
)
from deepbregman.data.checking import check_data
from deepbregman.data.datasets import has_labels
from deepbregman.data.shards import TarStore, read_index
from deepbregman.data.stored import LABELS as LABEL_NAMES
from deepbregman.data.stored import (
    choose_splits,
    find_column,
    group_by_split,
    number_labels,
    read_splits,
)
from deepbregman.errors import UserError
from deepbregman.terminal import ignore_progress
from deepbregman.training import loop

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (24, 9, 9, 3), dtype=np.uint8)
LABELS = [index % 3 for index in range(24)]
DATE = [1, 20231105]


def encode(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(indices: Sequence[int], labelled: bool = True) -> dict[str, bytes]:
    """Of images in the layout of WebDataset; a long name needs a header of its own."""
    found = {}
    for index in indices:
        key = f"part/{'x' * 120}{index:04d}" if index % 5 == 0 else f"{index:04d}"
        found[f"{key}.png"] = encode(PIXELS[index])
        if labelled:
            found[f"{key}.cls"] = str(LABELS[index]).encode()
    return found


def write_shards(folder: Path, labelled: bool = True) -> Path:
    for shard in range(3):
        part = range(6 * shard, 6 * shard + 6)
        write_tar(folder / f"mine-train-{shard}.tar", samples(part, labelled))
    write_tar(folder / "mine-val-0.tar", samples(range(18, 24), labelled))
    return folder


def write_parquet(folder: Path, struct: bool = True) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pip install 'deepbregman[parquet]'")
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("train-0", range(10)),
        ("train-1", range(10, 18)),
        ("test-0", range(18, 24)),
    ):
        images: list[Any] = [encode(PIXELS[index]) for index in part]
        images = [{"bytes": image, "path": None} for image in images] if struct else images
        kind = None if struct else arrow.large_binary()
        labels = [LABELS[index] for index in part]
        table = arrow.table({"image": arrow.array(images, kind), "label": labels})
        if not struct:
            table = table.append_column("mask", arrow.array([b"bytes of another kind"] * len(part)))
        else:
            names = {"info": {"features": {"label": {"names": ["cat", "dog", "owl"]}}}}
            table = table.replace_schema_metadata({b"huggingface": json.dumps(names).encode()})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=4)
    return folder


@pytest.fixture(scope="module", params=["tar", "parquet"])
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("stored") / request.param
    return write_shards(place) if request.param == "tar" else write_parquet(place)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read_pixels(source: Source, order: Sequence[int], split: str = "train", **how: Any) -> Any:
    images = source.splits[split].images
    batches = open_batches(images, CPU, **how)
    found = [batch.images for batch in batches.iterate(torch.tensor(order), 4)]
    return torch.cat(found).permute(0, 2, 3, 1).numpy()


def test_images_labels_and_splits(folder):
    source = open_source(str(folder), image_size=32)
    assert (len(source.train), len(source.test)) == (18, 6)
    assert source.train.labels.tolist() == LABELS[:18]
    named = folder.name == "parquet"
    assert source.classes == (("cat", "dog", "owl") if named else ("0", "1", "2"))
    order = [17, 3, 0, 12, 5, 8]
    for how in ({"resident": "yes"}, {"resident": "no", "num_workers": 0}):
        assert (read_pixels(source, order, **how) == PIXELS[order]).all()
    assert (read_pixels(source, range(6), "test") == PIXELS[18:]).all()
    assert (has_labels(str(folder)), typical_side(str(folder))) == (True, 9)


def test_a_dataset_is_named_after_its_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert open_source(".", image_size=32).name == folder.name


def test_worker_processes_read_them(folder):
    source = open_source(str(folder), image_size=32)
    found = read_pixels(source, range(18), resident="no", num_workers=1)
    assert (found == PIXELS[:18]).all()


def test_every_image_is_checked(folder):
    report = check_data(str(folder), Path("data"), ignore_progress)
    assert report.problems == []
    assert dict(report.rows)["unreadable"] == "0"


def test_a_run_on_them_resumes_to_the_bit(folder, tmp_path, monkeypatch):
    small = {
        "data.source": str(folder),
        "data.image_size": 8,
        "data.holdout": 0.0,
        "data.resident": "no",
        "data.workers": 0,
        "training.batch_size": 8,
        "training.epochs": 2,
        "training.save_seconds": 0.0,
        "training.health_every": 0,
        "training.knn_every": 0,
        "training.tensorboard": False,
        "optimiser.warmup_epochs": 0.5,
    }
    config: Config = override(load_recipe("digits"), small)
    whole = pretrain(config, run=tmp_path / "whole")
    write = loop.Pretraining._write_epoch

    def write_and_stop(self: loop.Pretraining, record: Any, *rest: Any) -> None:
        write(self, record, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Pretraining, "_write_epoch", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config, run=tmp_path / "part")
    resumed = resume(tmp_path / "part")
    assert resumed.metrics()[-1]["total"] == whole.metrics()[-1]["total"]


def test_changed_images_have_another_fingerprint(tmp_path):
    one = open_source(str(write_shards(tmp_path / "a")), image_size=8).train.images
    same = open_source(str(write_shards(tmp_path / "b")), image_size=8).train.images
    assert fingerprint(one) == fingerprint(same)
    members = samples(range(6))
    members["0001.png"] = encode(255 - PIXELS[1])
    write_tar(tmp_path / "b" / "mine-train-0.tar", members)
    other = open_source(str(tmp_path / "b"), image_size=8).train.images
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("write", [write_shards, write_parquet])
def test_another_time_of_any_part_is_another_identity(tmp_path, write):
    """By which it is known whether the features of the images are still those that were kept."""
    store = open_source(str(write(tmp_path / "p")), image_size=8).train.images.paths.store
    before = store.identity()
    assert store.identity() == before
    os.utime(store.paths[-1], (1, 1))
    assert store.identity() != before


class TestTar:
    def test_one_file_without_labels(self, tmp_path):
        path = write_tar(tmp_path / "all.TAR", samples(range(6), labelled=False))
        source = open_source(str(path), image_size=8)
        assert source.train.labels is None
        assert source.test is None
        assert source.train.names[1] == "all.TAR/0001.png"

    def test_shards_of_one_name_in_two_folders(self, tmp_path):
        for name in ("train", "test"):
            (tmp_path / name).mkdir()
            write_tar(tmp_path / name / "0.tar", samples(range(1, 3)))
            (tmp_path / name / "._0.tar").write_bytes(b"as macOS adds beside each file")
        source = open_source(str(tmp_path), image_size=8)
        assert source.test is not None
        names = [f"{folder}/0.tar/000{i}.png" for folder in ("train", "test") for i in (1, 2)]
        assert [*source.train.names, *source.test.names] == names

    def test_a_sample_is_a_folder_and_a_name_up_to_the_first_dot(self, tmp_path):
        members = {"a/0.left.PNG": encode(PIXELS[0]), "a/0.CLS": b"2"}
        members |= {"a/._0.left.PNG": b"as macOS adds beside each file"}
        members |= {"b/0.cls": b"1", "b/0.png": encode(PIXELS[1])}
        index = read_index([write_tar(tmp_path / "all.tar", members)])
        assert index.names == ["all.tar/a/0.left.PNG", "all.tar/b/0.png"]
        assert index.labels == ["2", "1"]

    def test_classes_may_be_words_and_a_fifth_is_the_test_split(self, tmp_path):
        members = {}
        for index in range(20):
            members |= {
                f"{index}.png": encode(PIXELS[index]),
                f"{index}.cls": b"owl" if index % 2 else b"7\n",
            }
        source = open_source(str(write_tar(tmp_path / "all.tar", members)), image_size=8)
        assert source.classes == ("7", "owl")
        assert (len(source.train), len(source.test)) == (16, 4)

    def test_the_index_is_kept_and_read_again(self, tmp_path, monkeypatch):
        paths = [write_tar(tmp_path / f"{i}.tar", samples(range(6 * i, 6 * i + 6))) for i in (0, 1)]
        first = read_index(paths)
        monkeypatch.setattr(tarfile, "open", None)
        again = read_index(paths)
        assert again.names == first.names
        assert again.labels == first.labels
        assert (again.offsets == first.offsets).all()
        os.utime(paths[1], (1, 1))
        with pytest.raises(TypeError):  # another time: it is read anew
            read_index(paths)

    def test_names_that_are_no_text_are_kept_as_they_are(self, tmp_path):
        """Else a run on them would not resume: its images would seem to be others."""
        path = write_tar(tmp_path / "all.tar", {"caf\udce9.png": b"x", "a\nb.png": b"x"})
        names = ["all.tar/caf\udce9.png", "all.tar/a\nb.png"]
        assert read_index([path]).names == read_index([path]).names == names

    def test_a_store_survives_pickling_and_many_shards(self, tmp_path, monkeypatch):
        monkeypatch.setattr("deepbregman.data.shards._OPEN_FILES", 1)
        folder = write_shards(tmp_path / "shards")
        images = open_source(str(folder), image_size=8).train.images
        store = images.paths[0].store
        assert isinstance(store, TarStore)
        assert store.read(6)
        copy = pickle.loads(pickle.dumps(store))
        assert not copy._files  # those of this process mean nothing in another
        assert [copy.read(index) for index in (0, 17, 1)] == [
            encode(PIXELS[index]) for index in (0, 17, 1)
        ]
        assert len(copy._files) == 1  # a system lets a process open few
        assert images.shards.tolist() == [index // 6 for index in range(18)]
        chosen = images.select(torch.tensor([7, 1]))
        assert chosen.shards.tolist() == [1, 0]
        one = chosen.select(torch.tensor([0]))
        assert [place.read() for place in (one.paths[0], chosen.paths[:1][0])] == [
            encode(PIXELS[7])
        ] * 2

    @pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="of Linux")
    def test_each_piece_of_a_shard_is_asked_for_once_and_ahead(self, tmp_path, monkeypatch):
        monkeypatch.setattr("deepbregman.data.shards._READ_AHEAD", 4096)
        index = read_index([write_tar(tmp_path / "all.tar", samples(range(12)))])
        asked: list[tuple[int, int]] = []

        def refuse(handle: int, start: int, length: int, advice: int) -> None:
            assert advice == os.POSIX_FADV_WILLNEED
            asked.append((start, length))
            raise OSError("this disk takes no advice")

        monkeypatch.setattr(os, "posix_fadvise", refuse)
        store = TarStore([tmp_path / "all.tar"], index)
        for row, offset in enumerate(index.offsets.tolist()):
            assert store.read(row)
            assert any(start <= offset < start + length == start + 4096 for start, length in asked)
        assert len(set(asked)) == len(asked) < len(store)

    def test_what_is_no_file_is_no_image(self, tmp_path):
        path = write_tar(tmp_path / "all.tar", samples([1], labelled=False))
        with tarfile.open(path, "a") as archive:
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
                member = tarfile.TarInfo("other.png")
                member.type, member.linkname = kind, "0001.png"
                archive.addfile(member)
        assert read_index([path]).names == ["all.tar/0001.png"]

    def test_an_image_that_cannot_be_decoded(self, tmp_path):
        members = {**samples(range(4)), "bad.png": b"no image", "bad.cls": b"0"}
        path = str(write_tar(tmp_path / "all.tar", members))
        with pytest.raises(UserError, match=r"image 'all.tar/bad.png': cannot be read .*remove it"):
            open_source(path, image_size=8)
        source = open_source(path, image_size=8, skip_unreadable=True)
        assert source.skipped == ("all.tar/bad.png",)
        assert sum(map(len, source.splits.values())) == 4
        report = check_data(path, Path("data"), ignore_progress)
        assert list(report.unreadable) == ["all.tar/bad.png"]
        assert report.problems == []

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"\x1f\x8b and so on", "cannot be read .*uncompress it"),
            (b"not a tar file at all" * 100, "cannot be read"),
        ],
    )
    def test_what_is_no_shard(self, tmp_path, content, words):
        (tmp_path / "all.tar").write_bytes(content)
        with pytest.raises(UserError, match=words):
            open_source(str(tmp_path / "all.tar"), image_size=8)

    @pytest.mark.parametrize(
        ("members", "words"),
        [
            ({"a.txt": b"words"}, "no image in"),
            ({"a.png": b"x", "a.cls": b"1", "b.png": b"x"}, "1 of 2 images have no .cls"),
        ],
    )
    def test_what_is_wrong_in_a_shard(self, tmp_path, members, words):
        path = write_tar(tmp_path / "all.tar", members)
        with pytest.raises(UserError, match=words):
            open_source(str(path), image_size=8)

    def test_a_shard_that_is_cut_anywhere_is_refused(self, tmp_path):
        """Python's library takes most cuts for the end of the archive."""
        path = write_tar(tmp_path / "all.tar", samples(range(1, 4), labelled=False))
        index, content = read_index([path]), path.read_bytes()
        end = -(-int(index.offsets[-1] + index.sizes[-1]) // 512) * 512  # zeros follow
        for cut in range(0, end + 511, 100):
            path.write_bytes(content[:cut])
            with pytest.raises(UserError, match=r"cannot be read .*copy it again"):
                read_index([path])

    @pytest.mark.parametrize("size", [2**40, 2**64])
    @pytest.mark.parametrize("name", ["a.cls", "a.png"])
    def test_a_size_that_no_file_has_takes_no_memory(self, tmp_path, name, size):
        member = tarfile.TarInfo(name)
        member.size = size
        header = member.tobuf(tarfile.GNU_FORMAT)
        (tmp_path / "all.tar").write_bytes(header + bytes(3 * 512))
        with pytest.raises(UserError, match="cannot be read"):
            read_index([tmp_path / "all.tar"])

    def test_a_damaged_header_is_not_the_end(self, tmp_path):
        path = write_tar(tmp_path / "all.tar", samples(range(1, 4), labelled=False))
        content = bytearray(path.read_bytes())
        header = int(read_index([path]).offsets[1]) - 512
        content[header + 20] ^= 1
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"damaged at byte {header:,}, so that images are lost"):
            read_index([path])

    def test_images_behind_the_end_are_not_passed_over(self, tmp_path):
        """As where a block was lost, or two archives were joined."""
        path = write_tar(tmp_path / "all.tar", samples(range(1, 4), labelled=False))
        content, header = path.read_bytes(), int(read_index([path]).offsets[1]) - 512
        for joined in (content[:header] + bytes(512) + content[header + 512 :], content + content):
            path.write_bytes(joined)
            with pytest.raises(UserError, match=r"something follows its end at byte"):
                read_index([path])

    def test_a_damaged_index_in_the_cache_is_made_anew(self, tmp_path):
        shards = write_shards(tmp_path / "shards")
        names = open_source(str(shards), image_size=32).train.names
        cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert cached
        for path in cached:
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 1  # a checksum is then wrong
            path.write_bytes(content)
        assert open_source(str(shards), image_size=32).train.names == names

    def test_a_truncated_shard_is_told_when_it_is_read(self, tmp_path):
        path = write_tar(tmp_path / "all.tar", samples(range(3), labelled=False))
        index = read_index([path])
        os.truncate(path, int(index.offsets[-1]) + 5)
        with pytest.raises(OSError, match="the shard ends within it"):
            TarStore([path], index).read(2)
        path.unlink()
        with pytest.raises(UserError, match="cannot be read"):
            read_index([path])


class TestParquet:
    def test_a_process_that_has_loaded_no_part_of_pyarrow(self, tmp_path, monkeypatch):
        """As on the command line, where no other library has loaded pyarrow before."""
        folder = write_parquet(tmp_path / "p")
        monkeypatch.delitem(sys.modules, "pyarrow.compute", raising=False)
        monkeypatch.delattr(sys.modules["pyarrow"], "compute", raising=False)
        assert len(open_source(str(folder), image_size=9).train) == 18

    def test_an_empty_folder_of_that_name(self, tmp_path):
        (tmp_path / "e.parquet").mkdir()
        with pytest.raises(UserError, match="no image in it"):
            open_source(str(tmp_path / "e.parquet"), image_size=8)

    def test_images_are_named_by_their_rows_whatever_is_set_aside(self, tmp_path):
        """By these names labels come back, which are wanted in the table."""
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        table = arrow.table({"image": [*map(encode, PIXELS)], "label": LABELS})
        parquet.write_table(table, tmp_path / "all.parquet", row_group_size=5)
        source = open_source(str(tmp_path / "all.parquet"), image_size=9)
        assert len(source.test) == 5  # a fifth, rounded
        rows = {}
        for part in ("train", "test"):
            names = source.splits[part].names
            rows |= dict(zip(names, read_pixels(source, range(len(names)), part), strict=True))
        assert sorted(rows) == sorted(f"train[{row}]" for row in range(24))
        assert all((rows[f"train[{row}]"] == PIXELS[row]).all() for row in range(24))

    def test_plain_bytes(self, tmp_path):
        folder = write_parquet(tmp_path / "p.parquet", struct=False)  # as Spark names it
        source = open_source(str(folder), image_size=8)
        assert (read_pixels(source, range(18)) == PIXELS[:18]).all()
        assert source.classes == ("0", "1", "2")

    def test_tables_that_do_not_fit_into_memory(self, folder, monkeypatch):
        if folder.name != "parquet":
            pytest.skip("shards stay on the disk")
        taken = sum(path.stat().st_size for path in folder.iterdir())
        monkeypatch.setattr("deepbregman.data.parquet.find_free_memory", lambda: 2 * taken)
        assert len(open_source(str(folder), image_size=8).train) == 18
        process = SimpleNamespace(local_processes=2)  # each has the tables in its own memory
        monkeypatch.setattr("deepbregman.data.parquet.find_process", lambda: process)
        with pytest.raises(UserError, match=r"2 processes .* write tar shards, which stay on the"):
            open_source(str(folder), image_size=8)

    def test_what_is_refused(self, tmp_path):
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        def refuse(words: str, **columns: Any) -> None:
            parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
            with pytest.raises(UserError, match=words):
                open_source(str(tmp_path / "t.parquet"), image_size=8)

        refuse("0 columns may hold images .* of label", label=[1])
        refuse("2 columns may hold images", a=[b"x"], b=[b"y"])
        refuse("a label is None", image=[b"x", b"y"], label=[1, None])
        refuse("-1 is below 0: .* or all of them -1", image=[b"x", b"y"], label=[-1, 0])
        refuse("a label is nan", image=[b"x", b"y"], label=[float("nan"), 1.0])
        refuse(
            "a label is 20231105, of 2 images: .* renumber", image=[b"x"] * 2, label=[1, 20231105]
        )
        refuse(r"a label is \[1, 2\]: each image has one class", image=[b"x"], label=[[1, 2]])
        refuse(r"image 'train\[0\]': cannot be read .*the row has no bytes", image=[None, b"y"])
        refuse("no row in .*t.parquet", image=arrow.array([], arrow.binary()))
        parquet.write_table(arrow.table({"image": [bytes(4000)]}), tmp_path / "t.parquet")
        content = bytearray((tmp_path / "t.parquet").read_bytes())
        content[50:90] = b"?" * 40  # its end, which says where everything is, is whole
        for damaged in (content, b"PAR1 or not"):
            (tmp_path / "t.parquet").write_bytes(damaged)
            with pytest.raises(UserError, match="cannot be read"):
                open_source(str(tmp_path / "t.parquet"), image_size=8)

    def test_labels_of_a_part_of_the_images_are_refused(self, tmp_path):
        """Else they would go to the first images."""
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        table = arrow.table({"image": [*map(encode, PIXELS[:4])], "label": [0, 1, 0, 1]})
        parquet.write_table(table.select(["image"]), tmp_path / "train-0.parquet")
        parquet.write_table(table, tmp_path / "train-1.parquet")
        with pytest.raises(UserError, match="train: 4 labels for 8 images; give one to each"):
            open_source(str(tmp_path), image_size=8)

    def test_columns_are_known_by_their_names(self, tmp_path):
        """In capitals too; of several that may be labels, by the most usual name."""
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        columns = {"class": [0] * 24, "mask": [b"no image"] * 24, "Image": [*map(encode, PIXELS)]}
        parquet.write_table(arrow.table({**columns, "Label": LABELS}), tmp_path / "all.parquet")
        source = open_source(str(tmp_path), image_size=9)
        assert source.classes == ("0", "1", "2")
        assert read_pixels(source, [0]).shape == (1, 9, 9, 3)

    @pytest.mark.parametrize("holder", ["train-0", "train-1", "test-0"])
    @pytest.mark.parametrize(
        ("known", "classes"),
        [
            ('{"info": {"features": {"label": {"names": ["cat", "dog"]}}}}', ("cat", "dog")),
            ('{"info": {"features": {"label": {"names": [10, 20]}}}}', ("10", "20")),
            ('{"info": null}', ("0", "1")),
            ("no JSON", ("0", "1")),
        ],
    )
    def test_any_table_may_name_the_classes(self, tmp_path, holder, known, classes):
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        plain = arrow.table({"image": [*map(encode, PIXELS[:2])], "label": [0, 1]})
        for name in ("train-0", "train-1", "test-0"):
            about = {b"huggingface": known.encode()} if name == holder else None
            parquet.write_table(plain.replace_schema_metadata(about), tmp_path / f"{name}.parquet")
        assert open_source(str(tmp_path), image_size=9).classes == classes

    def test_folders_that_are_named_as_tables(self, tmp_path):
        """As Spark names them, one for each split."""
        write_parquet(tmp_path / "first")
        for split in ("train", "test"):
            (tmp_path / "all" / f"{split}.parquet").mkdir(parents=True)
            part = tmp_path / "first" / f"{split}-0.parquet"
            part.rename(tmp_path / "all" / f"{split}.parquet" / "part-0.parquet")
        source = open_source(str(tmp_path / "all"), image_size=9)
        assert (len(source.train), len(source.test)) == (10, 6)

    def test_rows_without_an_image_are_left_out_of_a_table_too_large_to_decode(
        self, tmp_path, monkeypatch
    ):
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 5)
        path = tmp_path / "t.parquet"
        rows = [None, *(encode(pixels) for pixels in PIXELS)]
        parquet.write_table(arrow.table({"image": rows}), path)
        images = open_source(str(path), image_size=9, skip_unreadable=True).train.images
        before = fingerprint(images)
        assert open_batches(images, CPU, skip_unreadable=True).skipped == {0}
        parquet.write_table(arrow.table({"image": [None, *rows[2:], rows[1]]}), path)
        changed = open_source(str(path), image_size=9, skip_unreadable=True).train.images
        assert fingerprint(changed) != before


def test_splits_by_the_words_in_names():
    folder = Path("/nowhere")
    files = [Path(name) for name in ("imagenet-train-000.tar", "imagenet-val-000.tar")]
    assert group_by_split(folder, files) == {"train": files[:1], "val": files[1:]}
    capitals = [Path("Train_0.tar"), Path("Validation_0.tar")]
    assert group_by_split(folder, capitals) == {"train": capitals[:1], "val": capitals[1:]}
    both = [*files, Path("imagenet-test-000.tar")]
    parts = {"train": files[:1], "val": files[1:], "test": both[2:]}
    assert group_by_split(folder, both) == parts
    with pytest.raises(UserError, match="names no split"):
        group_by_split(folder, [Path("train-0.tar"), Path("extra.tar")])
    with pytest.raises(UserError, match="no train"):
        group_by_split(folder, [Path("test-0.tar")])


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"train": [0, 1]}, {"train": ("train", [0, 1])}),
        ({"train": [0], "val": [1], "test": [2]}, {"train": ("train", [0]), "test": ("test", [2])}),
        ({"train": [0], "val": [1]}, {"train": ("train", [0]), "test": ("val", [1])}),
        # As the hub has ImageNet: the labels of the test split are kept from the public.
        (
            {"train": [0], "val": [1], "test": [-1, -1]},
            {"train": ("train", [0]), "test": ("val", [1])},
        ),
        ({"train": [0], "test": ["-1"]}, {"train": ("train", [0]), "test": ("test", None)}),
        ({"train": [-1], "val": None}, {"train": ("train", None), "test": ("val", None)}),
    ],
)
def test_the_test_split_is_one_with_labels(splits, expected):
    assert choose_splits(splits) == expected


def test_columns_are_found_in_any_case_and_as_they_are_written_first():
    assert find_column(LABEL_NAMES, ["image", "Label", "label"]) == "label"
    assert find_column(LABEL_NAMES, ["label", "Label"]) == "label"
    assert find_column(LABEL_NAMES, ["Image", "TARGET"]) == "TARGET"
    assert find_column(LABEL_NAMES, ["image"]) is None


def test_a_validation_split_is_read_only_where_it_may_be_used():
    parts: dict[str, list[str | int] | None] = {"train": [0], "val": [1], "test": [2]}
    for test, read in (([2], {"train", "test"}), (None, {*parts}), ([-1], {*parts})):
        known = {**parts, "test": test}
        assert read_splits(known, known.__getitem__, lambda labels: labels).keys() == read
    without = read_splits({"train", "val"}, parts.__getitem__, lambda labels: labels)
    assert without.keys() == {"train", "val"}


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_an_unlabelled_test_split_gives_way_to_a_labelled_validation_split(tmp_path, kind):
    for name, part in (("train", range(18)), ("val", range(18, 22)), ("test", range(22, 24))):
        labels = [-1 if name == "test" else LABELS[index] for index in part]
        if kind == "tar":
            members = {f"{index}.png": encode(PIXELS[index]) for index in part}
            members |= {f"{i}.cls": str(x).encode() for i, x in zip(part, labels, strict=True)}
            write_tar(tmp_path / f"{name}-0.tar", dict(sorted(members.items())))
        else:
            arrow = pytest.importorskip("pyarrow")
            import pyarrow.parquet as parquet

            images = [encode(PIXELS[index]) for index in part]
            table = arrow.table({"image": images, "label": labels})
            parquet.write_table(table, tmp_path / f"{name}-0.parquet")
    source = open_source(str(tmp_path), image_size=9)
    assert source.test.labels.tolist() == [LABELS[index] for index in range(18, 22)]
    assert read_pixels(source, [0], "test").tolist() == [PIXELS[18].tolist()]


def test_labels_by_number_and_by_word():
    numbers, classes = number_labels({"train": [2, 0], "test": None})
    first, second = numbers.values()
    assert (first.tolist(), second, classes) == ([2, 0], None, ("0", "1", "2"))
    assert number_labels({"train": [2, 0]}, ["a", "b"])[1] == ("0", "1", "2")  # too few names
    names = [f"n{number}" for number in range(21841)]
    assert number_labels({"train": [20000]}, names)[1] == tuple(names)  # a sample of many classes
    with pytest.raises(UserError, match="a label is 20000, of 1 image: "):
        number_labels({"train": [20000]})
    numbers, classes = number_labels({"train": ["b", "a"], "test": ["b"]})
    first, second = numbers.values()
    assert classes == ("a", "b")
    assert (first.tolist(), second.tolist()) == ([1, 0], [1])
    assert number_labels({"train": [0, 1], "test": ["a"]})[1] == ("0", "1", "a")


def test_a_folder_of_images_beside_an_archive_is_a_folder(tmp_path):
    write_tar(tmp_path / "old.tar", samples(range(2)))
    for index in range(3):
        Image.fromarray(PIXELS[index]).save(tmp_path / f"{index}.png")
    source = open_source(str(tmp_path), image_size=8)
    assert len(source.train) == 3
    assert source.ignored == {".tar": 1}


@pytest.mark.parametrize("name", ["none.tar", "none.parquet"])
def test_a_file_that_is_not_there(name):
    with pytest.raises(UserError, match=r"no such file; .* the folder of all of them"):
        check_source(name)
