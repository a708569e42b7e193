// Read one prompt of a shard without Python: its token ids, and what one layer holds of each of its tokens.
//
//     npm install --prefix examples
//     node examples/read-shard.mjs run1/shards/shard_00000.zarr.zip --layer 2 --prompt 0 --values 4
//
// prints one JSON object:
//
//     array, logical_dtype    activations or projections, and the type that the run stored
//     shape                   [tokens of the prompt, hidden size or number of directions]
//     token_ids               the ids that the model read
//     values                  of each token the first --values numbers (by default 4; all), in float32; null for a NaN or an inf
//
// --layer is a decoder block's number and --prompt a prompt's number in the whole run. Needs Node 18 or newer.

import { open as openFile } from "node:fs/promises";
import { parseArgs } from "node:util";

import ZipFileStore from "@zarrita/storage/zip";
import * as zarr from "zarrita";

const FORMAT = "harvest-shard";
const FORMAT_VERSION = 2;
const USAGE = "usage: node read-shard.mjs SHARD --layer BLOCK --prompt NUMBER [--values COUNT|all]";

/** An error of the request or the file: shown in one line, without a stack. */
class AskedError extends Error {}

/** Reads pieces of a file from its place: a shard may be larger than memory. */
class FileReader {
  constructor(file) {
    this.file = file;
  }

  async getLength() {
    return (await this.file.stat()).size;
  }

  async read(offset, length) {
    const bytes = new Uint8Array(length);
    for (let done = 0; done < length; ) {
      const { bytesRead } = await this.file.read(bytes, done, length - done, offset + done);
      if (bytesRead === 0) throw new AskedError("the file ends too early: it is cut short");
      done += bytesRead;
    }
    return bytes;
  }
}

/** A shard's entries, with float16 arrays called uint16: JavaScript has had a Float16Array only since Node 24. */
class ShardStore {
  constructor(file) {
    this.zip = new ZipFileStore(new FileReader(file));
  }

  async get(key) {
    const bytes = await this.zip.get(key);
    if (bytes === undefined || !key.endsWith("/zarr.json")) return bytes;
    const document = JSON.parse(new TextDecoder().decode(bytes));
    if (document.data_type === "float16") Object.assign(document, { data_type: "uint16", fill_value: 0 });
    return new TextEncoder().encode(JSON.stringify(document));
  }
}

/** The bits of bfloat16 as float32: they are the upper half of it. */
function fromBfloat16(bits) {
  return new Float32Array(Uint32Array.from(bits, (value) => value << 16).buffer);
}

/** The bits of float16 as float32: a sign, five bits of exponent, ten of fraction. */
function fromFloat16(bits) {
  return Float32Array.from(bits, (value) => {
    const sign = value & 0x8000 ? -1 : 1;
    const exponent = (value >> 10) & 0x1f;
    const fraction = value & 0x3ff;
    if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
    return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : (sign * fraction) / 2 ** 24;
  });
}

const TO_FLOAT32 = { bfloat16: fromBfloat16, float16: fromFloat16, float32: (values) => values };

/** All numbers of a shard's small array, as plain numbers: int64 comes as BigInt. */
async function readNumbers(group, name) {
  const { data } = await zarr.get(await zarr.open.v3(group.resolve(name), { kind: "array" }));
  return Array.from(data, Number);
}

/** Where a number stands in a list. */
function findPlace(numbers, wanted, what) {
  const place = numbers.indexOf(wanted);
  if (place < 0) throw new AskedError(`the shard holds no ${what} ${wanted}; it holds ${numbers.join(", ")}`);
  return place;
}

/** Open the array of rows, whichever of its two names it has. */
async function openRows(group) {
  for (const name of ["activations", "projections"]) {
    if (await group.store.get(`/${name}/zarr.json`)) return [name, await zarr.open.v3(group.resolve(name), { kind: "array" })];
  }
  throw new AskedError("the shard holds neither activations nor projections");
}

/** One prompt of one layer, as the object that is printed. Only the chunks that hold it are read. */
async function readPrompt(store, layer, prompt, count) {
  const group = await zarr.open.v3(store, { kind: "group" });
  const { format, format_version: version } = group.attrs;
  if (format !== FORMAT || version !== FORMAT_VERSION) {
    throw new AskedError(`the file says that it is ${format} ${version}; this reads ${FORMAT} ${FORMAT_VERSION}`);
  }
  const position = findPlace(await readNumbers(group, "layer_indices"), layer, "layer");
  const place = findPlace(await readNumbers(group, "prompt_indices"), prompt, "prompt");
  const [start, stop] = (await readNumbers(group, "prompt_offsets")).slice(place, place + 2);
  const [name, rows] = await openRows(group);
  const dtype = rows.attrs.logical_dtype;
  if (!(dtype in TO_FLOAT32)) throw new AskedError(`the values are ${dtype}; this reads ${Object.keys(TO_FLOAT32).join(", ")}`);
  const { data, shape } = await zarr.get(rows, [position, zarr.slice(start, stop), null]);
  const values = TO_FLOAT32[dtype](data);
  const [nTokens, width] = shape;
  const ofToken = (token) => Array.from(values.subarray(token * width, token * width + Math.min(count, width)));
  return {
    array: name,
    logical_dtype: dtype,
    shape,
    token_ids: (await readNumbers(group, "token_ids")).slice(start, stop),
    values: Array.from({ length: nTokens }, (_, token) => ofToken(token)),
  };
}

/** A whole number of 0 or more from the command line. */
function parseCount(name, text) {
  if (!/^\d+$/.test(text ?? "")) throw new AskedError(`--${name} is ${text ?? "missing"}; a whole number is needed\n${USAGE}`);
  return Number(text);
}

/** What the command line asks for. */
function parseCommand() {
  const text = { type: "string" };
  try {
    const options = { layer: text, prompt: text, values: { ...text, default: "4" } };
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    if (positionals.length === 1) return { path: positionals[0], ...values };
  } catch (error) {
    throw new AskedError(`${error.message}\n${USAGE}`);
  }
  throw new AskedError(`one shard file is needed\n${USAGE}`);
}

async function main() {
  const { path, ...asked } = parseCommand();
  const [layer, prompt] = ["layer", "prompt"].map((name) => parseCount(name, asked[name]));
  const count = asked.values === "all" ? Infinity : parseCount("values", asked.values);
  let file;
  try {
    file = await openFile(path);
    console.log(JSON.stringify(await readPrompt(new ShardStore(file), layer, prompt, count)));
  } catch (error) {
    throw new AskedError(`${path}: ${error.message}`, { cause: error });
  } finally {
    await file?.close();
  }
}

try {
  await main();
} catch (error) {
  if (!(error instanceof AskedError)) throw error;
  console.error(`error: ${error.message}`);
  process.exitCode = 2;
}
