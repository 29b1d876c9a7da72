// Antialiased resizing of 8-bit images as torch and Pillow do it: columns first, then rows, each rounded to 8 bits.

export interface Pixels {
  width: number;
  height: number;
  data: Uint8Array; // height x width x 3, row by row
}

type Kernel = (x: number) => number;

const KERNELS: Record<"bilinear" | "bicubic", { reach: number; kernel: Kernel }> = {
  bilinear: { reach: 1, kernel: (x) => Math.max(1 - Math.abs(x), 0) },
  bicubic: { reach: 2, kernel: cubic },
};

// The cubic filter by Keys with a = -0.5, as in Pillow.
function cubic(x: number): number {
  const a = -0.5;
  const t = Math.abs(x);
  if (t < 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
  if (t < 2) return ((t - 5) * t + 8) * t * a - 4 * a;
  return 0;
}

interface Weights {
  starts: Int32Array; // of every place: the first that it is made from
  counts: Int32Array;
  values: Int32Array; // `most` a place, in fixed point
  most: number;
  bits: number;
}

// As in torch: 16-bit weights with as many fractional bits as the largest weight allows.
function weightsOf(from: number, to: number, filter: "bilinear" | "bicubic"): Weights {
  const { reach, kernel } = KERNELS[filter];
  const scale = from / to;
  const stretch = Math.max(scale, 1);
  const support = reach * stretch;
  const most = Math.ceil(support) * 2 + 1;
  const starts = new Int32Array(to);
  const counts = new Int32Array(to);
  const exact = new Float64Array(to * most);
  let largest = 0;
  for (let place = 0; place < to; place++) {
    const center = scale * (place + 0.5);
    const start = Math.max(Math.trunc(center - support + 0.5), 0);
    const count = Math.min(Math.max(Math.min(Math.trunc(center + support + 0.5), from) - start, 0), most);
    let total = 0;
    for (let k = 0; k < count; k++) {
      const weight = kernel((k + start - center + 0.5) / stretch);
      exact[place * most + k] = weight;
      total += weight;
    }
    for (let k = 0; k < count; k++) {
      exact[place * most + k] /= total || 1;
      largest = Math.max(largest, exact[place * most + k]);
    }
    starts[place] = start;
    counts[place] = count;
  }
  let bits = 0;
  while (bits < 22 && Math.trunc(0.5 + largest * 2 ** (bits + 1)) < 2 ** 15) bits++;
  const values = Int32Array.from(exact, (weight) => Math.trunc(weight * 2 ** bits + (weight < 0 ? -0.5 : 0.5)));
  return { starts, counts, values, most, bits };
}

function clamped(value: number): number {
  return value < 0 ? 0 : value > 255 ? 255 : value;
}

function columns(image: Pixels, width: number, filter: "bilinear" | "bicubic"): Pixels {
  const { starts, counts, values, most, bits } = weightsOf(image.width, width, filter);
  const data = new Uint8Array(image.height * width * 3);
  const half = bits > 0 ? 2 ** (bits - 1) : 0;
  for (let y = 0; y < image.height; y++) {
    for (let x = 0; x < width; x++) {
      let red = half;
      let green = half;
      let blue = half;
      let source = (y * image.width + starts[x]) * 3;
      for (let k = x * most; k < x * most + counts[x]; k++, source += 3) {
        red += values[k] * image.data[source];
        green += values[k] * image.data[source + 1];
        blue += values[k] * image.data[source + 2];
      }
      const target = (y * width + x) * 3;
      data[target] = clamped(red >> bits);
      data[target + 1] = clamped(green >> bits);
      data[target + 2] = clamped(blue >> bits);
    }
  }
  return { width, height: image.height, data };
}

function rows(image: Pixels, height: number, filter: "bilinear" | "bicubic"): Pixels {
  const { starts, counts, values, most, bits } = weightsOf(image.height, height, filter);
  const stride = image.width * 3;
  const data = new Uint8Array(height * stride);
  const half = bits > 0 ? 2 ** (bits - 1) : 0;
  const sums = new Int32Array(stride);
  for (let y = 0; y < height; y++) {
    sums.fill(half);
    for (let k = 0; k < counts[y]; k++) {
      const weight = values[y * most + k];
      const source = (starts[y] + k) * stride;
      for (let x = 0; x < stride; x++) sums[x] += weight * image.data[source + x];
    }
    for (let x = 0; x < stride; x++) data[y * stride + x] = clamped(sums[x] >> bits);
  }
  return { width: image.width, height, data };
}

export function resized(image: Pixels, height: number, width: number, filter: "bilinear" | "bicubic"): Pixels {
  const wide = width === image.width ? image : columns(image, width, filter);
  return height === image.height ? wide : rows(wide, height, filter);
}
