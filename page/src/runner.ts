// Asks a model's worker, one question at a time; of those that wait only the last is asked.

import type { Model, Outputs } from "./model.ts";
import type { Answer, Failure, Question, Ready } from "./worker.ts";

export interface Result {
  pixels: Float32Array;
  outputs: Outputs;
  milliseconds: number;
}

export class Runner {
  ready: Promise<string>;
  #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  #asked: Question | null = null;
  #waiting: Question | null = null;
  #count = 0;

  constructor(
    model: Model,
    private receive: (result: Result) => void,
    private fail: (reason: string) => void,
  ) {
    this.ready = new Promise((resolve) => {
      this.#worker.onmessage = ({ data }: MessageEvent<Ready | Failure | Answer>) => {
        if ("ready" in data) resolve(data.ready);
        else if ("failure" in data) this.#failed(data.failure);
        else this.#answered(data);
      };
    });
    this.#worker.onerror = (event) => this.#failed(event.message || "The worker of the page cannot be loaded.");
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
    if (asked !== null) this.receive({ pixels: asked.pixels, outputs, milliseconds });
  }

  #failed(reason: string): void {
    this.#next();
    this.fail(reason);
  }
}
