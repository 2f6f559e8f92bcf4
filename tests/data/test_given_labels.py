"""Labels that a user writes: what is read of them, and what is refused."""

from pathlib import Path

import pytest

from deepbregman.data.labels import GivenLabel, read_labels
from deepbregman.errors import UserError
from deepbregman.files import create_csv

RIGHT = [GivenLabel(f"{name}.png", name[0]) for name in ("a1", "a2", "b1", "b2")]


@pytest.mark.parametrize(
    "text",
    [
        "image,label\na1.png,a\na2.png,a\nb1.png,b\nb2.png,b\n",
        "\ufeffFile;Class\r\na1.png;a\r\na2.png;a\r\nb1.png;b\r\nb2.png;b\r\n",
        "label\timage\na\ta1.png\na\ta2.png\nb\tb1.png\nb\tb2.png",
        "image,label\n a1.png , a \na2.png,a\n\nc.png,\nb1.png,b\nb2.png,b,more\n",
        "image,label,given\na1.png,a,yes\na2.png,a,yes\nc.png,c,no\nb1.png,b,yes\nb2.png,b,Yes\n",
    ],
)
def test_tables_of_people_and_spreadsheets(tmp_path, text):
    path = tmp_path / "few.csv"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_labels(path) == RIGHT


def test_a_label_comes_back_as_it_was_written(tmp_path):
    """A table protects + from spreadsheets; a + that is added to it is the same class."""
    given = [("a.png", "+"), ("b.png", "-"), ("c.png", "=1, no"), ("d.png", "'a'"), ("e.png", "-1")]
    path = tmp_path / "all.csv"
    create_csv(path, [{"image": image, "label": label} for image, label in given * 2])
    assert "'+" in path.read_text()
    path.write_text(path.read_text() + "f.png,+\n")
    found = [(one.image, one.label) for one in read_labels(path)]
    assert found == [*given * 2, ("f.png", "+")]


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
def test_unicode_text_of_a_spreadsheet(tmp_path, code):
    path = tmp_path / "few.txt"
    lines = [f"{image}\t{label}" for image, label, *_ in RIGHT]
    path.write_text("\ufeff" + "\r\n".join(["image\tlabel", *lines]), encoding=code, newline="")
    assert read_labels(path) == RIGHT
    path.write_bytes(path.read_bytes()[:-1])  # half a character
    with pytest.raises(UserError, match=r"cannot be read as CSV .*UTF-8"):
        read_labels(path)


def test_folders_and_mappings(tmp_path):
    for image, label, *_ in RIGHT:
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / image).touch()
    found = read_labels(tmp_path)
    assert [(Path(one.image).name, one.label, one.is_file) for one in found] == [
        (image, label, True) for image, label, *_ in RIGHT
    ]
    assert read_labels({image: label for image, label, *_ in RIGHT}) == RIGHT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must name the columns"),
        ("a1.png,a\na2.png,b\n", "must name the columns"),
        ("image_id,dx\na1,a\na2,b\n", "write label over the column of labels"),
        (
            "photo,animal\na1,a\na2,b\n",
            "write image over the column of images and label over the column of labels",
        ),
        ("image,label\n", "no image has a label"),
        ("image,label\na1.png,\n", "no image has a label; .* in a table in the column label"),
        ("image,label\na1.png,a\na2.png,a\n", "2 labels, all 'a'"),
        ("image,label\na1.png,a\na2.png,a\nb1.png,b\n", "only one image of 'b'"),
        ('image,label\n"a1.png,a\n', "cannot be read as CSV"),
    ],
)
def test_what_teaches_nothing_is_refused(tmp_path, text, words):
    path = tmp_path / "few.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_labels(path)
    assert str(path) in str(error.value)


def test_a_name_need_not_be_text(tmp_path):
    """`label` writes such names of files as they are."""
    (tmp_path / "few.csv").write_bytes(b"image,label\n\xff1,a\n\xff2,a\n3,b\n4,b\n")
    assert read_labels(tmp_path / "few.csv")[0].image == "\udcff1"


def test_a_label_is_text(tmp_path):
    """Spreadsheets save in another encoding; such labels would be written and shown as rubbish."""
    (tmp_path / "few.csv").write_bytes("image;label\n1;Blüte\n".encode("cp1252"))
    with pytest.raises(UserError, match="is not in UTF-8: in a spreadsheet"):
        read_labels(tmp_path / "few.csv")


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        read_labels(tmp_path / "nowhere.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no image has a label"):
        read_labels(tmp_path / "empty")
