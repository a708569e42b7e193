"""One contender in a process of its own: what it did goes to a file, and the first prompt's stream beside it.

python scripts/bench contend NAME --work DIR --out DIR [--prompts N] [--batch-tokens N] [--model M --layers L --count N]
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from ceilings import disk_rate, matrix_rate
from contenders import CONTENDERS, folder_bytes
from limit import load_bare, packed, sweep, tune
from task import Task, load_task, read_plan, save_plan
from texts import corpus, cut_texts, read_96, write_prompts

import harvest
from harvest.input.tokens import tokenize
from harvest.model.describe import describe
from harvest.model.sources import find_model
from harvest.model.start_token import start_token_id
from harvest.model.tiny import tiny_model
from harvest.request import HarvestRequest, parse_layers

# How near a contender's first prompt must come to harvest's, each token of each layer. bfloat16 alone gives 0.99999.
_COSINE = 0.999


def main(arguments: list[str]) -> int:
    """Run what is named, and write its result to WORK/NAME.json."""
    parser = argparse.ArgumentParser(prog="bench contend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["prepare", "tune", "ceilings", "limit", "check", *CONTENDERS])
    parser.add_argument("--work", type=Path, required=True, help="where the plan lies and the result goes")
    parser.add_argument("--out", type=Path, help="an empty folder for the contender's files")
    parser.add_argument("--prompts", type=int, help="the first so many prompts [default: all]")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of the limit")
    parser.add_argument("--ceiling-s", type=float, default=1.0, help="with ceilings: seconds of each matrix product")
    parser.add_argument("--disk-mib", type=int, default=256, help="with ceilings: size of the file that is written")
    parser.add_argument("--model", help="with prepare")
    parser.add_argument("--layers", help="with prepare")
    parser.add_argument("--count", type=int, help="with prepare: how many prompts to make")
    parser.add_argument("--run", type=Path, help="with check: harvest's run folder")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.name == "prepare":
        result = _prepare(options.work, options.model, options.layers, options.count)
    elif options.name == "check":
        result = _check(options.work, options.run)
    else:
        task = load_task(options.work, options.out, options.prompts, options.batch_tokens)
        if options.name == "tune":
            result = {"sizes": tune(task)}
        elif options.name == "ceilings":
            result = _ceilings(task, options.work, options.ceiling_s, options.disk_mib << 20)
        elif options.name == "limit":
            result = _limit(task, options.work)
        else:
            result = _contend(options.name, task, options.work)
        result |= {"threads": torch.get_num_threads()}
    (options.work / f"{options.name}.json").write_text(json.dumps(result))
    return 0


def _prepare(work: Path, model: str, layers: str | None, count: int) -> dict[str, Any]:
    """Make the prompts, and the token ids that harvest reads of them; tiny, which has no files, is saved for the others."""
    source = find_model(model)
    description = describe(source)
    texts = read_96()[:count]
    if count > len(texts):
        text = corpus()
        spans = description.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        texts = cut_texts(text, [start for start, _ in spans], count)
    write_prompts(work / "prompts.jsonl", texts)
    body = {"model": model, "prompts": texts} | ({"layers": parse_layers(layers)} if layers else {})
    asked = HarvestRequest.check(body, limits=False).resolve_layers(description.n_layers)
    start = start_token_id(description.tokenizer, description.config)
    longest = description.context_length - 1 if description.context_length else None
    tokens = tokenize(texts, description.tokenizer, start, longest, description.vocab_size)
    location = source.location
    if source.is_tiny:
        location = str(work / "tiny")
        tiny_model().save_pretrained(location)
        description.tokenizer.save_pretrained(location)
    save_plan(work, location, description.n_layers, asked, [tokens.of(number).astype(np.int64) for number in range(len(texts))])
    config = description.config.get_text_config(decoder=True)
    return {"hidden": config.hidden_size, "intermediate": config.intermediate_size, "start_token_id": start}


def _contend(name: str, task: Task, work: Path) -> dict[str, Any]:
    contender = CONTENDERS[name]
    started = time.perf_counter()
    do = contender.prepare(task)
    load_s = time.perf_counter() - started
    started = time.perf_counter()
    do()
    seconds = time.perf_counter() - started
    np.save(work / f"first-{name}.npy", contender.read_back(task))
    return {"seconds": seconds, "tokens": task.n_tokens, "prompts": len(task.prompts), "load_s": load_s, "bytes": folder_bytes(task.out)}


def _limit(task: Task, work: Path) -> dict[str, Any]:
    started = time.perf_counter()
    bare = load_bare(task)
    rows_RS = packed(task)
    bare.run(rows_RS[:1, :64])
    load_s = time.perf_counter() - started
    started = time.perf_counter()
    n_tokens = sweep(bare, rows_RS, task.batch_tokens)
    seconds = time.perf_counter() - started
    np.save(work / "first-limit.npy", bare.streams(task.prompts[0]))
    return {
        "seconds": seconds,
        "tokens": n_tokens,
        "prompts": len(task.prompts),
        "load_s": load_s,
        "bytes": 0,
        "row_tokens": rows_RS.shape[1],
        "flop": 2.0 * bare.n_parameters * n_tokens,
    }


def _ceilings(task: Task, work: Path, seconds: float, disk_bytes: int) -> dict[str, Any]:
    shapes = json.loads((work / "prepare.json").read_text())
    hidden, intermediate = shapes["hidden"], shapes["intermediate"]
    return {
        "products": {
            f"{hidden} x {intermediate}": matrix_rate(task.batch_tokens, hidden, intermediate, seconds=seconds),
            f"{intermediate} x {hidden}": matrix_rate(task.batch_tokens, intermediate, hidden, seconds=seconds),
            f"{hidden} x {hidden}": matrix_rate(task.batch_tokens, hidden, hidden, seconds=seconds),
        },
        "disk_bytes_per_s": disk_rate(task.out, disk_bytes),
    }


def _check(work: Path, run_folder: Path) -> dict[str, Any]:
    """Hold each contender's first prompt against harvest's: the lowest cosine of any token in any layer that can be compared."""
    plan = read_plan(work)
    with np.load(work / "ids.npz") as file:
        ids = file["ids"]
    run = harvest.open(run_folder)
    same_ids = np.concatenate([run.token_ids(number).numpy() for number in range(run.n_prompts)]).tolist() == ids.tolist()
    truth_LTH = run.prompt(0).double().numpy()
    cosines = {}
    for path in sorted(work.glob("first-*.npy")):
        name = path.stem.removeprefix("first-")
        normed = name in CONTENDERS and CONTENDERS[name].final_norm
        kept = [place for place, layer in enumerate(plan["layers"]) if not (normed and layer == plan["n_layers"] - 1)]
        cosines[name] = _lowest_cosine(truth_LTH, np.load(path).astype(np.float64), kept)
    return {"same_ids": same_ids, "cosines": cosines, "at_least": _COSINE}


def _lowest_cosine(one_LTH: Any, other_LTH: Any, positions: Sequence[int]) -> float | None:
    if one_LTH.shape != other_LTH.shape:
        raise ValueError(f"the first prompt has the shape {other_LTH.shape}, and {one_LTH.shape} in harvest's run")
    if not positions:
        return None
    one, other = one_LTH[list(positions)], other_LTH[list(positions)]
    return float(((one * other).sum(-1) / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))).min())
