"""The verb data as a user meets it: list, check and prepare, and what each says when it cannot."""

import dataclasses
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from PIL import ExifTags, Image

from deepbregman.commands.data import prepare
from deepbregman.data import open_source
from deepbregman.data.datasets import DATASETS

from ..conftest import Command


@pytest.fixture
def command(command, monkeypatch, tmp_path) -> Command:
    """``deepbregman data ...`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: command("data", *words)


def _save(path: Path, height: int = 6, width: int = 6, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


def _expect(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    """Let a published dataset be as small as the test's."""
    monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], **changes))


@pytest.fixture
def imagenet(tmp_path, monkeypatch) -> Path:
    """A root with three classes of ImageNet, as many as are expected of it."""
    for number, wnid in enumerate(("n01440764", "n01443537", "n01484850")):
        for i in range(4):
            _save(tmp_path / "root" / "imagenet" / "train" / wnid / f"{i}.JPEG", 20, 30 + number)
        _save(tmp_path / "root" / "imagenet" / "val" / wnid / "0.JPEG", 25, 20)
    _expect(
        monkeypatch, "imagenet", num_classes=3, counts={"train": (12,), "test": (3,)}, image_size=8
    )
    return tmp_path / "root"


@pytest.fixture
def cifar10(tmp_path, monkeypatch) -> Path:
    """A root with CIFAR-10 in its real layout, of four and two images."""
    from torchvision.datasets import CIFAR10

    folder, random = tmp_path / "root" / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir(parents=True)

    def write(name: str, record: dict[str, object]) -> list[str]:
        content = pickle.dumps(record)
        (folder / name).write_bytes(content)
        return [name, hashlib.md5(content).hexdigest()]

    listed = [
        write(f"b{i}", {"data": random.integers(0, 256, (2, 3072), np.uint8), "labels": [i, 9]})
        for i in range(3)
    ]
    meta = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", listed[:2])
    monkeypatch.setattr(CIFAR10, "test_list", listed[2:])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": meta[1]})
    _expect(monkeypatch, "cifar10", counts={"train": (4,), "test": (2,)})
    return tmp_path / "root"


class TestList:
    def test_every_dataset_with_its_published_counts(self, output):
        out = output("list")
        lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
        assert lines["cifar10"][:3] == ["50,000", "10,000", "10"]
        assert lines["cifar100"][:3] == ["50,000", "10,000", "100"]
        assert lines["stl10"][:4] == ["5,000", "8,000", "100,000", "10"]
        assert lines["tiny-imagenet"][:3] == ["100,000", "10,000", "200"]
        assert lines["imagenet"][:3] == ["1,281,167", "50,000", "1,000"]
        assert lines["isic2018"][:3] == ["10,015", "1,512", "7"]
        assert lines["voc"][:3] == ["16,551", "4,952", "20"]
        answers = {name: lines[name][-1] for name in DATASETS}
        assert [name for name, answer in answers.items() if answer == "no"] == [
            "tiny-imagenet",
            "imagenet",
            "isic2018",
        ]

    def test_the_overview_and_wrong_words(self, output, refusal):
        out = output()
        assert all(verb in out for verb in ("list", "check", "prepare"))
        err = refusal("chek")
        assert "did you mean 'check'?" in err
        for verb in ("list", "check", "prepare"):
            out = output(verb, "--help")
            assert f"usage: deepbregman data {verb}" in out


