// Sends requests to a model's worker one at a time; of waiting requests only the last is sent.

import type { Model, Outputs } from "./model.ts";
import type { Answer, Failure, Question, Ready } from "./worker.ts";

export interface Result {
  pixels: Float32Array;
  outputs: Outputs;
  how: string; // it was computed, in words
}

// The source of a model's outputs: its worker, or recorded outputs (still.ts).
export interface Answerer {
  ask(pixels: Float32Array, outputs: string[]): void;
  close(): void;
}

export type Opener = (receive: (result: Result) => void, fail: (reason: string) => void) => Answerer;

export class Runner implements Answerer {
  #place = "";
  #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  #asked: Question | null = null;
  #waiting: Question | null = null;
  #count = 0;

  constructor(
    model: Model,
    private receive: (result: Result) => void,
    private fail: (reason: string) => void,
  ) {
    this.#worker.onmessage = ({ data }: MessageEvent<Ready | Failure | Answer>) => {
      if ("ready" in data) this.#place = data.ready;
      else if ("failure" in data) this.#failed(data.failure);
      else this.#answered(data);
    };
    this.#worker.onerror = (event) =>
      this.#failed(event.message || "The page's worker cannot be loaded. Reload the page.");
    this.#worker.postMessage({ model });
  }

  ask(pixels: Float32Array, outputs: string[]): void {
    this.#waiting = { id: ++this.#count, pixels, outputs };
    if (this.#asked === null) this.#next();
  }

  close(): void {
    this.#worker.terminate();
  }

  #next(): void {
    this.#asked = this.#waiting;
    this.#waiting = null;
    if (this.#asked !== null) this.#worker.postMessage(this.#asked);
  }

  #answered({ outputs, milliseconds }: Answer): void {
    const asked = this.#asked;
    this.#next();
    if (asked !== null) {
      this.receive({ pixels: asked.pixels, outputs, how: `${milliseconds.toFixed(0)} ms per image in ${this.#place}` });
    }
  }

  #failed(reason: string): void {
    this.#next();
    this.fail(reason);
  }
}
