// One model in a thread of its own. In: {id, pixels}; out: {id, outputs, milliseconds}, or {id, error}.

import type { InferenceSession, TypedTensor } from "onnxruntime-web";
import type { Model, Outputs } from "./model.ts";

type Runtime = typeof import("onnxruntime-web");

export interface Opening {
  model: Model;
}

export interface Question {
  id: number;
  pixels: Float32Array;
  outputs: string[];
}

export interface Answer {
  id: number;
  outputs: Outputs;
  milliseconds: number;
}

export interface Ready {
  ready: "WebGPU" | "WebAssembly";
}

export interface Failure {
  failure: string;
}

let opened: Promise<InferenceSession>;
let onGpu = false;
let runtime: Runtime;
let model: Model;

async function load(file: string): Promise<Runtime> {
  const address = new URL(`runtime/${file}`, self.location.href).href;
  const loaded: Runtime = await import(address);
  loaded.env.wasm.wasmPaths = new URL("runtime/", self.location.href).href;
  loaded.env.logLevel = "error";
  return loaded;
}

async function fetched(): Promise<Uint8Array> {
  // The browser asks whether the file has changed, as it may keep that of an older page here for days.
  const file = await fetch(new URL(`${model.folder}/model.onnx`, self.location.href), { cache: "no-cache" });
  if (!file.ok) throw new Error(`The model cannot be loaded (HTTP ${file.status}). Reload the page.`);
  return new Uint8Array(await file.arrayBuffer());
}

// Opens the model in WebGPU where that computes a first pass, else in WebAssembly.
async function open(): Promise<InferenceSession> {
  const gpu = (navigator as Navigator & { gpu?: { requestAdapter(): Promise<unknown> } }).gpu;
  const [graph, adapter] = await Promise.all([fetched(), gpu?.requestAdapter().catch(() => null)]);
  if (adapter) {
    try {
      runtime = await load("ort.webgpu.min.mjs");
      const session = await runtime.InferenceSession.create(graph, { executionProviders: ["webgpu"] });
      const [height, width] = model.image_size;
      await run(session, new Float32Array(3 * height * width), model.outputs); // what a GPU lacks shows in a first pass
      onGpu = true;
      self.postMessage({ ready: "WebGPU" } satisfies Ready);
      return session;
    } catch {
      // fall back to WebAssembly
    }
  }
  return openInWasm(graph);
}

async function openInWasm(graph: Uint8Array): Promise<InferenceSession> {
  runtime = await load("ort.wasm.min.mjs");
  const session = await runtime.InferenceSession.create(graph, { executionProviders: ["wasm"] });
  onGpu = false;
  self.postMessage({ ready: "WebAssembly" } satisfies Ready);
  return session;
}

function run(session: InferenceSession, pixels: Float32Array, outputs: string[]) {
  const images = new runtime.Tensor("float32", pixels, [1, 3, ...model.image_size]);
  return session.run({ pixel_values: images }, outputs);
}

async function answer({ id, pixels, outputs }: Question): Promise<void> {
  const session = await opened;
  const began = performance.now();
  const results = await run(session, pixels, outputs).catch(async (error: unknown) => {
    if (!onGpu) throw error;
    opened = fetched().then(openInWasm); // such as a lost device, which a page does not get back
    return run(await opened, pixels, outputs);
  });
  const found: Outputs = {};
  for (const [name, tensor] of Object.entries(results)) {
    found[name] = { dims: tensor.dims, data: (tensor as TypedTensor<"float32">).data };
  }
  const milliseconds = performance.now() - began;
  self.postMessage({ id, outputs: found, milliseconds } satisfies Answer);
}

self.onmessage = async ({ data }: MessageEvent<Opening | Question>) => {
  try {
    if ("model" in data) {
      model = data.model;
      opened = open();
      await opened;
    } else await answer(data);
  } catch (error) {
    self.postMessage({ failure: error instanceof Error ? error.message : String(error) } satisfies Failure);
  }
};
