import assert from "node:assert/strict";
import { test } from "node:test";
import type { Action, Task } from "./records.js";
import { Spell } from "./spell.js";

const task = (seed: number): Task => ({
  environment: "spell", split: "train", index: "0", seed: String(seed), purpose: "PURPOSE_TRAINING",
});
const say = (content: string): Action => ({ message: { role: "assistant", content }, malformed_tool_calls: [] });
const word = (spell: Spell): string => spell.reset().messages![0]!.content.split(" ")[1]!;

test("the right answer earns 1, three wrong ones 0", () => {
  for (let seed = 0; seed < 20; seed++) {
    const right = new Spell(task(seed));
    assert.equal(right.step(say([...word(right)].reverse().join(""))).reward, 1);
    const wrong = new Spell(task(seed));
    assert.deepEqual([1, 2, 3].map(() => wrong.step(say("?")).reward), [undefined, undefined, 0]);
    assert.ok(wrong.ended);
  }
});

test("the same seed asks the same, seeds differ", () => {
  const words = Array.from({ length: 20 }, (_, seed) => word(new Spell(task(seed))));
  assert.deepEqual(words, Array.from({ length: 20 }, (_, seed) => word(new Spell(task(seed)))));
  assert.ok(new Set(words).size > 3);
});
