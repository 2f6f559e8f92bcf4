"""A small labelled source, on which a whole protocol takes a second."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 digits to train on and 100 to test, 20 and 10 of each class, as an .npz file."""
    digits = load_digits()
    rows = np.concatenate([np.flatnonzero(digits.target == c)[:30] for c in range(10)])
    rows = rows.reshape(10, 30)
    train, test = rows[:, :20].ravel(), rows[:, 20:].ravel()
    pixels = (digits.images * 15.9).astype(np.uint8)
    path = Path(tmp_path_factory.mktemp("data")) / "few.npz"
    np.savez(
        path,
        train_images=pixels[train],
        train_labels=digits.target[train],
        test_images=pixels[test],
        test_labels=digits.target[test],
    )
    return str(path)
