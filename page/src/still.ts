// A page for one image without a runtime: it contains the model's outputs; src/hf_vit/analysis/showing.py writes it.

import type { Outputs, Page } from "./model.ts";
import type { Answerer, Result } from "./runner.ts";

export interface StillPage {
  page: Page;
  image: string; // data: URL
  outputs: Outputs;
}

type Written = Omit<StillPage, "outputs"> & { outputs: Record<string, { dims: number[]; data: string }> };

export function readStill(): StillPage | null {
  const written = document.querySelector("#still")?.textContent;
  if (!written) return null;
  const { page, image, outputs }: Written = JSON.parse(written);
  const read = Object.entries(outputs).map(([name, { dims, data }]) => [name, { dims, data: halves(data) }]);
  return { page, image, outputs: Object.fromEntries(read) };
}

// Decodes 16-bit values (IEEE 754 half precision, little-endian) from base64.
function halves(base64: string): Float32Array {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const fraction = bits & 0x3ff;
    const exponent = (bits >> 10) & 0x1f;
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14;
    return bits >> 15 ? -size : size;
  });
}

export class Still implements Answerer {
  constructor(
    private outputs: Outputs,
    private receive: (result: Result) => void,
  ) {}

  ask(pixels: Float32Array): void {
    this.receive({ pixels, outputs: this.outputs, how: "Computed by torch." });
  }

  close(): void {}
}
