"""Prints for each dataset of reasoning_gym a hash of one question and the lowest score of its own answers."""

import hashlib

from reasoning_gym import factory

from services.envs import reasoning

for name in sorted(set(factory.DATASETS) - {"composite"}):
    source = reasoning.Source(name)
    entries = [reasoning.question(source, False, seed) for seed in (1, 2)]
    examples = [reasoning.example(name, entry) for entry in entries]
    scores = [
        0.0 if e is None else reasoning.score(source, entry, e) for entry, e in zip(entries, examples, strict=True)
    ]
    print(name, hashlib.sha256(entries[0]["question"].encode()).hexdigest()[:12], min(scores))
