// matplotlib's viridis and cividis, 64 steps each (CC0): evenly spaced in lightness and readable with color blindness.

const VIRIDIS =
  "44015446075a470d6047136548186a481d6f482374482878472d7b46327e453781443b844240864045883e49893d4e8a3a538b38588c365c8d34608d32648e31688e2f6c8e2d708e2c738e2a778e297b8e277f8e26828e24868e238a8d218e8d20928c1f968b1f9a8a1f9e891fa18721a58523a98326ad812ab07f2fb47c35b7793bbb7542be714ac16d52c5695ac86465cb5e6ece5877d15381d34d8bd64695d840a0da39aadc32b5de2bc0df25cae11fd5e21adfe318eae51af4e61efde725";

const CIVIDIS =
  "00224e00255400285b002b62002e6a0030700533711235701a386f213b6e273e6e2d416d32436d36466c3b496c3f4c6c444f6c48526c4c556c50576c545a6d575d6d5b606e5e636f62656f656870696b716c6e727071737374757777767a7a787e7d788280798683798a86788e8978928c78958f779992779d9576a19975a59c74a99f73ada272b1a570b6a96fbaac6dbfb06bc3b369c7b767ccba64d0be62d4c15fd9c55cddc858e1cc55e6d051ead34cefd748f3db42f8df3cfde334fee838";

export type Colour = [number, number, number];

const TABLES = { viridis: table(VIRIDIS), cividis: table(CIVIDIS) };
export type Scale = keyof typeof TABLES;

function table(hex: string): Colour[] {
  const byte = (at: number) => Number.parseInt(hex.slice(at, at + 2), 16);
  return Array.from({ length: hex.length / 6 }, (_, at) => [byte(6 * at), byte(6 * at + 2), byte(6 * at + 4)]);
}

// Returns the color of a value in 0..1.
export function colour(scale: Scale, share: number): Colour {
  const steps = TABLES[scale];
  const place = Math.min(Math.max(share, 0), 1) * (steps.length - 1);
  const low = steps[Math.floor(place)];
  const high = steps[Math.ceil(place)];
  const part = place - Math.floor(place);
  return [0, 1, 2].map((at) => Math.round(low[at] + part * (high[at] - low[at]))) as Colour;
}
