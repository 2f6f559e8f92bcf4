"""A map of all images, their groups and their copies: python examples/explorer.py RUN FOLDER.

Writes FOLDER/map.html, which needs no network, and prints the largest groups.
"""

import sys
from pathlib import Path

from deepbregman import cluster, duplicates, explore

if not sys.argv[2:]:
    sys.exit(__doc__)
run, folder = sys.argv[1], Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
explore(run, folder / "map.html", clusters=5)
print(f"open {folder / 'map.html'} in a browser")

groups = cluster(run, 5, by=["features"], seeds=1)
sizes = groups.partitions["features"].sizes
for number, count in sorted(enumerate(sizes), key=lambda pair: -pair[1])[:3]:
    print(f"group {number}: {count} images")

copies = duplicates(run, out=folder / "copies.csv")
print(f"{len(copies.groups)} groups of copies")
