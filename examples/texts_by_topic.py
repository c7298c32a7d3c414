"""Train on texts: definitions of English nouns by topic, from the dictionary of WordNet 3.0 that timm brings.

The script writes the definitions into a .csv file, and the data set `texts` reads it, as it would read yours. Half of
the clients tell living things apart, the others what is made, eaten or grown. Nothing is downloaded.

Run it with: python examples/texts_by_topic.py [ROUNDS] (needs the extra `vision`)
"""

import csv
import random
import sys
import tempfile
from pathlib import Path

import fedloom as fl
from fedloom.core.lazy import need

EACH = 200  # definitions of each topic
TOPICS = {
    "animal": (1_300_000, 2_665_900),
    "artifact": (2_665_900, 4_616_000),
    "food": (7_550_000, 7_940_000),
    "person": (9_600_000, 11_400_000),
    "plant": (11_540_000, 13_241_000),
}
"""WordNet 3.0 numbers its nouns by their place in a file that goes topic by topic (noun.animal, ...)."""
TASKS = {"living": ("animal", "person", "plant"), "use": ("artifact", "food", "plant")}

known, draw = need("timm.data", "vision").ImageNetInfo("imagenet-21k-goog"), random.Random(0)
rows = []
for topic, (first, end) in TOPICS.items():
    nouns = [noun for noun in known.label_names() if first <= int(noun[1:]) < end]
    for noun in draw.sample(nouns, EACH):
        words = known.label_name_to_description(noun)
        # Without the defined words, so that only the definition tells the topic.
        said = known.label_name_to_description(noun, detailed=True).removeprefix(f"{words}: ")
        rows.append([said, *(topic if topic in topics else "" for topics in TASKS.values())])

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "definitions.csv")
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([["text", *TASKS], *rows])
    recipe = {
        "name": "texts-by-topic",
        "data": {"name": "texts", "path": str(file), "labels": {task: task for task in TASKS}, "length": 24},
        "partition": {"name": "one-task", "clients_per_task": 4, "val_fraction": 0.15},
        "model": {"name": "transformer", "width": 32, "heads": "own"},
        "method": "fedavg",
        "training": {
            "rounds": int(sys.argv[1]) if len(sys.argv) > 1 else 3,
            "epochs": 1,
            "batch_size": 32,
            "optimizer": {"name": "adamw", "lr": 0.003},
        },
    }
    print(fl.run(recipe, Path(folder, "run")).table())
