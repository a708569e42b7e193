"""The bench of harvest: how fast it is, against the machine's own limits and against what else there is.

    python scripts/bench models     harvest, a bare forward pass, and other ways to read the same stream, on one model
    python scripts/bench storage    the writers alone, on synthetic streams at the shapes of llama-8b
    python scripts/bench scaling    time and memory over 100 to 100,000 prompts on tiny
    python scripts/bench gpu        the engine on one CUDA card, on random weights at the shapes of llama-8b (also: --gpu)
    python scripts/bench stream     blocks that are streamed, and accelerate's offload to disk (also: --stream)
    python scripts/bench report     the JSON files of the above as markdown

Each prints its table and writes all single measurements as JSON with --json. From the words that everything shares to what runs them:

    watch.py        a process's memory while it works
    measuring.py    the machine, a child process with its time and memory, medians
    texts.py        prompts of log-normal lengths from the 96 texts
    tables.py       tables and figures in markdown
    ceilings.py     what the machine itself does: matrix products, bytes to a disk
    task.py         what every contender gets: the same token ids, the same layers
    limit.py        the limit: only the needed blocks, no padding, nothing stored
    contenders.py   other ways to read the stream, each as its users write it
    contend.py      one contender in a process of its own
    models.py       the comparison
    synthetic.py    streams like a model's, without one
    storage.py      the writers alone
    scaling.py      the command over more and more prompts
    engine.py       harvest's engine around a model that lies on a device already
    written.py      what the engine stored, checked
    race.py         whether copies to pinned memory ever arrive torn
    attention.py    attention alone, by each of torch's backends
    profiling.py    kernel launches, waits of the host, and a card's idle time
    report_gpu.py   the measurements of gpu to markdown
    gpu.py          the engine on one card
    cold.py         files and the system's cache
    llama.py        a random model in many files, and its blocks read from them alone
    stream.py       streamed blocks, accelerate's offload, and the model in memory
    report.py       measurements to markdown
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if importlib.util.find_spec("harvest") is None:
    # A checkout is enough, where harvest is not installed.
    sys.path.insert(0, str(ROOT))

_COMMANDS = {
    "models": "harvest, a bare forward pass and other ways, on one model",
    "storage": "the writers alone, on synthetic streams",
    "scaling": "time and memory over more and more prompts on tiny",
    "gpu": "the engine on one CUDA card; it was not run on a card yet",
    "stream": "streamed blocks against accelerate's offload to disk",
    "report": "JSON files of measurements as markdown",
    "contend": "one contender; called by models",
    "llama": "a random model in many files; called by stream",
}


def main(arguments: list[str]) -> int:
    """Hand over to a command's own module; only that one is imported, and the libraries that it needs."""
    if arguments[:1] in (["--gpu"], ["--stream"]):
        arguments = [arguments[0].removeprefix("--"), *arguments[1:]]
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, add_help=False)
        command.add_argument("rest", nargs=argparse.REMAINDER)
    name = parser.parse_args(arguments[:1]).command
    return int(importlib.import_module(name).main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
