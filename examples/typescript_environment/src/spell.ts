// The environment itself: spell a word backwards, in three attempts.

import { createHash } from "node:crypto";
import type { Action, EnvironmentInfo, InteractResponse, Task } from "./records.js";

const WORDS = ["stream", "lever", "canal", "wheel", "sluice", "basin", "weir", "flume"];
const ATTEMPTS = 3;

export const INFO: EnvironmentInfo = {
  name: "spell",
  description: "Spell a word backwards, in three attempts.",
  splits: [{ name: "train", task_count: 0 }], // 0: drawn from the seed without end
  metric_names: ["attempts"],
};

export class Spell {
  ended = false;
  private readonly word: string;
  private attempts = 0;

  constructor(task: Task) {
    // The same task and seed must give the same episode.
    const drawn = createHash("sha256").update(`${task.split}/${task.index}/${task.seed}`).digest();
    this.word = WORDS[drawn.readUInt32LE() % WORDS.length]!;
  }

  reset(): InteractResponse {
    return { messages: [{ role: "user", content: `Spell ${this.word} backwards.` }] };
  }

  step(action: Action): InteractResponse {
    this.attempts += 1;
    const metrics = { attempts: this.attempts };
    if ((action.message?.content ?? "").trim() === [...this.word].reverse().join("")) {
      this.ended = true;
      return { reward: 1, terminated: true, metrics };
    }
    if (this.attempts === ATTEMPTS) {
      this.ended = true;
      return { reward: 0, terminated: true, metrics };
    }
    return { messages: [{ role: "user", content: "No. Try again." }], metrics };
  }
}
