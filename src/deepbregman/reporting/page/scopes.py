"""What is shown together: arms with their curves, their differences and where they came from."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .arms import Arm, Difference, Subject, differences, is_number, spread, unequal_budget
from .charts import CURVES, DIAGNOSTICS, Figure, colour, curve_figures, dash, slug
from .dots import evaluation_figure
from .measures import count, evaluation_tables, measures, quickstart_tables, summary
from .tables import Cell, Row, Table


@dataclass(frozen=True)
class Card:
    """An arm at a glance."""

    name: str
    colour: str
    method: str
    facts: list[tuple[str, str]]
    headline: Cell | None
    headline_title: str
    states: list[str]
    """What is to be known before the numbers are believed; empty when all is well."""


@dataclass(frozen=True)
class Legend:
    """An arm's name, colour and strokes."""

    name: str
    colour: str
    dash: str


@dataclass(frozen=True)
class Scope:
    """Arms that are compared, and all that is drawn of them."""

    key: str
    arms: list[Arm]
    legend: list[Legend]
    cards: list[Card]
    tables: list[Table]
    results: list[Figure]
    curves: list[Figure]
    diagnostics: list[Figure]
    differences: list[Difference]
    unequal: list[str]
    provenance: Table

    @property
    def figures(self) -> list[Figure]:
        """All charts."""
        return [*self.results, *self.curves, *self.diagnostics]


def scope_of(arms: list[Arm], key: str, *, judged: bool = True) -> Scope:
    """Draw all there is of some arms.

    Args:
        arms: with their runs.
        key: begins the names of files; may be empty.
        judged: with tables and charts of evaluations; a study has its own.
    """
    prefix = f"{key}-" if key else ""
    tables = _with_own_files(evaluation_tables(arms, prefix)) if judged else []
    sources = dict.fromkeys(measure.data for measure in measures(arms)) if judged else {}
    results = [
        evaluation_figure(arms, data, table.key, table.title)
        for data, table in zip(sources, tables, strict=True)
    ]
    found = differences(arms)
    return Scope(
        key=key or "runs",
        arms=arms,
        legend=[
            Legend(arm.name, colour(arm.place), " ".join(map(str, dash(arm.place)))) for arm in arms
        ],
        cards=[card(arm) for arm in arms] if judged else [],
        tables=[*tables, *_with_own_files(quickstart_tables(arms) if judged else [])],
        results=results,
        curves=curve_figures(arms, CURVES, prefix),
        diagnostics=curve_figures(arms, DIAGNOSTICS, prefix),
        differences=found,
        unequal=unequal_budget(found) if judged else [],  # a study differs on purpose
        provenance=provenance_table(arms, prefix),
    )


def _with_own_files(tables: Sequence[Table]) -> list[Table]:
    """Give every table a name for its files that no other has."""
    keys = [slug(table.key) for table in tables]
    return [
        table._replace(key=key if keys.count(key) == 1 else f"{key}-{index + 1}")
        for index, (table, key) in enumerate(zip(tables, keys, strict=True))
    ]


def difference_table(scope: Scope, prefix: str) -> Table:
    """Write the fields in which arms differ as a table."""
    rows = [
        Row(part.field, tuple(Cell(text=value) for value in part.values))
        for part in scope.differences
    ]
    columns = tuple(arm.name for arm in scope.arms)
    return Table(f"{prefix}fields", "Fields that differ", "field", columns, tuple(rows))


def card(arm: Arm) -> Card:
    """Sum up an arm."""
    config = arm.config
    seeds = ", ".join(str(seed) for seed in arm.seeds)
    facts = [
        ("data", config.data.source.rstrip("/").rpartition("/")[2] or config.data.source),
        ("encoder", config.encoder.name),
        ("epochs", str(config.training.epochs)),
        ("runs", f"{len(arm.runs)} (seed {seeds})"),
    ]
    monitor = [value for run in arm.runs if (value := _last(run, "knn")) is not None]
    if monitor:
        facts.append(("kNN monitor, last", Cell(spread(monitor)).shown + " %"))
    seconds = [run.seconds for run in arm.runs if run.seconds is not None]
    if seconds:
        each = " each" if len(seconds) > 1 else ""
        facts.append(("training took", duration(spread(seconds).mean) + each))
    states = [f"{run.name}: {run.state}" for run in arm.runs if run.state != "finished"]
    if len(arm.seeds) < len(arm.runs):
        states.append(f"{count(arm)}: the deviation says less than it seems")
    elif len(arm.runs) == 1:
        states.append("one seed: no deviation over seeds")
    own = [m for m in measures([arm]) if m.data == config.data.source] or measures([arm])
    main = next((m for m in own if m.protocol == "linear" and m.metric == "top1"), None)
    main = main or next(iter(own), None)
    headline = None if main is None else summary(arm, main)
    title = "" if main is None else main.title
    return Card(arm.name, colour(arm.place), arm.method, facts, headline, title, states)


def _last(run: Subject, metric: str) -> float | None:
    """Return the last value of a metric that a run has."""
    values = [row[metric] for row in run.metrics if is_number(row.get(metric))]
    return values[-1] if values else None


def duration(seconds: float) -> str:
    """Write a time for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def provenance_table(arms: Sequence[Arm], prefix: str) -> Table:
    """Say where every run came from."""
    names = ("arm", "seed", "state", "started", "training took", "device", "commit")
    columns = (*names, "versions", "resumed", "command")
    rows = []
    runs = {run.path: (arm, run) for arm in reversed(arms) for run in reversed(arm.runs)}
    for arm, run in reversed(runs.values()):
        record = run.provenance
        versions = record.get("versions") or {}
        resumed = record.get("resumed") or []
        commit = str(record.get("commit") or "unknown")
        cells = (
            Cell(text=arm.name),
            Cell(text=str(run.config.seed)),
            Cell(text=run.state),
            Cell(text=str(record.get("started") or "unknown")),
            Cell(text="—" if run.seconds is None else duration(run.seconds)),
            Cell(text=str(record.get("device") or "unknown"), note=str(record.get("platform", ""))),
            Cell(text=commit[:10] + "-dirty" * commit.endswith("-dirty"), note=commit),
            Cell(text=", ".join(f"{name} {version}" for name, version in versions.items())),
            Cell(
                text=f"{len(resumed)} times" if resumed else "no",
                note="; ".join(f"{r.get('started')} on {r.get('device')}" for r in resumed),
            ),
            Cell(text=shlex.join(str(word) for word in record.get("command") or [])),
        )
        rows.append(Row(run.name, cells, arm.place))
    title = "Where the numbers come from"
    return Table(f"{prefix}provenance", title, "run", columns, tuple(rows))
