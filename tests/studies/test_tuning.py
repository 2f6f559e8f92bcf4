"""The search: by the command that a user types, and its workers by a cheap objective."""

import csv
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
import torch
from optuna.storages._rdb.models import TrialModel
from optuna.trial import TrialState
from rich.console import Console

from deepbregman.cli import main
from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run
from deepbregman.studies import engine, shared_search, tuning
from deepbregman.studies.definition import Search, SearchOptions, read_changes
from deepbregman.studies.engine import Stopped, Trial, run_trial
from deepbregman.studies.search_plan import check_search
from deepbregman.studies.shared_search import SharedSearch, open_storage
from deepbregman.studies.tuning import (
    NAME,
    build_sampler,
    join_search,
    list_trials,
    run_search,
    write_trials,
)
from deepbregman.training.faults import Interrupted

BEGAN = ["deepbregman", "tune", "digits"]
SPACE = ("divergence.sigma=0.5:3:log", "divergence.kernel=gaussian,inverse")


CHANGES = (
    *("training.batch_size=64", "training.knn_every=1", "data.holdout=0"),
    *("encoder.projection_hidden=16", "encoder.embedding=8", "divergence.hidden=4"),
)


def request(data: str, out: Path, **others: Any) -> tuple[str, SearchOptions]:
    given: dict[str, Any] = {
        **{"space": SPACE, "trials": 3, "data": data, "epochs": 1},
        **{"changes": CHANGES, "out": out, "sampler": "random"},
    }
    return "digits", SearchOptions(**{**given, **others})


@pytest.fixture(scope="module")
def searched(few_digits, tmp_path_factory) -> Path:
    """A search that has one trial."""
    out = tmp_path_factory.mktemp("searched") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", BEGAN)
        run_search(*request(few_digits, out, trials=1))
    return out


@pytest.fixture
def begun(searched, out) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(searched, out))


def trials(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "trials.json").read_text())["trials"]
    return rows


@pytest.mark.parametrize("command", ["tune", "study"])
def test_end_to_end_without_the_test_images(command, few_digits, out, explosive, capsys):
    explosive("deepbregman.studies.engine")
    words = {
        "tune": ["tune", "digits", "--space", *SPACE, "--sampler", "tpe", "--objective", "knn"],
        "study": ["study", "sigma-lambda", "--recipe", "digits"],
    }[command]
    main(
        [
            *words,
            *("--trials", "2", "--data", few_digits, "--epochs", "1", "--out", str(out)),
            "--set",
            *CHANGES,
        ]
    )
    rows = trials(out)
    origin = json.loads((out / "trials.json").read_text())["provenance"]
    of_trial = Run.open(out / "runs" / "trial-0000").provenance()
    for name in ("commit", "source", "versions", "device"):
        assert origin[name] == of_trial[name]
    assert [row["state"] for row in rows] == ["complete"] * 2
    best = max(rows, key=lambda row: row["value"])
    found = load_recipe(str(out / "best.toml"))
    recipe = override(
        load_recipe("digits"),
        {**read_changes(CHANGES), "data.source": few_digits, "training.epochs": 1},
    )
    assert found == override(recipe, best["values"])
    assert found.data.holdout == 0.0  # the recipe's own, though the trials held a tenth out
    run = Run.open(out / "runs" / f"trial-{best['trial']:04d}")
    assert run.config == override(found, {"data.holdout": 0.1, "training.tensorboard": False})
    (judged, *_) = run.result()["evaluations"]
    assert (judged["num_train"], judged["num_test"]) == (180, 20)
    assert judged["value"] == best["value"]
    last = run.metrics()[-1]  # what trials are pruned by
    assert (best["last_epoch"], best["last_knn"]) == (1, pytest.approx(last["knn"]))
    with (out / "trials.csv").open() as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == [r["value"] for r in rows]
    header = (out / "best.toml").read_text()
    assert f"# Command:  deepbregman pretrain {shlex.quote(str(out / 'best.toml'))}\n" in header
    assert f"{best['value']:.2f} % on held-out training images" in header
    assert (out / "search.png").stat().st_size > 5_000
    assert (out / "search.svg").is_file()
    printed = capsys.readouterr().out
    assert f"best:   {out / 'best.toml'}" in printed
    assert printed.count("warning: optimiser.warmup_epochs is 5 and training.epochs 1") == 1
    if command == "study":  # again, as the message on Ctrl-C says: there is nothing left to do
        main(["study", "sigma-lambda", "--out", str(out)])
        assert trials(out) == rows
        assert "best" in (figure := (out / "search.svg").read_text())
        assert "published best" not in figure  # that was of other images


def test_a_search_looks_for_the_highest_accuracy(begun):
    study = optuna.load_study(study_name=NAME, storage=f"sqlite:///{begun / 'search.db'}")
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE


