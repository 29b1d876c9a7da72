// Converts an image file to model input as the image processor does.

import type { Model, Preprocessing } from "./model.ts";
import { type Pixels, resized } from "./resize.ts";

// The part of the image that a model sees: `pixels` lie at (left, top) of the image resized to (width, height).
export interface View {
  pixels: Pixels;
  left: number;
  top: number;
  width: number;
  height: number;
}

const LARGEST_PX = 100_000_000;

// Puts transparency on white and applies the EXIF orientation.
export async function decoded(file: Blob): Promise<Pixels> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", imageOrientation: "from-image" });
  } catch {
    throw new Error("The browser cannot read this file as an image. Try a JPEG, PNG or WebP file.");
  }
  const { width, height } = bitmap;
  if (width * height > LARGEST_PX)
    throw new Error(`This image of ${width}×${height} px is too large for the page. Choose a smaller one.`);
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  if (context === null)
    throw new Error("The browser provides no canvas, which is needed to read images. Use another browser.");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return { width, height, data: withoutAlpha(context.getImageData(0, 0, width, height).data) };
}

function withoutAlpha(rgba: Uint8ClampedArray): Uint8Array {
  const data = new Uint8Array((rgba.length / 4) * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4, to += 3) {
    data[to] = rgba[from];
    data[to + 1] = rgba[from + 1];
    data[to + 2] = rgba[from + 2];
  }
  return data;
}

export function viewOf(image: Pixels, steps: Preprocessing): View {
  const [height, width] = sizeAfter(image, steps);
  const whole = resized(image, height, width, steps.filter);
  if (steps.crop === null) return { pixels: whole, left: 0, top: 0, width, height };
  const { height: h, width: w } = steps.crop;
  const left = offset(width, w);
  const top = offset(height, h);
  return { pixels: cropped(whole, left, top, w, h), left, top, width, height };
}

function sizeAfter(image: Pixels, { resize }: Preprocessing): [number, number] {
  if (resize === null) return [image.height, image.width];
  if ("height" in resize) return [resize.height, resize.width];
  const short = Math.min(image.height, image.width);
  const long = Math.trunc((resize.shortest_edge * Math.max(image.height, image.width)) / short);
  return image.width <= image.height ? [long, resize.shortest_edge] : [resize.shortest_edge, long];
}

// Returns where a crop begins; negative if the image is smaller and is padded with black.
function offset(side: number, crop: number): number {
  return crop > side ? -Math.trunc((crop - side) / 2) : Math.trunc((side - crop) / 2);
}

function cropped(image: Pixels, left: number, top: number, width: number, height: number): Pixels {
  const data = new Uint8Array(width * height * 3);
  for (let y = Math.max(0, -top); y < Math.min(height, image.height - top); y++) {
    const first = Math.max(0, -left);
    const last = Math.min(width, image.width - left);
    const from = ((y + top) * image.width + left + first) * 3;
    data.set(image.data.subarray(from, from + (last - first) * 3), (y * width + first) * 3);
  }
  return { width, height, data };
}

// Returns [3, H, W]; patches in `hidden` (h x w, row by row) get the image's mean color.
export function pixelValues(pixels: Pixels, model: Model, hidden: Uint8Array | null = null): Float32Array {
  const { factor, mean, std } = model.preprocessing;
  const size = pixels.width * pixels.height;
  const values = new Float32Array(3 * size);
  const [patchHeight, patchWidth] = model.patch_px;
  const [h, w] = model.grid;
  for (let channel = 0; channel < 3; channel++) {
    let sum = 0;
    for (let place = 0; place < size; place++) {
      const value = (pixels.data[place * 3 + channel] * factor - mean[channel]) / std[channel];
      values[channel * size + place] = value;
      sum += value;
    }
    if (hidden === null) continue;
    for (let y = 0; y < Math.min(pixels.height, h * patchHeight); y++) {
      for (let x = 0; x < Math.min(pixels.width, w * patchWidth); x++) {
        const patch = Math.floor(y / patchHeight) * w + Math.floor(x / patchWidth);
        if (hidden[patch]) values[channel * size + y * pixels.width + x] = sum / size;
      }
    }
  }
  return values;
}
