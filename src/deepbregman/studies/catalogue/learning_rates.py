"""The learning rate of every method, chosen on held-out images before ``study methods``."""

from deepbregman.studies.catalogue import methods
from deepbregman.studies.definition import Study

STUDY = Study(
    name="learning-rates",
    title="Which learning rate suits each method?",
    arms=(),
    figure="groups",
    recipes=methods.STUDY.recipes,
    rate_factors=(1.0, 0.3, 3.0),
    evaluate_on="holdout",
    seeds=1,
    unequal=True,
    note=(
        "Multiples of the rate in each recipe, with muon of both its rates. Where the best is the "
        "largest or the smallest, add further ones by --values 0.1 10 and choose recipes by "
        "--only. deepbregman study methods --rates FOLDER takes the best of each."
    ),
)
