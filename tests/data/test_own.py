"""Images of the user's program: arrays, tensors and map-style datasets."""

import io
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.transforms import v2

from deepbregman import own_data
from deepbregman.data import fingerprint, open_batches
from deepbregman.data.frames import decode_frames
from deepbregman.data.images import group_identical
from deepbregman.data.own import DatasetStore, _read_labels, find_own_side
from deepbregman.errors import UserError

CPU = torch.device("cpu")
PIXELS = torch.randint(
    0, 256, (6, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
GREY = PIXELS[:, :1]


class Pictures:
    """A map-style dataset: the images in one of the forms that such datasets have, and labels."""

    def __init__(self, form: str = "pil", labelled: bool = True) -> None:
        self.form, self.labelled = form, labelled

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        image: Any = PIXELS[index]
        if self.form == "pil":
            image = v2.functional.to_pil_image(image)
        elif self.form == "array":
            image = image.permute(1, 2, 0).numpy()
        if self.form == "dict":
            return {"image": image, "label": index % 2}
        return (image, index % 2) if self.labelled else image


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS.permute(0, 2, 3, 1), PIXELS),
        (PIXELS.permute(0, 2, 3, 1).numpy(), PIXELS),
        (GREY, GREY.expand(-1, 3, -1, -1)),
        (GREY[:, 0].numpy(), GREY.expand(-1, 3, -1, -1)),
        (GREY.permute(0, 2, 3, 1), GREY.expand(-1, 3, -1, -1)),
    ],
)
def test_every_layout_becomes_channels_first(values, expected):
    images = own_data(values).train.images
    assert torch.equal(images.pixels, expected)


def test_labels_split_off_a_fifth_that_has_every_class():
    labels = np.arange(20) % 2
    source = own_data((PIXELS[:1].expand(20, -1, -1, -1), labels), classes=["cat", "dog"])
    assert (len(source.train), len(source.test)) == (16, 4)
    assert sorted(source.test.labels.tolist()) == [0, 0, 1, 1]
    assert source.classes == ("cat", "dog")


def test_a_test_split_of_ones_own():
    source = own_data(PIXELS, [0] * 6, test=PIXELS[:2], test_labels=torch.tensor([0, 1]))
    assert (len(source.train), len(source.test)) == (6, 2)
    assert source.classes == ("0", "1")


@pytest.mark.parametrize("form", ["pil", "array", "tensor", "dict"])
@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_dataset_gives_its_pixels_in_order(form, resident):
    source = own_data(Pictures(form), test=PIXELS[:1], image_size=32)
    images = source.train.images
    assert images.side == 9
    assert source.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    batches = open_batches(images, CPU, resident=resident, num_workers=0)
    order = torch.tensor([4, 1, 3, 0])
    found = list(batches.iterate(order, 3))
    assert torch.equal(torch.cat([batch.images for batch in found])[..., :7], PIXELS[order])
    assert all(batch.sizes.eq(torch.tensor([9, 7])).all() for batch in found)


@pytest.mark.parametrize("form", ["jpg", "png", "memory"])
def test_a_list_of_files_that_pillow_has_opened_but_not_read(tmp_path, form):
    """Each is read several times, and decoding a large JPEG shrinks it: the list stays as it is."""
    large = PIXELS.repeat(1, 1, 20, 20).permute(0, 2, 3, 1).numpy()
    for index, pixels in enumerate(large):
        Image.fromarray(pixels).save(tmp_path / f"{index}.{'jpg' if form == 'jpg' else 'png'}")
    paths = sorted(tmp_path.iterdir())
    expected, _, _ = decode_frames(paths, 18, skip_unreadable=False)
    files = [io.BytesIO(path.read_bytes()) if form == "memory" else path for path in paths]
    opened = [Image.open(file) for file in files]
    images = own_data(opened, image_size=8).train.images
    for resident in ("yes", "no", "yes"):
        batches = open_batches(images, CPU, resident=resident, num_workers=0)
        (batch,) = batches.iterate(torch.arange(6), 6)
        assert (batch.images.permute(0, 2, 3, 1).numpy() == expected).all()
    assert [image.size for image in opened] == [(140, 180)] * 6
    assert len(fingerprint(images)) == 32
    for image in opened:
        image.close()