class TestCheck:
    def test_complete_class_folders(self, output, imagenet):
        out = output("check", "imagenet", "--root", imagenet)
        assert "imagenet: complete" in out
        out = output("check", "imagenet", "--root", imagenet / "imagenet")

    def test_wrong_counts_say_how_many_and_where_to_get_it(self, command, imagenet):
        (imagenet / "imagenet" / "train" / "n01443537" / "2.JPEG").unlink()
        shutil.rmtree(imagenet / "imagenet" / "val")
        code, out, err = command("check", "imagenet", "--root", imagenet)
        assert code == 2
        assert "11 of 12" in out
        for part in ("11 images instead of 12", "test: 0 images", "image-net.org", "<wnid>"):
            assert part in err
        assert "download it" not in err  # nobody can

    @pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
    def test_nothing_there(self, refusal, name, tmp_path):
        err = refusal("check", name, "--root", tmp_path / "none")
        assert f"{name} is not complete" in err
        assert "http" in err
        assert ("data prepare" in err) == DATASETS[name].downloadable
        assert list(tmp_path.iterdir()) == []

    def test_digits_need_nothing(self, output):
        output("check", "digits")

    def test_files_of_cifar_by_their_checksums(self, command, output, cifar10):
        out = output("check", "cifar10", "--root", cifar10)
        assert out.count("checksum right") == 4
        path = cifar10 / "cifar-10-batches-py" / "b1"
        path.write_bytes(path.read_bytes()[:-1])
        (cifar10 / "cifar-10-batches-py" / "b2").unlink()
        code, out, err = command("check", "cifar10", "--root", cifar10)
        assert code == 2
        assert "b1' is damaged" in err
        assert "b2' is not there" in err
        assert out.count("checksum right") == 2

    def test_an_archive_beside_it_is_verified(self, output, refusal, imagenet, monkeypatch):
        (imagenet / "train.tar").write_bytes(b"all of it")
        md5 = hashlib.md5(b"all of it").hexdigest()
        _expect(monkeypatch, "imagenet", archives={"train.tar": md5, "val.tar": "0"})
        out = output("check", "imagenet", "--root", imagenet)
        assert "checksum right" in out
        (imagenet / "train.tar").write_bytes(b"some of it")
        err = refusal("check", "imagenet", "--root", imagenet)
        assert "train.tar' is damaged" in err

    def test_pascal_voc(self, output, refusal, tmp_path, monkeypatch):
        folder = tmp_path / "VOCdevkit" / "VOC2007"
        (folder / "ImageSets" / "Main").mkdir(parents=True)
        (folder / "ImageSets" / "Main" / "trainval.txt").write_text("000005\n000007\n")
        (folder / "Annotations").mkdir()
        for name in ("000005", "000007"):
            _save(folder / "JPEGImages" / f"{name}.jpg")
            (folder / "Annotations" / f"{name}.xml").write_text("<annotation/>")
        _expect(monkeypatch, "voc", counts={"2007 trainval": (2,)})
        for root in (tmp_path, tmp_path / "VOCdevkit"):  # as evaluate takes either
            output("check", "voc", "--root", root)
        (folder / "Annotations" / "000007.xml").unlink()
        err = refusal("check", "voc", "--root", tmp_path)
        assert "'000007.xml'" in err

    def test_a_folder_of_your_own(self, command, output, refusal, tmp_path):
        for i in range(3):
            _save(tmp_path / "photos" / "cats" / f"{i}.png", 6, 9 + i)
        _save(tmp_path / "photos" / "dogs" / "0.jpg", 12, 5)
        for name in ("notes.txt", "photo.heix"):
            (tmp_path / "photos" / name).write_text("x")
        out = output("check", tmp_path / "photos")
        for part in ("4 in 2 classes", "cats", "5 to 11 px wide, 6 to 12 px high", "unreadable"):
            assert part in out
        assert "if these sub-folders are not classes, put one image beside them" in out
        assert "not images: 2 other files (1 .heix, 1 .txt)" in out
        assert f"next: deepbregman pretrain {tmp_path / 'photos'}" in out
        content = (tmp_path / "photos" / "dogs" / "0.jpg").read_bytes()
        (tmp_path / "photos" / "dogs" / "0.jpg").write_bytes(content[: len(content) * 2 // 3])
        code, out, err = command("check", tmp_path / "photos")
        assert (code, err) == (0, "")  # pretrain leaves it out
        assert "1 image cannot be read" in out
        assert "0.jpg" in out
        assert "complete" not in out
        for path in (tmp_path / "photos").rglob("*.*g"):
            path.write_bytes(b"no image")
        err = refusal("check", tmp_path / "photos")
        assert "no image can be read ('" in err

    def test_every_unreadable_image_is_named_with_the_reason(self, output, tmp_path):
        for i in range(8):
            _save(tmp_path / "photos" / f"{i}.png", 60, 60)
        whole = (tmp_path / "photos" / "0.png").read_bytes()
        for i in range(7):
            content = b"no image" if i % 2 else whole[: len(whole) // 2]
            (tmp_path / "photos" / f"{i}.png").write_bytes(content)
        out = output("check", tmp_path / "photos")
        lines = out.splitlines()
        for i in range(7):
            why = "not an image that Pillow can read, or damaged" if i % 2 else "truncated"
            (line,) = [line for line in lines if f"{i}.png: " in line]
            assert why in line
        assert "7.png: " not in out
        assert "7 images cannot be read: the recipe auto" in out

    @pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
    def test_a_photo_that_a_camera_took_upright(self, command, tmp_path, suffix):
        """It is stored lying, with a note to turn it; programs show it upright."""
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        (tmp_path / "photos").mkdir()
        Image.new("RGB", (1200, 800)).save(tmp_path / "photos" / f"0.{suffix}", exif=exif)
        assert "sizes       800 px wide, 1200 px high" in command("check", "photos")[1]
        Image.new("RGB", (1201, 1200)).save(tmp_path / "photos" / f"1.{suffix}")
        assert "800 to 1201 px wide, 1200 px high" in command("check", "photos")[1]

    def test_an_archive_of_your_own(self, output, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 6), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=[0, 1, 0, 0, 1])
        out = output("check", tmp_path / "a.npz")
        assert "5 in 2 classes" in out
        assert "6 px wide, 8 px high" in out

    def test_a_folder_with_the_name_of_a_dataset(self, command, output, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        _save(tmp_path / "voc" / "0.jpg", 12, 5)
        said = "note: voc means the dataset of that name; for the folder, write ./voc"
        assert said in command("check", "voc")[2]
        out = output("check", "./voc")
        assert "next: deepbregman pretrain ./voc" in out

    def test_a_mapped_archive_is_verified_all_the_same(self, refusal, tmp_path, monkeypatch):
        pixels = np.random.default_rng(0).integers(0, 256, (9, 80, 60), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", train_images=pixels)
        content = bytearray((tmp_path / "a.npz").read_bytes())
        content[content.index(pixels.tobytes()[:16])] ^= 1
        (tmp_path / "a.npz").write_bytes(content)
        monkeypatch.setattr("deepbregman.data.archives.MAP_FROM_BYTES", 1)
        open_source(str(tmp_path / "a.npz"), image_size=8)  # goes unnoticed here, as documented
        err = refusal("check", tmp_path / "a.npz")
        assert "CRC" in err

    @pytest.mark.parametrize("verb", ["check", "prepare"])
    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("imagnet", "did you mean 'imagenet'?"),
            ("gone.npz", "'gone.npz': no such file"),
            ("", "'': no such folder"),
        ],
    )
    def test_unknown_names(self, refusal, verb, name, part):
        err = refusal(verb, name)
        assert part in err


class TestPrepare:
    def test_digits_are_measured_and_cached(self, output, tmp_path):
        out = output("prepare", "digits", "--root", "r", "--cache", "d.npz")
        from sklearn.datasets import load_digits

        record = prepare("digits")
        assert record["images"] == {"train": 1297, "test": 500}
        assert record["mean"][0] == record["mean"][1]
        # All 1,797 are in two splits; their mean in sixteenths is scikit-learn's, but for rounding.
        everything = load_digits().images.mean() / 16
        assert record["mean"][0] == pytest.approx(everything, abs=0.005)
        assert f"{record['mean'][0]:.4f}" in out
        cached = open_source(str(tmp_path / "d.npz"), image_size=8)
        original = open_source("digits", image_size=8)
        assert cached.train.images.pixels.equal(original.train.images.pixels)
        output("check", "d.npz")

    def test_files_are_cached_for_the_image_size(self, output, refusal, imagenet):
        words = ("prepare", "imagenet", "--root", imagenet, "--cache", "i.npz")
        output(*words)
        cached = open_source("i.npz", image_size=8)
        assert cached.classes == ("n01440764", "n01443537", "n01484850")
        assert cached.train.images.frame == (18, 18)
        assert cached.train.images.sizes[0].tolist() == [12, 18]  # 20 x 30, shrunk by 0.6
        err = refusal(*words)
        assert "i.npz exists" in err
        output(*words[:-1], "j.npz", "--image-size", 4)
        assert open_source("j.npz", image_size=4).train.images.frame == (9, 9)

    def test_a_folder_of_your_own(self, tmp_path):
        for i in range(6):
            _save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", seed=i)
        pixels = [np.asarray(Image.open(path)) for path in (tmp_path / "photos").rglob("*.png")]
        record = prepare(str(tmp_path / "photos"))
        assert record["images"] == {"train": 4, "test": 2}
        assert np.isclose(record["mean"], np.mean(pixels, axis=(0, 1, 2)) / 255, atol=0.1).all()

    @pytest.mark.parametrize("size", [0, 1_000_000])
    def test_an_absurd_size_is_refused_before_the_work(self, command, tmp_path, size):
        _save(tmp_path / "photos" / "0.png")
        code, _, err = command("prepare", "photos", "--image-size", size, "--cache", "new.npz")
        assert (code, (tmp_path / "new.npz").exists()) == (2, False)
        assert f"data.image_size is {size}: it must be between 4 and 4096" in err

    def test_the_current_folder_and_no_size(self, output, tmp_path, monkeypatch):
        _save(tmp_path / "photos" / "0.png")
        monkeypatch.chdir(tmp_path / "photos")
        output("prepare", ".")

    @pytest.mark.parametrize(
        ("name", "module"), [("cifar10", "cifar"), ("stl10", "stl10"), ("voc", "voc")]
    )
    def test_offline(self, command, tmp_path, monkeypatch, name, module):
        def fail(*args: object, **kwargs: object) -> None:
            raise URLError("no route to host")

        place = f"torchvision.datasets.{module}.download_and_extract_archive"
        monkeypatch.setattr(place, fail)
        code, _, err = command("prepare", name, "--root", tmp_path / "r", "--cache", "c.npz")
        if name == "voc":
            assert "leave --cache out" in err
            code, _, err = command("prepare", name, "--root", tmp_path / "r")
        assert code == 2
        for part in (name, "no route to host", "http", str(tmp_path / "r")):
            assert part in err
        assert list(tmp_path.iterdir()) == []

    def test_downloads_can_be_forbidden(self, refusal, monkeypatch):
        def fail(*args: object, **kwargs: object) -> None:
            raise AssertionError("reached for the network")

        for name in ("cifar10", "voc"):
            module = "cifar" if name == "cifar10" else "voc"
            monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", fail)
            err = refusal("prepare", name, "--no-download")
            assert "http" in err
            assert "reached" not in err

    @pytest.mark.parametrize(
        ("cache", "part"),
        [("c.zip", "is to be a .npz file"), ("no/c.npz", "not exist"), ("c.npz", "exists")],
    )
    def test_a_cache_that_cannot_be_written_is_refused_before_the_work(
        self, refusal, tmp_path, cache, part
    ):
        (tmp_path / "c.npz").write_text("precious")
        err = refusal("prepare", "digits", "--cache", cache)
        assert part in err
        assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]
        assert (tmp_path / "c.npz").read_text() == "precious"

    def test_too_little_room_says_how_much_it_takes(self, refusal, imagenet, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=900_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        err = refusal("prepare", "imagenet", "--root", imagenet, "--cache", "c.npz")
        assert "takes 0.0 GB" in err
        assert not (tmp_path / "c.npz").exists()

    @pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left")])
    def test_interrupted_it_leaves_nothing_and_can_be_run_again(
        self, command, output, tmp_path, monkeypatch, failure
    ):
        def fail(file: int) -> None:
            raise failure

        with monkeypatch.context() as context:
            context.setattr(os, "fsync", fail)  # the last thing before the file has its name
            code, _, _ = command("prepare", "digits", "--root", "r", "--cache", "c.npz")
        assert code == (130 if isinstance(failure, KeyboardInterrupt) else 2)
        assert list(tmp_path.iterdir()) == []
        output("prepare", "digits", "--root", "r", "--cache", "c.npz")

    def test_unreadable_images(self, output, refusal, imagenet):
        broken = imagenet / "imagenet" / "train" / "n01440764" / "1.JPEG"
        broken.write_bytes(b"")
        err = refusal("prepare", "imagenet", "--root", imagenet)
        assert str(broken) in err
        words = ("--root", imagenet, "--skip-unreadable", "--cache", "c.npz")
        out = output("prepare", "imagenet", *words)
        assert "1 unreadable" in out
        assert len(open_source("c.npz", image_size=8).train) == 11

    def test_of_many_files_none_stands_in_for_another(self, output, imagenet, monkeypatch):
        """Above some number, opening reads headers alone, and the header of this one is whole."""
        monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 5)
        broken = imagenet / "imagenet" / "train" / "n01440764" / "1.JPEG"
        Image.effect_noise((99, 99), 50.0).save(broken)
        broken.write_bytes(broken.read_bytes()[:1500])
        words = ("--root", imagenet, "--skip-unreadable", "--cache", "c.npz")
        out = output("prepare", "imagenet", *words)
        assert re.search(r"left out +1 unreadable", out)
        assert "the cache has others instead" not in out
        names = open_source("c.npz", image_size=8).train.names
        assert len(names) == 11
        assert not any(name.endswith("n01440764/1.JPEG") for name in names)


SHARED = Path(os.environ.get("DEEPBREGMAN_SHARED", Path(__file__).parents[3] / "shared")) / "data"


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "cifar10" / "unpack.py").is_file(),
    reason="the compact copy of CIFAR-10 is not beside this repository",
)
def test_cifar10_itself(output, tmp_path):
    """Mean and deviation are those published; the cache holds the same arrays."""
    script = str(SHARED / "cifar10" / "unpack.py")
    subprocess.run([sys.executable, script, str(tmp_path / "cifar.npz")], check=True)
    out = output("check", "cifar.npz")
    assert "50,000 in 10 classes" in out
    assert out.count("5,000\n") == 10
    output("prepare", "cifar.npz", "--cache", "copy.npz")
    record = prepare(str(tmp_path / "cifar.npz"))
    # The compact copy is lossy: its colours are up to 0.0025 from the published ones.
    assert record["mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.003)
    assert record["deviation"] == pytest.approx([0.2470, 0.2435, 0.2616], abs=0.003)
    with np.load(tmp_path / "cifar.npz") as before, np.load(tmp_path / "copy.npz") as after:
        for key in ("train_images", "train_labels", "test_images", "test_labels"):
            assert np.array_equal(before[key], after[key])
        values = after["train_images"].reshape(-1, 3)
        assert record["mean"] == pytest.approx((values.mean(axis=0) / 255).tolist(), abs=1e-9)
