"""Draw the figures of the documentation from the records in results/.

Run from the root of the project: ``python docs/images/draw.py``. ``quickstart.png`` is what
``deepbregman quickstart`` draws, and ``report.png`` shows the page in docs/examples/digits-report.
"""

import json
from pathlib import Path

from deepbregman.reporting.figures import save_speed_figure
from deepbregman.reporting.studies import save_study_figure

IMAGES = Path(__file__).parent
RESULTS = IMAGES.parents[1] / "results"

for image in sorted(IMAGES.glob("study-*.png")):
    name = image.stem.removeprefix("study-")
    save_study_figure(
        [image], json.loads((RESULTS / "studies" / name / "results.json").read_text())
    )
save_speed_figure(IMAGES / "speed.png", json.loads((RESULTS / "bench/h200/main.json").read_text()))