@pytest.mark.filterwarnings("ignore:unclosed file")  # Pillow keeps a file of several pages open
@pytest.mark.parametrize("form", ["tiff", "gif"])
def test_pages_of_one_file_stay_different_images(tmp_path, form):
    first, *others = pages = [Image.new("L", (9, 7), shade) for shade in (10, 100, 200)]
    first.save(tmp_path / f"stack.{form}", save_all=True, append_images=others)
    opened = [Image.open(tmp_path / f"stack.{form}") for _ in pages]
    for page, image in enumerate(opened):
        image.seek(page)
    images = own_data(opened, image_size=8).train.images
    (batch,) = open_batches(images, CPU, resident="no", num_workers=0).iterate(torch.arange(3), 3)
    assert batch.images[:, 0, 0, 0].tolist() == [10, 100, 200]
    for image in opened:
        image.close()


def test_worker_processes_decode_a_dataset():
    images = own_data(Pictures(labelled=False)).train.images
    batches = open_batches(images, CPU, resident="no", num_workers=1)
    (batch,) = batches.iterate(torch.arange(6), 6)
    assert torch.equal(batch.images[..., :7], PIXELS)


def test_labels_are_read_without_decoding_where_the_dataset_keeps_them():
    class Counted(Pictures):
        targets = (1, 0, 1, 0, 1, 0)
        read = 0

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return super().__getitem__(index)

    dataset = Counted()
    labels = own_data(dataset, test=PIXELS).train.labels
    assert labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert dataset.read == 18  # for the sizes, and twice to see that they do not change


def test_a_list_of_labels_of_another_length_is_not_that_of_the_dataset():
    """As of a class that chooses some images of another and has all of its attributes."""

    class Chosen(Pictures):
        targets = (7,) * 10

    assert _read_labels(DatasetStore(Chosen())) == [0, 1, 0, 1, 0, 1]


def test_labels_that_a_dataset_changes_are_those_of_its_items():
    """Datasets of torchvision keep the labels as they were before ``target_transform``."""

    class Kinds(Pictures):
        targets = (0, 1, 0, 1, 0, 1)
        target_transform = staticmethod({0: 7, 1: 8}.get)

        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, self.target_transform(label)

    assert _read_labels(DatasetStore(Kinds())) == [7, 8, 7, 8, 7, 8]
    assert _read_labels(DatasetStore(Subset(Kinds(), [1, 0]))) == [8, 7]


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_arrays_that_are_read_only(tmp_path):
    """As a file that is mapped, and a column of pandas."""
    np.save(tmp_path / "a.npy", PIXELS.numpy())
    labels = np.arange(6)
    labels.setflags(write=False)
    torch.set_warn_always(True)
    try:
        source = own_data(np.load(tmp_path / "a.npy", mmap_mode="r"), labels, test=PIXELS)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(source.train.images.pixels, PIXELS)
    assert source.train.labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_one_image_of_a_dataset_is_read_at_a_time():
    class Alone(Pictures):
        reading = 0

        def __getitem__(self, index: int) -> Any:
            self.reading += 1
            time.sleep(0.002)
            assert self.reading == 1
            self.reading -= 1
            return super().__getitem__(index)

    decode_frames(own_data(Alone(), test=PIXELS).train.images.paths, 9, skip_unreadable=False)


def test_the_identity_tells_any_other_image():
    """By which it is known whether the features of the images are still those that were kept."""
    images = list(PIXELS.repeat(4, 1, 1, 1))
    before = DatasetStore(images).identity()
    assert DatasetStore([*images]).identity() == before
    assert DatasetStore([*images[:-1], images[0]]).identity() != before


def test_labels_of_parts_of_a_dataset_are_read_without_decoding():
    class Counted(Pictures):
        targets = (5, 4, 3, 2, 1, 0)
        reads = 0

        def __getitem__(self, index: int) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    whole = Counted()
    part = Subset(whole, [1, 1, 4, 0])
    assert _read_labels(DatasetStore(part)) == [4, 4, 1, 5]
    joined = ConcatDataset([Subset(part, [2]), whole])
    assert _read_labels(DatasetStore(joined)) == [1, 5, 4, 3, 2, 1, 0]
    assert Counted.reads == 0
    mixed = ConcatDataset([whole, Pictures()])  # which has no list: all items are read
    assert len(_read_labels(DatasetStore(mixed))) == 12
    assert Counted.reads > 0


def test_labels_that_a_subclass_of_subset_changes_are_read_from_its_items():
    class Listed(Pictures):
        targets = (5, 4, 3, 2, 1, 0)

    class Ones(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)[0], 1

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    assert _read_labels(DatasetStore(Ones(Listed(), [0, 3]))) == [1, 1]