def test_more_trials_later_and_nothing_else(few_digits, begun):
    first = trials(begun)
    with pytest.raises(UserError, match=r"training\.epochs is 1 there, 2 here"):
        run_search(*request(few_digits, begun, epochs=2))
    with pytest.raises(UserError, match=r"sampler is 'random' there, 'gp' here"):
        run_search(*request(few_digits, begun, sampler="gp"))
    with pytest.raises(UserError, match="space is"):
        run_search(*request(few_digits, begun, space=("divergence.sigma=1:2",)))
    options: list[tuple[dict[str, Any], str]] = [
        ({"changes": ("training.knn_every=2",)}, r"\(training\.knn_every is 1 there, 2 here\)"),
        ({"epochs": 2}, r"other settings \(training\.epochs is 1 there, 2 here\)"),
        ({"changes": ("training.epochs=2",)}, r"\(training\.epochs is 1 there, 2 here\)"),
        (
            {"recipe": "digits", "changes": ("training.epochs=2",)},
            r"\(training\.epochs is 1 there, 2 here\)",
        ),
        (
            {"epochs": 2, "changes": ("training.epochs=1",)},
            r"--epochs 2 and --set training\.epochs=1 contradict",
        ),
    ]
    for given, words in options:
        recipe = given.pop("recipe", None)
        with pytest.raises(UserError, match=words):
            run_search(recipe, SearchOptions(out=begun, **given))
    run_search(None, SearchOptions(out=begun, trials=1, epochs=1))
    again = SearchOptions(out=begun, trials=2, changes=("training.knn_every=1",))
    run_search("digits", again)
    later = trials(begun)
    header = (begun / "best.toml").read_text()
    assert f"# Search:   {shlex.join(BEGAN)}\n" in header  # what began it can be done again
    assert later[0] == first[0]
    assert len(later) == 2
    assert later[1]["values"] != later[0]["values"]


def test_each_worker_draws_other_values_by_the_seed(few_digits, out):
    def draw(folder: Path, *changes: str) -> float:
        recipe, asked = request(few_digits, folder, changes=(*CHANGES, *changes))
        return _draw(_begin(join_search(recipe, asked, folder, _own(folder), NAME)[0]))

    both = [draw(out), draw(out)]
    again = [draw(out.with_name("again")) for _ in range(2)]
    assert again == both
    assert len({*both, draw(out.with_name("other"), "seed=7")}) == 3


@pytest.mark.parametrize("more", [5, 2])
def test_a_later_number_of_trials_is_that_of_the_search(few_digits, out, more, monkeypatch):
    """The words of a search that was stopped do not give it again."""
    join_search(*request(few_digits, out), out, _own(out), NAME)
    totals = []

    def stop(queue: tuning.SearchQueue, worker: Any) -> bool:
        totals.append(queue.total)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.SearchQueue, "run_next", stop)
    for options in (SearchOptions(out=out, trials=more), SearchOptions(out=out)):
        with pytest.raises(Stopped):
            run_search(None, options)
    assert totals == [more] * 2


def test_a_search_may_leave_out_pruning(few_digits, out):
    kinds = {True: optuna.pruners.MedianPruner, False: optuna.pruners.NopPruner}
    for prune, kind in kinds.items():
        folder = out.with_name(f"prune-{prune}")
        recipe, asked = request(few_digits, folder, prune=prune)
        assert type(join_search(recipe, asked, folder, _own(folder), NAME)[0].pruner) is kind


def test_a_machine_without_the_device_begins_no_search(few_digits, out):
    with pytest.raises(UserError, match="cuda"):
        run_search(*request(few_digits, out, accelerator="cuda"))
    assert not out.exists()


def test_a_published_best_is_kept_beside_searches_of_its_images(begun):
    best = {"divergence.sigma": 1.5}
    for data, kept in (("few", best), ("many", None)):
        entry = Search("s", "S?", SPACE, 1, published=best, published_data=data)
        record = run_search(None, SearchOptions(out=begun, trials=1), entry=entry).results
        assert record.get("published") == kept
    words = shlex.split(tuning._format_command(SearchOptions(), begun, entry))
    assert words == ["deepbregman", "study", "s", "--out", str(begun)]


def test_the_best_recipe_can_be_read_whatever_the_command_was(begun):
    record = json.loads((begun / "trials.json").read_text())
    record |= {"command": ["deepbregman", "tune", "--out", "a\nseed = 7"], "num_counted": 12}
    record["trials"] *= 2
    before = load_recipe(str(begun / "best.toml"))
    tuning.write_best(begun, load_recipe("digits"), record)
    expected = override(load_recipe("digits"), record["best"]["values"])
    assert load_recipe(str(begun / "best.toml")) == expected != before
    assert "the best of 12 and so" in (begun / "best.toml").read_text()


def test_a_hopeless_trial_is_pruned_and_its_checkpoints_go(few_digits, out, monkeypatch):
    monkeypatch.setattr(optuna.trial.Trial, "should_prune", lambda self: self.number == 1)
    run_search(*request(few_digits, out, trials=2, epochs=2))
    assert [row["state"] for row in trials(out)] == ["complete", "pruned"]
    pruned = trials(out)[1]
    assert pruned["last_epoch"] == 1  # of two
    assert pruned["value"] is None
    assert not (out / "runs" / "trial-0001" / "checkpoints").exists()


