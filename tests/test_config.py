"""headrace.config: every error at once, each with its key and a remedy."""

from pathlib import Path

import pytest
import yaml

from headrace import config

ROOT = Path(__file__).resolve().parent.parent


def tree() -> dict:
    return yaml.safe_load((ROOT / "configs/guess_number.yaml").read_text())


def errors(changed: dict) -> list[str]:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(changed)
    return caught.value.errors


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    loaded = config.load(path)
    assert config.parse(yaml.safe_load(config.dump(loaded))) == loaded


def test_every_error_is_reported_at_once():
    changed = tree()
    changed["trainer"]["steps"] = "many"
    changed["trainer"]["stepz"] = 3
    del changed["rollout"]["group_size"]
    assert errors(changed) == [
        "trainer.steps: input should be a valid integer, unable to parse string as an integer, but it is 'many';"
        " correct it",
        "trainer.stepz: unknown key; remove it or correct its spelling",
        "rollout.group_size: missing; add it",
    ]


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("rollout.group_size", 1, "rollout.group_size"),
        ("rollout.max_episode_tokens", 4096, "context_length"),
        ("rollout.max_action_tokens", 64, "max_action_tokens"),
        ("trainer.minibatches", 5, "multiple of minibatches"),
        ("trainer.optimizer.warmup_steps", 500, "warmup_steps"),
        ("trainer.optimizer.learning_rate", float("nan"), "learning_rate"),
        ("trainer.optimizer.learning_rate", float("inf"), "learning_rate"),
        ("trainer.max_staleness", -1, "max_staleness"),
        ("inference.batch_buckets", [16, 1], "ascending"),
        ("inference.max_running_requests", 128, "batch_buckets"),
        ("inference.data_parallel", 2, "samples wrongly"),
        ("inference.lora", {"rank": 4, "layers": []}, "inference.lora.layers"),
        ("inference.addresses", ["engine:30000", "engine"], "inference.addresses.1: 'engine' is no HOST:PORT"),
        ("trainer.address", "trainer:70000", "trainer.address: 'trainer:70000' is no HOST:PORT"),
        ("environments.guess_number.address", ":7000", "environments.guess_number.address"),
        ("environments", {}, "environments"),
        ("environments.guess_number", {}, "class"),
        ("environments.guess_number.driver", "external", "neither `class` nor `address`"),
        ("model", {}, "exactly one"),
        ("run.id", "No Spaces", "run.id"),
        ("run.directory", "gs://bucket/runs", "mount the bucket"),
    ],
)
def test_impossible_values_are_refused_by_name(key, value, word):
    changed = tree()
    *sections, last = key.split(".")
    section = changed
    for name in sections:
        section = section[name]
    section[last] = value
    assert any(word in error for error in errors(changed))


def test_zero_is_a_value():
    changed = tree()
    changed["trainer"]["max_staleness"] = 0
    changed["rollout"]["evaluation_temperature"] = 0
    loaded = config.parse(changed)
    assert (loaded.trainer.max_staleness, loaded.rollout.evaluation_temperature) == (0, 0)


def test_unreadable_files_are_named(tmp_path):
    for name, text, word in (
        ("absent.yaml", None, "cannot be read"),
        ("a.yaml", "a: [", "not YAML"),
        ("b.yaml", "3", "sections"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(config.ConfigError, match=word) as caught:
            config.load(tmp_path / name)
        assert name in str(caught.value)


def test_overrides_replace_values():
    loaded = config.load(
        ROOT / "configs/guess_number.yaml", overrides={"trainer.steps": 7, "redis.url": "redis://h:1/0"}
    )
    assert (loaded.trainer.steps, loaded.redis.url) == (7, "redis://h:1/0")


def test_a_run_gets_a_name_once():
    loaded = config.load(ROOT / "configs/guess_number.yaml")
    named = config.named_run(loaded, "Guess Number")
    assert named.run.id.startswith("guess-number-")
    assert config.named_run(named, "other") == named


def test_text_values_take_environment_variables():
    path, overrides = ROOT / "configs/guess_number.yaml", {"redis.url": "rediss://:${PASSWORD}@h:1/${DB}"}
    loaded = config.load(path, overrides=overrides, variables={"PASSWORD": "a$b", "DB": "0"})
    assert loaded.redis.url == "rediss://:a$b@h:1/0"
    with pytest.raises(config.ConfigError, match=r"redis\.url: the environment variable DB is not set"):
        config.load(path, overrides=overrides, variables={"PASSWORD": ""})


def test_messages_name_redis_without_its_password():
    url = "rediss://user:p@ss@h:1/0?ssl_ca_certs=/a&password=b"
    assert config.Redis(url=url).place == "rediss://h:1/0"
    assert config.Redis(url="redis://h:1/0").place == "redis://h:1/0"


def test_a_file_extends_another_key_by_key(tmp_path):
    above = tmp_path / "above.yaml"
    base = ROOT / "configs" / "guess_number.yaml"
    above.write_text(f"extends: {base}\ntrainer:\n  steps: 7\n  loss: {{clip_high: 0.5}}\n")
    loaded, plain = config.load(above), config.load(base)
    assert (loaded.trainer.steps, loaded.trainer.loss.clip_high) == (7, 0.5)
    assert loaded.trainer.loss.entropy_coefficient == plain.trainer.loss.entropy_coefficient
    assert loaded.environments == plain.environments


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("extends: gone.yaml", r"extends .*gone.yaml, which: cannot be read"),
        ("extends: above.yaml", "must name another run file"),
        ("extends: [1]", "must name another run file"),
    ],
)
def test_what_cannot_be_extended_is_told(tmp_path, text, error):
    (tmp_path / "above.yaml").write_text(text)
    with pytest.raises(config.ConfigError, match=error):
        config.load(tmp_path / "above.yaml")