def test_the_fingerprint_tells_other_images():
    class Dimmed(Pictures):
        def __getitem__(self, index: int) -> Any:
            return v2.functional.to_pil_image(PIXELS[index] // 2)

    Dimmed.__name__ = "Pictures"
    same = [fingerprint(own_data(Pictures(labelled=False)).train.images) for _ in range(2)]
    assert same[0] == same[1] != fingerprint(own_data(Dimmed(labelled=False)).train.images)


def test_copies_are_found_within_and_between_parts():
    class Twice(Pictures):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index % 3)

    images = own_data(Twice(labelled=False)).train.images
    assert group_identical(images) == [[0, 3], [1, 4], [2, 5]]
    others = own_data(Pictures(labelled=False)).train.images
    assert group_identical(images.select(torch.tensor([1, 4])), others) == [[0, 1, 3]]


def test_the_typical_side():
    assert find_own_side(PIXELS) == 7
    assert find_own_side(Pictures()) == 7


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (PIXELS.float(), r"data is torch.float32 .* \(255 \* x\).to\(torch.uint8\)"),
        (PIXELS[:, :2], r"data has shape \(6, 2, 9, 7\)"),
        (PIXELS[:0], "at least one"),
        ((PIXELS, [0, 1]), "train labels are torch.int64 of shape \\(2,\\) for 6 images"),
        ((PIXELS, np.eye(6, dtype=int)), r"labels are torch.int64 of shape \(6, 6\) for 6 images"),
        ((PIXELS, [0.5] * 6), "one whole number from 0"),
        ((PIXELS, [-1] * 6), "a train label is -1: .*one whole number from 0"),
        (iter([1]), "a list_iterator: it must be .* iterable dataset has no order to resume in"),
        ([], "data is an empty list"),
        ([Image.new("F", (3, 3))], r"list\[0\].*floating-point"),
        ([torch.rand(3, 4, 4)], "leave out transforms such as ToTensor"),
        ([torch.zeros(4, 4, 4, dtype=torch.uint8)], "an image has 1 or 3 channels"),
        (["photo.jpg"], "is of type str.* a tuple that begins with it"),
        ([([PIXELS[0], PIXELS[1]], 0)], "is of type list.* belong to augment="),
        ([{"pixel_values": PIXELS[0]}], "dict with pixel_values: call the image one of image, img"),
        ({"train": PIXELS, "test": PIXELS}, r"data is a dict of train, test: .* data\['train'\]"),
        ((PIXELS, ["cat", 1] * 3), "some labels are words and others are not"),
        ((PIXELS, [None, 1] * 3), "train labels such as None are not whole numbers"),
    ],
)
def test_what_is_refused(values, words):
    with pytest.raises(UserError, match=words):
        open_batches(own_data(values).train.images, CPU)


def test_a_dataset_whose_images_change_is_refused():
    """They would be kept as they were drawn the first time."""

    class Flipped(Pictures):
        calls = 0

        def __getitem__(self, index: int) -> Any:
            self.calls += 1
            return PIXELS[index].flip(-1) if self.calls % 2 else PIXELS[index]

    with pytest.raises(UserError, match=r"Flipped\[0\] gave two different .* to augment="):
        own_data(Flipped())


def test_an_item_that_raises_has_words():
    class Gone(Pictures):
        def __getitem__(self, index: int) -> Any:
            raise OSError("no such disk")

    with pytest.raises(UserError, match=r"Gone\[0\].*no such disk.*torch.utils.data.Subset"):
        own_data(Gone())


def test_labels_may_be_words():
    source = own_data(PIXELS, list("cabcab"), test=PIXELS[:2], test_labels=["d", "a"])
    assert source.classes == ("a", "b", "c", "d")
    assert source.train.labels.tolist() == [2, 0, 1, 2, 0, 1]
    assert source.test.labels.tolist() == [3, 0]


def test_a_pair_of_a_dataset_and_labels():
    source = own_data(([*PIXELS], [0, 1] * 3), test=PIXELS)
    assert source.train.labels.tolist() == [0, 1] * 3


def test_a_dataset_object_of_hugging_face():
    """Its columns may be called img and fine_label, and labels are read without decoding."""
    datasets = pytest.importorskip("datasets")
    pictures = [v2.functional.to_pil_image(image) for image in PIXELS]
    kinds = datasets.Features({"img": datasets.Image(), "fine_label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"img": pictures, "fine_label": [2, 0, 1] * 2}, kinds)
    assert _read_labels(DatasetStore(made.with_transform(lambda rows: 1 / 0))) == [2, 0, 1] * 2
    images = own_data(made, test=PIXELS).train.images
    (batch,) = open_batches(images, CPU).iterate(torch.arange(6), 6)
    assert torch.equal(batch.images[..., :7], PIXELS)
