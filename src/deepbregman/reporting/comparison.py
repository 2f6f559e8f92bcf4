"""Arms side by side: a card, charts and tables of runs that were grouped by their configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepbregman.statistics import format_spread, summarise
from deepbregman.terminal import format_duration

from .charts import Figure, draw_evaluations, slug
from .curves import draw_curves
from .detection_tables import tabulate_trunks
from .records import (
    RunGroup,
    average_references,
    find_differences,
    find_unequal_budget,
    is_finite,
    list_measures,
    name_datasets,
)
from .tables import (
    Cell,
    Table,
    summarise_measure,
    tabulate_evaluations,
    tabulate_fields,
    tabulate_provenance,
)


@dataclass(frozen=True)
class Card:
    """An arm at a glance."""

    group: RunGroup
    facts: list[tuple[str, str]]
    headline: Cell | None
    headline_title: str
    test_set: str
    warnings: list[str]
    """Reasons to doubt the numbers; empty if there are none."""
    has_labels: bool = True
    """Whether the data may have labels: without any, the kNN monitor never ran."""


@dataclass(frozen=True)
class Comparison:
    """Arms to compare, with their charts and tables."""

    groups: list[RunGroup]
    cards: list[Card]
    evaluations: list[Figure]
    curves: list[Figure]
    diagnostics: list[Figure]
    tables: list[Table]
    fields: Table | None
    unequal: list[str]
    incomparable: str
    """Why the headlines of the cards cannot be compared; empty if they can."""
    provenance: Table

    @property
    def figures(self) -> list[Figure]:
        """All charts."""
        return [*self.evaluations, *self.curves, *self.diagnostics]


def compare(groups: list[RunGroup], key: str, *, evaluated: bool = True) -> Comparison:
    """Draw all charts and tables of some arms.

    Args:
        key: begins the names of files; may be empty.
        evaluated: add tables and charts of evaluations; a study has its own.
    """
    prefix = f"{key}-" if key else ""
    tables: list[Table] = []
    if evaluated:
        tables = [*tabulate_evaluations(groups, prefix), *tabulate_trunks(groups, prefix)]
        tables = _make_keys_unique(tables)
    sources = dict.fromkeys(measure.data for measure in list_measures(groups)) if evaluated else {}
    evaluations = [
        draw_evaluations(groups, data, table.key, table.title)
        for data, table in zip(sources, tables, strict=False)  # tables of differences follow
    ]
    curves, diagnostics = draw_curves(groups, prefix)
    names = name_datasets(groups)
    cards = [make_card(group, names) for group in groups] if evaluated else []
    return Comparison(
        groups=groups,
        cards=cards,
        evaluations=evaluations,
        curves=curves,
        diagnostics=diagnostics,
        tables=tables,
        fields=tabulate_fields(groups, prefix),
        # A study's arms differ on purpose.
        unequal=find_unequal_budget(find_differences(groups)) if evaluated else [],
        incomparable=_describe_test_sets(cards),
        provenance=tabulate_provenance(groups, prefix),
    )


def _make_keys_unique(tables: Sequence[Table]) -> list[Table]:
    """Give the files of every table a unique name."""
    keys = [slug(table.key) for table in tables]
    return [
        table._replace(key=key if keys.count(key) == 1 else f"{key}-{index + 1}")
        for index, (table, key) in enumerate(zip(tables, keys, strict=True))
    ]


def make_card(group: RunGroup, names: Mapping[str, str]) -> Card:
    """Summarise an arm, with the names of all datasets of the page."""
    config = group.config
    seeds = ", ".join(str(seed) for seed in group.seeds)
    facts = [
        ("data", names[config.data.source]),
        ("encoder", config.encoder.name),
        ("epochs", str(config.training.epochs)),
        ("runs", f"{len(group.runs)} (seed {seeds})"),
    ]
    monitored = [[row["knn"] for row in r.metrics if is_finite(row.get("knn"))] for r in group.runs]
    last = [values[-1] for values in monitored if values]
    if last:
        found = summarise(last)
        spread = format_spread(found["mean"], found["deviation"])
        facts.append(("kNN monitor, last", f"{spread} %"))
    health = [f"{run.health}" for run in group.runs if run.health is not None]
    facts += [("health", words) for words in dict.fromkeys(health)]
    stopped = [run.stopped for run in group.runs if run.stopped is not None]
    facts += [("stopped", words) for words in dict.fromkeys(stopped)]
    seconds = [run.seconds for run in group.runs if run.seconds is not None]
    if seconds:
        each = " each" if len(seconds) > 1 else ""
        facts.append(("training took", format_duration(summarise(seconds)["mean"]) + each))
    states = [f"{run.name}: {run.state}" for run in group.runs if run.state != "finished"]
    if len(group.seeds) < len(group.runs):
        states.append(f"{group.size}: so the deviation is not over independent seeds")
    elif len(group.runs) == 1:
        states.append("one seed: no deviation over seeds")
    known = list_measures([group])
    own = [m for m in known if m.data == config.data.source] or known
    linear = [m for m in own if m.protocol == "linear" and m.metric == "top1"]
    main = next(iter([*linear, *own]), None)
    if main is None:  # the card says so, and there is nothing to deviate
        unusual = [f"{r.name}: {r.state}" for r in group.runs if not r.is_complete]
        ran = all(run.is_complete and run.config.training.knn_every for run in group.runs)
        return Card(group, facts, None, "", "", unusual, has_labels=bool(last) or not ran)
    compared = average_references([group], main).items()
    facts[:0] = [(name, f"{value:.2f} %") for name, value in compared]
    images = main.describe_images(names[main.data])
    return Card(group, facts, summarise_measure(group, main), main.title, images, states)


def _describe_test_sets(cards: Sequence[Card]) -> str:
    """Say that headlines are not of the same images or the same measure; empty if they are."""
    known = [card for card in cards if card.headline is not None]
    for part, what in (("test_set", "test images"), ("headline_title", "measures")):
        if len({getattr(card, part) for card in known}) > 1:
            words = "; ".join(f"{card.group.name}: {getattr(card, part)}" for card in known)
            return f"different {what}: {words}"
    return ""
