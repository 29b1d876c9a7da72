// Computes maps of outputs that come as JSON on the standard input; tests/pages/test_in_browser.py compares them.

import { readFileSync } from "node:fs";
import { attention, rollout, similarity } from "../src/maps.ts";

const { model, outputs, query, layer, head } = JSON.parse(readFileSync(0, "utf-8"));
for (const tensor of Object.values(outputs)) tensor.data = Float32Array.from(tensor.data);
const hidden = outputs[`hidden_${layer}`];
const maps = {
  attention: attention(model, outputs, layer, head, query),
  rollout: rollout(model, outputs, query),
  features: similarity(model, hidden, query, model.patch_start),
  positions: outputs.positions ? similarity(model, outputs.positions, query, 0) : null,
};
const written = Object.entries(maps).map(([name, map]) => [name, map && [...map.values]]);
console.log(JSON.stringify(Object.fromEntries(written)));
