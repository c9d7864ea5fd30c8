"""services.trainer.journal."""

from services.trainer.journal import Journal


def test_later_steps_are_forgotten(tmp_path):
    journal = Journal(tmp_path / "new" / "j.jsonl")
    journal.forget_after(0)
    for step in (1, 2, 3):
        journal.append({"step": step})
    journal.forget_after(1)
    journal.append({"step": 2, "again": True})
    assert journal.read() == [{"step": 1}, {"step": 2, "again": True}]


def test_a_torn_line_is_none(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert Journal(path).read() == [{"step": 1}]
    Journal(path).append({"step": 2})
    assert Journal(path).read() == [{"step": 1}, {"step": 2}]