def test_a_pruned_trial_is_never_the_best_by_its_knn(tmp_path):
    """Optuna gives it the last value that it reported, which is another accuracy."""
    study = optuna.create_study(direction="maximize")
    pruned, complete, failed, equal, _running = (study.ask() for _ in range(5))
    pruned.report(30.0, 1)
    pruned.report(90.0, 2)
    study.tell(pruned, state=TrialState.PRUNED)
    study.tell(complete, 50.0)
    study.tell(failed, state=TrialState.FAIL)
    study.tell(equal, 50.0)
    study.enqueue_trial({})
    record = write_trials(tmp_path, study, {"recipe": "digits", "base": "a whole recipe"})
    assert (record["recipe"], "base" in record) == ("digits", False)
    assert [row["trial"] for row in record["trials"]] == [0, 1, 2, 3, 4]  # none that waits
    first = record["trials"][0]
    assert (first["value"], first["last_knn"], first["last_epoch"]) == (None, 90.0, 2)
    assert (record["best"]["trial"], record["best"]["value"]) == (1, 50.0)
    assert record["num_counted"] == 4  # not the one that failed


def test_importance_is_each_fields_share_of_what_varies(tmp_path):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), direction="maximize")

    def judge(trial: optuna.Trial) -> float:
        return trial.suggest_float("a", 0.0, 1.0) + 0.0 * trial.suggest_float("b", 0.0, 1.0)

    study.optimize(judge, 3)
    assert write_trials(tmp_path, study, {})["importance"] is None  # too few to tell
    study.optimize(judge, 1)
    first = write_trials(tmp_path, study, {})["importance"]
    assert sum(first.values()) == pytest.approx(1.0)
    study.optimize(judge, 12)
    found = [write_trials(tmp_path, study, {})["importance"] for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["a"] > 0.9
    same = optuna.create_study()
    same.optimize(lambda trial: 0.0 * judge(trial), 5)
    assert write_trials(tmp_path, same, {})["importance"] is None


def test_a_trial_that_diverges_is_worth_a_guess_and_never_the_best(few_digits, out):
    wild = (*CHANGES, "optimiser.learning_rate=1e30", "optimiser.name=sgd")
    run_search(*request(few_digits, out, trials=1, changes=wild))
    (row,) = trials(out)
    assert row["diverged"]
    assert row["value"] == pytest.approx(100.0 * 2 / 20)  # ten classes of two images each
    assert not (out / "best.toml").exists()


def test_an_interrupted_trial_goes_on_where_it_stopped(few_digits, out, monkeypatch):
    """Stopped after training, before judging; the run is taken up again, with the same values."""
    with monkeypatch.context() as patch:

        def interrupted(*arguments: Any, **options: Any) -> Any:
            raise Interrupted(signal.SIGINT, "go on")

        patch.setattr(engine, "run_protocols", interrupted)
        with pytest.raises(Stopped, match="trials are done") as stopped:
            run_search(*request(few_digits, out))
    assert f"deepbregman tune --out {out}" in str(stopped.value)
    run_search(None, SearchOptions(out=out, trials=1))
    lost, again = trials(out)
    assert (lost["state"], again["state"]) == ("fail", "complete")
    assert again["continues"] == lost["trial"]
    assert again["values"] == lost["values"]
    assert [path.name for path in (out / "runs").iterdir()] == ["trial-0000"]
    assert "resumed" not in Run.open(out / "runs" / "trial-0000").provenance()  # it had ended


def test_a_trial_without_enough_memory_does_not_stop_the_others(
    few_digits, out, monkeypatch, capsys
):
    """It counts as failed; a later process, which may have more memory, tries it again."""
    enough, begun = False, []

    def run_out_of_memory(trial: Trial, *arguments: Any) -> Record:
        begun.append(trial.name)
        if trial.name == "trial-0000" and not enough:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24 GiB")
        return run_trial(trial, *arguments)

    monkeypatch.setattr(engine, "run_trial", run_out_of_memory)
    recipe, asked = request(few_digits, out, trials=2)
    words = r"memory ran out in trial-0000 \(CUDA out .+\); 1 of 2 trials are done, and their"
    with pytest.raises(UserError, match=words) as refused:
        run_search(recipe, asked, Console(width=200))
    assert f"continue with: deepbregman tune --out {out}" in str(refused.value)
    said = capsys.readouterr().out
    assert "trial 0 (" in said
    assert "): out of memory; going on with the others" in said
    assert begun == ["trial-0000", "trial-0001"]
    failed, complete = trials(out)
    assert (failed["state"], complete["state"]) == ("fail", "complete")
    assert load_recipe(str(out / "best.toml")).divergence.sigma == pytest.approx(
        complete["values"]["divergence.sigma"]
    )
    with pytest.raises(UserError, match="memory ran out in trial-0000"):
        run_search(None, SearchOptions(out=out))
    enough = True
    run_search(None, SearchOptions(out=out))
    assert begun[2:] == ["trial-0000"] * 2
    assert [row["state"] for row in trials(out)] == ["fail", "complete", "fail", "complete"]
    assert trials(out)[3]["values"] == failed["values"]


def test_no_trial_has_enough_memory(few_digits, out, monkeypatch):
    """The search ends after as many trials as were asked for."""
    begun = []

    def run_out_of_memory(trial: Trial, *arguments: Any) -> Record:
        begun.append(trial.name)
        raise MemoryError

    monkeypatch.setattr(engine, "run_trial", run_out_of_memory)
    words = (
        r"trial-0000, trial-0001 \(MemoryError\); 0 of 2 trials are done; on a machine with more"
    )
    with pytest.raises(UserError, match=words):
        run_search(*request(few_digits, out, trials=2))
    assert begun == ["trial-0000", "trial-0001"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a new search needs a recipe and a space"),
        (["digits"], "a new search needs a recipe and a space"),
        (["digits", "--space", "divergence.sigma=3"], "at least two values"),
        (["digits", "--space", "divergence.sigma=1:2", "--trials", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words, message, refused):
    refused(["tune", *words], message)


def test_the_command_that_goes_on_names_the_storage(few_digits, tmp_path, monkeypatch):
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.SearchQueue, "run_next", interrupted)
    out, storage = tmp_path / "a search", f"sqlite:///{tmp_path}/other.db"
    with pytest.raises(Stopped) as stopped:
        run_search(*request(few_digits, out, storage=storage))
    command = shlex.split(str(stopped.value).partition("continue with: ")[2])
    assert command == ["deepbregman", "tune", "--out", str(out), "--storage", storage]
    with pytest.raises(SystemExit) as ended:
        main(command[1:])
    assert ended.value.code == 128 + signal.SIGINT  # it joined, and was stopped again
    secret = SearchOptions(storage="postgresql+psycopg://me:s3cret@host/database")
    assert "s3cret" not in tuning._format_command(secret, out, None)


def test_a_storage_that_cannot_be_opened_is_named_without_its_password(tmp_path):
    with pytest.raises(UserError, match="--storage nonsense cannot be opened"):
        open_storage("nonsense://user:secret@host/database")
    with pytest.raises(UserError, match=r"--storage oracle\+cx_oracle needs a driver") as error:
        open_storage("oracle+cx_oracle://user:secret@host/database")
    assert "secret" not in str(error.value)
    with pytest.raises(UserError, match="--storage sqlite cannot be opened"):
        open_storage(f"sqlite:///{tmp_path}/no/such/folder.db")


def test_a_refused_storage_leaves_no_search(few_digits, out):
    with pytest.raises(UserError, match="--storage nonsense cannot be opened"):
        run_search(*request(few_digits, out, storage="nonsense://host/database"))
    assert [path.name for path in out.iterdir()] == ["locks"]
    check_search(*request(few_digits, out))  # the folder is still free


def test_a_search_in_another_storage_is_continued_with_that_storage(few_digits, out, tmp_path):
    storage = f"sqlite:///{tmp_path}/elsewhere.db"
    run_search(*request(few_digits, out, trials=1, storage=storage))
    first = trials(out)
    assert not (out / "search.db").exists()
    run_search(None, SearchOptions(out=out, trials=1, storage=storage))
    assert trials(out) == first
    with pytest.raises(UserError, match=r"does not have: give the --storage that it was begun"):
        run_search(*request(few_digits, out))
    assert trials(out) == first


def test_a_search_in_a_common_storage_is_named_after_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "postgresql+psycopg://me@host/database"
    assert tuning.locate_storage(SearchOptions(storage=url), Path()) == (url, tmp_path.name)


def test_a_search_begun_in_its_folder_is_not_begun_again_elsewhere(begun, tmp_path):
    with pytest.raises(UserError, match=r"was begun in its own search\.db; leave --storage out"):
        run_search(None, SearchOptions(out=begun, storage=f"sqlite:///{tmp_path}/x.db"))
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize(
    "url", ["postgresql://me@host/db?password=s3cret", "postgresql://me:a/s3cret@host/db"]
)
def test_no_password_reaches_the_record_of_a_search(url, few_digits, out, monkeypatch):
    monkeypatch.setattr("sys.argv", [*BEGAN, "--storage", url])
    study, plan = join_search(*request(few_digits, out), out, _own(out), "search")
    write_trials(out, study, plan.definition)
    kept = b"".join(path.read_bytes() for path in out.iterdir() if path.is_file())
    assert b"postgresql" in kept
    assert b"s3cret" not in kept


def test_a_search_folder_may_be_renamed_and_copied(few_digits, begun, tmp_path):
    before, table = trials(begun), (begun / "trials.csv").read_bytes()
    moved = begun.rename(tmp_path / "second")
    run_search(None, SearchOptions(out=moved, trials=1))
    run_search(*request(few_digits, moved, trials=1))  # with the recipe given
    assert (trials(moved), (moved / "trials.csv").read_bytes()) == (before, table)
    (moved / "search.db").unlink()
    for gone in ("nothing", "trials.json"):
        (moved / gone).unlink(missing_ok=True)
        with pytest.raises(UserError, match="holds trials of a search that its storage"):
            run_search(*request(few_digits, moved, trials=1))
        (moved / "search.db").unlink()
    assert (moved / "trials.csv").read_bytes() == table


@pytest.mark.parametrize("end", ["", "-journal", "-wal", "-shm"])
def test_a_database_behind_a_link_is_left_alone(end, begun, tmp_path):
    name = f"search.db{end}"
    (tmp_path / "precious").write_bytes(b"x")
    (begun / name).unlink(missing_ok=True)
    (begun / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a symbolic link"):
        run_search(None, SearchOptions(out=begun))
    assert (tmp_path / "precious").read_bytes() == b"x"


@pytest.mark.parametrize("garbled", [b"no database at all" * 300, None])
def test_a_damaged_database_is_words(garbled, few_digits, out, refusal):
    join_search(*request(few_digits, out), out, _own(out), "search")
    database = out / "search.db"
    whole = database.read_bytes()
    database.write_bytes(garbled or whole[:4096] + b"\xff" * (len(whole) - 4096))
    words = refusal("tune", "--out", out)
    assert f"the storage of the search in {out} fails" in words
    assert "nothing that was complete is lost" in words


def test_a_full_disk_under_the_database_is_words(begun, monkeypatch):
    """SQLite's own error, of a database that may not grow."""
    open_storage = tuning.open_storage

    def open_small(url: str) -> Any:
        storage = open_storage(url)

        @sqlalchemy.event.listens_for(storage.engine, "begin")
        def limit(connection: Any) -> None:
            connection.exec_driver_sql("PRAGMA max_page_count=1")  # SQLite takes what there is

        return storage

    def write_much(self: Any, trial: optuna.Trial, worker: Any) -> float:
        trial.set_user_attr("much", "x" * 100_000)
        return 1.0

    before = trials(begun)
    monkeypatch.setattr(tuning, "open_storage", open_small)
    monkeypatch.setattr(tuning.SearchQueue, "_train", write_much)
    with pytest.raises(UserError, match=r"disk is full.*free space there.*nothing .* is lost"):
        run_search(None, SearchOptions(out=begun, trials=2))
    assert trials(begun) == before


def _own(out: Path) -> str:
    out.mkdir(exist_ok=True)
    return f"sqlite:///{out}/search.db"


# What follows stands for workers on several machines: processes that share a storage only.


def _shared(url: str, name: str = "shared") -> optuna.Study:
    return optuna.create_study(
        study_name=name,
        storage=open_storage(url),
        sampler=optuna.samplers.RandomSampler(),
        load_if_exists=True,
    )


def _draw(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0.0, 1.0)


def _begin(study: optuna.Study) -> optuna.Trial:
    """What ``study.ask`` does, without its warning about heartbeats."""
    return optuna.Trial(study, study._storage.create_new_trial(study._study_id))


def _fail(study: optuna.Study, trial: optuna.Trial) -> None:
    """What another worker does with a trial whose heartbeat is old."""
    study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def judge_all(study: optuna.Study, total: int, objective: Callable[[optuna.Trial], float]) -> None:
    """What the engine does with a search, without networks."""
    search = SharedSearch(study, total)
    while search.count()[0] < total:
        if search.run_one(objective) is None:
            time.sleep(0.2)


def _worker(url: str, total: int, log: str, stuck: bool) -> None:
    """Run trials of x; the one that is stuck says so and waits to be killed."""

    def objective(trial: optuna.Trial) -> float:
        x = _draw(trial)
        with Path(log).open("a") as file:
            file.write(f"{trial.number} {x!r}\n")
        time.sleep(600 if stuck else 0.05)
        return x

    judge_all(_shared(url), total, objective)


def test_a_queued_trial_is_handed_to_one_worker(tmp_path, monkeypatch):
    """Both read that the trial is waiting before either can say that it has taken it."""
    url = f"sqlite:///{tmp_path}/shared.db"
    _shared(url).enqueue_trial({"x": 0.5})
    studies = [_shared(url) for _ in range(2)]
    find = TrialModel.find_or_raise_by_id

    def find_slowly(*arguments: Any, **options: Any) -> Any:
        found = find(*arguments, **options)
        if found.state == TrialState.WAITING:
            time.sleep(0.5)
        return found

    monkeypatch.setattr(TrialModel, "find_or_raise_by_id", find_slowly)
    judged = []

    def objective(trial: optuna.Trial) -> float:
        judged.append(_draw(trial))
        return judged[-1]

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda study: SharedSearch(study, 2).run_one(objective), studies))
    assert len(judged) == 2
    assert judged.count(0.5) == 1


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_that_another_worker_has_ended_is_harmless_and_said(tmp_path, fails, prunes):
    study = _shared(f"sqlite:///{tmp_path}/shared.db")

    def objective(trial: optuna.Trial) -> float:
        values = None if fails else [0.25]
        state = TrialState.FAIL if fails else TrialState.COMPLETE
        study._storage.set_trial_state_values(trial._trial_id, state, values)
        if prunes:
            raise optuna.TrialPruned
        return 0.5

    words = SharedSearch(study, 1).run_one(objective)
    assert words == "trial 0: another worker has ended it meanwhile; its result counts"
    assert study.get_trials()[0].value == (None if fails else 0.25)


def test_an_error_of_a_trial_is_no_matter_of_other_workers():
    def objective(trial: optuna.Trial) -> float:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        SharedSearch(optuna.create_study(), 1).run_one(objective)


@pytest.mark.parametrize("place", ["ask", "_storage.set_trial_state_values"])
def test_an_error_before_or_after_a_trial_is_no_matter_of_other_workers(place, monkeypatch):
    study = optuna.create_study()
    SharedSearch(study, 2).run_one(_draw)  # this one has ended

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("a fault of the storage")

    owner = study._storage if "storage" in place else study
    monkeypatch.setattr(owner, place.rpartition(".")[2], fail)
    words = "a fault of the storage|Should not reach"  # Optuna's, of a trial that did not end
    with pytest.raises((ValueError, AssertionError), match=words):
        SharedSearch(study, 2).run_one(_draw)


def test_a_trial_gives_way_to_one_that_was_queued_before_it(tmp_path):
    study = _shared(f"sqlite:///{tmp_path}/shared.db")
    study.enqueue_trial({"x": 0.5})  # of a worker that died
    late = _begin(study)
    with pytest.raises(shared_search.NotOurs):
        SharedSearch(study, 1)._run(late, _draw)
    _fail(study, late)
    judge_all(study, 1, _draw)
    assert [(t.state.name, t.value) for t in study.get_trials()] == [
        ("COMPLETE", 0.5),
        ("FAIL", None),
    ]


@pytest.mark.parametrize("reports", [False, True])
def test_a_worker_that_seemed_dead_goes_on(tmp_path, reports):
    study = _shared(f"sqlite:///{tmp_path}/shared.db")

    def objective(trial: optuna.Trial) -> float:
        x = _draw(trial)
        if trial.number == 1:
            _fail(study, trial)
            if reports:
                trial.report(x, 1)
        return x

    judge_all(study, 3, objective)
    found = study.get_trials()
    assert [trial.state.name for trial in found] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert found[2].params == found[1].params


def _age_heartbeats(url: str) -> int:
    """Let all workers seem dead whose heartbeat has come; return their number."""
    with open_storage(url).engine.begin() as connection:
        words = "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'"
        return connection.exec_driver_sql(words).rowcount


def _kill_one_of_three(url: str, tmp_path: Path) -> None:
    total, log = 8, tmp_path / "log"
    _shared(url)
    start = multiprocessing.get_context("fork").Process
    stuck = start(target=_worker, args=(url, total, str(log), True))
    stuck.start()
    while not (log.exists() and _age_heartbeats(url)):
        assert stuck.is_alive()
        time.sleep(0.05)
    assert stuck.pid is not None
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join()
    others = [start(target=_worker, args=(url, total, str(log), False)) for _ in range(2)]
    for worker in others:
        worker.start()
    for worker in others:
        worker.join(240)
    assert [worker.exitcode for worker in others] == [0, 0]
    found = _shared(url).get_trials()
    complete = [trial for trial in found if trial.state == TrialState.COMPLETE]
    assert len(complete) == total  # none lost, none too many
    assert len({trial.params["x"] for trial in complete}) == total  # none counted twice
    number, x = log.read_text().splitlines()[0].split()
    assert found[int(number)].state == TrialState.FAIL
    (again,) = [t for t in complete if t.user_attrs.get(shared_search.CONTINUES) == int(number)]
    assert again.params["x"] == float(x)


def test_three_workers_one_killed(tmp_path):
    _kill_one_of_three(f"sqlite:///{tmp_path}/shared.db", tmp_path)


def test_no_database_stays_open(tmp_path):
    counts = {"connect": 0, "close": 0}

    def count(kind: str, *others: Any) -> None:
        counts[kind] += 1

    listeners = [(sqlalchemy.Pool, kind, functools.partial(count, kind)) for kind in counts]
    for listener in listeners:
        sqlalchemy.event.listen(*listener)
    try:
        judge_all(_shared(f"sqlite:///{tmp_path}/shared.db"), 2, _draw)
    finally:
        for listener in listeners:
            sqlalchemy.event.remove(*listener)
    assert counts["connect"] == counts["close"] > 0


def test_a_lost_trial_keeps_its_place(tmp_path, monkeypatch):
    """Another worker asks between the failing of a stale trial and the queueing of its values."""
    url = f"sqlite:///{tmp_path}/shared.db"
    study, other = _shared(url), _shared(url)
    lost = _begin(study)
    x = _draw(lost)
    study._storage.record_heartbeat(lost._trial_id)  # type: ignore[attr-defined]
    assert _age_heartbeats(url) == 1
    set_state = study._storage.set_trial_state_values

    def interrupted_by_another(trial_id: int, state: TrialState, values: Any = None) -> bool:
        done = set_state(trial_id, state, values)
        if trial_id == lost._trial_id:
            with pytest.raises(shared_search.NotOurs):
                SharedSearch(other, 1)._run(late := _begin(other), _draw)
            _fail(other, late)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(study._storage, "set_trial_state_values", interrupted_by_another)
        SharedSearch(study, 1).run_one(_draw)
    judge_all(study, 1, _draw)
    assert [(t.state.name, t.value) for t in study.get_trials()] == [
        ("FAIL", None),  # lost
        ("FAIL", None),  # gave way
        ("COMPLETE", x),
    ]
    assert [row["trial"] for row in list_trials(study)] == [0, 2]


def test_a_worker_killed_before_its_first_heartbeat_loses_nothing(tmp_path):
    """Optuna leaves its trial running for ever, and the search would wait for it."""
    url = f"sqlite:///{tmp_path}/shared.db"
    study = _shared(url)
    _begin(study)
    storage = open_storage(url)
    interval, grace = storage.heartbeat_interval, storage.grace_period
    assert interval is not None
    assert grace is not None
    assert 3 * interval < grace  # one that is late is not taken for dead
    for age in (0, 2 * interval, 2 * grace):
        started = datetime.now() - timedelta(seconds=age)
        with storage.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE trials SET datetime_start = '{started}'")
        if age < grace:  # the worker may still be alive
            assert SharedSearch(study, 1).run_one(_draw) is None
    assert SharedSearch(study, 1).run_one(_draw) == ""
    assert [trial.state.name for trial in study.get_trials()] == ["FAIL", "COMPLETE"]


def test_a_trial_that_takes_long_is_left_to_its_worker(tmp_path):
    url = f"sqlite:///{tmp_path}/shared.db"
    study, other = _shared(url), _shared(url)

    def objective(trial: optuna.Trial) -> float:
        with open_storage(url).engine.begin() as connection:
            connection.exec_driver_sql("UPDATE trials SET datetime_start = '2000-01-01 00:00:00'")
        assert SharedSearch(other, 1).run_one(_draw) is None
        return _draw(trial)

    assert SharedSearch(study, 1).run_one(objective) == ""
    assert [trial.state for trial in study.get_trials()] == [TrialState.COMPLETE]


@pytest.mark.parametrize("state", [TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE])
def test_a_trial_gives_way_to_a_continuation_with_a_higher_number(state):
    study = optuna.create_study()
    x = _draw(lost := _begin(study))
    _fail(study, lost)
    late = _begin(study)
    SharedSearch(study, 1)._queue_lost_trials()
    if state != TrialState.WAITING:
        continuation = study.ask()
        assert _draw(continuation) == x
    if state == TrialState.COMPLETE:
        study.tell(continuation, x)
    with pytest.raises(shared_search.NotOurs):
        SharedSearch(study, 1)._run(late, _draw)


def test_a_trial_that_two_workers_queue_again_is_run_once():
    study = optuna.create_study()
    x = _draw(lost := _begin(study))
    _fail(study, lost)
    (attempted,) = shared_search.list_attempted_trials(study)
    attempted.queue_again(study)
    attempted.queue_again(study)
    search = SharedSearch(study, 2)
    first, second = study.ask(), study.ask()
    assert search._run(first, _draw) == x
    with pytest.raises(shared_search.NotOurs):
        search._run(second, _draw)


def test_a_worker_that_dies_before_it_queues_a_trial_again_loses_nothing():
    study = optuna.create_study()
    values = [_draw(_begin(study)) for _ in range(2)]
    for number in range(2):
        study._storage.set_trial_state_values(number, TrialState.FAIL)  # and no more
    unused = study.ask()
    _fail(study, unused)  # died before it had a value
    judge_all(study, 3, _draw)
    done = study.get_trials(states=(TrialState.COMPLETE,))
    assert [trial.params["x"] for trial in done[:2]] == values
    assert [trial.user_attrs[shared_search.CONTINUES] for trial in done] == [0, 1, 2]
    assert SharedSearch(study, 2).count() == (2, 2)  # if fewer are asked for than are done


def test_values_survive_a_worker_that_dies_before_it_has_read_them():
    study = optuna.create_study()
    x = _draw(lost := _begin(study))
    _fail(study, lost)
    SharedSearch(study, 1)._queue_lost_trials()
    _fail(study, study.ask())
    judge_all(study, 1, _draw)
    assert study.best_trial.params == {"x": x}


def test_a_continuation_takes_a_new_folder_where_the_old_one_is_in_use(tmp_path):
    study = optuna.create_study()
    plan: Any = None  # nothing is run
    queue = tuning.SearchQueue(study, plan, tmp_path, 2)
    study.enqueue_trial({}, user_attrs={shared_search.CONTINUES: 7})
    trial = study.ask()
    places = []
    with ExitStack() as worker:
        for _ in range(2):
            places.append(queue._claim_run(trial, worker))  # held from here on
        with pytest.raises(UserError, match="another process holds the run of trial 0"):
            queue._claim_run(trial, worker)
    assert places == [tmp_path / "runs" / name for name in ("trial-0007", "trial-0000")]


def test_a_search_waits_for_other_workers_after_memory_ran_out(tmp_path):
    study = optuna.create_study()
    large, running = study.ask(), study.ask()
    large.set_user_attr(shared_search.TOO_LARGE, "CUDA out of memory")
    _fail(study, large)
    plan: Any = None  # nothing is run
    queue = tuning.SearchQueue(study, plan, tmp_path, 2)
    assert queue.run_one(_draw) is None
    assert queue.find_too_large() == {}
    study.tell(running, 1.0)
    assert queue.find_too_large() == {"trial-0000": "CUDA out of memory"}


def test_a_trial_without_enough_memory_kills_no_worker():
    study = optuna.create_study()
    search = SharedSearch(study, 1)
    x = _draw(trial := study.ask())
    for _ in range(shared_search.MAX_DEATHS):
        trial.set_user_attr(shared_search.TOO_LARGE, "CUDA out of memory")
        _fail(study, trial)
        search.retry_too_large()
        trial = study.ask()
        assert _draw(trial) == x
    _fail(study, trial)  # the first death
    judge_all(study, 1, _draw)
    assert study.best_trial.params == {"x": x}


def test_a_trial_that_kills_every_worker_is_given_up():
    study = optuna.create_study()
    search = SharedSearch(study, 1)
    x = _draw(trial := study.ask())
    for _ in range(shared_search.MAX_DEATHS - 1):
        _fail(study, trial)
        search._queue_lost_trials()
        trial = study.ask()
        assert trial.user_attrs[shared_search.CONTINUES] == 0
        assert _draw(trial) == x
    _fail(study, trial)
    judge_all(study, 1, _draw)  # other values have its place
    assert study.best_trial.params["x"] != x
    assert shared_search.CONTINUES not in study.best_trial.user_attrs


@pytest.mark.parametrize("error", [Interrupted(signal.SIGTERM, "go on"), KeyboardInterrupt()])
def test_a_trial_may_be_interrupted_often(error):
    study = optuna.create_study()
    search = SharedSearch(study, 1)
    seen = []

    def interrupted(trial: optuna.Trial) -> float:
        seen.append(_draw(trial))
        raise error

    for _ in range(shared_search.MAX_DEATHS + 2):  # a cluster that takes its machines back
        with pytest.raises(type(error)):
            search.run_one(interrupted)
    judge_all(study, 1, _draw)
    assert {*seen, study.best_value} == {seen[0]}


def test_an_interruption_is_one_though_another_worker_has_ended_the_trial():
    study = optuna.create_study()

    def interrupted(trial: optuna.Trial) -> float:
        _fail(study, trial)
        raise Interrupted(signal.SIGTERM, "go on")

    with pytest.raises(Interrupted):
        SharedSearch(study, 1).run_one(interrupted)


def test_a_trial_that_failed_by_its_own_error_is_not_continued():
    study = optuna.create_study()
    search = SharedSearch(study, 1)

    def faulty(trial: optuna.Trial) -> float:
        raise ValueError(f"cannot train with {_draw(trial)}")

    with pytest.raises(ValueError, match="cannot train"):
        search.run_one(faulty)
    judge_all(study, 1, _draw)
    assert shared_search.CONTINUES not in study.best_trial.user_attrs


def test_the_last_trial_is_not_run_twice():
    """Two workers ask at the same moment for the one trial that is left: the later gives way."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    ran = []

    def objective(trial: optuna.Trial) -> float:
        ran.append(trial.number)
        return 1.0

    earlier = study.ask()
    with pytest.raises(shared_search.NotOurs):
        SharedSearch(study, 1)._run(late := study.ask(), objective)
    study.tell(late, state=TrialState.FAIL)
    assert ran == []
    assert list_trials(study)[0]["trial"] == earlier.number
    assert len(list_trials(study)) == 1  # a trial that gave way is none
    study.tell(earlier, state=TrialState.FAIL)
    judge_all(study, 1, objective)  # now there is one left
    assert ran == [2]


@pytest.fixture
def postgres() -> Any:
    """A server of our own, in a folder, over a socket; it refuses to run as root."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("PostgreSQL's initdb and postgres are not installed")
    drivers = ("psycopg", "psycopg2")
    found = [name for name in drivers if importlib.util.find_spec(name)]
    if not found:
        pytest.skip(f"no PostgreSQL driver is installed: one of {', '.join(drivers)}")
    owner = "postgres" if os.geteuid() == 0 else None
    if owner is not None and owner not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # the tests' own folder is closed to other users
        if owner is not None:
            shutil.chown(folder, owner)
        place: Any = {"user": owner, "cwd": folder}
        data = folder / "cluster"
        subprocess.run(["initdb", "-D", data, "-U", "me", "-A", "trust"], check=True, **place)
        words = ["postgres", "-D", data, "-k", folder, "-c", "listen_addresses="]
        server = subprocess.Popen(words, **place)
        try:
            deadline = time.monotonic() + 240
            while not (folder / ".s.PGSQL.5432").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            yield f"postgresql+{found[0]}://me@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown, which waits for no client
            server.wait(240)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the connections that pools hold
def test_three_workers_on_postgresql(postgres, tmp_path):
    _kill_one_of_three(postgres, tmp_path)
    gc.collect()


@pytest.mark.slow
def test_a_gaussian_process_finds_the_hill():
    """The default sampler on a function with a known maximum, and better than chance at it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=build_sampler("gp", 0), direction="maximize")

    def hill(trial: optuna.Trial) -> float:
        x, y = trial.suggest_float("x", -1, 1), trial.suggest_float("y", 0.01, 100, log=True)
        return -((x - 0.3) ** 2) - (float(y) / 3.0 - 1.0) ** 2 / (1.0 + (y / 3.0) ** 2)

    judge_all(study, 30, hill)
    assert study.best_params["x"] == pytest.approx(0.3, abs=0.1)
    assert study.best_params["y"] == pytest.approx(3.0, rel=0.2)
